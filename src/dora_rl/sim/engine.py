"""The simulator's loop: the twin of runtime/driver.py, line for line, under a virtual clock."""

import heapq
from collections.abc import Callable, Sequence
from itertools import count
from typing import Protocol

from dora_rl.core.messages import Command, Event
from dora_rl.core.orchestrator import Orchestrator

Recorder = Callable[[Event, Sequence[Command]], None]


class Agenda:
    """What will happen: earliest first; simultaneous events in the order in which they were caused."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Event]] = []
        self._ids = count()
        self._dropped: set[int] = set()

    def add(self, event: Event) -> int:
        number = next(self._ids)
        heapq.heappush(self._heap, (event.at, number, event))
        return number

    def drop(self, number: int) -> None:
        """Something else happened instead; it must not have been popped yet."""
        self._dropped.add(number)

    def pop(self) -> Event | None:
        while self._heap:
            _, number, event = heapq.heappop(self._heap)
            if number not in self._dropped:
                return event
            self._dropped.discard(number)
        return None


class World(Protocol):
    """What answers commands; it knows durations that the core must not know."""

    def begin(self) -> None:
        """Facts that come whatever the core does: the start, instances that join, the losses to come."""
        ...

    def take(self, command: Command, *, now: float) -> None:
        """Carry a command out: exactly one event will answer it."""
        ...

    def next(self) -> Event | None:
        """What happens next; None: nothing ever will."""
        ...


class Deadlock(RuntimeError):
    """The core waits for events, and none will ever come."""


def simulate(core: Orchestrator, world: World, record: Recorder) -> None:
    """Run to the end of the core's run. Raises Deadlock when nothing is left that could happen."""
    world.begin()
    while not core.done:
        event = world.next()
        if event is None:
            raise Deadlock(f"nothing will ever happen again: ledger {core.state.ledger()}")
        commands = core.step(event)
        record(event, commands)
        for command in commands:
            world.take(command, now=event.at)
