"""Lengths of answers that a paced run forces: the same for every strategy, whoever generates them and when."""

import math
from random import Random

from dora_rl.config import Config


def forced_length(config: Config, prompt: int, member: int) -> int:
    """Tokens of one answer: lognormal, with `pace.length_mean` before the cut at `pace.length_cut` times the mean."""
    pace = config.pace
    draw = Random(f"{config.run.seed}/{prompt}/{member}").gauss(0.0, 1.0)
    median = pace.length_mean * math.exp(-0.5 * pace.length_sigma**2)
    length = median * math.exp(pace.length_sigma * draw)
    return max(1, min(round(length), round(pace.length_mean * pace.length_cut), config.rollout.max_completion_tokens))
