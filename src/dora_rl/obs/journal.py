"""`journal.jsonl`: what happened and what was decided, one line per event, in the order the core saw it.

The first line is the header. Replaying the events reproduces the commands, whichever driver wrote them. Owns the
file's format; knows the messages only by their classes' names and fields.
"""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Self, get_args

import msgspec

from dora_rl.core.messages import Command, Event


class JournalError(ValueError):
    """The journal is damaged; the message names the line."""


@dataclass(frozen=True, kw_only=True, slots=True)
class JournalHeader:
    run_id: str
    program_version: str
    config_hash: str
    start_time: str
    """ISO 8601 with its zone. The only wall-clock time: all others count seconds from here."""
    seed: int


class JournalWriter:
    """Appends to a new journal. Every line is handed to the operating system at once, so that a killed process
    leaves all of its lines behind, and at most the last one torn."""

    def __init__(self, path: Path, header: JournalHeader) -> None:
        """Raises FileExistsError: a journal is never written over."""
        self._encoder = msgspec.json.Encoder(order="deterministic")
        # Not buffered: a line costs one `write`, a few microseconds.
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o644)
        self._write(self._encoder.encode(header) + b"\n")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Make all lines durable. Closing twice is harmless."""
        if self._file >= 0:
            os.fsync(self._file)
            os.close(self._file)
            self._file = -1

    def record(self, event: Event, commands: Sequence[Command]) -> None:
        """The driver's `record` callback."""
        tagged = self._tagged
        decided = b",".join([tagged(command) for command in commands])
        self._write(b'{"event":%b,"commands":[%b]}\n' % (tagged(event), decided))

    def _tagged(self, message: Event | Command) -> bytes:
        # msgspec tags only its own classes; every message has a field, so the object's inside is never empty.
        return b'{"type":"%b",%b' % (type(message).__name__.encode(), self._encoder.encode(message)[1:])

    def _write(self, line: bytes) -> None:
        view = memoryview(line)
        while view:  # a disk that is nearly full takes a part
            view = view[os.write(self._file, view) :]


class JournalEntries(Iterator[tuple[Event, tuple[Command, ...]]]):
    """The entries after the header, read as they are asked for."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self._path = path
        self._file = file
        self._line = 1
        self.torn: str | None = None
        """Once the end is reached: what is wrong with the last line, of a run that was killed while it wrote."""

    def __next__(self) -> tuple[Event, tuple[Command, ...]]:
        line = self._file.readline()
        self._line += 1
        if not line.endswith(b"\n"):
            self._file.close()
            if line:
                self.torn = (
                    f"{self._path}, line {self._line}: cut off after {len(line)} bytes; the run was killed there"
                )
            raise StopIteration
        try:
            return _entry(line)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            self._file.close()
            raise JournalError(
                f"{self._path}, line {self._line}: {error}; the journal was damaged, restore it"
            ) from error


def read_journal(path: Path) -> tuple[JournalHeader, JournalEntries]:
    """The header and an iterator over (event, commands). Raises JournalError about a line that is damaged, now or
    when the iterator comes to it; a torn last line only ends the iteration, see `JournalEntries.torn`."""
    try:
        file = path.open("rb")
    except OSError as error:
        raise JournalError(f"cannot read {path}: {error.strerror}; is this a run's folder?") from error
    try:
        header = msgspec.json.decode(file.readline(), type=JournalHeader)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        file.close()
        raise JournalError(f"{path}, line 1: {error}; it should be the journal's header") from error
    return header, JournalEntries(path, file)


class _Line(msgspec.Struct, forbid_unknown_fields=True):
    event: msgspec.Raw
    commands: tuple[msgspec.Raw, ...]


class _Tag(msgspec.Struct):
    type: str


_line = msgspec.json.Decoder(_Line)
_tag = msgspec.json.Decoder(_Tag)
_events: dict[str, msgspec.json.Decoder[Any]] = {cls.__name__: msgspec.json.Decoder(cls) for cls in get_args(Event)}
_commands: dict[str, msgspec.json.Decoder[Any]] = {cls.__name__: msgspec.json.Decoder(cls) for cls in get_args(Command)}


def _entry(text: bytes) -> tuple[Event, tuple[Command, ...]]:
    line = _line.decode(text)
    event = _message(line.event, _events, "event")
    return event, tuple(_message(command, _commands, "command") for command in line.commands)


def _message(raw: msgspec.Raw, decoders: dict[str, msgspec.json.Decoder[Any]], kind: str) -> Any:
    name = _tag.decode(raw).type
    if name not in decoders:
        raise msgspec.ValidationError(f"no {kind} is called {name!r}; expected one of {', '.join(decoders)}")
    return decoders[name].decode(raw)
