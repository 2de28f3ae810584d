"""The picture of who did what when: a lane per instance, filled by the versions that run there, and the trainer's.

Drawn from journals, so that a simulated and a real run look alike. One panel a run, all with the same scale of time.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("agg")  # draws into files; no screen is needed

from matplotlib import pyplot
from matplotlib.patches import Patch

from dora_rl.core import messages as m
from dora_rl.core.types import InstanceId, Version
from dora_rl.obs.folder import RunFolder
from dora_rl.obs.journal import read_journal

COLORS = pyplot.get_cmap("tab10").colors
"""By version, in turn: versions that run at once never share one."""


@dataclass(slots=True)
class _Lanes:
    """What one journal says about time, in its seconds."""

    running: dict[InstanceId, list[tuple[float, dict[Version, int]]]] = field(default_factory=lambda: defaultdict(list))
    """By instance: from when on how many answers of which version run."""
    slots: dict[InstanceId, int] = field(default_factory=dict)
    trainer: list[tuple[float, float, int]] = field(default_factory=list)
    """From, to and iteration of the trainer's work."""
    steps: list[float] = field(default_factory=list)


def plot_timelines(runs: Sequence[tuple[str, Path]], out: Path, *, first_step: int, seconds: float) -> None:
    """Draw titled runs from their `first_step`-th optimizer step on. Raises ValueError when a run has fewer."""
    lanes = [(title, _read(folder)) for title, folder in runs]
    heights = [len(lane.slots) + 1 for _, lane in lanes]
    figure, axes = pyplot.subplots(
        len(lanes),
        1,
        figsize=(12, 1.0 + 0.5 * sum(heights)),
        height_ratios=heights,
        squeeze=False,
        layout="constrained",
    )
    for axis, (title, lane) in zip(axes[:, 0], lanes, strict=True):
        if len(lane.steps) < first_step:
            raise ValueError(
                f"{title} has {len(lane.steps)} optimizer steps, {first_step} are needed; give a longer run"
            )
        _draw(axis, lane, lane.steps[first_step - 1], seconds)
        axis.set_title(title, loc="left", fontsize="medium")
        axis.set_xlim(0, seconds)
    axes[-1, 0].set_xlabel(
        "seconds; dashed: optimizer steps; colour: the version that generates, the trainer's: that it improves"
    )
    figure.savefig(out, dpi=110)
    pyplot.close(figure)


def _read(folder: Path) -> _Lanes:
    lanes = _Lanes()
    counts: dict[InstanceId, dict[Version, int]] = defaultdict(lambda: defaultdict(int))
    asked: dict[Any, float] = {}
    free_at = 0.0  # the trainer does one thing after the other

    def change(at: float, instance: InstanceId, version: Version, by: int) -> None:
        counts[instance][version] += by
        lanes.running[instance].append((at, dict(counts[instance])))

    _, entries = read_journal(RunFolder(folder).journal)
    for event, commands in entries:
        match event:
            case m.InstanceJoined(instance=instance, descriptor=descriptor):
                lanes.slots[instance] = descriptor.slots
            case m.Generated(instance=instance, version=version) if instance in lanes.slots:
                change(event.at, instance, version, -1)
            case m.Accumulated() | m.Stepped():
                key = (event.iteration, event.attempt, event.group if isinstance(event, m.Accumulated) else None)
                began = max(free_at, asked.pop(key, event.at))
                lanes.trainer.append((began, event.at, event.iteration))
                free_at = event.at
                if isinstance(event, m.Stepped):
                    lanes.steps.append(event.at)
        for command in commands:
            match command:
                case m.Generate(instance=instance, version=version):
                    change(event.at, instance, version, +1)
                case m.Accumulate() | m.Step():
                    group = command.group if isinstance(command, m.Accumulate) else None
                    asked[(command.iteration, command.attempt, group)] = event.at
    return lanes


def _draw(axis: Any, lanes: _Lanes, start: float, seconds: float) -> None:
    names = sorted(lanes.slots)
    for row, name in enumerate(names, start=1):
        for begin, end, counts in _pieces(lanes.running[name], start, start + seconds):
            bottom = float(row)
            for version, answers in sorted(counts.items()):
                height = 0.9 * answers / lanes.slots[name]
                axis.fill_between([begin - start, end - start], bottom, bottom + height, color=_color(version), lw=0)
                bottom += height
    for begin, end, iteration in lanes.trainer:
        if end > start and begin < start + seconds:
            axis.broken_barh([(begin - start, end - begin)], (0.0, 0.9), color=_color(Version(iteration)), lw=0)
    for at in lanes.steps:
        if start <= at <= start + seconds:
            axis.axvline(at - start, color="black", linestyle="--", lw=0.8)
    axis.set_yticks([row + 0.45 for row in range(len(names) + 1)], ["trainer", *names], fontsize="small")
    axis.set_ylim(0, len(names) + 1)
    shown = sorted({v for lane in lanes.running.values() for _, counts in lane for v, n in counts.items() if n})
    axis.legend(
        handles=[Patch(color=_color(version), label=f"v{version}") for version in shown],
        ncols=len(shown), fontsize="x-small", loc="lower right", bbox_to_anchor=(1.0, 1.0), frameon=False,
    )  # fmt: skip


def _pieces(
    changes: Sequence[tuple[float, dict[Version, int]]], start: float, end: float
) -> Iterator[tuple[float, float, dict[Version, int]]]:
    """Between two changes nothing changes."""
    for (at, counts), following in zip(changes, [*(at for at, _ in changes[1:]), end], strict=True):
        if following > start and at < end:
            yield max(at, start), min(following, end), counts


def _color(version: Version) -> Any:
    return COLORS[version % len(COLORS)]
