"""The scheduler: `step(event)` changes the state and returns the commands that follow from it.

    facts and answers ──> _apply ──> state ──> _decide ──> commands
                                                  seat      ready groups take seats, by deadline
                                                  close     a full batch (or the last one there can be) is stepped
                                                  serve     waiting answers are placed; idle instances load what is due
                                                  admit     new groups of the newest version, into slots that are free
                                                  finish    versions nobody needs are forgotten; the run ends

Knows no clock, no I/O and no strategy by name: what is allowed is asked of policy.py. Every command is answered by
exactly one event; an answer that nobody waits for is a ProtocolError, unless it is to something written off.
"""

import heapq
from collections import deque
from collections.abc import Callable
from typing import Any

from dora_rl.config import Config
from dora_rl.core import messages as m
from dora_rl.core import policy
from dora_rl.core.state import Batch, Evaluation, Group, Instance, Rollout, State
from dora_rl.core.types import (
    UNSEATED,
    EvaluationId,
    GroupId,
    GroupStatus,
    RolloutId,
    Version,
)

FACTS = (m.RunStarted, m.InstanceJoined, m.InstanceLost, m.RankLost, m.DataLost, m.Interrupted)


class Orchestrator:
    def __init__(self, config: Config, *, survive_lost_instances: bool = False) -> None:
        self.state = State(config)
        self._strategy = policy.STRATEGIES[config.schedule.strategy]
        self._eval_every = config.eval.every_iterations
        self._survive = survive_lost_instances
        self._commands: list[m.Command] = []
        self._handlers: dict[type, Callable[[Any], None]] = {
            m.RunStarted: self._run_started,
            m.InstanceJoined: self._instance_joined,
            m.InstanceLost: self._instance_lost,
            m.RankLost: self._rank_lost,
            m.DataLost: self._data_lost,
            m.Interrupted: self._interrupted,
            m.Loaded: self._loaded,
            m.Generated: self._generated,
            m.Scored: self._scored,
            m.Accumulated: self._accumulated,
            m.Stepped: self._stepped,
            m.Published: self._published,
            m.Closed: self._closed,
            m.Evaluated: self._evaluated,
            m.Forgotten: self._forgotten,
            m.Exported: self._exported,
        }

    @property
    def done(self) -> bool:
        return self.state.done

    def step(self, event: m.Event) -> list[m.Command]:
        """Apply one event and return the commands that follow, in the order in which they were decided."""
        self._commands = []
        if type(event) not in FACTS:
            self.state.unanswered -= 1
        self._handlers[type(event)](event)
        if not self.state.done:
            self._decide(event)
        if self.state.done:
            self._commands = []  # whoever ends the run ends what it would have begun
        self.state.unanswered += len(self._commands)
        return self._commands

    # --- facts ---------------------------------------------------------------------------------------------------

    def _run_started(self, event: m.RunStarted) -> None:
        state = self.state
        if state.started:
            raise m.ProtocolError("RunStarted came twice; a run starts once")
        state.started = True
        state.prompts = event.prompts
        state.evaluation_answers = event.evaluation_answers
        self._publish()

    def _instance_joined(self, event: m.InstanceJoined) -> None:
        state, descriptor = self.state, event.descriptor
        if event.instance in state.instances:
            raise m.ProtocolError(f"instance {event.instance} joined twice; a new engine needs a new name")
        fit = descriptor.kv_capacity_tokens // state.kv_tokens_per_answer
        if fit < 1:
            state.stopped = (
                f"instance {event.instance}: KV cache of {descriptor.kv_capacity_tokens} tokens holds no answer of "
                f"{state.kv_tokens_per_answer}; raise rollout.kv_cache_gib or lower rollout.max_completion_tokens"
            )
        state.instances[event.instance] = Instance(
            id=event.instance,
            descriptor=descriptor,
            slots=min(descriptor.slots, fit),
            version=max(descriptor.versions, default=None),
        )

    def _instance_lost(self, event: m.InstanceLost) -> None:
        state = self.state
        if not self._survive:
            state.stopped = f"instance {event.instance} was lost: {event.reason}"
            return
        instance = state.instances.pop(event.instance, None)
        if instance is None:
            return  # lost already; its death was noticed twice
        if instance.loading is not None:
            state.written_off_loads.add((instance.id, instance.loading))
        for rollout_id in instance.running:
            rollout = state.rollouts[rollout_id]
            state.written_off.add((rollout_id, rollout.attempt))
            rollout.attempt += 1
            self._leave_work(rollout)
        for rollout_id in (*instance.running, *instance.reserved):
            self._wait(state.rollouts[rollout_id])

    def _rank_lost(self, event: m.RankLost) -> None:
        """The batch's gradient is gone: its groups are ready again, and answers to its commands come too late."""
        state, batch = self.state, self.state.batch
        groups = batch.groups
        state.batch = Batch(
            iteration=batch.iteration, size=batch.size, attempt=batch.attempt + 1, filtered=batch.filtered
        )
        for group_id in groups:
            self._set_status(state.groups[group_id], GroupStatus.READY)

    def _data_lost(self, event: m.DataLost) -> None:
        group = self.state.groups.get(event.group)
        if group is None or group.status is not GroupStatus.READY:
            return  # left in the meantime, or being repaired already
        self._repair(group)

    def _interrupted(self, event: m.Interrupted) -> None:
        state = self.state
        state.interrupted = True
        for group in list(state.groups.values()):
            self._set_status(group, GroupStatus.INTERRUPTED)
        state.batch.groups.clear()

    # --- answers -------------------------------------------------------------------------------------------------

    def _loaded(self, event: m.Loaded) -> None:
        state = self.state
        if (event.instance, event.version) in state.written_off_loads:
            state.written_off_loads.discard((event.instance, event.version))
            return
        instance = state.instances.get(event.instance)
        if instance is None or instance.loading != event.version:
            raise m.ProtocolError(f"{event.instance} loaded version {event.version}, which nobody asked of it")
        if event.error is not None:
            what = f"load of version {event.version} on {event.instance}"
            self._retry(what, event.error, self._load_command(instance))
            return
        instance.version, instance.loading = event.version, None
        reserved, instance.reserved = instance.reserved, []
        for rollout_id in reserved:
            self._generate(state.rollouts[rollout_id], instance)

    def _generated(self, event: m.Generated) -> None:
        state = self.state
        if (event.rollout, event.attempt) in state.written_off:
            state.written_off.discard((event.rollout, event.attempt))
            return
        rollout = state.rollouts.get(event.rollout)
        if rollout is None or rollout.attempt != event.attempt or rollout.instance != event.instance:
            raise m.ProtocolError(f"rollout {event.rollout}, attempt {event.attempt}: an answer that nobody waits for")
        if rollout.version != event.version:
            raise m.ProtocolError(
                f"rollout {event.rollout} is of version {rollout.version}, but version {event.version} answered it"
            )
        del state.instances[event.instance].running[event.rollout]
        self._leave_work(rollout)
        rollout.tokens += event.num_tokens
        if event.reason in ("stop", "length"):
            self._finish(rollout, event)
            return
        rollout.segment += 1
        rollout.attempt += 1
        rollout.failures += event.reason == "failed"
        if rollout.tokens >= state.max_tokens:
            self._finish(rollout, event)  # no budget is left: truncated, not asked for again
        elif rollout.failures < state.config.max_attempts:
            self._wait(rollout)
        elif rollout.evaluation is not None:
            state.stopped = f"evaluation answer {rollout.member} failed {rollout.failures} times: {event.error}"
        else:
            self._finish(rollout, event)  # the group is scored with its survivors

    def _finish(self, rollout: Rollout, event: m.Generated) -> None:
        state = self.state
        rollout.finished = "length" if event.reason == "detached" else event.reason
        if rollout.group is not None:
            group = state.groups[rollout.group]
            group.unfinished -= 1
            if group.unfinished == 0:
                self._score(group)
        elif rollout.evaluation is not None:
            evaluation = state.evaluations[rollout.evaluation]
            del state.rollouts[rollout.id]
            evaluation.unfinished -= 1
            if evaluation.unfinished == 0:
                self._commands.append(self._evaluate_command(evaluation))

    def _scored(self, event: m.Scored) -> None:
        state = self.state
        group = state.groups.get(event.group)
        if group is None or group.attempt != event.attempt:
            raise m.ProtocolError(f"group {event.group}, attempt {event.attempt}: a score that nobody waits for")
        group.working -= 1
        if event.error is not None:
            group.failures += 1
            group.attempt += 1
            if group.failures < state.config.max_attempts:
                self._score(group)
            else:
                state.stopped = f"scoring group {group.id} failed {group.failures} times: {event.error}"
            return
        rewards = [r for r in event.rewards if r is not None]
        if len(rewards) < 2:
            self._leave(group, GroupStatus.FAILED)
        elif not policy.has_spread(rewards):
            state.batch.filtered += 1
            self._leave(group, GroupStatus.FILTERED)
        else:
            self._set_status(group, GroupStatus.READY)

    def _accumulated(self, event: m.Accumulated) -> None:
        state, batch = self.state, self.state.batch
        if event.iteration != batch.iteration or event.attempt != batch.attempt:
            return  # a rank was lost since
        batch.accumulating -= 1
        if event.error is not None:
            state.stopped = f"the trainer could not take group {event.group}: {event.error}"
        elif event.lost:
            # Its seat is free again, and the batch open again should its step be waiting for this answer.
            batch.groups.remove(event.group)
            self._repair(state.groups[event.group])

    def _stepped(self, event: m.Stepped) -> None:
        state, batch = self.state, self.state.batch
        if event.iteration != batch.iteration or event.attempt != batch.attempt:
            return  # a rank was lost since
        if event.error is not None:
            state.stopped = f"the trainer failed in iteration {event.iteration}: {event.error}"
            return
        self._close_iteration()
        for group_id in batch.groups:
            self._leave(state.groups[group_id], GroupStatus.TRAINED)
        state.trained = Version(state.trained + event.improved)
        state.batch = Batch(iteration=batch.iteration + 1, size=batch.size)
        state.ended = state.batch.iteration >= state.iterations
        self._publish()
        self._maybe_evaluate()

    def _published(self, event: m.Published) -> None:
        state = self.state
        if state.publishing != event.version:
            raise m.ProtocolError(f"version {event.version} was published, but {state.publishing} was under way")
        if event.error is not None:
            what = f"publication of version {event.version}"
            self._retry(what, event.error, self._publish_command(event.version, attempt=event.attempt + 1))
            return
        state.published, state.publishing = event.version, None
        state.stored.add(event.version)
        self._publish()
        self._maybe_evaluate()

    def _closed(self, event: m.Closed) -> None:
        if event.error is not None:
            self.state.stopped = f"iteration {event.iteration} could not be written: {event.error}"

    def _evaluated(self, event: m.Evaluated) -> None:
        evaluation = self.state.evaluations[event.evaluation]
        if event.error is not None:
            what = f"evaluation of version {evaluation.version}"
            self._retry(what, event.error, self._evaluate_command(evaluation))
            return
        del self.state.evaluations[event.evaluation]

    def _forgotten(self, event: m.Forgotten) -> None:
        if event.error is not None:
            self._retry(f"forgetting version {event.version}", event.error, m.Forget(version=event.version))

    def _exported(self, event: m.Exported) -> None:
        if event.error is not None:
            self._retry("the export", event.error, m.Export(version=event.version))
        else:
            self.state.exported = True

    # --- decisions -----------------------------------------------------------------------------------------------

    def _decide(self, event: m.Event) -> None:
        self._seat()
        self._close_batch()
        if isinstance(event, m.Generated) and event.instance in self.state.instances:
            # The common case, kept short: what one answer leaves free, the next one waiting takes.
            instance = self.state.instances[event.instance]
            self._fill(instance)
            if instance.idle:
                self._serve()
        else:
            self._serve()
        self._admit()
        if not isinstance(event, m.Generated | m.Accumulated):
            self._forget()
            self._end()

    def _seat(self) -> None:
        state = self.state
        while state.ready and state.batch.seats > 0:
            version, group_id = state.ready[0]
            if not self._strategy.may_seat(state, version):
                return
            group = state.groups[group_id]
            self._set_status(group, GroupStatus.SEATED)
            state.batch.groups.append(group_id)
            state.batch.accumulating += 1
            self._commands.append(
                m.Accumulate(
                    iteration=state.batch.iteration,
                    attempt=state.batch.attempt,
                    group=group_id,
                    trained_at=state.trained,
                )
            )

    def _close_batch(self) -> None:
        """Step a batch that is full, or that nothing more can join without breaking a promise."""
        state, batch = self.state, self.state.batch
        if batch.closed or batch.accumulating or state.ended or state.publishing is not None:
            return  # weights may not change while they are being published
        if batch.seats and not (self._nothing_more_can_come() or policy.filtering_too_much(state)):
            return
        if batch.seats and not policy.schedulable(state, seats=0):
            return  # somebody who is still running needs a seat of this very batch
        if not batch.groups:
            self._close_empty()
            return
        batch.closed = True
        self._commands.append(
            m.Step(
                iteration=batch.iteration,
                attempt=batch.attempt,
                groups=tuple(batch.groups),
                version=Version(state.trained + 1),
            )
        )

    def _close_empty(self) -> None:
        state = self.state
        if state.unseated or state.published < 0:
            return
        if policy.filtering_too_much(state):
            state.stopped = (
                f"iteration {state.batch.iteration}: {state.batch.filtered} groups in a row had equal rewards "
                "(schedule.max_filtered_groups), so there is nothing to learn from; make the tasks easier or harder"
            )
        elif not state.prompts_left:
            if any(state.left.values()):
                self._close_iteration()
            state.ended = True
            self._maybe_evaluate()

    def _close_iteration(self) -> None:
        """Hand over every group that left the ledger since the last iteration closed, to be written."""
        state = self.state
        left, state.left = state.left, {GroupStatus.FILTERED: [], GroupStatus.FAILED: []}
        self._commands.append(
            m.Close(
                iteration=state.batch.iteration,
                trained_at=state.trained,
                trained=tuple(state.batch.groups),
                filtered=tuple(left[GroupStatus.FILTERED]),
                failed=tuple(left[GroupStatus.FAILED]),
            )
        )

    def _nothing_more_can_come(self) -> bool:
        return not self.state.unseated and not self.state.prompts_left

    def _serve(self) -> None:
        """Place what waits: where its version is held, else on an idle instance that loads it; drain one if it is due."""
        state = self.state
        for instance in state.instances.values():
            if instance.draining_to is not None and policy.drain_is_over(state, instance):
                instance.draining_to = None
            self._fill(instance)
        for instance in state.instances.values():
            if instance.idle and (wanted := policy.choose_version(state)) is not None:
                instance.draining_to = None
                self._load(instance, wanted)
        while (drain := policy.choose_drain(state)) is not None:
            state.instances[drain[0]].draining_to = drain[1]

    def _fill(self, instance: Instance) -> None:
        """Give an instance answers of the version it serves until its slots are taken."""
        state = self.state
        version = instance.serves
        if version is None:
            return
        while instance.free > 0 and (rollout_id := policy.next_waiting(state, version)) is not None:
            rollout = state.rollouts[rollout_id]
            if rollout.evaluation is None:
                heapq.heappop(state.waiting[version])
                if not state.waiting[version]:
                    del state.waiting[version]
            else:
                state.evaluating[version].popleft()
                if not state.evaluating[version]:
                    del state.evaluating[version]
            if instance.loading is None:
                self._generate(rollout, instance)
            else:
                rollout.instance = instance.id
                instance.reserved.append(rollout_id)

    def _admit(self) -> None:
        """Dispatch new groups of the newest version while slots are free for it and the strategy allows."""
        state = self.state
        while (
            policy.admission_open(state)
            and state.published not in state.waiting
            and state.published not in state.evaluating
            and self._strategy.may_admit(state)
            and (home := policy.choose_home(state)) is not None
        ):
            self._dispatch(home)

    def _dispatch(self, home: Instance) -> None:
        state, version = self.state, self.state.published
        group_id = GroupId(state.dispatched)
        members = tuple(RolloutId(state.next_rollout + i) for i in range(state.config.group_size))
        state.next_rollout += len(members)
        state.dispatched += 1
        state.groups[group_id] = Group(id=group_id, version=version, members=members, unfinished=len(members))
        state.counts[GroupStatus.PARKED] += 1
        state.unseated[version] = state.unseated.get(version, 0) + 1
        for position, member in enumerate(members):
            rollout = Rollout(id=member, group=group_id, evaluation=None, member=position, version=version)
            state.rollouts[member] = rollout
            self._wait(rollout)
        if home.serves != version:
            self._load(home, version)
        self._fill(home)
        for instance in state.instances.values():  # what did not fit there starts wherever there is room
            if version not in state.waiting:
                break
            if instance.serves == version:
                self._fill(instance)

    def _forget(self) -> None:
        for version in policy.forgettable(self.state):
            self.state.stored.discard(version)
            self._commands.append(m.Forget(version=version))

    def _maybe_evaluate(self) -> None:
        """Evaluate the newest version before the first iteration, after the last one, and as often as asked between."""
        state = self.state
        iteration = state.batch.iteration
        regular = self._eval_every > 0 and iteration % self._eval_every == 0
        wanted = iteration == 0 or state.ended or regular
        version = state.published
        if not wanted or state.evaluation_answers == 0 or version != state.trained or version in state.evaluated:
            return
        state.evaluated.add(version)
        evaluation = EvaluationId(state.next_evaluation)
        state.next_evaluation += 1
        state.evaluations[evaluation] = Evaluation(
            id=evaluation, version=version, iteration=iteration, unfinished=state.evaluation_answers
        )
        queue: deque[RolloutId] = deque()
        for member in range(state.evaluation_answers):
            rollout = Rollout(
                id=RolloutId(state.next_rollout),
                group=None,
                evaluation=evaluation,
                member=member,
                version=version,
                sampling="sampled" if member % 2 == 0 else "greedy",
            )
            state.next_rollout += 1
            state.rollouts[rollout.id] = rollout
            queue.append(rollout.id)
        state.evaluating[version] = queue

    def _end(self) -> None:
        """Once the last iteration is done and its version published and evaluated: export, then nothing is left."""
        state = self.state
        if state.ended and state.published == state.trained and not state.evaluations and not state.exporting:
            state.exporting = True
            self._commands.append(m.Export(version=state.published))

    # --- changes of the state, each in one place --------------------------------------------------------------------

    def _publish(self) -> None:
        state = self.state
        if state.publishing is None and state.published < state.trained:
            state.publishing = state.trained
            self._commands.append(self._publish_command(state.trained, attempt=0))

    def _publish_command(self, version: Version, *, attempt: int) -> m.Publish:
        return m.Publish(version=version, parent=Version(version - 1) if version else None, attempt=attempt)

    def _evaluate_command(self, evaluation: Evaluation) -> m.Evaluate:
        return m.Evaluate(evaluation=evaluation.id, version=evaluation.version, iteration=evaluation.iteration)

    def _load(self, instance: Instance, version: Version) -> None:
        instance.loading = version
        self._commands.append(self._load_command(instance))
        self._fill(instance)

    def _load_command(self, instance: Instance) -> m.Load:
        assert instance.loading is not None, f"{instance.id} loads nothing"
        return m.Load(instance=instance.id, version=instance.loading)

    def _retry(self, what: str, error: str, command: m.Command) -> None:
        """Give a failed command again, a limited number of times."""
        state = self.state
        state.failures[what] += 1
        if state.failures[what] < state.config.max_attempts:
            self._commands.append(command)
        else:
            state.stopped = f"{what} failed {state.failures[what]} times: {error}"

    def _generate(self, rollout: Rollout, instance: Instance) -> None:
        state = self.state
        rollout.instance = instance.id
        instance.running[rollout.id] = None
        if rollout.group is not None:
            group = state.groups[rollout.group]
            group.working += 1
            if group.working == 1:
                self._set_status(group, GroupStatus.RUNNING)
        self._commands.append(
            m.Generate(
                rollout=rollout.id,
                segment=rollout.segment,
                attempt=rollout.attempt,
                instance=instance.id,
                version=rollout.version,
                group=rollout.group,
                evaluation=rollout.evaluation,
                member=rollout.member,
                sampling=rollout.sampling,
                generated_tokens=rollout.tokens,
                max_tokens=state.max_tokens - rollout.tokens,
            )
        )

    def _leave_work(self, rollout: Rollout) -> None:
        rollout.instance = None
        if rollout.group is not None:
            group = self.state.groups[rollout.group]
            group.working -= 1
            if group.working == 0:
                self._set_status(group, GroupStatus.PARKED)

    def _wait(self, rollout: Rollout) -> None:
        rollout.instance = None
        if rollout.evaluation is None:
            heapq.heappush(self.state.waiting.setdefault(rollout.version, []), rollout.id)
        else:
            self.state.evaluating.setdefault(rollout.version, deque()).appendleft(rollout.id)

    def _score(self, group: Group) -> None:
        group.working += 1
        self._set_status(group, GroupStatus.RUNNING)
        self._commands.append(m.Score(group=group.id, attempt=group.attempt))

    def _repair(self, group: Group) -> None:
        """The group's answers are lost: sample all of them again, under its own version."""
        group.attempt += 1
        group.unfinished = len(group.members)
        self._set_status(group, GroupStatus.PARKED)
        for member in group.members:
            rollout = self.state.rollouts[member]
            rollout.finished, rollout.tokens = None, 0
            rollout.segment += 1
            rollout.attempt += 1
            self._wait(rollout)

    def _leave(self, group: Group, status: GroupStatus) -> None:
        """A group reaches its end; nothing of it stays but the count."""
        self._set_status(group, status)
        if status is not GroupStatus.TRAINED:
            self.state.left[status].append(group.id)
        del self.state.groups[group.id]
        for member in group.members:
            del self.state.rollouts[member]

    def _set_status(self, group: Group, status: GroupStatus) -> None:
        """Move a group in the ledger, with the counters and the heap that depend on it."""
        state, old = self.state, group.status
        if old is status:
            return
        state.counts[old] -= 1
        state.counts[status] += 1
        if (old in UNSEATED) != (status in UNSEATED):
            count = state.unseated.get(group.version, 0) + (1 if status in UNSEATED else -1)
            if count:
                state.unseated[group.version] = count
            else:
                del state.unseated[group.version]
        if old is GroupStatus.READY:
            state.ready.remove((group.version, group.id))
            heapq.heapify(state.ready)
        if status is GroupStatus.READY:
            heapq.heappush(state.ready, (group.version, group.id))
        group.status = status
