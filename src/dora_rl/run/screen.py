"""Where a run's words go: a live picture on a terminal, plain lines elsewhere, next to nothing with --quiet."""

import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Protocol, Self

from rich.console import Console
from rich.live import Live

from dora_rl.obs.live import Snapshot, picture

REDRAW_S = 0.25
"""Shortest time between two pictures."""


class Screen(Protocol):
    def line(self, text: str) -> None:
        """Something happened."""

    def result(self, text: str) -> None:
        """What the run came to."""

    def show(self, now: Callable[[], Snapshot]) -> None:
        """The run has gone on; the snapshot is taken only if it is drawn."""

    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class Lines:
    """Plain lines, for files, pipes and continuous integration; with `quiet` the result alone."""

    def __init__(self, *, quiet: bool = False) -> None:
        self._quiet = quiet

    def line(self, text: str) -> None:
        if not self._quiet:
            print(text, flush=True)

    def result(self, text: str) -> None:
        print(text, flush=True)

    def show(self, now: Callable[[], Snapshot]) -> None:
        pass

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass


class LiveScreen:
    """Lines as they come, and below them a picture of the moment."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = Live(console=console, auto_refresh=False, transient=True)
        self._drawn = -REDRAW_S
        self._over = False

    def line(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def result(self, text: str) -> None:
        """From here on there is no moment to picture any more."""
        self._live.stop()
        self._over = True
        self.line(text)

    def show(self, now: Callable[[], Snapshot]) -> None:
        if self._over:
            return
        if (at := time.monotonic()) - self._drawn >= REDRAW_S:
            self._drawn = at
            self._live.update(picture(now()), refresh=True)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()


def open_screen(*, quiet: bool) -> Screen:
    if quiet or not sys.stdout.isatty():
        return Lines(quiet=quiet)
    return LiveScreen(Console())
