"""What follows from the state: commands, each decided by policy.py and given here.

    seat      ready groups take seats, by deadline
    close     a full batch (or the last one there can be) is stepped
    serve     waiting answers are placed; idle instances load what is due
    switch    some instances are told to change to the newest version, the others generate on meanwhile
    move      answers leave an instance that is to change version for one that goes on with theirs
    admit     new groups of the newest version that is held, into slots that are free
    finish    versions nobody needs are forgotten; the run is evaluated and exported

Knows no event's contents and no strategy by name.
"""

from dora_rl.config import Config
from dora_rl.core import ledger, policy
from dora_rl.core import messages as m
from dora_rl.core.schedulability import schedulable
from dora_rl.core.state import Evaluation, Group, Instance, Rollout, State
from dora_rl.core.strategies import STRATEGIES, stale
from dora_rl.core.types import UNTRAINED, GroupStatus, Version


class Planner:
    """`commands` collects what was decided since it was last taken, in that order."""

    def __init__(self, state: State, config: Config) -> None:
        self.state = state
        self.commands: list[m.Command] = []
        self._strategy = STRATEGIES[config.schedule.strategy]
        self._eval_every = config.eval.every_iterations

    def take(self) -> list[m.Command]:
        commands, self.commands = self.commands, []
        return commands

    def decide(self, event: m.Event) -> None:
        """Everything that follows from the state as this event has left it."""
        state = self.state
        if "C2" not in state.config.promises and isinstance(event, m.Stepped | m.RankLost):
            self._drop()
        if "C1" not in state.config.promises:
            if isinstance(event, m.Published):
                for instance in state.instances.values():
                    state.switching[instance.id] = None
                    self._clear(instance)
            ledger.renew_waiting(state)
        self._seat()
        self._close_batch()
        if isinstance(event, m.Generated) and event.instance in state.instances:
            # The common case, kept short: what one answer leaves free, the next one waiting takes.
            instance = state.instances[event.instance]
            self._fill(instance)
            if instance.idle:
                self._switch()
                self._serve()
        else:
            if isinstance(event, m.Reported) and event.instance in state.instances:
                self._relieve(state.instances[event.instance])
            self._switch()
            self._serve()
        self._admit()
        if state.waiting:  # what one gives up, another may take
            for instance in state.instances.values():
                self._fill(instance)
        if isinstance(event, m.Stepped | m.Published | m.Loaded | m.Evaluated):
            self._forget()
        if state.ended:
            self._end()

    def _drop(self) -> None:
        """Throw away what no batch may train any more."""
        for group in stale(self.state):
            for rollout, instance in ledger.drop(self.state, group):
                self.commands.append(
                    m.Detach(rollout=rollout.id, attempt=rollout.attempt, instance=instance, keep=False)
                )

    def _clear(self, instance: Instance) -> None:
        """Take all answers off an instance, to go on when it takes some again."""
        for rollout_id in instance.running:
            rollout = self.state.rollouts[rollout_id]
            if not rollout.detaching:
                room = self.state.kept_bytes < self.state.kept_bytes_limit
                self._detach(rollout, keep=room and self.state.config.kv == "keep")

    def _seat(self) -> None:
        state = self.state
        while state.ready and state.batch.seats > 0 and not state.ended:
            version, group_id = state.ready[0]
            if not self._strategy.may_seat(state, version):
                return
            group = state.groups[group_id]
            ledger.set_status(state, group, GroupStatus.SEATED)
            state.batch.groups.append(group_id)
            state.batch.accumulating += 1
            self.commands.append(
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
        if batch.seats and not schedulable(state, seats=0):
            return  # somebody who is still running needs a seat of this very batch
        if not batch.groups:
            self._close_empty()
            return
        if state.config.placement == "colocated":
            self._begin_training_turn()
            if not all(instance.idle for instance in state.instances.values()):
                return  # the trainer computes on their devices
        batch.closed = True
        self.commands.append(
            m.Step(
                iteration=batch.iteration,
                attempt=batch.attempt,
                groups=tuple(batch.groups),
                version=Version(state.trained + 1),
            )
        )

    def _begin_training_turn(self) -> None:
        """Colocated: instances give up their devices until the batch has been trained and published."""
        if not self.state.training_turn:
            self.state.training_turn = True
            for instance in self.state.instances.values():
                self._clear(instance)

    def _close_empty(self) -> None:
        state = self.state
        if state.unseated or state.published < 0:
            return
        if policy.filtering_too_much(state):
            state.stopped = (
                f"iteration {state.batch.iteration}: {state.batch.fruitless} groups and none to learn from "
                "(schedule.max_filtered_groups): rewards were all equal or missing; "
                + (
                    f"the last failure: {state.last_failure}"
                    if state.last_failure
                    else "make the tasks easier or harder"
                )
            )
        elif not state.prompts_left:
            if any(state.left.values()):
                self.close_iteration()
            state.ended = True
            self.maybe_evaluate()

    def close_iteration(self) -> None:
        """Hand over every group that left the ledger since the last iteration closed, to be written."""
        state = self.state
        left, state.left = state.left, {status: [] for status in UNTRAINED}
        self.commands.append(
            m.Close(
                iteration=state.batch.iteration,
                trained_at=state.trained,
                trained=tuple(state.batch.groups),
                filtered=tuple(left[GroupStatus.FILTERED]),
                failed=tuple(left[GroupStatus.FAILED]),
                dropped=tuple(left[GroupStatus.DROPPED]),
            )
        )

    def _nothing_more_can_come(self) -> bool:
        return not self.state.unseated and not self.state.prompts_left

    def _serve(self) -> None:
        """Place what waits: where its version is held, else on an idle instance that loads it; drain one if due."""
        state = self.state
        if state.training_turn:
            return
        for name in [name for name in state.draining if policy.drain_is_over(state, name)]:
            del state.draining[name]
        if not (state.waiting or state.evaluating):
            return
        for instance in state.instances.values():
            self._fill(instance)
        for instance in state.instances.values():
            if instance.idle and (wanted := policy.choose_version(state)) is not None:
                state.draining.pop(instance.id, None)
                self._load(instance, wanted)
        while (drain := policy.choose_drain(state)) is not None:
            state.draining[drain[0]] = drain[1]
            self._move(state.instances[drain[0]])

    def _fill(self, instance: Instance) -> None:
        """Give an instance answers of the version it serves until its slots are taken."""
        state = self.state
        version = instance.serves
        if (
            state.training_turn
            or version is None
            or instance.id in state.draining
            or policy.leaves_to_others(state, instance)
        ):
            return
        while instance.free > 0 and (rollout_id := policy.next_waiting(state, version)) is not None:
            rollout = state.rollouts[rollout_id]
            ledger.take(state, rollout)
            if instance.loading is None:
                self.generate(rollout, instance)
            else:
                rollout.instance = instance.id
                instance.reserved.append(rollout_id)

    def _switch(self) -> None:
        """Tell instances to change to the newest version: they take no new group until they have."""
        state = self.state
        for name in list(state.switching):
            if name not in state.instances or state.instances[name].version == state.published:
                del state.switching[name]
        while (instance := policy.choose_switch(state)) is not None:
            state.switching[instance.id] = None
        for name in state.switching:
            self._move(state.instances[name])

    def _move(self, instance: Instance) -> None:
        """Tell an instance to give up answers that are better continued elsewhere."""
        for rollout in policy.choose_moves(self.state, instance):
            self._send_on(rollout)

    def _relieve(self, instance: Instance) -> None:
        if instance.pressed and not any(self.state.rollouts[r].detaching for r in instance.running):
            for rollout in policy.choose_relief(self.state, instance):
                self._send_on(rollout)

    def _send_on(self, rollout: Rollout) -> None:
        """Have it leave, with its KV or without, as is sooner."""
        keep = policy.choose_keep(self.state, rollout)
        self.state.costs.chosen(keep=keep)
        self._detach(rollout, keep=keep)

    def _detach(self, rollout: Rollout, *, keep: bool) -> None:
        assert rollout.instance is not None, f"rollout {rollout.id} runs nowhere"
        ledger.detach(self.state, rollout)
        self.commands.append(
            m.Detach(rollout=rollout.id, attempt=rollout.attempt, instance=rollout.instance, keep=keep)
        )

    def _admit(self) -> None:
        """Dispatch new groups into slots that are free, as far as the strategy allows: of the newest version first;
        while instances change to it, of the version that another one still holds."""
        while policy.admission_open(self.state) and (self._admit_newest() or self._admit_legacy()):
            pass

    def _admit_newest(self) -> bool:
        state, version = self.state, self.state.published
        if version in state.waiting or version in state.evaluating or not self._strategy.may_admit(state, version):
            return False
        home = policy.choose_home(state, version)
        if home is not None:
            self._dispatch(home, version)
        return home is not None

    def _admit_legacy(self) -> bool:
        state = self.state
        home = policy.choose_legacy_home(state)
        if home is None or home.version is None or not self._strategy.may_admit(state, home.version):
            return False
        self._dispatch(home, home.version)
        return True

    def _dispatch(self, home: Instance, version: Version) -> None:
        state = self.state
        ledger.new_group(state, version)
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
            self.commands.append(m.Forget(version=version))

    def maybe_evaluate(self) -> None:
        """Evaluate the newest version before the first iteration, after the last one, and as often as asked between."""
        state = self.state
        iteration = state.batch.iteration
        regular = self._eval_every > 0 and iteration % self._eval_every == 0
        if not (iteration == 0 or state.ended or regular) or state.evaluation_answers == 0:
            return
        if state.published == state.trained and state.published not in state.evaluated:
            ledger.new_evaluation(state, state.published)

    def _end(self) -> None:
        """Once the last iteration is done and its version published and evaluated: export, then nothing is left."""
        state = self.state
        if state.ended and state.published == state.trained and not state.evaluations and not state.exporting:
            state.exporting = True
            self.commands.append(m.Export(version=state.published))

    # --- commands ---------------------------------------------------------------------------------------------------

    def publish(self) -> None:
        state = self.state
        if state.publishing is None and state.published < state.trained:
            state.publishing = state.trained
            self.commands.append(self.publish_command(state.trained, attempt=0))

    def publish_command(self, version: Version, *, attempt: int) -> m.Publish:
        return m.Publish(version=version, parent=Version(version - 1) if version else None, attempt=attempt)

    def _load(self, instance: Instance, version: Version) -> None:
        instance.loading = version
        self.commands.append(self.load_command(instance))
        self._fill(instance)

    def load_command(self, instance: Instance) -> m.Load:
        assert instance.loading is not None, f"{instance.id} loads nothing"
        return m.Load(instance=instance.id, version=instance.loading)

    def generate(self, rollout: Rollout, instance: Instance) -> None:
        kept = rollout.kept_tokens if rollout.kept_layout == instance.descriptor.layout else 0
        ledger.run(self.state, rollout, instance)
        self.commands.append(
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
                max_tokens=self.state.max_tokens - rollout.tokens,
                kept_tokens=kept,
            )
        )

    def score(self, group: Group) -> None:
        group.working += 1
        ledger.set_status(self.state, group, GroupStatus.RUNNING)
        self.commands.append(m.Score(group=group.id, attempt=group.attempt))

    def evaluate_command(self, evaluation: Evaluation) -> m.Evaluate:
        return m.Evaluate(evaluation=evaluation.id, version=evaluation.version, iteration=evaluation.iteration)

    def retry(self, what: str, error: str, command: m.Command) -> None:
        """Give a failed command again, a limited number of times."""
        state = self.state
        state.failures[what] += 1
        if state.failures[what] < state.config.max_attempts:
            self.commands.append(command)
        else:
            state.stopped = f"{what} failed {state.failures[what]} times: {error}"
