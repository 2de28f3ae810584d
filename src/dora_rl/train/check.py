"""Does the gradient depend on how it was computed? Answers with figures, on any model and recorded groups.

Three things must not matter: the order in which groups came, how they were cut into micro-batches, and whether shared
prefixes were computed once. Used by `make accept`.
"""

# mypy: allow-untyped-calls
# transformers annotates little of what it lets one call.

import math
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from dora_rl.config import Config, TrainConfig
from dora_rl.train.gradient import GradientSum
from dora_rl.train.model import load_model
from dora_rl.wire.rollouts import Trajectory

Groups = Sequence[Sequence[Trajectory]]


def gradient_difference(config: Config, model_dir: Path, groups: Groups) -> dict[str, float]:
    """|g - g0| / |g0| in L2 over all parameters: "order", "split" and "sharing", each changed alone.

    g0 is the gradient before clipping, as the trainer computes it. Raises ValueError when it is zero.
    """
    torch.set_num_threads(config.train.threads)
    model = load_model(model_dir)

    def gradient(groups: Groups, **changed: int | bool) -> list[Tensor]:
        train = TrainConfig.model_validate(config.train.model_dump() | changed)
        total = GradientSum(model, config.model_copy(update={"train": train}))
        for group in groups:
            total.add(group, trained_version=group[0].version)
        total.finish()
        return [grad.clone() for grad in total.gradients()]

    reference = gradient(groups)
    norm = _norm(reference)
    if norm == 0:
        raise ValueError("these groups have no gradient to compare; give groups whose rewards differ")
    return {
        name: _norm([a - b for a, b in zip(other(), reference, strict=True)]) / norm
        for name, other in (
            ("order", lambda: gradient(groups[::-1])),
            ("split", lambda: gradient(groups, micro_batch_tokens=1)),  # every group alone
            ("sharing", lambda: gradient(groups, share_prefix=not config.train.share_prefix)),
        )
    }


def _norm(tensors: Sequence[Tensor]) -> float:
    return math.sqrt(math.fsum(float(tensor.double().square().sum()) for tensor in tensors))
