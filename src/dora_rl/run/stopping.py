"""What it means for a command to be asked to end (Ctrl-C, a polite kill, a closed terminal) while it works.

It depends on how far the command has come: by default KeyboardInterrupt is raised wherever it strikes; within `asks` a
function is called instead. Asking twice is the guardian's business.
"""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Self

ASKING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that ask a command to end."""

INTERRUPTED = 130
"""Exit status."""


class Stopping:
    """Owns these signals while its block runs. Only in the main thread, as Python wants it."""

    def __init__(self) -> None:
        self._first: Callable[[], object] = _raise
        self._asked = False
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
        if not self._asked:
            self._asked = True
            self._first()


def _raise() -> None:
    raise KeyboardInterrupt
