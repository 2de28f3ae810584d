"""The journal recounted: who was asked to sample what under which version, what came back, and what was closed.

Notes as problems what the journal alone shows to be wrong: an answer under a version that its instance did not hold or
exchanged meanwhile, one begun again, a group with two versions, a step that trains other groups than it closes.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from dora_rl.audit import lines
from dora_rl.audit.lines import AuditError as AuditError
from dora_rl.core.types import has_spread


@dataclass(slots=True, kw_only=True)
class Answer:
    """A rollout as the journal tells it."""

    rollout: int
    group: int | None
    member: int
    version: int
    segments: list[tuple[int, str, int]] = field(default_factory=list)
    """(version, instance, tokens) of segments that added tokens."""
    reason: str | None = None
    failures: int = 0
    asked: lines.Generate | None = None
    """The Generate that has no answer yet."""

    @property
    def tokens(self) -> int:
        return sum(tokens for _, _, tokens in self.segments)

    @property
    def name(self) -> str:
        return f"trajectory {self.rollout} (member {self.member} of group {self.group})"


@dataclass(frozen=True, slots=True)
class Closing:
    iteration: int
    trained_at: int
    status: str


@dataclass(slots=True, kw_only=True)
class Group:
    id: int
    version: int
    members: dict[int, int] = field(default_factory=dict)
    """Rollout by member."""
    digest: str | None = None
    """Once it is scored and durable."""
    rewards: list[float | None] = field(default_factory=list)
    lost: bool = False
    """Its data are gone since it was scored: it is sampled again."""
    seat: tuple[int, int] | None = None
    """Iteration and attempt of the batch in which it has a seat."""
    closing: Closing | None = None

    @property
    def status(self) -> str:
        """Where it is in the ledger, as if nobody had interrupted the run."""
        if self.closing is not None:
            return self.closing.status
        if self.digest is None:
            return "running"
        # Filtered and failed groups leave when they are scored; an iteration that never closed did not list them.
        if sum(reward is not None for reward in self.rewards) < 2:
            return "failed"
        if not has_spread(self.rewards):
            return "filtered"
        return "ready" if self.seat is None else "seated"


class History:
    """What happened, told once through from the first line to the last."""

    def __init__(self, path: Path) -> None:
        """Raises AuditError when there is no readable journal."""
        self.groups: dict[int, Group] = {}
        self.answers: dict[int, Answer] = {}
        self.written: set[int] = set()
        """Iterations whose file the journal says is written."""
        self.closed: set[int] = set()
        self.stepped: dict[int, tuple[int, list[int]]] = {}
        """By iteration: the version that the trainer held when it stepped, and the batch's groups."""
        self.publishing: set[int] = set()
        """Versions that the trainer was told to publish."""
        self.published: set[int] = set()
        self.interrupted = False
        self.finished = False
        """The run came to its proper end: nothing may be unfinished."""
        self.problems: list[str] = []
        self.notes: list[str] = []
        self._trained = 0
        self._held: dict[str, list[int]] = {}
        self._room: dict[str, int] = {}
        self._loading: dict[str, int] = {}
        self._step: lines.Step | None = None
        self._written_off: set[tuple[int, int, int]] = set()
        rows = self._lines(path)
        self.header = lines.read_header(next(rows, b""), f"{path}, line 1")
        for number, row in enumerate(rows, start=2):
            where = f"{path}, line {number}"
            entry = lines.read_entry(row, where)
            try:
                self._event(entry.event)
                for command in entry.commands:
                    self._command(command)
            except _UnknownGroupError as error:
                raise AuditError(f"{where}: {error}; the journal was damaged, restore it") from error

    def _lines(self, path: Path) -> Iterator[bytes]:
        try:
            text = path.read_bytes()
        except OSError as error:
            raise AuditError(f"cannot read {path}: {error.strerror}; name a run's folder") from error
        *rows, rest = text.split(b"\n")
        if rest:
            self.notes.append(f"{path.name} ends in the middle of line {len(rows) + 1}: the run was killed there")
        yield from rows

    def _group(self, name: int) -> Group:
        if name not in self.groups:
            raise _UnknownGroupError(f"group {name} was never dispatched")
        return self.groups[name]

    # --- events ---

    def _event(self, event: lines.Event) -> None:
        match event:
            case lines.InstanceJoined(instance=instance, descriptor=descriptor):
                self._held[instance] = sorted(descriptor.versions)
                self._room[instance] = descriptor.max_versions
            case lines.InstanceLost(instance=instance, saved=saved):
                self._lose(instance, dict(saved))
            case lines.Loaded():
                self._loaded(event)
            case lines.Generated():
                self._generated(event)
            case lines.Scored(error=None):
                group = self._group(event.group)
                group.digest, group.rewards, group.lost = event.digest, event.rewards, False
            case lines.Accumulated(lost=True):
                group = self._group(event.group)
                if group.seat == (event.iteration, event.attempt):  # else it sat in a batch that is lost anyway
                    self._data_lost(group)
            case lines.DataLost(group=name):
                # Of a group that is not waiting for a seat it comes too late.
                if name in self.groups and self.groups[name].status == "ready":
                    self._data_lost(self.groups[name])
            case lines.RankLost():
                self._step = None
                for group in self.groups.values():
                    group.seat = None
            case lines.Stepped(error=None):
                self._stepped(event)
            case lines.Published(error=None):
                self.published.add(event.version)
            case lines.Closed(error=None):
                self.written.add(event.iteration)
            case lines.Interrupted():
                self.interrupted = True
            case lines.Exported(error=None):
                self.finished = True

    def _lose(self, instance: str, saved: dict[int, int]) -> None:
        """What ran there goes on from the tokens that it had reported."""
        self._held.pop(instance, None)
        self._loading.pop(instance, None)
        for answer in self._running(instance):
            if answer.asked is not None:
                self._written_off.add(_key(answer.asked))
                if tokens := saved.get(answer.rollout):
                    answer.segments.append((answer.asked.version, instance, tokens))
                answer.asked, answer.reason = None, "failed"

    def _running(self, instance: str) -> list[Answer]:
        return [one for one in self.answers.values() if one.asked is not None and one.asked.instance == instance]

    def _data_lost(self, group: Group) -> None:
        """All that its answers had is gone: they may begin again."""
        if self.interrupted:
            return  # nothing is repaired any more
        group.seat = group.digest = None
        group.lost = True
        for rollout in group.members.values():
            answer = self.answers[rollout]
            answer.segments.clear()
            answer.reason = None

    def _loaded(self, event: lines.Loaded) -> None:
        instance, version = event.instance, event.version
        if instance not in self._held or event.error is not None:
            return
        if self._loading.pop(instance, None) != version:
            self.problems.append(f"C1: {instance} loaded version {version}, but nobody had asked for that")
        self.problems += [
            f"C1: {one.name} was running on {instance} when version {version} was loaded there; expected an instance "
            "that runs nothing"
            for one in self._running(instance)
        ]
        held = [other for other in self._held[instance] if other != version]
        self._held[instance] = [*held, version][-self._room[instance] :]

    def _generated(self, event: lines.Generated) -> None:
        answer = self.answers.get(event.rollout)
        if _key(event) in self._written_off:
            return  # its instance was lost: this late answer is nobody's
        if answer is None or answer.asked is None or _key(answer.asked) != _key(event):
            self.problems.append(f"C1: trajectory {event.rollout} was answered, but nobody had asked for it")
            return
        asked, answer.asked = answer.asked, None
        for what, wanted, came in (
            ("version", asked.version, event.version),
            ("instance", asked.instance, event.instance),
        ):
            if came != wanted:
                self.problems.append(f"C1: {answer.name}: asked of {what} {wanted}, answered by {came}")
        if event.num_tokens:
            answer.segments.append((event.version, event.instance, event.num_tokens))
        answer.reason = event.reason
        answer.failures += event.reason == "failed"

    def _stepped(self, event: lines.Stepped) -> None:
        step = self._step
        if step is None or (step.iteration, step.attempt) != (event.iteration, event.attempt):
            return  # late, of an attempt whose rank was lost
        self._step = None
        self.stepped[step.iteration] = (self._trained, step.groups)
        for name in step.groups:
            if self._group(name).seat != (step.iteration, step.attempt):
                self.problems.append(f"C2: group {name} was stepped in iteration {step.iteration} without a seat")
        if event.improved:
            self._trained += 1
            if step.version != self._trained:
                self.problems.append(
                    f"C3: iteration {step.iteration} made version {step.version}, recounted {self._trained}"
                )

    # --- commands ---

    def _command(self, command: lines.Command) -> None:
        match command:
            case lines.Load():
                self._load(command)
            case lines.Generate():
                self._generate(command)
            case lines.Accumulate():
                self._accumulate(command)
            case lines.Step():
                self._step = command
            case lines.Publish():
                self.publishing.add(command.version)
            case lines.Close():
                self._close(command)

    def _load(self, command: lines.Load) -> None:
        self._loading[command.instance] = command.version
        self.problems += [
            f"C1: {one.name} was running on {command.instance} when it was told to load version {command.version}; "
            "expected an instance that runs nothing"
            for one in self._running(command.instance)
        ]

    def _generate(self, command: lines.Generate) -> None:
        rollout, member, version, instance = command.rollout, command.member, command.version, command.instance
        answer = self.answers.setdefault(
            rollout, Answer(rollout=rollout, group=command.group, member=member, version=version)
        )
        if command.group is not None:
            group = self.groups.setdefault(command.group, Group(id=command.group, version=version))
            if group.version != version:
                self.problems.append(f"C1: {answer.name} asked of version {version}, its group of {group.version}")
            if group.members.setdefault(member, rollout) != rollout or answer.group != group.id:
                self.problems.append(f"C2: {answer.name} was dispatched twice, also as rollout {group.members[member]}")
            if group.closing is not None:
                self.problems.append(f"C2: {answer.name} was asked for after its group was closed")
            elif group.digest is not None:
                self.problems.append(
                    f"C2: {answer.name} was asked for after its group was scored, and nothing was lost"
                )
            group.digest = None
        if version != answer.version:
            self.problems.append(f"C1: {answer.name} is of version {answer.version}, asked of {version}")
        if instance in self._loading:
            self.problems.append(
                f"C1: {answer.name} asked of {instance}, which loads version {self._loading[instance]}"
            )
        elif version not in self._held.get(instance, []):
            self.problems.append(f"C1: {answer.name} asked of {instance}, which held no version {version}")
        if answer.asked is not None:
            self.problems.append(f"C2: {answer.name} was asked for again while {answer.asked.instance} worked on it")
        elif answer.reason in ("stop", "length"):
            self.problems.append(f"C2: {answer.name} was asked for again after it had ended, and nothing was lost")
        if command.generated_tokens != answer.tokens:
            self.problems.append(
                f"C2: {answer.name} goes on from token {command.generated_tokens}, but has {answer.tokens}, and "
                "no loss of its group is recorded"
            )
        answer.asked, answer.reason = command, None

    def _accumulate(self, command: lines.Accumulate) -> None:
        group = self._group(command.group)
        group.seat = (command.iteration, command.attempt)
        if command.trained_at != self._trained:
            self.problems.append(
                f"C3: group {group.id} was seated at version {command.trained_at}, recounted {self._trained}"
            )

    def _close(self, command: lines.Close) -> None:
        iteration = command.iteration
        # When the data end in the middle of a batch, what was filtered since is closed without a step.
        trained_at, groups = self.stepped.get(iteration, (self._trained, []))
        if iteration in self.closed or command.trained_at != trained_at:
            self.problems.append(
                f"C3: iteration {iteration} was closed {'again ' if iteration in self.closed else ''}as trained at "
                f"version {command.trained_at}, recounted {trained_at}"
            )
        for name in sorted(set(groups) ^ set(command.trained)):
            self.problems.append(
                f"C2: group {name} was not both stepped and closed as trained in iteration {iteration}"
            )
        self.closed.add(iteration)
        ended = (
            ("trained", command.trained),
            ("filtered", command.filtered),
            ("failed", command.failed),
            ("dropped", command.dropped),
        )
        for status, names in ended:
            for name in names:
                group = self._group(name)
                if group.closing is not None:
                    self.problems.append(
                        f"C2: group {name} was closed twice, also in iteration {group.closing.iteration}"
                    )
                group.closing = Closing(iteration, command.trained_at, status)


def _key(message: lines.Generate | lines.Generated) -> tuple[int, int, int]:
    return message.rollout, message.segment, message.attempt


class _UnknownGroupError(ValueError):
    """A line names a group that no earlier line dispatched."""
