"""Ctrl-C and a polite kill over the whole life of a command: the first asks it to end, the second ends it at once.

What the first one does depends on how far the command has come: by default it raises KeyboardInterrupt wherever it
strikes; within `asks` it calls a function.
"""

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, NoReturn, Self

import psutil

INTERRUPTED = 130
"""Exit status."""


class Stopping:
    """Owns both signals while its block runs. Only in the main thread, as Python wants it."""

    def __init__(self) -> None:
        self._first: Callable[[], object] = _raise
        self._asked = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        self._before = {number: signal.signal(number, self._strike) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @contextmanager
    def asks(self, first: Callable[[], object]) -> Iterator[None]:
        """Within the block the first signal calls this, between two bytecodes of whatever runs."""
        outer, self._first = self._first, first
        try:
            yield
        finally:
            self._first = outer

    def _strike(self, number: int, frame: FrameType | None) -> None:
        if self._asked:
            end_at_once()
        self._asked = True
        self._first()


def end_at_once() -> NoReturn:
    """Kill every process that this one has started, then end without another word to anybody."""
    os.write(2, b"dora-rl: ended at once; what the run's folder has is what was written until now\n")
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()
    os._exit(INTERRUPTED)


def _raise() -> None:
    raise KeyboardInterrupt
