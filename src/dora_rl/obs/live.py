"""What a terminal shows while a run goes on: one picture, drawn again and again. Only makes pictures of numbers."""

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from dora_rl.obs.console import duration


@dataclass(frozen=True, kw_only=True, slots=True)
class InstanceView:
    name: str
    version: int | None
    loading: int | None
    running: int
    slots: int
    finished: int
    """Answers that came to their end here so far."""


@dataclass(frozen=True, kw_only=True, slots=True)
class VersionView:
    version: int
    running: int
    waiting: int
    """Answers that have begun or may begin, and have no slot."""
    finished: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Snapshot:
    """A run at one moment; None: not known yet."""

    iteration: int
    iterations: int
    elapsed_s: float
    left_s: float | None
    instances: Sequence[InstanceView]
    versions: Sequence[VersionView]
    """Those with answers that have not ended."""
    seated: int
    """Groups with a seat in the batch that is being collected."""
    batch: int
    """Seats of a batch."""
    ready: int
    """Complete groups that wait for one."""
    reward: float | None
    reward_before: float | None
    """Mean training reward of the last iteration and of the first."""
    held_out: str
    """The newest evaluation in words; empty before the first."""
    staleness: tuple[float, int] | None
    """Mean and largest, of the last iteration."""
    tokens_per_s: float | None
    trainer_waits: float | None
    rollout_idle: float | None
    """Shares of the last iteration's time."""


def picture(now: Snapshot) -> RenderableType:
    tables = Table.grid(padding=(0, 6))
    tables.add_row(_instances(now), _versions(now))
    return Group(_progress(now), _figures(now), tables)


def _progress(now: Snapshot) -> RenderableType:
    row = Table.grid(padding=(0, 2))
    left = "" if now.left_s is None else f", {duration(now.left_s)} left"
    row.add_row(
        Text(f"iteration {now.iteration}/{now.iterations}", style="bold"),
        ProgressBar(total=now.iterations, completed=now.iteration, width=32),
        f"{duration(now.elapsed_s)}{left}",
        f"{now.seated} of {now.batch} groups in the batch, {now.ready} ready",
    )
    return row


def _figures(now: Snapshot) -> RenderableType:
    row = Table.grid(padding=(0, 3))
    row.add_row(
        f"reward {_number(now.reward, 3)}" + ("" if now.reward_before is None else f" (first {now.reward_before:.3f})"),
        "staleness -" if now.staleness is None else f"staleness {now.staleness[0]:.2f}, at most {now.staleness[1]}",
        f"{_number(now.tokens_per_s, 0)} tokens/s",
        f"trainer waits {_share(now.trainer_waits)}, rollout idle {_share(now.rollout_idle)}",
    )
    return Group(row, Text(now.held_out)) if now.held_out else row


def _instances(now: Snapshot) -> RenderableType:
    table = Table(box=None, padding=(0, 2), header_style="dim")
    for column in ("instance", "version", "running", "", "finished"):
        table.add_column(column, justify="left" if column in ("instance", "") else "right")
    for one in now.instances:
        version = "-" if one.version is None else str(one.version)
        table.add_row(
            one.name,
            version if one.loading is None else f"{version} -> {one.loading}",
            f"{one.running}/{one.slots}",
            ProgressBar(total=one.slots, completed=one.running, width=16),
            str(one.finished),
        )
    return table


def _versions(now: Snapshot) -> RenderableType:
    table = Table(box=None, padding=(0, 2), header_style="dim")
    for column in ("version", "running", "waiting", "finished"):
        table.add_column(column, justify="right")
    for one in now.versions:
        table.add_row(str(one.version), str(one.running), str(one.waiting), str(one.finished))
    return table


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"
