"""Changes of the state, each in one place, so that counters, heaps and statuses can never part ways.

Gives no commands and decides nothing; orchestrator.py says what happened, planner.py what follows.
"""

import heapq
from collections import deque

from dora_rl.core.messages import Generated
from dora_rl.core.state import Evaluation, Group, Instance, Rollout, State
from dora_rl.core.types import UNFINISHED, UNSEATED, EvaluationId, GroupId, GroupStatus, InstanceId, RolloutId, Version


def set_status(state: State, group: Group, status: GroupStatus) -> None:
    """Move a group in the ledger, with the counters and the heap that depend on it."""
    old = group.status
    if old is status:
        return
    state.counts[old] -= 1
    state.counts[status] += 1
    for kind, counted in ((UNSEATED, state.unseated), (UNFINISHED, state.unfinished)):
        if (old in kind) != (status in kind):
            _count(counted, group.version, 1 if status in kind else -1)
    if old is GroupStatus.READY:
        state.ready.remove((group.version, group.id))
        heapq.heapify(state.ready)
    if status is GroupStatus.READY:
        heapq.heappush(state.ready, (group.version, group.id))
    group.status = status


def _count(counted: dict[Version, int], version: Version, change: int) -> None:
    """Only versions that have any are in it."""
    count = counted.get(version, 0) + change
    if count:
        counted[version] = count
    else:
        del counted[version]


def new_group(state: State, version: Version) -> Group:
    """Dispatch the next prompt of the stream under a version; its members wait."""
    members = tuple(RolloutId(state.next_rollout + i) for i in range(state.config.group_size))
    group = Group(id=GroupId(state.dispatched), version=version, members=members, unfinished=len(members))
    state.next_rollout += len(members)
    state.dispatched += 1
    state.groups[group.id] = group
    state.counts[group.status] += 1
    _count(state.unseated, version, 1)
    _count(state.unfinished, version, 1)
    for position, member in enumerate(members):
        state.rollouts[member] = Rollout(id=member, group=group.id, evaluation=None, member=position, version=version)
        wait(state, state.rollouts[member])
    return group


def new_evaluation(state: State, version: Version) -> Evaluation:
    """All held-out prompts under one version: even members sampled, odd ones greedy."""
    evaluation = Evaluation(
        id=EvaluationId(state.next_evaluation),
        version=version,
        iteration=state.batch.iteration,
        unfinished=state.evaluation_answers,
    )
    state.next_evaluation += 1
    state.evaluations[evaluation.id] = evaluation
    state.evaluated.add(version)
    queue: deque[RolloutId] = deque()
    for member in range(state.evaluation_answers):
        rollout = Rollout(
            id=RolloutId(state.next_rollout),
            group=None,
            evaluation=evaluation.id,
            member=member,
            version=version,
            sampling="sampled" if member % 2 == 0 else "greedy",
        )
        state.next_rollout += 1
        state.rollouts[rollout.id] = rollout
        queue.append(rollout.id)
    state.evaluating[version] = queue
    return evaluation


def wait(state: State, rollout: Rollout) -> None:
    """No instance works on this answer: it queues under its version."""
    rollout.instance = None
    if rollout.evaluation is None:
        heapq.heappush(state.waiting.setdefault(rollout.version, []), rollout.id)
    else:
        state.evaluating.setdefault(rollout.version, deque()).appendleft(rollout.id)


def take(state: State, rollout: Rollout) -> None:
    """The first answer of its queue leaves it."""
    if rollout.evaluation is None:
        heapq.heappop(state.waiting[rollout.version])
        if not state.waiting[rollout.version]:
            del state.waiting[rollout.version]
    else:
        state.evaluating[rollout.version].popleft()
        if not state.evaluating[rollout.version]:
            del state.evaluating[rollout.version]


def run(state: State, rollout: Rollout, instance: Instance) -> None:
    """A segment of the answer starts on an instance."""
    rollout.instance, rollout.started, rollout.stays = instance.id, state.now, False
    instance.running[rollout.id] = None
    forget_kept(state, rollout)
    if rollout.group is not None:
        group = state.groups[rollout.group]
        group.working += 1
        if group.working == 1:
            set_status(state, group, GroupStatus.RUNNING)


def stop_running(state: State, rollout: Rollout) -> None:
    """Its segment ended, or was lost with its instance."""
    rollout.instance = None
    _leaves_no_more(state, rollout)
    if rollout.group is not None:
        group = state.groups[rollout.group]
        group.working -= 1
        if group.working == 0:
            set_status(state, group, GroupStatus.PARKED)


def detach(state: State, rollout: Rollout) -> None:
    """Its instance was told to end its segment; room is kept for it where its version is served."""
    rollout.detaching = True
    state.leaving[rollout.version] += 1


def stay(state: State, rollout: Rollout) -> None:
    """Its instance could not be told: the segment goes on to its own end."""
    rollout.stays = True
    _leaves_no_more(state, rollout)


def _leaves_no_more(state: State, rollout: Rollout) -> None:
    """No room has to be kept for it elsewhere."""
    if rollout.detaching:
        rollout.detaching = False
        state.leaving[rollout.version] -= 1


def keep(state: State, rollout: Rollout, event: Generated) -> None:
    """KV that its last segment left behind is there for the next one, if that runs where the layout is the same."""
    rollout.kept_tokens, rollout.kept_bytes, rollout.keep_s = event.kept_tokens, event.kept_bytes, event.keep_s
    rollout.kept_layout = state.instances[event.instance].descriptor.layout
    state.kept_bytes += event.kept_bytes


def forget_kept(state: State, rollout: Rollout) -> None:
    state.kept_bytes -= rollout.kept_bytes
    rollout.kept_tokens, rollout.kept_bytes, rollout.kept_layout = 0, 0, ""


def drop(state: State, group: Group) -> list[tuple[Rollout, InstanceId]]:
    """Throw a group away; returns its running answers, whose ends only free their slots."""
    running = []
    for member in group.members:
        rollout = state.rollouts[member]
        if rollout.instance is not None and rollout.id in state.instances[rollout.instance].running:
            instance = state.instances[rollout.instance]
            running.append((rollout, instance.id))
            instance.release(rollout.id)
            instance.ending.add((rollout.id, rollout.attempt))
            state.written_off.add((rollout.id, rollout.attempt))
            _leaves_no_more(state, rollout)
        elif rollout.instance is not None:
            state.instances[rollout.instance].reserved.remove(rollout.id)
        elif rollout.finished is None:
            heap = state.waiting[rollout.version]
            heap.remove(rollout.id)
            heapq.heapify(heap)
            if not heap:
                del state.waiting[rollout.version]
        forget_kept(state, rollout)
    if group.unfinished == 0 and group.status is GroupStatus.RUNNING:
        state.written_off_scores.add((group.id, group.attempt))
    leave(state, group, GroupStatus.DROPPED)
    return running


def renew_waiting(state: State) -> None:
    """Waiting answers go on under the newest version (only strategies without C1 do this)."""
    for version in [version for version in state.waiting if version < state.published]:
        for rollout_id in state.waiting.pop(version):
            rollout = state.rollouts[rollout_id]
            rollout.version = state.published
            wait(state, rollout)


def repair(state: State, group: Group) -> None:
    """The group's answers are lost: all of them wait to be sampled again, under its own version."""
    group.attempt += 1
    group.unfinished = len(group.members)
    set_status(state, group, GroupStatus.PARKED)
    for member in group.members:
        rollout = state.rollouts[member]
        rollout.finished, rollout.tokens = None, 0
        forget_kept(state, rollout)
        rollout.segment += 1
        rollout.attempt += 1
        wait(state, rollout)


def leave(state: State, group: Group, status: GroupStatus) -> None:
    """A group reaches its end; nothing of it stays but the count, and its name until the iteration closes."""
    set_status(state, group, status)
    if status in state.left:
        state.left[status].append(group.id)
    del state.groups[group.id]
    for member in group.members:
        del state.rollouts[member]
