"""What each answer of a group is worth against its siblings. Pure functions over rewards."""

import math
from collections.abc import Sequence

from dora_rl.core.types import has_spread

_EPS = 1e-6


def group_advantages(rewards: Sequence[float | None]) -> list[float | None]:
    """(reward - mean) / (standard deviation + 1e-6) over the members that have a reward (GRPO, Shao et al. 2024).

    None where the reward is None, and for everybody when fewer than two rewards are left to compare. 0 for everybody
    in a group without spread. The standard deviation is the population's and the group's own, never the batch's.
    Raises ValueError on a reward that is not finite: it would turn every parameter into NaN.
    """
    scored = [reward for reward in rewards if reward is not None]
    unusable = [reward for reward in scored if not math.isfinite(reward)]
    if unusable:
        raise ValueError(f"rewards must be finite numbers or None, got {unusable[0]}; mend the reward function")
    if len(scored) < 2:
        return [None] * len(rewards)
    if not has_spread(rewards):
        return [None if reward is None else 0.0 for reward in rewards]
    mean = math.fsum(scored) / len(scored)
    std = math.sqrt(math.fsum((reward - mean) ** 2 for reward in scored) / len(scored))
    return [None if reward is None else (reward - mean) / (std + _EPS) for reward in rewards]
