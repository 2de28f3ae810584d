"""A world in which everything takes the time that one law gives it: the law of `[pace]` (config.PaceConfig).

An instance decodes in steps whose duration grows with the answers that run on it; answers join and leave between
steps, a prefill stops all of them for its time. The trainer computes groups one after the other. The same law paces
real engines and a real trainer (runtime/pace.py), so that one can be held against the other.
"""

from collections import deque
from dataclasses import dataclass, field, replace
from random import Random
from typing import assert_never

from dora_rl.config import Config
from dora_rl.core import messages as m
from dora_rl.core.types import GroupId, InstanceDescriptor, InstanceId, RolloutId
from dora_rl.pace.law import forced_length, move_s, step_s, train_s
from dora_rl.sim.engine import Agenda


@dataclass(slots=True)
class _Running:
    command: m.Generate
    ends_at_step: float
    """Steps of its instance after which it is complete."""
    began_at_step: float
    resume_s: float


@dataclass(slots=True)
class _Instance:
    running: dict[RolloutId, _Running] = field(default_factory=dict)
    steps: float = 0.0
    """Decode steps done, fractions included."""
    at: float = 0.0
    """When that was."""
    prefilled: set[GroupId] = field(default_factory=set)
    """Groups whose prompt is in its prefix cache."""
    due: tuple[RolloutId, int] | None = None
    """The answer that will be complete first, and the place of its end in the agenda."""


@dataclass(slots=True)
class _Job:
    """A group that the trainer has to compute, or the step that closes its batch."""

    command: m.Accumulate | m.Step
    seconds: float


class PacedWorld:
    def __init__(self, config: Config) -> None:
        self._config = config
        assert config.law is not None, "a paced world needs the law of [pace]"
        self._pace = config.law
        self._agenda = Agenda()
        self._instances: dict[InstanceId, _Instance] = {}
        self._tokens: dict[GroupId, int] = {}
        self._kept: dict[RolloutId, int] = {}
        self._waiting: deque[_Job] = deque()
        self._trainer_free_at = 0.0
        self._busy_s = 0.0
        self._rng = Random(config.run.seed)

    def begin(self) -> None:
        self._agenda.add(m.RunStarted(at=0.0, prompts=None, evaluation_answers=0))
        rollout = self._config.rollout
        for index in range(rollout.instances):
            name = InstanceId(f"engine-{index}")
            self._instances[name] = _Instance()
            descriptor = InstanceDescriptor(
                node="sim",
                devices=(f"sim:{index}",),
                layout="sim",
                slots=rollout.slots,
                kv_capacity_tokens=rollout.slots * self._config.max_model_tokens,
            )
            self._agenda.add(m.InstanceJoined(at=0.0, instance=name, descriptor=descriptor))

    def next(self) -> m.Event | None:
        event = self._agenda.pop()
        if isinstance(event, m.Generated):
            instance = self._instances[event.instance]
            self._advance(instance, event.at)
            running = instance.running.pop(event.rollout)
            if instance.due is not None and instance.due[0] == event.rollout:
                instance.due = None
            if running.command.group is not None:
                self._tokens[running.command.group] = self._tokens.get(running.command.group, 0) + event.num_tokens
            self._expect(event.instance)
        return event

    def take(self, command: m.Command, *, now: float) -> None:
        pace = self._pace
        match command:
            case m.Generate():
                self._generate(command, now)
            case m.Detach():
                self._detach(command, now)
            case m.Load(instance=instance, version=version):
                self._instances[instance].prefilled.clear()
                self._agenda.add(m.Loaded(at=now + pace.load_s, instance=instance, version=version))
            case m.Score(group=group, attempt=attempt):
                rewards = tuple(float(i % 2) for i in range(self._config.schedule.group_size))
                self._agenda.add(m.Scored(at=now, group=group, attempt=attempt, rewards=rewards, digest=""))
            case m.Accumulate(group=group):
                job = _Job(command, train_s(pace, self._tokens.pop(group)))
                if pace.early_training:
                    self._compute(job, now)
                else:
                    self._waiting.append(job)
                    self._agenda.add(self._accumulated(command, now))
            case m.Step():
                while self._waiting:
                    job = self._waiting.popleft()
                    self._trainer_free_at = max(self._trainer_free_at, now) + job.seconds
                    self._busy_s += job.seconds
                self._compute(_Job(command, pace.step_s), now)
            case m.Publish(version=version, attempt=attempt):
                self._agenda.add(m.Published(at=now + pace.publish_s, version=version, attempt=attempt))
            case m.Close(iteration=iteration):
                self._agenda.add(m.Closed(at=now, iteration=iteration))
            case m.Evaluate(evaluation=evaluation):
                self._agenda.add(m.Evaluated(at=now, evaluation=evaluation))
            case m.Forget(version=version):
                self._agenda.add(m.Forgotten(at=now, version=version))
            case m.Export(version=version):
                self._agenda.add(m.Exported(at=now, version=version))
            case _:
                assert_never(command)

    # --- instances ---------------------------------------------------------------------------------------------------

    def _generate(self, command: m.Generate, now: float) -> None:
        instance, pace = self._instances[command.instance], self._pace
        self._advance(instance, now)
        kept = self._kept.pop(command.rollout, 0) if command.kept_tokens else 0
        prefix = pace.prompt_tokens + command.generated_tokens
        if kept:
            stall = resume = move_s(pace, prefix)
        elif command.generated_tokens or command.group is None or command.group not in instance.prefilled:
            stall = resume = prefix * pace.prefill_token_s
        else:
            # Another member has computed the prompt; its last block is not full, or would leave nothing to compute.
            block = self._config.rollout.block_tokens
            stall = resume = ((prefix - 1) % block + 1) * pace.prefill_token_s
        if command.group is not None:
            instance.prefilled.add(command.group)
        instance.at += stall
        length = forced_length(
            pace,
            seed=self._config.run.seed,
            prompt=command.group or 0,
            member=command.member,
            limit=self._config.rollout.max_completion_tokens,
        )
        length -= command.generated_tokens
        instance.running[command.rollout] = _Running(command, instance.steps + length, instance.steps, resume)
        self._expect(command.instance)

    def _detach(self, command: m.Detach, now: float) -> None:
        instance, pace = self._instances[command.instance], self._pace
        self._advance(instance, now)
        running = instance.running.get(command.rollout)
        if running is not None and running.command.attempt == command.attempt:
            # What the pending end would have told comes now instead; `expect` plans the next one's.
            tokens = min(int(instance.steps - running.began_at_step), self._left(running) - 1)
            prefix = pace.prompt_tokens + running.command.generated_tokens + tokens
            seconds = move_s(pace, prefix) if command.keep else 0.0
            instance.at += seconds
            if command.keep:
                self._kept[command.rollout] = prefix
            end = self._generated(running, now + seconds, tokens=tokens, reason="detached")
            running.ends_at_step = float("inf")
            if command.keep:
                end = replace(end, kept_tokens=prefix, kept_bytes=prefix, keep_s=seconds)
            self._agenda.add(end)
            self._expect(command.instance)
        self._agenda.add(m.Detached(at=now, rollout=command.rollout, attempt=command.attempt))

    def _advance(self, instance: _Instance, now: float) -> None:
        """Steps done until now; during a stall (`at` lies ahead) none."""
        if now > instance.at:
            instance.steps += (now - instance.at) / self._step_s(instance)
            instance.at = now

    def _step_s(self, instance: _Instance) -> float:
        return step_s(self._pace, answers=len(instance.running))

    def _expect(self, name: InstanceId) -> None:
        """Plan the end of the answer that will be complete first."""
        instance = self._instances[name]
        if instance.due is not None:
            self._agenda.drop(instance.due[1])
            instance.due = None
        open_ended = [one for one in instance.running.values() if one.ends_at_step != float("inf")]
        first = min(open_ended, key=lambda one: (one.ends_at_step, one.command.rollout), default=None)
        if first is not None:
            at = instance.at + max(0.0, first.ends_at_step - instance.steps) * self._step_s(instance)
            end = self._generated(first, at, tokens=self._left(first), reason="stop")
            instance.due = (first.command.rollout, self._agenda.add(end))

    def _left(self, running: _Running) -> int:
        return round(running.ends_at_step - running.began_at_step)

    def _generated(self, running: _Running, at: float, *, tokens: int, reason: str) -> m.Generated:
        command = running.command
        continued = command.generated_tokens > 0
        prefix = self._pace.prompt_tokens + command.generated_tokens
        return m.Generated(
            at=at,
            rollout=command.rollout,
            segment=command.segment,
            attempt=command.attempt,
            instance=command.instance,
            version=command.version,
            reason=reason,  # type: ignore[arg-type]
            num_tokens=tokens,
            loaded_tokens=prefix if command.kept_tokens else 0,
            recomputed_tokens=prefix if continued and not command.kept_tokens else 0,
            resume_s=running.resume_s if continued else 0.0,
        )

    # --- trainer -----------------------------------------------------------------------------------------------------

    def _compute(self, job: _Job, now: float) -> None:
        self._trainer_free_at = max(self._trainer_free_at, now) + job.seconds
        self._busy_s += job.seconds
        if isinstance(job.command, m.Accumulate):
            self._agenda.add(self._accumulated(job.command, self._trainer_free_at))
            return
        busy, self._busy_s = self._busy_s, 0.0
        command = job.command
        self._agenda.add(
            m.Stepped(
                at=self._trainer_free_at,
                iteration=command.iteration,
                attempt=command.attempt,
                improved=True,
                busy_s=busy,
            )
        )

    def _accumulated(self, command: m.Accumulate, at: float) -> m.Accumulated:
        return m.Accumulated(at=at, iteration=command.iteration, attempt=command.attempt, group=command.group)
