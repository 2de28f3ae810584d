"""The simulator's loop: the twin of runtime/driver.py, line for line, under a virtual clock."""

import heapq
from collections.abc import Callable, Sequence
from itertools import count
from typing import Protocol

from dora_rl.core.messages import Command, Event
from dora_rl.core.orchestrator import Orchestrator

Recorder = Callable[[Event, Sequence[Command]], None]


class Timeline:
    """Earliest first; simultaneous events in the order in which they were caused."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Event]] = []
        self._cause = count()

    def push(self, event: Event) -> None:
        heapq.heappush(self._heap, (event.at, next(self._cause), event))

    def pop(self) -> Event:
        return heapq.heappop(self._heap)[2]

    def __len__(self) -> int:
        return len(self._heap)


class World(Protocol):
    """What answers commands; it knows durations that the core must not know."""

    def begin(self) -> Sequence[Event]:
        """Facts that come whatever the core does: the start, instances that join, the losses to come."""
        ...

    def answer(self, command: Command, *, now: float) -> Event:
        """The one event that answers a command, with the time at which it will happen."""
        ...


class Deadlock(RuntimeError):
    """The core waits for events, and none will ever come."""


def simulate(core: Orchestrator, world: World, record: Recorder) -> None:
    """Run to the end of the core's run. Raises Deadlock when nothing is left that could happen."""
    timeline = Timeline()
    for event in world.begin():
        timeline.push(event)
    while not core.done:
        if not len(timeline):
            raise Deadlock(f"nothing will ever happen again: ledger {core.state.ledger()}")
        event = timeline.pop()
        commands = core.step(event)
        record(event, commands)
        for command in commands:
            timeline.push(world.answer(command, now=event.at))
