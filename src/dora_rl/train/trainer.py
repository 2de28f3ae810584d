"""The trainer of step 1: one rank that turns groups into gradients and gradients into new weights.

Owns model, optimizer and the open batch. Plain Python: whoever wants it in another process wraps it.
Knows versions only as numbers to subtract.
"""

import math
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import Tensor

from dora_rl.config import Config
from dora_rl.models.files import save_model
from dora_rl.train.gradient import GradientSum
from dora_rl.train.model import load_model, tree_scores
from dora_rl.train.tree import TokenPair, build_tree
from dora_rl.wire.rollouts import Trajectory
from dora_rl.wire.weights import Canary

_CANARY_TOKENS = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class StepReport:
    stepped: bool
    """False: the parameters are what they were, and `reason` says why."""

    reason: str | None
    stats: dict[str, Any]
    """The policy/ and mismatch/ metrics of interfaces.md; None where there was no token to take them from."""

    busy_s: float
    """Seconds this rank computed for the batch, by its own monotonic clock; waiting for groups is not in it."""

    tokens: int
    """Prompt and completion tokens that went through the model, shared prefixes once."""

    advantages: dict[tuple[int, int], float | None]
    """(group id, member) -> advantage; None for a member that was not trained."""


_METRICS = (
    "policy/loss", "policy/kl", "policy/clip_fraction", "policy/entropy", "policy/grad_norm", "policy/ess_share",
    "policy/first_ratio_max_deviation", "mismatch/mean_abs_logprob_diff", "mismatch/max_abs_logprob_diff",
    "mismatch/by_staleness",
)  # fmt: skip


class Trainer:
    def __init__(self, config: Config, model_dir: Path) -> None:
        torch.set_num_threads(config.train.threads)
        self._config = config
        self._model_dir = model_dir
        self._model = load_model(model_dir)
        self._optimizer = torch.optim.AdamW(
            self._model.parameters(), lr=config.train.learning_rate, weight_decay=config.train.weight_decay, fused=True
        )
        self._sum = GradientSum(self._model, config)
        self._open = (0, 0)  # (iteration, attempt) that the sum belongs to
        self._busy_s = 0.0
        self._finished_iteration = 0

    def accumulate(self, iteration: int, attempt: int, group: Sequence[Trajectory], trained_version: int) -> None:
        """Add one group of a batch; computes at once when a micro-batch is full.

        The first group of a newer attempt throws away what older attempts of the batch had added.
        """
        start = time.monotonic()
        self._turn_to(iteration, attempt)
        self._sum.add(group, trained_version=trained_version)
        self._busy_s += time.monotonic() - start

    def step(self, iteration: int, attempt: int) -> StepReport:
        """Close the batch and make its optimizer step, unless nothing is to be learned or the gradient is broken."""
        start = time.monotonic()
        self._turn_to(iteration, attempt)
        self._sum.finish()
        stats: dict[str, Any] = dict.fromkeys(_METRICS) | self._sum.stats()
        norm = float(torch.nn.utils.clip_grad_norm_(self._model.parameters(), self._config.train.max_grad_norm))
        reason = self._why_not(norm)
        if reason is None:
            stats["policy/grad_norm"] = norm
            self._optimizer.param_groups[0]["lr"] = self.learning_rate(iteration)
            self._optimizer.step()
        advantages, tokens = self._sum.advantages, self._sum.tokens_computed
        self._sum.reset()
        self._finished_iteration = iteration
        busy_s = self._busy_s + time.monotonic() - start
        self._busy_s = 0.0
        return StepReport(
            stepped=reason is None, reason=reason, stats=stats, busy_s=busy_s, tokens=tokens, advantages=advantages
        )

    def learning_rate(self, iteration: int) -> float:
        """Rises linearly and is never zero: a step at rate zero would make a version that equals its parent."""
        train = self._config.train
        return train.learning_rate * min(1.0, iteration / train.warmup_iterations)

    def state_tensors(self) -> dict[str, Tensor]:
        """A copy of the weights under their Hugging Face names, tied ones once; later steps do not change it."""
        return {name: parameter.detach().clone() for name, parameter in self._model.named_parameters()}

    def moments(self) -> dict[str, Tensor]:
        """A copy of the optimizer's state: AdamW's step count and moments, as `<parameter>/<name>`."""
        return {
            f"{name}/{part}": torch.as_tensor(value).detach().clone()
            for name, parameter in self._model.named_parameters()
            for part, value in self._optimizer.state.get(parameter, {}).items()
        }

    def restore(self, weights: Mapping[str, Tensor], moments: Mapping[str, Tensor], iteration: int) -> None:
        """Go on from a checkpoint after so many iterations. Raises ValueError when it is another model's."""
        parameters = dict(self._model.named_parameters())
        if weights.keys() != parameters.keys():
            odd = sorted(weights.keys() ^ parameters.keys())
            raise ValueError(f"the checkpoint is of another model: {odd[0]} is in one of them only")
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(weights[name])
        for key, value in moments.items():
            name, _, part = key.rpartition("/")
            self._optimizer.state[parameters[name]][part] = value.clone()
        self._finished_iteration = iteration

    @property
    def finished_iterations(self) -> int:
        return self._finished_iteration

    def canary(self) -> Canary:
        """What the current weights make of a fixed probe: served weights must give the same numbers."""
        rng = Random(self._config.run.seed)
        # The engine answers it with one token.
        length = min(_CANARY_TOKENS, self._config.max_model_tokens - 1)
        token_ids = tuple(rng.randrange(self._model.config.vocab_size) for _ in range(length))
        tree = build_tree([[TokenPair(token_ids[:1], token_ids[1:])]], share=False)
        return Canary(token_ids, tuple(tree_scores(self._model, tree, 1.0).logprobs_T.tolist()))

    def export(self, path: Path) -> None:
        """Write a folder that `AutoModelForCausalLM` and `AutoTokenizer` load; it appears whole or not at all."""
        partial = path.with_name(path.name + ".partial")
        shutil.rmtree(partial, ignore_errors=True)
        save_model(self._model, partial)
        for file in sorted(self._model_dir.iterdir()):
            if file.is_file() and not (partial / file.name).exists():
                shutil.copyfile(file, partial / file.name)  # the tokenizer and its chat template
        shutil.rmtree(path, ignore_errors=True)
        partial.rename(path)

    def measure_rate(self, groups: Sequence[Sequence[Trajectory]]) -> float:
        """Tokens per second of forward and backward over these groups in full micro-batches.

        Counts tokens as StepReport.tokens does. Weights and the open batch's gradient stay what they are. Raises
        ValueError when no group has rewards that differ: there would be nothing to time.
        """
        kept = [parameter.grad for parameter in self._model.parameters()]
        for parameter in self._model.parameters():
            parameter.grad = None
        try:
            probe = GradientSum(self._model, self._config)
            start = time.monotonic()
            for group in groups:
                probe.add(group, trained_version=group[0].version)
            probe.finish()
            elapsed = time.monotonic() - start
        finally:
            for parameter, grad in zip(self._model.parameters(), kept, strict=True):
                parameter.grad = grad
        if not probe.tokens_computed:
            raise ValueError("measure_rate needs a group whose rewards differ, got none; give it trained groups")
        return probe.tokens_computed / elapsed

    def _turn_to(self, iteration: int, attempt: int) -> None:
        if iteration <= self._finished_iteration:
            raise ValueError(
                f"iteration {iteration} came after iteration {self._finished_iteration} was finished; "
                "the driver must send every batch once"
            )
        asked = (iteration, attempt)
        if asked < self._open or (iteration != self._open[0] and self._sum.advantages):
            raise ValueError(
                f"iteration {iteration} attempt {attempt} came while iteration {self._open[0]} attempt "
                f"{self._open[1]} is open; the driver must close it first"
            )
        if asked != self._open:
            self._sum.reset()
            self._open = asked

    def _why_not(self, norm: float) -> str | None:
        if not self._sum.completion_tokens:
            return "no group of the batch has two rewards that differ"
        if not math.isfinite(norm):
            return f"the gradient's norm is {norm}"
        return None if norm > 0 else "the gradient is zero"
