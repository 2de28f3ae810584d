"""The lines of `journal.jsonl` as the audit reads them: of every message the fields that it needs, with their types.

The audit's own account of the format; what does not fit it is no journal. Fields that are not named here may be there.
"""

from typing import Annotated

from msgspec import Meta, MsgspecError, Struct
from msgspec.json import Decoder

Count = Annotated[int, Meta(ge=0)]


class AuditError(ValueError):
    """The folder cannot be judged at all; the message is one line and says why."""


class Header(Struct):
    config_hash: str


class Tagged(Struct, tag=True):
    """Its class's name is the message's `type`."""


class RunStarted(Tagged): ...


class Descriptor(Struct):
    max_versions: Annotated[int, Meta(ge=1)]
    versions: list[int]


class InstanceJoined(Tagged):
    instance: str
    descriptor: Descriptor


class InstanceLost(Tagged):
    instance: str
    saved: list[tuple[int, Count]]


class Reported(Tagged): ...


class RankLost(Tagged): ...


class DataLost(Tagged):
    group: int


class Interrupted(Tagged): ...


class Loaded(Tagged):
    instance: str
    version: int
    error: str | None


class Generated(Tagged):
    rollout: int
    segment: int
    attempt: int
    instance: str
    version: int
    reason: str
    num_tokens: Count


class Detached(Tagged): ...


class Scored(Tagged):
    group: int
    rewards: list[float | None]
    digest: str
    error: str | None


class Accumulated(Tagged):
    iteration: int
    attempt: int
    group: int
    lost: bool


class Stepped(Tagged):
    iteration: int
    attempt: int
    improved: bool
    error: str | None


class Published(Tagged):
    version: int
    error: str | None


class Closed(Tagged):
    iteration: int
    error: str | None


class Evaluated(Tagged): ...


class Forgotten(Tagged): ...


class Exported(Tagged):
    error: str | None


class Load(Tagged):
    instance: str
    version: int


class Generate(Tagged):
    rollout: int
    segment: int
    attempt: int
    instance: str
    version: int
    group: int | None
    member: int
    generated_tokens: Count


class Detach(Tagged): ...


class Score(Tagged): ...


class Accumulate(Tagged):
    iteration: int
    attempt: int
    group: int
    trained_at: int


class Step(Tagged):
    iteration: int
    attempt: int
    groups: list[int]
    version: int


class Publish(Tagged):
    version: int


class Close(Tagged):
    iteration: int
    trained_at: int
    trained: list[int]
    filtered: list[int]
    failed: list[int]
    dropped: list[int] = []
    """Not named by journals before there was a strategy that drops."""


class Evaluate(Tagged): ...


class Forget(Tagged): ...


class Export(Tagged): ...


Event = (
    RunStarted
    | InstanceJoined
    | InstanceLost
    | Reported
    | RankLost
    | DataLost
    | Interrupted
    | Loaded
    | Generated
    | Detached
    | Scored
    | Accumulated
    | Stepped
    | Published
    | Closed
    | Evaluated
    | Forgotten
    | Exported
)
Command = Load | Generate | Detach | Score | Accumulate | Step | Publish | Close | Evaluate | Forget | Export


class Entry(Struct):
    event: Event
    commands: list[Command]


class MetricsLine(Struct):
    """What the audit wants to know of a line of `metrics.jsonl`."""

    iteration: int


_header, _entry, _metrics = Decoder(Header), Decoder(Entry), Decoder(MetricsLine)

Damaged = (MsgspecError, UnicodeDecodeError, RecursionError)
"""What a line that is none of ours makes a decoder raise."""


def read_header(line: bytes, where: str) -> Header:
    try:
        return _header.decode(line)
    except Damaged as error:
        raise AuditError(f"{where} is no header ({error}); expected a journal that a run of dora-rl wrote") from error


def read_entry(line: bytes, where: str) -> Entry:
    try:
        return _entry.decode(line)
    except Damaged as error:
        raise AuditError(f"{where}: {error}; the journal was damaged, restore it") from error


def read_metrics_line(line: bytes) -> MetricsLine | None:
    """None when it is no such line: metrics promise nothing, a torn or changed one is no matter for the judge."""
    try:
        return _metrics.decode(line)
    except Damaged:
        return None
