"""Re-scores answers for the audit, with `transformers` and a run's stored weights alone.

On purpose it shares nothing with the trainer: one plain forward pass per answer, the model's own attention, no tree.
"""

# mypy: allow-untyped-calls
# transformers annotates little of what it lets one call.

from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from dora_rl.wire.rollouts import Trajectory


def score(
    model_dir: Path, weights_dir: Path, trajectories: Sequence[Trajectory], temperature: float
) -> list[list[float]]:
    """log softmax(logits / temperature) of every completion token, in nats, under the weights in `weights_dir`.

    `model_dir` gives the architecture, `weights_dir` one or more .safetensors files with Hugging Face names. Raises
    ValueError when names or shapes do not fit the architecture, or a trajectory does not fit it (see `unfit`).
    """
    model = _load(model_dir, weights_dir)
    for faults in unfit(model_dir, trajectories).values():
        raise ValueError(faults)
    with torch.no_grad():
        return [_score_one(model, trajectory, temperature) for trajectory in trajectories]


def unfit(model_dir: Path, trajectories: Sequence[Trajectory]) -> dict[int, str]:
    """By rollout, why the model could not have sampled it at all: an empty prompt, or tokens that it does not have."""
    config = AutoConfig.from_pretrained(model_dir, local_files_only=True, trust_remote_code=False)
    size: int = config.get_text_config().vocab_size
    faults = {}
    for one in trajectories:
        foreign = [token for token in (*one.prompt_token_ids, *one.completion_token_ids) if not 0 <= token < size]
        if foreign:
            faults[int(one.rollout)] = f"trajectory {one.rollout}: token {foreign[0]} is none of the model's {size}"
        elif not one.prompt_token_ids and one.completion_token_ids:
            faults[int(one.rollout)] = (
                f"trajectory {one.rollout}: its prompt is empty, nothing predicts its first token"
            )
    return faults


def _load(model_dir: Path, weights_dir: Path) -> PreTrainedModel:
    config = AutoConfig.from_pretrained(model_dir, local_files_only=True, trust_remote_code=False)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa")
    tensors: dict[str, Tensor] = {}
    for file in sorted(weights_dir.glob("*.safetensors")):
        tensors |= load_file(file)
    needed = {name for name, _ in model.named_parameters()}  # tied weights count once, as they are stored
    if tensors.keys() != needed:
        odd = sorted(tensors.keys() ^ needed)
        raise ValueError(f"{weights_dir} should hold the {len(needed)} tensors of {model_dir}, but {odd[0]!r} differs")
    try:
        model.load_state_dict(tensors, strict=False)
    except RuntimeError as error:
        raise ValueError(f"{weights_dir} does not fit {model_dir}: {str(error).splitlines()[-1].strip()}") from error
    model.eval()
    return model


def _score_one(model: PreTrainedModel, trajectory: Trajectory, temperature: float) -> list[float]:
    n = len(trajectory.completion_token_ids)
    if n == 0:
        return []
    token_ids = torch.tensor([[*trajectory.prompt_token_ids, *trajectory.completion_token_ids]])
    # The position before each completion token predicts it; the last position predicts nothing that was sampled.
    logits = model(token_ids, use_cache=False, logits_to_keep=n + 1).logits[0, :-1]
    logprobs = (logits / temperature).log_softmax(-1).gather(1, token_ids[0, -n:, None])[:, 0]
    scores: list[float] = logprobs.tolist()
    return scores
