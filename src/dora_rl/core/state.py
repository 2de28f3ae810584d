"""What the orchestrator knows, and `check`, the sentences that must be true of it after every event.

Owns the nouns' mutable halves and the counters that keep decisions cheap. Decides nothing (policy.py) and
answers no event (orchestrator.py). Order is always that of dispatch: identifiers count upwards, so sorting by
identifier is sorting by dispatch.
"""

from collections import Counter, deque
from dataclasses import dataclass, field

from dora_rl.config import Config
from dora_rl.core.costs import Costs, Line
from dora_rl.core.types import (
    UNFINISHED,
    UNSEATED,
    UNTRAINED,
    EvaluationId,
    FinishReason,
    GroupId,
    GroupStatus,
    InstanceDescriptor,
    InstanceId,
    RolloutId,
    Sampling,
    Version,
)


@dataclass(slots=True, kw_only=True)
class Rollout:
    """One answer. `attempt` rises with every retry, so that a late answer to an older one is recognised."""

    id: RolloutId
    group: GroupId | None
    evaluation: EvaluationId | None
    member: int
    version: Version
    sampling: Sampling = "sampled"
    instance: InstanceId | None = None
    """Where a segment of it runs now, or where it will as soon as its version is loaded there (reserved)."""
    segment: int = 0
    attempt: int = 0
    failures: int = 0
    tokens: int = 0
    started: float = 0.0
    """When its running segment was given out."""
    detaching: bool = False
    stays: bool = False
    """Its instance could not be told to end this segment: it runs to its own end."""
    kept_tokens: int = 0
    """Tokens whose KV was kept when its last segment was detached."""
    kept_bytes: int = 0
    kept_layout: str = ""
    keep_s: float = 0.0
    finished: FinishReason | None = None


@dataclass(slots=True, kw_only=True)
class Group:
    id: GroupId
    version: Version
    members: tuple[RolloutId, ...]
    status: GroupStatus = GroupStatus.PARKED
    unfinished: int = 0
    working: int = 0
    """Members that generate now, plus one while the group is being scored."""
    attempt: int = 0
    failures: int = 0


@dataclass(slots=True, kw_only=True)
class Instance:
    """A rollout engine. It runs answers of the one version it holds; `reserved` ones wait for the load under way."""

    id: InstanceId
    descriptor: InstanceDescriptor
    slots: int
    version: Version | None = None
    loading: Version | None = None
    running: dict[RolloutId, None] = field(default_factory=dict)
    kv_tokens: int = 0
    """Of its KV cache, as it has reported last."""
    pressed: bool = False
    """Its KV cache is nearly full: it takes nothing, and gives answers up before the engine has to."""
    reserved: list[RolloutId] = field(default_factory=list)
    ending: set[tuple[RolloutId, int]] = field(default_factory=set)
    """Attempts at answers that were thrown away, which still have their slots."""

    @property
    def serves(self) -> Version | None:
        """The version that work placed here now would run under."""
        return self.version if self.loading is None else self.loading

    @property
    def free(self) -> int:
        return 0 if self.pressed else self.slots - len(self.running) - len(self.reserved) - len(self.ending)

    @property
    def idle(self) -> bool:
        return not self.running and not self.ending and self.loading is None

    def release(self, rollout: RolloutId) -> None:
        """An answer runs here no more. Where none does, nothing presses: what was reported is out of date."""
        del self.running[rollout]
        if not self.running:
            self.kv_tokens, self.pressed = 0, False


@dataclass(slots=True, kw_only=True)
class Evaluation:
    id: EvaluationId
    version: Version
    iteration: int
    unfinished: int


@dataclass(slots=True, kw_only=True)
class Batch:
    """The open batch; `closed` once its Step is under way."""

    iteration: int
    size: int
    attempt: int = 0
    groups: list[GroupId] = field(default_factory=list)
    accumulating: int = 0
    closed: bool = False
    fruitless: int = 0
    """Groups that ended without anything to learn from while it was open: filtered or failed."""

    @property
    def seats(self) -> int:
        return 0 if self.closed else self.size - len(self.groups)


class State:
    """Everything, in one place, as plain data."""

    def __init__(self, config: Config) -> None:
        schedule = config.schedule
        self.config = schedule
        self.iterations = config.run.iterations
        self.max_tokens = config.rollout.max_completion_tokens
        self.kv_tokens_per_answer = config.max_model_tokens
        self.kv_overcommit = config.rollout.kv_overcommit
        self.kv_pressure = config.rollout.kv_pressure
        self.bound = schedule.bound

        self.started = False
        self.prompts: int | None = None
        self.evaluation_answers = 0
        self.trained = Version(0)
        self.published = Version(-1)  # nothing is dispatched before version 0 is served
        self.publishing: Version | None = None
        self.batch = Batch(iteration=0, size=schedule.batch)

        self.groups: dict[GroupId, Group] = {}
        self.rollouts: dict[RolloutId, Rollout] = {}
        self.instances: dict[InstanceId, Instance] = {}
        self.expected = config.rollout.instances
        """Instances that start with the run and have neither joined nor failed to."""
        self.draining: dict[InstanceId, Version] = {}
        """Instances that give up all they have; then they load a version that is due and that nobody serves."""
        self.switching: dict[InstanceId, None] = {}
        """Instances that take no new group, and give what they have to others of their version, until they have
        changed to the newest one."""
        self.leaving: Counter[Version] = Counter()
        """Answers that were told to leave their instance and have not yet, by version."""
        self.training_turn = False
        """Colocated: the trainer has the devices, or waits for instances to give them up; nothing is placed."""
        self.costs = Costs(moving=Line(), computing=Line())
        self.sampling = Line()
        """Tokens that a segment has sampled over the seconds it ran."""
        self.kept_bytes = 0
        """KV that is kept outside the engines now."""
        self.kept_bytes_limit = int(config.rollout.kept_kv_gib * 2**30)
        self.now = 0.0
        self.evaluations: dict[EvaluationId, Evaluation] = {}
        self.evaluated: set[Version] = set()

        self.waiting: dict[Version, list[RolloutId]] = {}
        """Heaps of answers that no instance works on, by version."""
        self.evaluating: dict[Version, deque[RolloutId]] = {}
        """The same for evaluations' answers."""
        self.ready: list[tuple[Version, GroupId]] = []
        """A heap: earliest deadline first, then dispatch."""
        self.unseated: dict[Version, int] = {}
        """Outstanding groups without a seat, by version."""
        self.unfinished: dict[Version, int] = {}
        """Of these, the ones that still generate or are scored."""
        self.stored: set[Version] = set()
        self.left: dict[GroupStatus, list[GroupId]] = {status: [] for status in UNTRAINED}
        """Groups that left the ledger without training since the last iteration closed."""

        self.dispatched = 0
        self.counts: Counter[GroupStatus] = Counter()
        self.next_rollout = 0
        self.next_evaluation = 0
        self.written_off: set[tuple[RolloutId, int]] = set()
        self.written_off_loads: set[tuple[InstanceId, Version]] = set()
        self.written_off_scores: set[tuple[GroupId, int]] = set()
        self.failures: Counter[str] = Counter()
        self.unanswered = 0
        self.exporting = False
        self.exported = False
        self.ended = False
        """No further iteration will be trained; what is left is to publish, evaluate and export."""
        self.last_failure = ""
        """Why the latest failed group could not be scored."""
        self.stopped: str | None = None
        """Why the run cannot go on."""
        self.interrupted = False

    @property
    def last_trainable(self) -> Version:
        """The trainer's version in the run's last iteration, if every iteration from now on makes one."""
        return Version(self.trained + self.iterations - self.batch.iteration - 1)

    def deadline(self, version: Version) -> Version:
        """The last version at which the trainer may train a group of this one."""
        return Version(min(version + self.bound, self.last_trainable))

    def tokens_now(self, rollout: Rollout) -> int:
        """About how many tokens a running answer has by now, as the core hears only of whole segments."""
        elapsed = self.now - rollout.started
        return rollout.tokens + round(self.sampling.at(elapsed) or 0.0)

    @property
    def prompts_left(self) -> bool:
        return self.prompts is None or self.dispatched < self.prompts

    @property
    def done(self) -> bool:
        return self.stopped is not None or self.interrupted or (self.ended and self.exported and self.unanswered == 0)

    def ledger(self) -> dict[str, int]:
        """How many groups were dispatched, and where they are now."""
        return {"dispatched": self.dispatched} | {status.value: self.counts[status] for status in GroupStatus}


def check(state: State) -> None:
    """Raise AssertionError unless the state is consistent; run after every event in tests."""
    _check_ledger(state)
    _check_groups(state)
    _check_instances(state)
    _check_moves(state)
    _check_bound(state)


def _check_ledger(state: State) -> None:
    total = sum(state.counts.values())
    assert state.dispatched == total, f"{state.dispatched} groups dispatched, but the ledger holds {total}"
    held = Counter(group.status for group in state.groups.values())
    for status in (*UNSEATED, GroupStatus.SEATED):
        assert held[status] == state.counts[status], f"{held[status]} groups {status}, ledger {state.counts[status]}"
    unseated = Counter(g.version for g in state.groups.values() if g.status in UNSEATED)
    assert dict(unseated) == state.unseated, f"unseated by version {dict(unseated)}, counted {state.unseated}"
    unfinished = Counter(g.version for g in state.groups.values() if g.status in UNFINISHED)
    assert dict(unfinished) == state.unfinished, f"unfinished {dict(unfinished)}, counted {state.unfinished}"
    seated = [g.id for g in state.groups.values() if g.status is GroupStatus.SEATED]
    assert sorted(seated) == sorted(state.batch.groups), f"seated {seated}, batch {state.batch.groups}"
    ready = [(g.version, g.id) for g in state.groups.values() if g.status is GroupStatus.READY]
    assert sorted(ready) == sorted(state.ready), f"ready {ready}, heap {state.ready}"
    assert state.unanswered >= 0, f"{-state.unanswered} answers to commands that were never given"


def _check_groups(state: State) -> None:
    for group in state.groups.values():
        members = [state.rollouts[m] for m in group.members]
        versions = {m.version for m in members} | {group.version}
        if "C1" in state.config.promises:
            assert len(versions) == 1, f"group {group.id} has versions {sorted(versions)} (C1)"
        unfinished = sum(m.finished is None for m in members)
        assert unfinished == group.unfinished, f"group {group.id}: {unfinished} unfinished, counted {group.unfinished}"
        if group.status is GroupStatus.PARKED:
            assert group.working == 0, f"group {group.id} is parked and worked on by {group.working}"
        if group.status in (GroupStatus.READY, GroupStatus.SEATED):
            assert unfinished == 0, f"group {group.id} is {group.status} with {unfinished} unfinished members"
    queued = [r for heap in (*state.waiting.values(), *state.evaluating.values()) for r in heap]
    placed = [r for i in state.instances.values() for r in (*i.running, *i.reserved)]
    everywhere = Counter(queued + placed)
    assert all(n == 1 for n in everywhere.values()), f"in two places: {[r for r, n in everywhere.items() if n > 1]}"
    alive = {r.id for r in state.rollouts.values() if r.finished is None}
    assert alive == set(everywhere), f"lost sight of rollouts {sorted(alive ^ set(everywhere))} (C2)"


def _check_instances(state: State) -> None:
    for instance in state.instances.values():
        taken = len(instance.running) + len(instance.reserved)
        assert taken <= instance.slots, f"{instance.id}: {taken} answers in {instance.slots} slots"
        assert not (instance.running and instance.loading is not None), f"{instance.id} loads while it runs"
        assert not (instance.reserved and instance.loading is None), f"{instance.id} reserves without a load"
        for rollout in (*instance.running, *instance.reserved):
            version = state.rollouts[rollout].version
            assert version == instance.serves, f"rollout {rollout} of version {version} on {instance.id} (C1)"


def _check_moves(state: State) -> None:
    told = Counter(r.version for r in state.rollouts.values() if r.detaching)
    assert told == +state.leaving, f"told to leave {dict(told)}, counted {dict(state.leaving)}"
    for rollout in state.rollouts.values():
        assert not (rollout.detaching and rollout.instance is None), f"rollout {rollout.id} leaves, but runs nowhere"
    kept = sum(rollout.kept_bytes for rollout in state.rollouts.values())
    assert kept == state.kept_bytes, f"{kept} bytes of KV kept, {state.kept_bytes} counted"


def _check_bound(state: State) -> None:
    from dora_rl.core.policy import leaves_to_others
    from dora_rl.core.schedulability import schedulable

    assert state.published <= state.trained, f"published {state.published} ahead of trained {state.trained}"
    for group in state.batch.groups:
        staleness = state.trained - state.groups[group].version
        assert 0 <= staleness <= state.bound, f"group {group} seated at staleness {staleness} > {state.bound} (C3)"
    assert "C2" not in state.config.promises or schedulable(state, seats=state.batch.seats), (
        f"not schedulable at version {state.trained}: {state.batch.seats} seats left, unseated {state.unseated}"
    )
    for version, heap in state.waiting.items():
        vacant = [
            i.id
            for i in state.instances.values()
            if i.serves == version and i.free > 0 and i.id not in state.draining and not leaves_to_others(state, i)
        ]
        assert not (heap and vacant and not state.done and not state.training_turn), (
            f"version {version} waits although {vacant} have room"
        )
