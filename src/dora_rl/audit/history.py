"""The journal recounted: who was asked to sample what under which version, what came back, and what was closed.

Reads `journal.jsonl` as plain JSON. Notes as problems what the journal alone shows to be wrong: an answer under a
version that its instance did not hold, a group with two versions, a step that trains other groups than it closes.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Message = dict[str, Any]


class AuditError(ValueError):
    """The folder cannot be judged at all; the message is one line and says why."""


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
    asked: Message | None = None
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
    seat: int | None = None
    """The attempt at the batch in which it has a seat."""
    closing: Closing | None = None

    @property
    def status(self) -> str:
        """Where it is in the ledger, as if nobody had interrupted the run."""
        if self.closing is not None:
            return self.closing.status
        if self.digest is None:
            return "running"
        # Filtered and failed groups leave when they are scored; an iteration that never closed did not list them.
        known = [reward for reward in self.rewards if reward is not None]
        if len(known) < 2:
            return "failed"
        if max(known) - min(known) <= 1e-9:
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
        self.closed: dict[int, Message] = {}
        self.stepped: dict[int, tuple[int, list[int]]] = {}
        """By iteration: the version that the trainer held when it stepped, and the batch's groups."""
        self.interrupted = False
        self.finished = False
        """The run came to its proper end: nothing may be unfinished."""
        self.problems: list[str] = []
        self.notes: list[str] = []
        self._trained = 0
        self._held: dict[str, list[int]] = {}
        self._room: dict[str, int] = {}
        self._step: Message | None = None
        self._written_off: set[tuple[int, int, int]] = set()
        lines = self._lines(path)
        self.header = next(lines, {})
        if "config_hash" not in self.header:
            raise AuditError(f"{path} has no header; expected a journal that a run of dora-rl wrote")
        for number, entry in enumerate(lines, start=2):
            try:
                self._tell(entry)
            except (KeyError, TypeError, AttributeError) as error:
                raise AuditError(f"{path}, line {number}: {error!r}; the journal was damaged, restore it") from error

    def _lines(self, path: Path) -> Iterator[Message]:
        try:
            text = path.read_bytes()
        except OSError as error:
            raise AuditError(f"cannot read {path}: {error.strerror}; name a run's folder") from error
        *lines, rest = text.split(b"\n")
        if rest:
            self.notes.append(f"{path.name} ends in the middle of line {len(lines) + 1}: the run was killed there")
        for number, line in enumerate(lines, start=1):
            try:
                yield json.loads(line)
            except ValueError as error:
                raise AuditError(f"{path}, line {number}: {error}; the journal was damaged, restore it") from error

    def _tell(self, entry: Message) -> None:
        self._event(entry["event"])
        for command in entry["commands"]:
            self._command(command)

    # --- events ---

    def _event(self, event: Message) -> None:
        match event["type"]:
            case "InstanceJoined":
                self._held[event["instance"]] = sorted(event["descriptor"]["versions"])
                self._room[event["instance"]] = event["descriptor"]["max_versions"]
            case "InstanceLost":
                self._lose(event["instance"])
            case "Loaded" if event["error"] is None and event["instance"] in self._held:
                held = [version for version in self._held[event["instance"]] if version != event["version"]]
                self._held[event["instance"]] = [*held, event["version"]][-self._room[event["instance"]] :]
            case "Generated":
                self._generated(event)
            case "Scored" if event["error"] is None:
                group = self.groups[event["group"]]
                group.digest, group.rewards = event["digest"], event["rewards"]
            case "Accumulated" if event["lost"]:
                group = self.groups[event["group"]]
                if group.seat == event["attempt"]:  # else it sat in a batch that is lost anyway
                    group.seat = group.digest = None
            case "DataLost":
                group = self.groups[event["group"]]
                if group.seat is None and group.closing is None:
                    group.digest = None
            case "RankLost":
                self._step = None
                for group in self.groups.values():
                    group.seat = None
            case "Stepped" if event["error"] is None:
                self._stepped(event)
            case "Closed" if event["error"] is None:
                self.written.add(event["iteration"])
            case "Interrupted":
                self.interrupted = True
            case "Exported" if event["error"] is None:
                self.finished = True

    def _lose(self, instance: str) -> None:
        self._held.pop(instance, None)
        for answer in self.answers.values():
            if answer.asked is not None and answer.asked["instance"] == instance:
                self._written_off.add(_key(answer.asked))
                answer.asked = None

    def _generated(self, event: Message) -> None:
        answer = self.answers.get(event["rollout"])
        if _key(event) in self._written_off:
            return  # its instance was lost: this late answer is nobody's
        if answer is None or answer.asked is None or _key(answer.asked) != _key(event):
            self.problems.append(f"C1: trajectory {event['rollout']} was answered, but nobody had asked for it")
            return
        asked, answer.asked = answer.asked, None
        for what in ("version", "instance"):
            if event[what] != asked[what]:
                self.problems.append(f"C1: {answer.name}: asked of {what} {asked[what]}, answered by {event[what]}")
        if event["num_tokens"]:
            answer.segments.append((event["version"], event["instance"], event["num_tokens"]))
        answer.reason = event["reason"]

    def _stepped(self, event: Message) -> None:
        step = self._step
        if step is None or (step["iteration"], step["attempt"]) != (event["iteration"], event["attempt"]):
            return  # late, of an attempt whose rank was lost
        self._step = None
        self.stepped[step["iteration"]] = (self._trained, step["groups"])
        for name in step["groups"]:
            if self.groups[name].seat != step["attempt"]:
                self.problems.append(f"C2: group {name} was stepped in iteration {step['iteration']} without a seat")
        if event["improved"]:
            self._trained += 1
            if step["version"] != self._trained:
                self.problems.append(
                    f"C3: iteration {step['iteration']} made version {step['version']}, recounted {self._trained}"
                )

    # --- commands ---

    def _command(self, command: Message) -> None:
        match command["type"]:
            case "Generate":
                self._generate(command)
            case "Accumulate":
                self._accumulate(command)
            case "Step":
                self._step = command
            case "Close":
                self._close(command)

    def _generate(self, command: Message) -> None:
        rollout, member, version = command["rollout"], command["member"], command["version"]
        answer = self.answers.setdefault(
            rollout, Answer(rollout=rollout, group=command["group"], member=member, version=version)
        )
        if command["group"] is not None:
            group = self.groups.setdefault(command["group"], Group(id=command["group"], version=version))
            if group.version != version:
                self.problems.append(f"C1: {answer.name} asked of version {version}, its group of {group.version}")
            if group.members.setdefault(member, rollout) != rollout or answer.group != group.id:
                self.problems.append(f"C2: {answer.name} was dispatched twice, also as rollout {group.members[member]}")
            if group.closing is not None:
                self.problems.append(f"C2: {answer.name} was asked for after its group was closed")
            group.digest = None
        if version != answer.version:
            self.problems.append(f"C1: {answer.name} is of version {answer.version}, asked of {version}")
        if version not in self._held.get(command["instance"], []):
            self.problems.append(f"C1: {answer.name} asked of {command['instance']}, which held no version {version}")
        if command["generated_tokens"] == 0:
            answer.segments.clear()  # nothing is left of what earlier segments had: it is repaired from its prompt
        elif command["generated_tokens"] != answer.tokens:
            self.problems.append(
                f"C2: {answer.name} goes on from token {command['generated_tokens']}, but has {answer.tokens}"
            )
        answer.asked, answer.reason = command, None

    def _accumulate(self, command: Message) -> None:
        group = self.groups[command["group"]]
        group.seat = command["attempt"]
        if command["trained_at"] != self._trained:
            self.problems.append(
                f"C3: group {group.id} was seated at version {command['trained_at']}, recounted {self._trained}"
            )

    def _close(self, command: Message) -> None:
        iteration = command["iteration"]
        # When the data end in the middle of a batch, what was filtered since is closed without a step.
        trained_at, groups = self.stepped.get(iteration, (self._trained, []))
        if iteration in self.closed or command["trained_at"] != trained_at:
            self.problems.append(
                f"C3: iteration {iteration} was closed {'again ' if iteration in self.closed else ''}as trained at "
                f"version {command['trained_at']}, recounted {trained_at}"
            )
        for name in sorted(set(groups) ^ set(command["trained"])):
            self.problems.append(
                f"C2: group {name} was not both stepped and closed as trained in iteration {iteration}"
            )
        self.closed[iteration] = command
        for status in ("trained", "filtered", "failed"):
            for name in command[status]:
                group = self.groups[name]
                if group.closing is not None:
                    self.problems.append(
                        f"C2: group {name} was closed twice, also in iteration {group.closing.iteration}"
                    )
                group.closing = Closing(iteration, command["trained_at"], status)


def _key(message: Message) -> tuple[int, int, int]:
    return message["rollout"], message["segment"], message["attempt"]
