"""Which groups go through the model together. Whole groups only, in the order in which they came.

Knows sizes and advantages; knows nothing of the model.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from dora_rl.core.types import has_spread
from dora_rl.train.advantage import group_advantages
from dora_rl.train.tree import build_tree
from dora_rl.wire.rollouts import Trajectory


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoredGroup:
    """The members of one group that are learned from."""

    members: tuple[Trajectory, ...]
    advantages: tuple[float, ...]
    staleness: int
    """Versions between the one that sampled and the one that is trained."""

    @property
    def completion_tokens(self) -> int:
        return sum(len(member.completion_token_ids) for member in self.members)


def score_group(group: Sequence[Trajectory], *, trained_version: int) -> tuple[list[float | None], ScoredGroup | None]:
    """Every member's advantage, and the group as the loss sees it; None when there is nothing to learn from it.

    A member without reward is not there for the loss at all: neither its gradient nor its tokens in the normaliser.
    """
    rewards = [member.reward for member in group]
    advantages = group_advantages(rewards)
    if not has_spread(rewards):
        return advantages, None
    kept = [(member, value) for member, value in zip(group, advantages, strict=True) if value is not None]
    scored = ScoredGroup(
        members=tuple(member for member, _ in kept),
        advantages=tuple(value for _, value in kept),
        staleness=trained_version - group[0].version,
    )
    return advantages, scored if scored.completion_tokens else None


class Packer:
    """Collects groups until a budget of computed tokens is full; a group beyond the budget goes alone."""

    def __init__(self, *, budget: int, share: bool) -> None:
        self._budget = budget
        self._share = share
        self._waiting: list[ScoredGroup] = []

    def add(self, group: ScoredGroup) -> list[list[ScoredGroup]]:
        """The micro-batches that this group completed: none, the ones before it, or those and itself."""
        full: list[list[ScoredGroup]] = []
        if self._waiting and self._size([*self._waiting, group]) > self._budget:
            full += self.flush()
        self._waiting.append(group)
        if self._size(self._waiting) >= self._budget:
            full += self.flush()
        return full

    def flush(self) -> list[list[ScoredGroup]]:
        """What waits, as one micro-batch; nothing when nothing waits."""
        waiting, self._waiting = self._waiting, []
        return [waiting] if waiting else []

    def _size(self, groups: Sequence[ScoredGroup]) -> int:
        return build_tree([group.members for group in groups], share=self._share).num_tokens
