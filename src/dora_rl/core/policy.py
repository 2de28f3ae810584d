"""Placing: which instance serves which version and which answers, each decision a pure function of the state.

What may start and what may be trained is decided in strategies.py. To change how dora-rl schedules, change these two.
"""

from dora_rl.core import balance
from dora_rl.core.schedulability import room
from dora_rl.core.state import Instance, Rollout, State
from dora_rl.core.types import InstanceId, RolloutId, Version


def filtering_too_much(state: State) -> bool:
    """So many groups of this iteration had nothing to learn from that it should close with what it has."""
    return state.batch.fruitless >= state.config.max_filtered_groups


def admission_open(state: State) -> bool:
    """Whether this run dispatches any more groups at all for now, whatever the strategy."""
    if state.training_turn:
        return False
    return state.published >= 0 and not state.ended and state.prompts_left and not filtering_too_much(state)


def next_waiting(state: State, version: Version) -> RolloutId | None:
    """The answer of this version to place next: work at its deadline, then evaluations, then all other work."""
    work = state.waiting.get(version)
    evaluation = state.evaluating.get(version)
    if evaluation and not (work and state.deadline(version) <= state.trained):
        return evaluation[0]
    return work[0] if work else None


def choose_version(state: State) -> Version | None:
    """The version that an idle instance should load: among those with answers waiting, work by earliest deadline;
    an evaluation, which has none, comes after what is due now and before the rest."""
    due = [v for v in state.waiting if state.deadline(v) <= state.trained]
    return min(due or state.evaluating or state.waiting, default=None)


def work_left(state: State) -> dict[Version, int]:
    """Unfinished answers by version; of the newest one also those that could be dispatched now."""
    work = {version: len(waiting) for version, waiting in state.waiting.items()}
    for version, evaluating in state.evaluating.items():
        work[version] = work.get(version, 0) + len(evaluating)
    for instance in state.instances.values():
        if instance.serves is not None:
            work[instance.serves] = work.get(instance.serves, 0) + len(instance.running) + len(instance.reserved)
    if admission_open(state) and len(state.ready) < state.config.ready_target:
        work[state.published] = work.get(state.published, 0) + room(state, state.published) * state.config.group_size
    return work


def frontier(state: State) -> Version | None:
    """The newest version that some instance holds: what new groups are of until a newer one has been loaded."""
    return max((i.version for i in state.instances.values() if i.version is not None), default=None)


def hosts(state: State, version: Version) -> list[Instance]:
    """Instances that serve a version and mean to go on with it."""
    return [
        instance
        for instance in state.instances.values()
        if instance.serves == version and instance.id not in state.switching and instance.id not in state.draining
    ]


def choose_home(state: State, version: Version) -> Instance | None:
    """Where a new group of the newest version starts: where most of it fits, and without a load if that is equal.

    Nothing is loaded for new work while a newer version is about to appear: it would be loaded a moment later again.
    """
    best: tuple[tuple[int, bool, int], Instance] | None = None
    for instance in state.instances.values():  # ties: the one that joined first
        serves = instance.serves == version
        able = serves or (instance.idle and state.publishing is None)
        free = instance.free - (arriving(state, version) if serves else 0)
        if free <= 0 or not able or instance.id in state.draining or (serves and instance.id in state.switching):
            continue
        score = (min(free, state.config.group_size), serves, free)
        if best is None or score > best[0]:
            best = (score, instance)
    return best[1] if best else None


def may_fill(state: State, version: Version) -> bool:
    """Whether instances that hold this version still take new groups: the newest that anyone holds, and those behind
    the published one by no more than `legacy_fill_versions`."""
    return version == frontier(state) or version >= state.published - state.config.legacy_fill_versions


def choose_legacy_home(state: State) -> Instance | None:
    """An instance with an older version that still takes new groups and has room for one: the newest such.

    A group that did not fit would leave members waiting, and the change of this instance with them.
    """
    best: Instance | None = None
    for instance in state.instances.values():
        version = instance.version
        if version is None or instance.loading is not None or not version < state.published:
            continue
        if instance.id in state.switching or instance.id in state.draining or not may_fill(state, version):
            continue
        if version in state.waiting or version in state.evaluating:
            continue
        if instance.free - arriving(state, version) < min(state.config.group_size, instance.slots):
            continue
        if best is None or best.version is None or (version, instance.free) > (best.version, best.free):
            best = instance
    return best


def arriving(state: State, version: Version) -> int:
    """Answers on their way from one instance to another that serves the same version: room is kept for them."""
    return state.leaving.get(version, 0)


def leaves_to_others(state: State, instance: Instance) -> bool:
    """Whether an instance that is to change version should empty itself: another one goes on serving the old one."""
    return (
        instance.id in state.switching
        and instance.loading is None
        and instance.serves is not None
        and bool(hosts(state, instance.serves))
    )


def choose_switch(state: State) -> Instance | None:
    """The next instance that should change to the newest version.

    Versions get instances in proportion to the work they have left (balance.partition); of those that have more than
    their part the oldest gives one up, the one with the least left to run. A version that still takes new groups gives
    up no more than the newest lacks, and never do more than half of the instances stop taking groups at once, so that
    the others generate on while weights are loaded.
    """
    instances = state.instances.values()
    stopped = sum(
        i.loading is not None or i.id in state.switching or (i.version is not None and not may_fill(state, i.version))
        for i in instances
    )
    on_their_way = sum(i.serves == state.published or i.id in state.switching for i in instances)
    counts: dict[Version, int] | None = None
    best: tuple[tuple[Version, int], Instance] | None = None
    for instance in instances:
        version = instance.version
        if version is None or version >= state.published or instance.loading is not None:
            continue
        if instance.id in state.switching or instance.id in state.draining:
            continue
        if counts is None:
            counts = balance.partition(work_left(state), len(instances), newest=state.published)
        if len(hosts(state, version)) <= counts.get(version, 0):
            continue
        if may_fill(state, version) and (
            stopped >= max(1, len(instances) // 2) or on_their_way >= counts.get(state.published, 0)
        ):
            continue
        key = (version, len(instance.running))
        if best is None or key < best[0]:
            best = (key, instance)
    return best[1] if best else None


def choose_moves(state: State, instance: Instance) -> list[Rollout]:
    """The answers that an instance should give up now that it is to change version: those for which another instance
    that serves their version has room, cheapest first, if moving them costs less time than waiting for their end."""
    if instance.loading is not None or instance.version is None:
        return []
    running = [state.rollouts[r] for r in instance.running]
    running = [rollout for rollout in running if not rollout.detaching and not rollout.stays]
    if not running:
        return []
    version = instance.version
    if instance.id in state.draining:
        chosen = [] if state.deadline(version) <= state.trained else running  # due work is never put aside
    else:
        places = sum(i.free for i in hosts(state, version)) - arriving(state, version)
        places -= len(state.waiting.get(version, ()))
        chosen = sorted(running, key=lambda r: (-r.started, r.id))[: max(0, places)]
    # Answers are heavy-tailed: one that has run for some time will run about as long again.
    frees = max(state.now - rollout.started for rollout in running)
    costs = sum(state.costs.of_move(state.tokens_now(rollout)) for rollout in chosen)
    return chosen if costs <= frees else []


def is_pressed(state: State, instance: Instance) -> bool:
    """Whether an instance's KV cache is nearly full; it is so until there is room for a few answers again."""
    capacity = instance.descriptor.kv_capacity_tokens
    limit = state.kv_pressure * capacity
    if instance.slots * state.kv_tokens_per_answer <= capacity:
        return False  # all of its answers fit, however long they get
    return instance.kv_tokens > (limit - state.kv_tokens_per_answer if instance.pressed else limit)


def choose_relief(state: State, instance: Instance) -> list[Rollout]:
    """The answers that a pressed instance gives up: the youngest, whose KV is cheapest to move, but never its last."""
    running = [state.rollouts[r] for r in instance.running]
    running = sorted((r for r in running if not r.detaching and not r.stays), key=lambda r: (-r.started, -r.id))
    excess = instance.kv_tokens - (state.kv_pressure * instance.descriptor.kv_capacity_tokens)
    excess += state.kv_tokens_per_answer  # room for one to grow
    share = instance.kv_tokens / max(1, len(instance.running))
    return running[: max(0, min(len(running) - 1, round(excess / max(1.0, share))))]


def choose_keep(state: State, rollout: Rollout) -> bool:
    """Whether to keep the KV of an answer that leaves its instance, rather than compute its prefix again."""
    return state.kept_bytes < state.kept_bytes_limit and state.costs.choose_keep(state.tokens_now(rollout))


def choose_drain(state: State) -> tuple[InstanceId, Version] | None:
    """A version whose work is due and which no instance serves, and the instance with the least left to run."""
    served = {state.draining.get(i.id, i.serves) for i in state.instances.values()}
    due = [v for v in state.waiting if v not in served and state.deadline(v) <= state.trained]
    able = [i for i in state.instances.values() if i.id not in state.draining and i.loading is None]
    if not due or not able:
        return None
    return min(able, key=lambda i: (len(i.running), i.id)).id, min(due)


def drain_is_over(state: State, name: InstanceId) -> bool:
    """The work that this instance drains for is gone, or another instance serves it by now."""
    wanted = state.draining[name]
    return wanted not in state.waiting or any(
        other.serves == wanted for other in state.instances.values() if other.id != name
    )


def forgettable(state: State) -> list[Version]:
    """Versions in the store that nothing can ask for again: no unfinished answer, instance, or evaluation has them."""
    needed = {state.published, state.trained}
    needed.update(state.unseated)  # ready ones too: lost data is sampled again under its own version
    needed.update(state.groups[g].version for g in state.batch.groups)
    needed.update(e.version for e in state.evaluations.values())
    for instance in state.instances.values():
        needed.update(v for v in (instance.version, instance.loading) if v is not None)
    return sorted(state.stored - needed)
