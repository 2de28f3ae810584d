"""One line of `metrics.jsonl` per iteration. Pure formulas; docs/metrics.md has each with its unit.

Everything but prompt lengths and the trainer's statistics comes from the journal, so a simulated run has the same line.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain

from dora_rl.core.types import GroupId
from dora_rl.obs.timeline import GroupRecord, Timeline, Window

Metrics = dict[str, object]

FROM_TRAINER = (
    "policy/loss",
    "policy/kl",
    "policy/clip_fraction",
    "policy/entropy",
    "policy/grad_norm",
    "policy/ess_share",
    "policy/first_ratio_max_deviation",
    "mismatch/mean_abs_logprob_diff",
    "mismatch/max_abs_logprob_diff",
    "mismatch/by_staleness",
)
"""What only the trainer can measure; null in a simulated run and in an iteration without a gradient."""


def iteration_metrics(
    timeline: Timeline,
    iteration: int,
    *,
    prompt_tokens: Mapping[GroupId, int] | None = None,
    stats: Mapping[str, object] | None = None,
    orchestration_s: float | None = None,
) -> Metrics:
    """The line of an iteration whose Close the timeline has recorded; raises LookupError before that.

    `prompt_tokens`: prompt tokens of each group's trajectories, summed over its members; the journal does not know
    them. `stats`: the trainer's, under the names of `FROM_TRAINER`. `orchestration_s`: seconds spent in the core.
    """
    window = timeline.ended(iteration)
    close = window.close
    assert close is not None  # what `ended` promises
    trained = [timeline.group(group) for group in close.trained]
    filtered = [timeline.group(group) for group in close.filtered]
    staleness = [int(close.trained_at - group.version) for group in trained]
    return {
        "iteration": iteration,
        "version": int(close.trained_at),
        **_rewards(trained + filtered),
        **_completions(trained + filtered),
        "groups/trained": len(trained),
        "groups/filtered": len(filtered),
        "groups/failed": len(close.failed),
        "groups/dropped": len(close.dropped),
        "staleness/mean": _mean(staleness),
        "staleness/max": max(staleness, default=None),
        "staleness/histogram": {str(versions): n for versions, n in sorted(Counter(staleness).items())},
        "versions/alive_max": window.alive_max,
        "versions/running_max": window.running_max,
        **_times(window, orchestration_s),
        **_throughput(window, trained, filtered, prompt_tokens),
        **{name: _plain((stats or {}).get(name)) for name in FROM_TRAINER},
        "moves/count": window.moves,
        "moves/bytes": window.moved_bytes,
        "moves/recomputed_tokens": window.recomputed_tokens,
    }


def evaluation_line(
    *, iteration: int, version: int, sampling: str, rewards: Sequence[float | None], lengths: Sequence[int]
) -> Metrics:
    """One line of `eval.jsonl`: the mean reward of the held-out prompts and its standard error.

    `rewards` keeps the prompts' order, so that two evaluations can be compared prompt by prompt; None: not scored.
    """
    known = [reward for reward in rewards if reward is not None]
    return {
        "iteration": iteration,
        "version": version,
        "sampling": sampling,
        "score": _mean(known),
        "stderr": standard_error(known),
        "prompts": len(rewards),
        "length_mean": _mean(lengths),
        "rewards": list(rewards),
        "lengths": list(lengths),
    }


def standard_error(values: Sequence[float]) -> float | None:
    """Of the mean: sample standard deviation / sqrt(n). None for fewer than two values."""
    if len(values) < 2:
        return None
    mean = math.fsum(values) / len(values)
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1) / len(values))


def _rewards(groups: Iterable[GroupRecord]) -> Metrics:
    known = [reward for group in groups for reward in group.rewards if reward is not None]
    mean = _mean(known)
    variance = None if mean is None else _mean([(reward - mean) ** 2 for reward in known])
    return {"reward/mean": mean, "reward/std": None if variance is None else math.sqrt(variance)}


def _completions(groups: Sequence[GroupRecord]) -> Metrics:
    lengths = [tokens for group in groups for tokens in group.tokens.values()]
    reasons = [reason for group in groups for reason in group.reasons.values()]
    return {
        "completion/length_mean": _mean(lengths),
        "completion/length_max": max(lengths, default=None),
        "completion/clipped_share": _share(reasons.count("length"), len(reasons)),
    }


def _times(window: Window, orchestration_s: float | None) -> Metrics:
    duration = window.duration_s
    # The trainer's own clock can run a hair ahead of the journal's; waiting is never negative, nor more than all.
    exposed = min(max(duration - window.trainer_busy_s, 0.0), duration)
    return {
        "time/iteration_s": duration,
        "time/exposed_rollout_s": exposed,
        "idle/trainer_share": _share(exposed, duration),
        "idle/rollout_share": _share(window.instance_s - window.instance_busy_s, window.instance_s),
        "idle/slots_share": _share(window.slot_s - window.slot_busy_s, window.slot_s),
        "time/orchestration_share": None if orchestration_s is None else _share(orchestration_s, duration),
    }


def _throughput(
    window: Window,
    trained: Sequence[GroupRecord],
    filtered: Sequence[GroupRecord],
    prompt_tokens: Mapping[GroupId, int] | None,
) -> Metrics:
    def tokens(groups: Iterable[GroupRecord]) -> int | None:
        """Prompts and completions. Unknown prompts make the sum unknown: half of a sum is not a lower one."""
        if prompt_tokens is None:
            return None
        return sum(prompt_tokens[group.id] + sum(group.tokens.values()) for group in groups)

    duration = window.duration_s
    return {
        "throughput/tokens_per_s": _rate(tokens(chain(trained, filtered)), duration),
        "throughput/trained_tokens_per_s": _rate(tokens(trained), duration),
        "throughput/generated_tokens_per_s": _rate(window.generated_tokens, duration),
        "throughput/filtered_generated_tokens": sum(sum(group.tokens.values()) for group in filtered),
        "throughput/devices": window.devices,
    }


def _mean(values: Sequence[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None


def _rate(tokens: int | None, seconds: float) -> float | None:
    return None if tokens is None or seconds <= 0 else tokens / seconds


def _share(part: float, whole: float) -> float | None:
    """Sums of many stretches round: a share is held within [0, 1]."""
    return None if whole <= 0 else min(max(part / whole, 0.0), 1.0)


def _plain(value: object) -> object:
    """JSON knows neither NaN nor infinity nor keys that are numbers."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value
