"""Ctrl-C, a polite kill and a closed terminal over the whole life of a command: the first asks it to end, the second
ends it at once.

What the first one does depends on how far the command has come: by default it raises KeyboardInterrupt wherever it
strikes; within `asks` it calls a function.
"""

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, NoReturn, Self

import psutil

from dora_rl.cli.guardian import ASKING

INTERRUPTED = 130
"""Exit status."""
SAME_S = 0.5
"""A terminal signals a whole group of processes, and the guardian passes on what it got: what comes within this time of
the first signal is the same wish."""


class Stopping:
    """Owns these signals while its block runs. Only in the main thread, as Python wants it."""

    def __init__(self) -> None:
        self._first: Callable[[], object] = _raise
        self._asked_at: float | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        # nohup ignores the closed terminal, and so does what it starts.
        owned = [n for n in ASKING if not (n == signal.SIGHUP and signal.getsignal(n) == signal.SIG_IGN)]
        self._before = {number: signal.signal(number, self._strike) for number in owned}
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
        now = time.monotonic()
        if self._asked_at is None:
            self._asked_at = now
            self._first()
        elif now - self._asked_at > SAME_S:
            end_at_once()


def end_at_once() -> NoReturn:
    """Kill every process that this one has started, then end without another word to anybody."""
    os.write(2, b"dora-rl: ended at once; what the run's folder has is what was written until now\n")
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()
    os._exit(INTERRUPTED)


def _raise() -> None:
    raise KeyboardInterrupt
