"""The unnormalised gradient of a batch, summed group by group as the groups arrive.

Owns the parameters' `.grad` and what is remembered of every token for the metrics. Knows nothing of optimizers.
The sum is divided by the batch's own number of tokens at the end, so it depends neither on arrival order nor on
how the groups were cut into micro-batches.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from dora_rl.config import Config
from dora_rl.train.batch import Packer, ScoredGroup, score_group
from dora_rl.train.loss import grpo_loss, loss_stats
from dora_rl.train.model import tree_backward
from dora_rl.train.tree import build_tree
from dora_rl.wire.rollouts import Trajectory


class GradientSum:
    def __init__(self, model: PreTrainedModel, config: Config) -> None:
        self._model = model
        self._config = config
        self.reset()

    def reset(self) -> None:
        """Forget everything that was added."""
        train = self._config.train
        self._packer = Packer(budget=train.micro_batch_tokens, share=train.share_prefix)
        self._facts: list[tuple[Tensor, ...]] = []  # per micro-batch, in the order of loss_stats' tensors
        self.advantages: dict[tuple[int, int], float | None] = {}
        self.tokens_computed = 0
        self.completion_tokens = 0
        self._model.zero_grad(set_to_none=False)  # the memory is needed again at once

    def add(self, group: Sequence[Trajectory], *, trained_version: int) -> None:
        """Take a group, and compute when a micro-batch is full.

        Raises ValueError when the batch has the group already, or a recorded log-probability is not a finite number."""
        for member in group:
            if (member.group_id, member.member) in self.advantages:
                raise ValueError(f"group {member.group_id} came twice for one batch; the driver must send it once")
        advantages, scored = score_group(group, trained_version=trained_version)
        for member, value in zip(group, advantages, strict=True):
            self.advantages[member.group_id, member.member] = value
        if scored is not None:
            for member in scored.members:
                _require_finite(member)
            self._compute(self._packer.add(scored))

    def finish(self) -> None:
        """Compute what still waits and turn the sum into the mean over the batch's completion tokens."""
        self._compute(self._packer.flush())
        if self.completion_tokens:
            torch._foreach_div_(self.gradients(), float(self.completion_tokens))

    def gradients(self) -> list[Tensor]:
        return [parameter.grad for parameter in self._model.parameters() if parameter.grad is not None]

    def stats(self) -> dict[str, Any]:
        """`loss_stats` over every token so far; empty when there was none."""
        if not self._facts:
            return {}
        columns = [torch.cat(column) for column in zip(*self._facts, strict=True)]
        return loss_stats(*columns, clip_low=self._config.train.clip_low, clip_high=self._config.train.clip_high)

    def _compute(self, micro_batches: Sequence[Sequence[ScoredGroup]]) -> None:
        for groups in micro_batches:
            self._backward(groups)

    def _backward(self, groups: Sequence[ScoredGroup]) -> None:
        train = self._config.train
        tree = build_tree([group.members for group in groups], share=train.share_prefix)
        behaviour_T, advantages_T, staleness_T = _per_token(groups)

        def loss(logprobs_P: Tensor, tokens_P: Tensor) -> Tensor:
            return grpo_loss(
                logprobs_P,
                behaviour_T[tokens_P],
                advantages_T[tokens_P],
                clip_low=train.clip_low,
                clip_high=train.clip_high,
            )

        scores = tree_backward(self._model, tree, self._config.rollout.temperature, loss)
        self._facts.append((scores.logprobs_T, behaviour_T, advantages_T, scores.entropies_T, staleness_T))
        self.tokens_computed += tree.num_tokens
        self.completion_tokens += len(behaviour_T)


def _require_finite(member: Trajectory) -> None:
    """A token was sampled, so it had a probability; anything else would be clipped away without a word."""
    for position, logprob in enumerate(member.logprobs):
        if not math.isfinite(logprob):
            raise ValueError(
                f"rollout {member.rollout}: the engine recorded log-probability {logprob} for completion token "
                f"{position}, expected a finite number; look at the engine that sampled it"
            )


def _per_token(groups: Sequence[ScoredGroup]) -> tuple[Tensor, Tensor, Tensor]:
    """Behaviour log-probability, advantage and staleness of every completion token, in the tree's order."""
    behaviour: list[float] = []
    advantages: list[float] = []
    staleness: list[int] = []
    for group in groups:
        for member, advantage in zip(group.members, group.advantages, strict=True):
            behaviour += member.logprobs
            advantages += [advantage] * len(member.logprobs)
            staleness += [group.staleness] * len(member.logprobs)
    return torch.tensor(behaviour), torch.tensor(advantages), torch.tensor(staleness)
