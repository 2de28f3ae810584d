"""Follows a run event by event and cuts it into iterations: who was busy when, and what each group became.

Reads only the stream of (event, commands), so that a simulated and a real run are measured by the same code. Counts
for itself and asks no scheduler. docs/metrics.md has the definitions.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from dora_rl.core.messages import (
    Accumulate,
    Accumulated,
    Close,
    Command,
    Event,
    Generate,
    Generated,
    InstanceJoined,
    InstanceLost,
    Loaded,
    RankLost,
    Scored,
    Step,
    Stepped,
)
from dora_rl.core.types import (
    FinishReason,
    GroupId,
    InstanceDescriptor,
    InstanceId,
    RolloutId,
    Version,
    has_spread,
)


@dataclass(slots=True, kw_only=True)
class GroupRecord:
    """A dispatched group, as far as the journal tells."""

    id: GroupId
    version: Version
    tokens: dict[int, int] = field(default_factory=dict)
    """Completion tokens by member."""
    reasons: dict[int, FinishReason] = field(default_factory=dict)
    rewards: tuple[float | None, ...] = ()
    seat: int | None = None
    """The attempt at the batch in which it has a seat."""
    gone: bool = False
    """It left the ledger: trained, filtered or failed when it was scored, or dropped."""


@dataclass(slots=True, kw_only=True)
class Window:
    """One iteration: from the opening of its batch to the opening of the next. Sums of time are in seconds."""

    iteration: int
    opened_at: float
    ended_at: float | None = None
    trainer_busy_s: float = 0.0
    instance_s: float = 0.0
    instance_busy_s: float = 0.0
    """Instance-time with at least one running answer, evaluations' answers included."""
    slot_s: float = 0.0
    slot_busy_s: float = 0.0
    generated_tokens: int = 0
    """Of segments for training that ended in this window."""
    moves: int = 0
    """Answers that went on after they had been told to leave their instance."""
    moved_bytes: int = 0
    """Of KV that the next segment loaded."""
    recomputed_tokens: int = 0
    """Prefix tokens of continued answers that were computed again, for whatever reason."""
    alive_max: int = 0
    running_max: int = 0
    devices: int = 0
    close: Close | None = None

    @property
    def duration_s(self) -> float:
        assert self.ended_at is not None, f"iteration {self.iteration} has not ended"
        return self.ended_at - self.opened_at


@dataclass(slots=True, kw_only=True)
class _Instance:
    descriptor: InstanceDescriptor
    held: list[Version]
    running: int = 0


class Timeline:
    """The accumulator. `trainer_devices` counts the trainer's ranks, which no event mentions."""

    def __init__(self, *, trainer_devices: int = 1) -> None:
        self._trainer_devices = trainer_devices
        self._now = 0.0
        self._open: Window | None = None
        self._stepping: Step | None = None
        self._ended: dict[int, Window] = {}
        self._groups: dict[GroupId, GroupRecord] = {}
        self._instances: dict[InstanceId, _Instance] = {}
        self._running: dict[RolloutId, Generate] = {}
        self._detached: dict[RolloutId, int] = {}
        """Answers that were told to leave and have not gone on yet, with the bytes of their kept KV."""
        self._moving: dict[RolloutId, int] = {}
        """The same, of those that run again."""
        # Versions counted by what keeps them alive: unseated groups and instances that hold them; running answers.
        self._alive: Counter[Version] = Counter()
        self._running_versions: Counter[Version] = Counter()

    def record(self, event: Event, commands: Sequence[Command]) -> None:
        """Take in one entry of the journal."""
        self._advance(event.at)
        self._apply(event)
        for command in commands:
            self._follow(command)
        if self._open is not None:
            # Only now: what happens within one event happens at one moment.
            self._open.alive_max = max(self._open.alive_max, len(self._alive))
            self._open.running_max = max(self._open.running_max, len(self._running_versions))
            devices = sum(len(instance.descriptor.devices) for instance in self._instances.values())
            self._open.devices = max(self._open.devices, devices + self._trainer_devices)

    def ended(self, iteration: int) -> Window:
        """A window whose Close was commanded. Raises LookupError before that, or after `forget`."""
        window = self._ended.get(iteration)
        if window is None or window.close is None:
            raise LookupError(f"iteration {iteration} has no Close in what was recorded; record its events first")
        return window

    def group(self, group: GroupId) -> GroupRecord:
        return self._groups[group]

    def forget(self, iteration: int) -> None:
        """Drop an iteration and its groups: a run's memory must not grow with its length."""
        close = self.ended(iteration).close
        assert close is not None
        for group in (*close.trained, *close.filtered, *close.failed, *close.dropped):
            del self._groups[group]
        del self._ended[iteration]

    # --- time ---

    def _advance(self, now: float) -> None:
        """Add the stretch in which nothing changed."""
        elapsed, self._now = now - self._now, now
        if (window := self._open) is None or elapsed <= 0:
            return
        for instance in self._instances.values():
            window.instance_s += elapsed
            window.instance_busy_s += elapsed * (instance.running > 0)
            window.slot_s += elapsed * instance.descriptor.slots
            window.slot_busy_s += elapsed * min(instance.running, instance.descriptor.slots)

    def _end_window(self, event: Stepped) -> None:
        step = self._stepping
        if step is None or self._open is None or (step.iteration, step.attempt) != (event.iteration, event.attempt):
            return  # late, of an attempt whose rank was lost
        self._stepping = None
        for group in step.groups:
            self._groups[group].gone = True
        self._open.ended_at = event.at
        self._open.trainer_busy_s = event.busy_s
        self._ended[event.iteration] = self._open
        self._open = Window(iteration=event.iteration + 1, opened_at=event.at)

    # --- events and commands ---

    def _apply(self, event: Event) -> None:
        match event:
            case InstanceJoined(instance=name, descriptor=descriptor):
                held = sorted(descriptor.versions)
                self._instances[name] = _Instance(descriptor=descriptor, held=held)
                self._alive.update(held)
            case InstanceLost(instance=name):
                self._lose(name)
            case Loaded(at=at, instance=name, version=version, error=None):
                if self._open is None:  # from now on there is something to wait for
                    self._open = Window(iteration=0, opened_at=at)
                self._hold(name, version)
            case Generated():
                self._finish_segment(event)
            case Scored(group=group, rewards=rewards, error=None):
                if group in self._groups and not self._groups[group].gone:  # else it was dropped meanwhile
                    self._groups[group].rewards = rewards
                    if not has_spread(rewards):
                        self._leave(group)
            case Accumulated(group=group, attempt=attempt, lost=True):
                if self._groups[group].seat == attempt:  # else it sat in a batch that is lost anyway
                    self._unseat(group)
            case RankLost():
                self._stepping = None
                for group in self._groups:
                    self._unseat(group)
            case Stepped(error=None):
                self._end_window(event)
            case _:
                pass

    def _follow(self, command: Command) -> None:
        match command:
            case Generate():
                self._start_segment(command)
            case Accumulate(group=group, attempt=attempt):
                self._leave(group, seat=attempt)
            case Step():
                self._stepping = command
            case Close(iteration=iteration, dropped=dropped):
                for group in dropped:
                    self._leave(group)
                if iteration in self._ended:
                    self._ended[iteration].close = command
            case _:
                pass

    # --- answers ---

    def _start_segment(self, command: Generate) -> None:
        self._stop(command.rollout)
        self._running[command.rollout] = command
        if (size := self._detached.pop(command.rollout, None)) is not None:
            self._moving[command.rollout] = size
            if self._open is not None:
                self._open.moves += 1
        if command.instance in self._instances:
            self._instances[command.instance].running += 1
        if command.group is None:
            return
        if command.group not in self._groups:
            self._groups[command.group] = GroupRecord(id=command.group, version=command.version)
            self._alive[command.version] += 1
        self._running_versions[command.version] += 1
        # Not a sum of all segments: a repaired answer may start again from fewer tokens than it had.
        self._groups[command.group].tokens[command.member] = command.generated_tokens

    def _finish_segment(self, event: Generated) -> None:
        command = self._running.get(event.rollout)
        if command is None or (command.segment, command.attempt) != (event.segment, event.attempt):
            return  # a late answer to what was written off when its instance was lost
        self._stop(event.rollout)
        moved = self._moving.pop(event.rollout, 0)
        if self._open is not None:
            self._open.moved_bytes += moved if event.loaded_tokens else 0
            self._open.recomputed_tokens += event.recomputed_tokens
        if event.reason == "detached":
            self._detached[event.rollout] = event.kept_bytes
        if command.group is not None:
            if (record := self._groups.get(command.group)) is not None:  # else it was dropped meanwhile
                record.tokens[command.member] += event.num_tokens
                record.reasons[command.member] = event.reason
            if self._open is not None:
                self._open.generated_tokens += event.num_tokens

    def _stop(self, rollout: RolloutId) -> None:
        if (command := self._running.pop(rollout, None)) is None:
            return
        if command.instance in self._instances:
            self._instances[command.instance].running -= 1
        if command.group is not None:
            _take(self._running_versions, command.version)

    # --- versions ---

    def _hold(self, name: InstanceId, version: Version) -> None:
        instance = self._instances.get(name)
        if instance is None or version in instance.held:
            return
        if len(instance.held) >= instance.descriptor.max_versions:
            _take(self._alive, instance.held.pop(0))
        instance.held.append(version)
        self._alive[version] += 1

    def _lose(self, name: InstanceId) -> None:
        for rollout in [r for r, command in self._running.items() if command.instance == name]:
            self._stop(rollout)
        instance = self._instances.pop(name, None)
        for version in instance.held if instance else ():
            _take(self._alive, version)

    def _leave(self, group: GroupId, *, seat: int | None = None) -> None:
        """It takes a seat or, without one, leaves the ledger: no longer what keeps its version alive."""
        record = self._groups[group]
        record.seat, record.gone = seat, seat is None
        _take(self._alive, record.version)

    def _unseat(self, group: GroupId) -> None:
        record = self._groups[group]
        if record.seat is not None and not record.gone:
            record.seat = None
            self._alive[record.version] += 1


def _take(counter: Counter[Version], version: Version) -> None:
    """Subtract one, so that the counter's length is the number of versions with any."""
    counter[version] -= 1
    if counter[version] <= 0:
        del counter[version]
