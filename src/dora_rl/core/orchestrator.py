"""The scheduler: `step(event)` changes the state and returns the commands that follow from it.

    facts and answers ──> orchestrator ──> ledger ──> state ──> planner ──> commands
                          what happened    changes              what follows, as policy allows

Here stands what each event means. Knows no clock, no I/O and no strategy. Every command is answered by exactly one
event; an answer that nobody waits for is a ProtocolError, unless it is to something written off.
"""

from collections.abc import Callable
from typing import Any

from dora_rl.config import Config
from dora_rl.core import ledger, policy
from dora_rl.core import messages as m
from dora_rl.core.planner import Planner
from dora_rl.core.state import Batch, Instance, Rollout, State
from dora_rl.core.types import FinishReason, GroupStatus, Version, has_spread

FACTS = (m.RunStarted, m.InstanceJoined, m.InstanceLost, m.Reported, m.RankLost, m.DataLost, m.Interrupted)


class Orchestrator:
    def __init__(self, config: Config) -> None:
        self.state = State(config)
        self._planner = Planner(self.state, config)
        self._handlers: dict[type, Callable[[Any], None]] = {
            m.RunStarted: self._run_started,
            m.InstanceJoined: self._instance_joined,
            m.InstanceLost: self._instance_lost,
            m.Reported: self._reported,
            m.RankLost: self._rank_lost,
            m.DataLost: self._data_lost,
            m.Interrupted: self._interrupted,
            m.Loaded: self._loaded,
            m.Generated: self._generated,
            m.Detached: self._detached,
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
        if type(event) not in FACTS:
            self.state.unanswered -= 1
        self.state.now = event.at
        self._handlers[type(event)](event)
        if not self.state.done:
            self._planner.decide(event)
        commands = self._planner.take()
        if self.state.done:
            return []  # whoever ends the run ends what it would have begun
        self.state.unanswered += len(commands)
        return commands

    # --- facts ---------------------------------------------------------------------------------------------------

    def _run_started(self, event: m.RunStarted) -> None:
        state = self.state
        if state.started:
            raise m.ProtocolError("RunStarted came twice; a run starts once")
        state.started = True
        state.prompts = event.prompts
        state.evaluation_answers = event.evaluation_answers
        self._planner.publish()

    def _instance_joined(self, event: m.InstanceJoined) -> None:
        state, descriptor = self.state, event.descriptor
        if event.instance in state.instances:
            raise m.ProtocolError(f"instance {event.instance} joined twice; a new engine needs a new name")
        fit = int(descriptor.kv_capacity_tokens * state.kv_overcommit) // state.kv_tokens_per_answer
        if fit < 1:
            state.stopped = (
                f"instance {event.instance}: KV cache of {descriptor.kv_capacity_tokens} tokens holds no answer of "
                f"{state.kv_tokens_per_answer}; raise rollout.kv_cache_gib or lower rollout.max_completion_tokens"
            )
        state.expected = max(0, state.expected - 1)
        state.instances[event.instance] = Instance(
            id=event.instance,
            descriptor=descriptor,
            slots=min(descriptor.slots, fit),
            version=max(descriptor.versions, default=None),
        )

    def _instance_lost(self, event: m.InstanceLost) -> None:
        """What ran there goes on elsewhere, from the tokens that it had reported."""
        state = self.state
        state.draining.pop(event.instance, None)
        state.switching.pop(event.instance, None)
        instance = state.instances.pop(event.instance, None)
        if instance is None:
            state.expected = max(0, state.expected - 1)
        if not state.instances and not state.expected:
            state.stopped = f"instance {event.instance} was lost, and no other is left: {event.reason}"
        if instance is None:
            return  # it never joined
        saved = dict(event.saved)
        if instance.loading is not None:
            state.written_off_loads.add((instance.id, instance.loading))
        for rollout_id in instance.running:
            rollout = state.rollouts[rollout_id]
            state.written_off.add((rollout_id, rollout.attempt))
            rollout.attempt += 1
            rollout.segment += 1
            rollout.tokens += saved.get(rollout_id, 0)
            ledger.stop_running(state, rollout)
            if rollout.tokens < state.max_tokens:
                ledger.wait(state, rollout)
            else:
                self._finish(rollout, "failed")  # nothing was left to sample but the news of its end
        for rollout_id in instance.reserved:
            ledger.wait(state, state.rollouts[rollout_id])

    def _reported(self, event: m.Reported) -> None:
        instance = self.state.instances.get(event.instance)
        if instance is None:
            return  # lost in the meantime
        if instance.running:  # else its cache is empty by now
            instance.kv_tokens = event.kv_tokens
            instance.pressed = policy.is_pressed(self.state, instance)

    def _rank_lost(self, event: m.RankLost) -> None:
        """The batch's gradient is gone: its groups are ready again, and answers to its commands come too late."""
        state, batch = self.state, self.state.batch
        groups = batch.groups
        state.training_turn = state.training_turn and state.publishing is not None
        state.batch = Batch(
            iteration=batch.iteration, size=batch.size, attempt=batch.attempt + 1, fruitless=batch.fruitless
        )
        for group_id in groups:
            ledger.set_status(state, state.groups[group_id], GroupStatus.READY)

    def _data_lost(self, event: m.DataLost) -> None:
        group = self.state.groups.get(event.group)
        if group is None or group.status is not GroupStatus.READY:
            return  # left in the meantime, or being repaired already
        ledger.repair(self.state, group)

    def _interrupted(self, event: m.Interrupted) -> None:
        state = self.state
        state.interrupted = True
        for group in list(state.groups.values()):
            ledger.set_status(state, group, GroupStatus.INTERRUPTED)
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
            self._planner.retry(what, event.error, self._planner.load_command(instance))
            return
        instance.version, instance.loading = event.version, None
        reserved, instance.reserved = instance.reserved, []
        for rollout_id in reserved:
            self._planner.generate(state.rollouts[rollout_id], instance)

    def _generated(self, event: m.Generated) -> None:
        state = self.state
        if (event.rollout, event.attempt) in state.written_off:
            state.written_off.discard((event.rollout, event.attempt))
            if event.instance in state.instances:  # its group was thrown away; else its instance was lost
                state.instances[event.instance].ending.discard((event.rollout, event.attempt))
            return
        rollout = state.rollouts.get(event.rollout)
        if rollout is None or rollout.attempt != event.attempt or rollout.instance != event.instance:
            raise m.ProtocolError(f"rollout {event.rollout}, attempt {event.attempt}: an answer that nobody waits for")
        if rollout.version != event.version:
            raise m.ProtocolError(
                f"rollout {event.rollout} is of version {rollout.version}, but version {event.version} answered it"
            )
        instance = state.instances[event.instance]
        instance.release(event.rollout)
        self._learn(rollout, event)
        ledger.stop_running(state, rollout)
        rollout.tokens += event.num_tokens
        if event.reason in ("stop", "length"):
            self._finish(rollout, event.reason)
            return
        rollout.segment += 1
        rollout.attempt += 1
        rollout.failures += event.reason == "failed"
        if rollout.tokens >= state.max_tokens:
            # No budget is left: truncated, not asked for again.
            self._finish(rollout, "length" if event.reason == "detached" else event.reason)
        elif rollout.failures < state.config.max_attempts:
            ledger.keep(state, rollout, event)
            ledger.wait(state, rollout)
        elif rollout.evaluation is not None:
            state.stopped = f"evaluation answer {rollout.member} failed {rollout.failures} times: {event.error}"
        else:
            self._finish(rollout, event.reason)  # the group is scored with its survivors

    def _learn(self, rollout: Rollout, event: m.Generated) -> None:
        """What this segment tells of the costs of moving and of the rate of sampling."""
        state = self.state
        if event.num_tokens:
            state.sampling.observe(event.at - rollout.started, event.num_tokens)
        if event.recomputed_tokens:
            state.costs.computed(event.recomputed_tokens, event.resume_s)
        elif event.loaded_tokens:
            state.costs.moved(event.loaded_tokens, rollout.keep_s + event.resume_s)

    def _detached(self, event: m.Detached) -> None:
        """The instance was told, or could not be: then the segment goes on to its own end."""
        rollout = self.state.rollouts.get(event.rollout)
        if event.error is not None and rollout is not None and rollout.attempt == event.attempt and rollout.detaching:
            ledger.stay(self.state, rollout)

    def _finish(self, rollout: Rollout, reason: FinishReason) -> None:
        state = self.state
        rollout.finished = reason
        if rollout.group is not None:
            group = state.groups[rollout.group]
            group.unfinished -= 1
            if group.unfinished == 0:
                self._planner.score(group)
        elif rollout.evaluation is not None:
            evaluation = state.evaluations[rollout.evaluation]
            del state.rollouts[rollout.id]
            evaluation.unfinished -= 1
            if evaluation.unfinished == 0:
                self._planner.commands.append(self._planner.evaluate_command(evaluation))

    def _scored(self, event: m.Scored) -> None:
        state = self.state
        if (event.group, event.attempt) in state.written_off_scores:
            state.written_off_scores.discard((event.group, event.attempt))
            return
        group = state.groups.get(event.group)
        if group is None or group.attempt != event.attempt:
            raise m.ProtocolError(f"group {event.group}, attempt {event.attempt}: a score that nobody waits for")
        group.working -= 1
        if event.error is not None:
            group.failures += 1
            group.attempt += 1
            if group.failures < state.config.max_attempts:
                self._planner.score(group)
            else:
                state.stopped = f"scoring group {group.id} failed {group.failures} times: {event.error}"
            return
        rewards = [r for r in event.rewards if r is not None]
        if len(rewards) < 2:
            state.batch.fruitless += 1
            state.last_failure = event.note
            ledger.leave(state, group, GroupStatus.FAILED)
        elif not has_spread(rewards):
            state.batch.fruitless += 1
            ledger.leave(state, group, GroupStatus.FILTERED)
        else:
            ledger.set_status(state, group, GroupStatus.READY)

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
            state.training_turn = False
            ledger.repair(state, state.groups[event.group])

    def _stepped(self, event: m.Stepped) -> None:
        state, batch = self.state, self.state.batch
        if event.iteration != batch.iteration or event.attempt != batch.attempt:
            return  # a rank was lost since
        if event.error is not None:
            state.stopped = f"the trainer failed in iteration {event.iteration}: {event.error}"
            return
        self._planner.close_iteration()
        for group_id in batch.groups:
            ledger.leave(state, state.groups[group_id], GroupStatus.TRAINED)
        state.trained = Version(state.trained + event.improved)
        state.training_turn &= event.improved  # with a new version it lasts until that is published
        state.batch = Batch(iteration=batch.iteration + 1, size=batch.size)
        state.ended = state.batch.iteration >= state.iterations
        self._planner.publish()
        self._planner.maybe_evaluate()

    def _published(self, event: m.Published) -> None:
        state = self.state
        if state.publishing != event.version:
            raise m.ProtocolError(f"version {event.version} was published, but {state.publishing} was under way")
        if event.error is not None:
            what = f"publication of version {event.version}"
            self._planner.retry(
                what, event.error, self._planner.publish_command(event.version, attempt=event.attempt + 1)
            )
            return
        state.published, state.publishing, state.training_turn = event.version, None, False
        state.stored.add(event.version)
        self._planner.publish()
        self._planner.maybe_evaluate()

    def _closed(self, event: m.Closed) -> None:
        if event.error is not None:
            self.state.stopped = f"iteration {event.iteration} could not be written: {event.error}"

    def _evaluated(self, event: m.Evaluated) -> None:
        evaluation = self.state.evaluations[event.evaluation]
        if event.error is not None:
            what = f"evaluation of version {evaluation.version}"
            self._planner.retry(what, event.error, self._planner.evaluate_command(evaluation))
            return
        del self.state.evaluations[event.evaluation]

    def _forgotten(self, event: m.Forgotten) -> None:
        if event.error is not None:
            self._planner.retry(f"forgetting version {event.version}", event.error, m.Forget(version=event.version))

    def _exported(self, event: m.Exported) -> None:
        if event.error is not None:
            self._planner.retry("the export", event.error, m.Export(version=event.version))
        else:
            self.state.exported = True
