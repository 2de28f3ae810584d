"""A journal read again: the same events through a fresh core must give the same commands, whoever wrote it."""

from collections.abc import Iterable, Iterator

from dora_rl.config import Config
from dora_rl.core.messages import Command, Event
from dora_rl.core.orchestrator import Orchestrator
from dora_rl.core.state import State

Record = tuple[Event, tuple[Command, ...]]


def replay(config: Config, events: Iterable[Event]) -> Iterator[tuple[Record, State]]:
    """Drive a fresh core with recorded events; yields each event with its commands, and the state after it."""
    core = Orchestrator(config)
    for event in events:
        yield (event, tuple(core.step(event))), core.state


def divergence(config: Config, records: Iterable[Record]) -> str | None:
    """The first place at which the journal's commands differ from the core's, in one line; None: there is none."""
    core = Orchestrator(config)
    for number, (event, recorded) in enumerate(records):
        commands = tuple(core.step(event))
        if commands != recorded:
            return f"event {number} ({type(event).__name__}): recorded {recorded}, replayed {commands}"
    return None
