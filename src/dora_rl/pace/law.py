"""The law of `[pace]`: how long everything lasts, and how long answers are. Pure; read by simulator and real run."""

import math
from random import Random

from dora_rl.config import PaceConfig


def forced_length(pace: PaceConfig, *, seed: int, prompt: int, member: int, limit: int) -> int:
    """Tokens of one answer: lognormal with `pace.length_mean`, cut at `pace.length_cut` means and at `limit`.

    Of prompt and member alone: the same for every strategy, whoever generates the answer and when.
    """
    draw = Random(f"{seed}/{prompt}/{member}").gauss(0.0, 1.0)
    median = pace.length_mean * math.exp(-0.5 * pace.length_sigma**2)
    length = median * math.exp(pace.length_sigma * draw)
    return max(1, min(round(length), round(pace.length_mean * pace.length_cut), limit))


def step_s(pace: PaceConfig, *, answers: int, prefill_tokens: int = 0) -> float:
    """One step of an instance on which so many answers run."""
    return pace.decode_step_s + pace.decode_answer_s * answers + pace.prefill_token_s * prefill_tokens


def train_s(pace: PaceConfig, completion_tokens: int) -> float:
    """One group, over all trainer devices."""
    return (pace.prompt_tokens + completion_tokens) * pace.train_token_s / pace.trainer_devices


def move_s(pace: PaceConfig, tokens: int) -> float:
    """Keeping or loading the KV of one prefix."""
    return pace.move_s + pace.move_token_s * tokens
