"""The heart: whether everything that was begun can still be trained in time (docs/staleness.md)."""

from dora_rl.core.state import State
from dora_rl.core.types import Version


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


def room(state: State, version: Version) -> int:
    """How many more groups of this version could be dispatched before something would be too late for its seat."""
    newest = state.deadline(version)
    due, least = 0, state.config.batch * (state.bound + 1)
    for other in sorted({*state.unseated, version}):
        due += state.unseated.get(other, 0)
        deadline = state.deadline(other)
        if deadline >= newest:
            least = min(least, state.batch.seats + state.config.batch * (deadline - state.trained) - due)
    return max(0, least)
