"""The strategies: how each decides what may start and what may be trained, and which promises it keeps.

A strategy is two pure functions and the promises that it keeps (config.ScheduleConfig.promises): without C1, running
answers go on under each new version as soon as it is published; without C2, groups that have become older than the
bound are thrown away. Everything else (placing, moving, loading) is the same for all of them and stands in policy.py.
`dora` keeps all three promises by (S) of docs/staleness.md; the others are what it is measured against, each as its
users know it.
"""

from collections.abc import Callable
from dataclasses import dataclass

from dora_rl.core.schedulability import schedulable
from dora_rl.core.state import Group, State
from dora_rl.core.types import UNSEATED, GroupStatus, Version


@dataclass(frozen=True, kw_only=True, slots=True)
class Strategy:
    """How one way of scheduling differs from the others."""

    may_admit: Callable[[State, Version], bool]
    """Whether one more group may be dispatched under this version, room for it given."""

    may_seat: Callable[[State, Version], bool]
    """Whether a complete group of this version may take a seat of the open batch."""


def _few_ready(state: State) -> bool:
    return len(state.ready) < state.config.ready_target


# --- dora ------------------------------------------------------------------------------------------------------------


def _in_time(state: State, version: Version) -> bool:
    """Few enough are ready, and with one more group everything can still be trained in time."""
    return _few_ready(state) and schedulable(state, seats=state.batch.seats, extra=version)


def _seats_suffice(state: State, version: Version) -> bool:
    """The seats that remain are enough for the groups that remain."""
    return schedulable(state, seats=state.batch.seats - 1, without=version)


# --- sync ------------------------------------------------------------------------------------------------------------


def _this_batch_lacks(state: State, version: Version) -> bool:
    """Each batch is filled by the version that it improves: no more groups than it has seats."""
    return version == state.trained and sum(state.unseated.values()) < state.batch.seats


def _of_this_version(state: State, version: Version) -> bool:
    """Any group there is belongs to this batch."""
    return version == state.trained


# --- one step off ----------------------------------------------------------------------------------------------------


def _next_batch_lacks(state: State, version: Version) -> bool:
    """One batch is trained while one version generates the next, which it begins when the one before is whole."""
    if version != state.published or any(other != version for other in state.unfinished):
        return False
    lacking = (state.batch.seats or state.config.batch) - sum(state.unseated.values())
    return lacking > 0 and schedulable(state, seats=state.batch.seats, extra=version)


# --- drop stale ------------------------------------------------------------------------------------------------------


def _slots_are_free(state: State, version: Version) -> bool:
    """Always, while few enough are complete: what grows too old is thrown away.

    Those being scored count too: no deadline holds them back, and a slow reward would have them grow without end.
    """
    complete = sum(group.status in UNSEATED and not group.unfinished for group in state.groups.values())
    return version == state.published and complete < state.config.ready_target and _young_enough(state, version)


def _young_enough(state: State, version: Version) -> bool:
    return state.trained - version <= state.bound


STRATEGIES: dict[str, Strategy] = {
    "dora": Strategy(may_admit=_in_time, may_seat=_seats_suffice),
    "sync": Strategy(may_admit=_this_batch_lacks, may_seat=_of_this_version),
    "one_step_off": Strategy(may_admit=_next_batch_lacks, may_seat=_seats_suffice),
    "partial": Strategy(may_admit=_in_time, may_seat=_seats_suffice),
    "drop_stale": Strategy(may_admit=_slots_are_free, may_seat=_young_enough),
}


def stale(state: State) -> list[Group]:
    """Groups without a seat that no batch may train any more."""
    return [
        group
        for group in state.groups.values()
        if group.status is not GroupStatus.SEATED and (state.ended or state.trained - group.version > state.bound)
    ]
