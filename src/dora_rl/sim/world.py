"""The smallest world: engines whose answers take random, heavy-tailed times, and things that fail now and then.

Durations are continuous, so that no two events tie by accident. Every failure comes out of a budget: with an endless
one no run could promise to end.
"""

import math
from dataclasses import dataclass, replace
from random import Random
from typing import assert_never

from dora_rl.core import messages as m
from dora_rl.core.types import InstanceDescriptor, InstanceId, RolloutId
from dora_rl.sim.engine import Agenda


@dataclass(frozen=True, kw_only=True, slots=True)
class WorldConfig:
    """What a run meets. Times in seconds; probabilities per occasion."""

    seed: int = 0
    instances: int = 2
    slots: int = 8
    prompts: int | None = None
    evaluation_answers: int = 0
    answer_s: float = 10.0
    """Median time of one answer; lengths are lognormal."""
    sigma: float = 0.99
    train_s: float = 20.0
    publish_s: float = 1.0
    load_s: float = 0.5
    detach_s: float = 0.1
    resume_s: float = 0.2
    """Of a continued answer, until its first token."""
    equal_rewards: float = 0.2
    """Share of groups that are filtered."""
    missing_rewards: float = 0.02
    kv_capacity_tokens: int = 10**9
    reports: float = 0.0
    """Chance that an instance reports some use of its KV cache when an answer ends there."""
    failure: float = 0.0
    """Chance that a publication, load, segment or score fails, or that a seated group's data turns out to be lost."""
    failures: int = 0
    """Failures in all."""
    losses: tuple[m.Event, ...] = ()
    """Instances, ranks and data lost, and instances that join, at given times."""


class RandomWorld:
    def __init__(self, config: WorldConfig, *, max_tokens: int, group_size: int) -> None:
        self.config = config
        self.rng = Random(config.seed)
        self._left = config.failures
        self._max_tokens = max_tokens
        self._group_size = group_size
        self._length: dict[RolloutId, int] = {}
        self._agenda = Agenda()
        self._now = 0.0
        self._pressed: dict[InstanceId, None] = {}
        """Instances whose last report was of some use."""
        self._running: dict[tuple[RolloutId, int], tuple[int, float, m.Generated]] = {}
        """(rollout, attempt) -> its place in the agenda, when it began, and how it ends if nothing intervenes."""

    def begin(self) -> None:
        self._agenda.add(
            m.RunStarted(at=0.0, prompts=self.config.prompts, evaluation_answers=self.config.evaluation_answers)
        )
        for index in range(self.config.instances):
            self._agenda.add(self.joins(index, at=self._soon(1.0)))
        for loss in self.config.losses:
            self._agenda.add(loss)

    def next(self) -> m.Event | None:
        event = self._agenda.pop()
        if event is None and self._pressed:
            # Engines go on reporting, also when nothing else happens.
            return m.Reported(at=self._now, instance=self._pressed.popitem()[0], kv_tokens=0)
        if event is not None:
            self._now = event.at
        if isinstance(event, m.Generated):
            del self._running[event.rollout, event.attempt]
            if event.reason in ("stop", "length") and self.rng.random() < self.config.reports:
                used = self.rng.randrange(self.config.kv_capacity_tokens + 1)
                self._agenda.add(m.Reported(at=event.at, instance=event.instance, kv_tokens=used))
                self._pressed[event.instance] = None
        if isinstance(event, m.InstanceLost):
            event = replace(event, saved=self._saved(event))
        return event

    def _saved(self, event: m.InstanceLost) -> tuple[tuple[RolloutId, int], ...]:
        """What the instance's answers had reported: a part of what they had. Their ends, already on their way, come
        too late."""
        return tuple(
            (rollout, int(end.num_tokens * self.rng.random() * (event.at - began) / (end.at - began)))
            for (rollout, _), (_, began, end) in self._running.items()
            if end.instance == event.instance
        )

    def take(self, command: m.Command, *, now: float) -> None:
        match command:
            case m.Generate():
                end = self._generated(command, now)
                self._running[command.rollout, command.attempt] = (self._agenda.add(end), now, end)
            case m.Detach():
                self._detach(command, now)
            case _:
                self._agenda.add(self.answer(command, now))

    def _detach(self, command: m.Detach, now: float) -> None:
        """The segment ends within a moment with the tokens it has by then, unless it ends by itself before."""
        error = self._error()
        at = now + self._soon(self.config.detach_s)
        running = self._running.get((command.rollout, command.attempt))
        if running is not None and error is None and at < running[2].at:
            place, began, end = running
            self._agenda.drop(place)
            tokens = int(end.num_tokens * (at - began) / (end.at - began))
            cut = replace(
                end,
                at=at,
                reason="detached",
                num_tokens=tokens,
                error=None,
                kept_tokens=tokens if command.keep else 0,
                kept_bytes=tokens if command.keep else 0,
                keep_s=at - now,
            )
            self._running[command.rollout, command.attempt] = (self._agenda.add(cut), began, cut)
        self._agenda.add(m.Detached(at=at, rollout=command.rollout, attempt=command.attempt, error=error))

    def joins(self, index: int, *, at: float) -> m.InstanceJoined:
        descriptor = InstanceDescriptor(
            node="sim",
            devices=(f"sim:{index}",),
            layout="sim",
            slots=self.config.slots,
            kv_capacity_tokens=self.config.kv_capacity_tokens,
        )
        return m.InstanceJoined(at=at, instance=InstanceId(f"engine-{index}"), descriptor=descriptor)

    def answer(self, command: m.Command, now: float) -> m.Event:
        """The event that answers a command about which nothing can change once it was given."""
        config = self.config
        match command:
            case m.Load(instance=instance, version=version):
                return m.Loaded(
                    at=now + self._soon(config.load_s), instance=instance, version=version, error=self._error()
                )
            case m.Score(group=group, attempt=attempt):
                error = self._error()
                rewards = () if error else self._rewards()
                return m.Scored(
                    at=now + self._soon(0.1), group=group, attempt=attempt, rewards=rewards, digest="", error=error
                )
            case m.Accumulate(iteration=iteration, attempt=attempt, group=group):
                lost = self._error() is not None
                return m.Accumulated(
                    at=now + self._soon(0.1), iteration=iteration, attempt=attempt, group=group, lost=lost
                )
            case m.Step(iteration=iteration, attempt=attempt):
                took = self._soon(config.train_s)
                improved = self.rng.random() < 0.95
                return m.Stepped(at=now + took, iteration=iteration, attempt=attempt, improved=improved, busy_s=took)
            case m.Publish(version=version, attempt=attempt):
                return m.Published(
                    at=now + self._soon(config.publish_s), version=version, attempt=attempt, error=self._error()
                )
            case m.Close(iteration=iteration):
                return m.Closed(at=now + self._soon(0.1), iteration=iteration)
            case m.Evaluate(evaluation=evaluation):
                return m.Evaluated(at=now + self._soon(0.1), evaluation=evaluation)
            case m.Forget(version=version):
                return m.Forgotten(at=now + self._soon(0.1), version=version)
            case m.Export(version=version):
                return m.Exported(at=now + self._soon(0.1), version=version)
            case m.Generate() | m.Detach():
                raise AssertionError("taken elsewhere")
            case _:
                assert_never(command)

    def _generated(self, command: m.Generate, now: float) -> m.Generated:
        tokens = self._length.setdefault(command.rollout, self._draw_length()) - command.generated_tokens
        tokens = max(1, min(tokens, command.max_tokens))
        error = self._error()
        if error:
            tokens = self.rng.randrange(tokens)
        ends = command.generated_tokens + tokens >= self._max_tokens
        return m.Generated(
            at=now + self._soon(self.config.answer_s * max(tokens, 1) / 100.0),
            rollout=command.rollout,
            segment=command.segment,
            attempt=command.attempt,
            instance=command.instance,
            version=command.version,
            reason="failed" if error else "length" if ends else "stop",
            num_tokens=tokens,
            error=error,
            loaded_tokens=command.kept_tokens,
            recomputed_tokens=command.generated_tokens - command.kept_tokens,
            resume_s=self._soon(self.config.resume_s) if command.generated_tokens else 0.0,
        )

    def _draw_length(self) -> int:
        """Tokens of an answer: lognormal with median 100."""
        return max(1, round(100 * math.exp(self.rng.gauss(0.0, self.config.sigma))))

    def _rewards(self) -> tuple[float | None, ...]:
        if self.rng.random() < self.config.equal_rewards:
            return (1.0,) * self._group_size
        missing = self.config.missing_rewards
        return tuple(None if self.rng.random() < missing else self.rng.random() for _ in range(self._group_size))

    def _error(self) -> str | None:
        if self._left <= 0 or self.rng.random() >= self.config.failure:
            return None
        self._left -= 1
        return "a failure out of the budget"

    def _soon(self, mean: float) -> float:
        return mean * self.rng.uniform(0.5, 1.5)
