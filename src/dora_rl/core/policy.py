"""The decisions, each a pure function of the state; to change how dora-rl schedules, change this file.

`schedulable` is the heart: the earliest-deadline-first test of docs/staleness.md. Every strategy is one `Strategy`:
when a new group may be dispatched, and when a complete one may take a seat.
"""

from collections.abc import Callable
from dataclasses import dataclass

from dora_rl.core.state import Instance, State
from dora_rl.core.types import InstanceId, RolloutId, Version


def schedulable(state: State, *, seats: int, extra: Version | None = None, without: Version | None = None) -> bool:
    """Whether every outstanding group can still be trained by its deadline: N(d) <= seats + B * (d - v) for all d.

    v is the trainer's version, N(d) the number of unseated groups due at d or before, `seats` what the open batch has
    left. `extra` adds one group of that version, `without` takes one away. N grows only at deadlines while the right
    side grows with d, so it is enough to look at the deadlines.
    """
    versions = sorted(state.unseated) if extra is None else sorted({*state.unseated, extra})
    due = 0
    for version in versions:
        due += state.unseated.get(version, 0) + (version == extra) - (version == without)
        deadline = state.deadline(version)
        if due > 0 and (deadline < state.trained or due > seats + state.config.batch * (deadline - state.trained)):
            return False
    return True


@dataclass(frozen=True, kw_only=True, slots=True)
class Strategy:
    """How one way of scheduling differs from the others."""

    may_admit: Callable[[State, Version], bool]
    """Whether one more group may be dispatched under this published version, room for it given."""

    may_seat: Callable[[State, Version], bool]
    """Whether a complete group of this version may take a seat of the open batch."""


def _dora_may_admit(state: State, version: Version) -> bool:
    """Few enough are ready, and with one more group everything can still be trained in time."""
    return len(state.ready) < state.config.ready_target and schedulable(state, seats=state.batch.seats, extra=version)


def _dora_may_seat(state: State, version: Version) -> bool:
    """The seats that remain are enough for the groups that remain."""
    return schedulable(state, seats=state.batch.seats - 1, without=version)


def _sync_may_admit(state: State, version: Version) -> bool:
    """Each batch is filled by the version that it improves: no more groups than it has seats."""
    return version == state.trained and sum(state.unseated.values()) < state.batch.seats


def _sync_may_seat(state: State, version: Version) -> bool:
    """Any group there is belongs to this batch."""
    return version == state.trained


STRATEGIES: dict[str, Strategy] = {
    "sync": Strategy(may_admit=_sync_may_admit, may_seat=_sync_may_seat),
    "dora": Strategy(may_admit=_dora_may_admit, may_seat=_dora_may_seat),
}


def filtering_too_much(state: State) -> bool:
    """So many groups of this iteration had nothing to learn from that it should close with what it has."""
    return state.batch.fruitless >= state.config.max_filtered_groups


def admission_open(state: State) -> bool:
    """Whether this run dispatches any more groups at all for now, whatever the strategy."""
    return state.published >= 0 and not state.ended and state.prompts_left and not filtering_too_much(state)


def next_waiting(state: State, version: Version) -> RolloutId | None:
    """The answer of this version to place next: work at its deadline, then evaluations, then all other work."""
    work = state.waiting.get(version)
    evaluation = state.evaluating.get(version)
    if evaluation and not (work and state.deadline(version) <= state.trained):
        return evaluation[0]
    return work[0] if work else None


def choose_version(state: State) -> Version | None:
    """The version that an idle instance should load: among those with answers waiting, work by earliest deadline;
    an evaluation, which has none, comes after what is due now and before the rest."""
    due = [v for v in state.waiting if state.deadline(v) <= state.trained]
    return min(due or state.evaluating or state.waiting, default=None)


def choose_home(state: State) -> Instance | None:
    """Where a new group of the newest version starts: where most of it fits, and without a load if that is equal.

    Nothing is loaded for new work while a newer version is about to appear: it would be loaded a moment later again.
    """
    best: tuple[tuple[int, bool, int], Instance] | None = None
    for instance in state.instances.values():  # ties: the one that joined first
        serves = instance.serves == state.published
        able = serves or (instance.idle and state.publishing is None)
        if instance.free <= 0 or not able or instance.id in state.draining:
            continue
        score = (min(instance.free, state.config.group_size), serves, instance.free)
        if best is None or score > best[0]:
            best = (score, instance)
    return best[1] if best else None


def choose_legacy_home(state: State) -> Instance | None:
    """While other instances change to the newest version: one that still holds an older one and has room for a group.

    A group that did not fit would leave members waiting, and the change of this instance with them.
    """
    able = [
        instance
        for instance in state.instances.values()
        if instance.id not in state.switching
        and instance.id not in state.draining
        and instance.running
        and instance.free >= min(state.config.group_size, instance.slots)
        and instance.version != state.published
        and instance.version not in state.waiting
        and instance.version not in state.evaluating
    ]
    return max(able, key=lambda instance: instance.free, default=None)


def leaves_to_others(state: State, instance: Instance) -> bool:
    """Whether an instance that is to change version should empty itself: another one goes on serving the old one."""
    return (instance.id in state.switching and instance.loading is None) and any(
        other.serves == instance.serves and other.id not in state.switching and other.id not in state.draining
        for other in state.instances.values()
    )


def choose_switch(state: State) -> Instance | None:
    """The next instance that should change to the newest version: of those with an older one, that with the least left
    to run. Never more than half of them at once, so that the others generate on while weights are loaded."""
    changing = sum(i.loading is not None or i.id in state.switching for i in state.instances.values())
    if changing >= max(1, len(state.instances) // 2):
        return None
    old = [
        instance
        for instance in state.instances.values()
        if instance.version is not None
        and instance.version < state.published
        and instance.loading is None
        and instance.id not in state.switching
    ]
    return min(old, key=lambda instance: len(instance.running), default=None)


def choose_drain(state: State) -> tuple[InstanceId, Version] | None:
    """A version whose work is due and which no instance serves, and the busy instance with the least left to run."""
    served = {state.draining.get(i.id, i.serves) for i in state.instances.values()}
    due = [v for v in state.waiting if v not in served and state.deadline(v) <= state.trained]
    able = [i for i in state.instances.values() if i.id not in state.draining and i.loading is None]
    if not due or not able:
        return None
    return min(able, key=lambda i: (len(i.running), i.id)).id, min(due)


def drain_is_over(state: State, name: InstanceId) -> bool:
    """The work that this instance drains for is gone, or another instance serves it by now."""
    wanted = state.draining[name]
    return wanted not in state.waiting or any(
        other.serves == wanted for other in state.instances.values() if other.id != name
    )


def forgettable(state: State) -> list[Version]:
    """Versions in the store that nothing can ask for again: no unfinished answer, instance, or evaluation has them."""
    needed = {state.published, state.trained}
    needed.update(state.unseated)  # ready ones too: lost data is sampled again under its own version
    needed.update(state.groups[g].version for g in state.batch.groups)
    needed.update(e.version for e in state.evaluations.values())
    for instance in state.instances.values():
        needed.update(v for v in (instance.version, instance.loading) if v is not None)
    return sorted(state.stored - needed)
