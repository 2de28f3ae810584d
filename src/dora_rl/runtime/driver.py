"""The real run's loop: the twin of sim/engine.py, line for line, under asyncio."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Protocol

from dora_rl.core.messages import Command, Event
from dora_rl.core.orchestrator import Orchestrator

Recorder = Callable[[Event, Sequence[Command]], None]
Inbox = asyncio.Queue[Event | Exception]
"""What has happened; an exception is a fault of the driver's own side, which ends the run."""


class Executes(Protocol):
    def start(self, command: Command) -> None:
        """Begin a command; its one answer will come into the inbox, failure included."""
        ...


async def drive(core: Orchestrator, hands: Executes, inbox: Inbox, record: Recorder) -> None:
    """Run to the end of the core's run. Raises whatever exception it finds in the inbox."""
    while not core.done:
        event = await inbox.get()
        if isinstance(event, Exception):
            raise event
        commands = core.step(event)
        record(event, commands)
        for command in commands:
            hands.start(command)
