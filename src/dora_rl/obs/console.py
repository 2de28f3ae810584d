"""What a person reads in the terminal: one line per iteration, and a summary at the end. Only makes text."""

from collections.abc import Iterable, Mapping, Sequence
from math import ceil, fsum
from pathlib import Path
from typing import Any

from dora_rl.obs.metrics import standard_error

Line = Mapping[str, Any]

# The two lines of each column's heading; its width is that of the wider one.
_COLUMNS = (
    ("", "iteration"),
    ("", "reward"),
    ("groups", "trained"),
    ("", "equal"),
    ("versions", "alive"),
    ("", "running"),
    ("staleness", "mean"),
    ("", "max"),
    ("tokens", "per s"),
    ("mean", "length"),
    ("trainer", "busy"),
    ("", "waits"),
    ("rollout", "idle"),
    ("time", "  left"),
)


def _row(cells: Iterable[str]) -> str:
    widths = (max(map(len, column)) for column in _COLUMNS)
    return "  ".join(cell.rjust(width) for cell, width in zip(cells, widths, strict=True)).rstrip()


HEADER = _row(top for top, _ in _COLUMNS) + "\n" + _row(bottom for _, bottom in _COLUMNS)
"""Printed once, above the iterations' lines. `equal`: groups filtered because all their rewards were equal."""


def iteration_line(metrics: Line, *, iterations: int, left_s: float | None) -> str:
    """One iteration, `metrics` as in metrics.jsonl; `left_s`: see `time_left`."""
    waits = metrics["idle/trainer_share"]
    failed = f"  {metrics['groups/failed']} groups failed" if metrics["groups/failed"] else ""
    cells = _row(
        (
            f"{metrics['iteration'] + 1}/{iterations}",
            _number(metrics["reward/mean"], 3),
            str(metrics["groups/trained"]),
            str(metrics["groups/filtered"]),
            str(metrics["versions/alive_max"]),
            str(metrics["versions/running_max"]),
            _number(metrics["staleness/mean"], 2),
            _number(metrics["staleness/max"], 0),
            _number(metrics["throughput/tokens_per_s"], 0),
            _number(metrics["completion/length_mean"], 1),
            _percent(None if waits is None else 1.0 - waits),
            _percent(waits),
            _percent(metrics["idle/rollout_share"]),
            duration(left_s),
        )
    )
    return cells + failed


def time_left(iteration_s: Sequence[float], *, iterations: int) -> float | None:
    """Seconds that the remaining iterations will take if they are like the last five. None before the first."""
    recent = iteration_s[-5:]
    return fsum(recent) / len(recent) * (iterations - len(iteration_s)) if recent else None


def summary(
    metrics: Sequence[Line], evaluations: Sequence[Line], *, folder: Path, wall_s: float, ended: str = "finished"
) -> str:
    """The whole run on one screen. `ended`: how, in a few words."""
    lines = [f"run {ended} after {len(metrics)} iterations in {duration(wall_s)}", ""]
    for sampling in ("sampled", "greedy"):
        lines += _held_out([line for line in evaluations if line["sampling"] == sampling], sampling)
    if metrics:
        lines += [*_training_reward(metrics), *_staleness(metrics), *_throughput(metrics), *_moves(metrics)]
    lines += [_item("run folder", str(folder)), *_model(folder), _item("check it with", f"dora-rl audit {folder}")]
    return "\n".join(lines)


def duration(seconds: float | None) -> str:
    """Two units at most: 42s, 12m05s, 3h20m."""
    if seconds is None:
        return "-"
    whole = max(0, ceil(seconds))
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02}m"


def paired_difference(before: Line, after: Line) -> tuple[float, float | None] | None:
    """Mean and standard error of the same prompts' difference; None when no prompt was scored both times.

    Pairing removes what makes prompts differ in difficulty, so it tells smaller gains from chance.
    """
    pairs = zip(before["rewards"], after["rewards"], strict=True)
    gains = [new - old for old, new in pairs if old is not None and new is not None]
    return (fsum(gains) / len(gains), standard_error(gains)) if gains else None


def staleness_totals(metrics: Sequence[Line]) -> dict[int, int]:
    """Trained groups of all iterations by their staleness, in versions."""
    totals: dict[int, int] = {}
    for line in metrics:
        for versions, groups in line["staleness/histogram"].items():
            totals[int(versions)] = totals.get(int(versions), 0) + int(groups)
    return totals


def thirds(metrics: Sequence[Line]) -> tuple[float | None, float | None]:
    """Mean training reward of the first and of the last third of the iterations (of at least one each)."""
    rewards = [line["reward/mean"] for line in metrics]
    third = max(1, len(rewards) // 3)
    return _mean(rewards[:third]), _mean(rewards[-third:])


def evaluation_text(line: Line) -> str:
    """One evaluation, as in eval.jsonl."""
    return f"held-out {line['sampling']}: {_with_error(line['score'], line['stderr'])} at version {line['version']}"


def _held_out(lines: Sequence[Line], sampling: str) -> list[str]:
    if not lines:
        return []
    lines = sorted(lines, key=lambda line: int(line["version"]))
    before, after = lines[0], lines[-1]
    label = f"held-out {sampling}"
    first = f"{_with_error(before['score'], before['stderr'])} at version {before['version']}"
    if len(lines) == 1:
        return [_item(label, f"{first} ({before['prompts']} prompts)")]
    last = f"{_with_error(after['score'], after['stderr'])} at version {after['version']}"
    text = [_item(label, f"{first} -> {last} ({after['prompts']} prompts)")]
    if (paired := paired_difference(before, after)) is not None:
        gain, error = paired
        ratio = f", {gain / error:+.1f} standard errors" if error else ""
        text.append(_item("", f"difference by prompt {_with_error(gain, error, sign='+')}{ratio}"))
    return text


def _training_reward(metrics: Sequence[Line]) -> list[str]:
    first, last = thirds(metrics)
    text = f"{_number(first, 3)} in the first third of the iterations -> {_number(last, 3)} in the last"
    return [_item("training reward", text)]


def _model(folder: Path) -> list[str]:
    """Where the trained weights are."""
    if (folder / "export").is_dir():
        return [_item("trained model", f"{folder / 'export'} (Hugging Face format)")]
    versions = [int(path.name) for path in folder.glob("weights/*") if path.name.isdecimal()]
    if not versions:
        return []
    newest = folder / "weights" / str(max(versions))
    return [_item("latest weights", f"{newest}; their config and tokenizer are in {folder / 'model'}")]


def _staleness(metrics: Sequence[Line]) -> list[str]:
    totals = staleness_totals(metrics)
    everything = sum(totals.values())
    if not everything:
        return []
    parts = [f"{versions}: {n} ({n / everything:.0%})" for versions, n in sorted(totals.items())]
    return [_item("staleness", f"{', '.join(parts)} of {everything} trained groups, in versions")]


def _throughput(metrics: Sequence[Line]) -> list[str]:
    seconds = fsum(line["time/iteration_s"] for line in metrics)
    if seconds <= 0:
        return []
    known = [line for line in metrics if line["throughput/tokens_per_s"] is not None]
    tokens = fsum(line["throughput/tokens_per_s"] * line["time/iteration_s"] for line in known)
    rate = _number(tokens / seconds if known else None, 0)
    waits = fsum(line["time/exposed_rollout_s"] for line in metrics) / seconds
    devices = max(line["throughput/devices"] for line in metrics)
    generated = fsum(line["throughput/generated_tokens_per_s"] * line["time/iteration_s"] for line in metrics) / seconds
    return [
        _item("throughput", f"{rate} tokens/s of prompts and answers, {generated:.0f} of answers; {devices} devices"),
        _item("time", f"{seconds / len(metrics):.1f} s an iteration; the trainer waited {waits:.0%} of it"),
    ]


def _moves(metrics: Sequence[Line]) -> list[str]:
    moves = sum(line["moves/count"] for line in metrics)
    recomputed = sum(line["moves/recomputed_tokens"] for line in metrics)
    if not moves and not recomputed:
        return []
    mib = sum(line["moves/bytes"] for line in metrics) / 2**20
    return [_item("moves", f"{moves} running answers, {mib:.0f} MiB of KV; {recomputed} prefix tokens computed again")]


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fsum(known) / len(known) if known else None


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.0%}"


def _with_error(value: float | None, stderr: float | None, *, sign: str = "") -> str:
    return "-" if value is None else f"{value:{sign}.3f}" + ("" if stderr is None else f" ± {stderr:.3f}")


def _item(label: str, text: str) -> str:
    return f"  {label:<17} {text}"
