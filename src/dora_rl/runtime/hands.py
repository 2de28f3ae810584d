"""The driver's hands: every command of the core becomes one task, and every task puts one event into the inbox.

    Load, Generate           engines
    Score, Evaluate          reward workers, then the store (a group is durable before it counts)
    Accumulate, Step,
    Publish, Export          the trainer
    Close, Forget            the run's folder and the weight store

Owns the tokens of running answers and the manifests of live versions. Decides nothing: a failure is reported to the
core as the command's answer, and what it means is decided there. The only broad `except` of the project is here.
"""

import asyncio
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol, assert_never

from dora_rl.config import Config
from dora_rl.core import messages as m
from dora_rl.core.types import EvaluationId, GroupId, InstanceId, RolloutId, Sampling, Version
from dora_rl.pace.law import forced_length
from dora_rl.runtime.answers import Answer, Answers, trajectory
from dora_rl.runtime.driver import Inbox
from dora_rl.runtime.failures import failed, one_line
from dora_rl.runtime.moves import Moves
from dora_rl.runtime.ports import (
    Engine,
    GenerateRequest,
    ProcessLost,
    RewardResult,
    Rewards,
    SourceLost,
    StepReport,
    Trainer,
)
from dora_rl.wire.errors import RemoteError
from dora_rl.wire.iteration_files import RolloutRow, RowStatus, write_iteration
from dora_rl.wire.open_store import OpenStore
from dora_rl.wire.rollouts import Prompt, RolloutFileError
from dora_rl.wire.weights import Manifest


class Prompts(Protocol):
    """The data, as the hands need it (rl.datasets.Dataset)."""

    def train(self, position: int) -> Prompt: ...

    @property
    def held_out(self) -> Sequence[Prompt]: ...


class Listener(Protocol):
    """Who wants to know what passed through: metrics, console. Must be quick."""

    def closed(self, command: m.Close, rows: Sequence[RolloutRow], report: StepReport | None) -> None: ...

    def evaluated(self, command: m.Evaluate, answers: Mapping[Sampling, Sequence["ScoredAnswer"]]) -> None: ...

    def moved(self, command: m.Generate, *, fallback: str) -> None:
        """An answer continues with the KV of its prefix, or (`fallback` says why) computes it again."""
        ...

    def loaded(self, command: m.Load, *, seconds: float, canary_max_abs_diff: float) -> None: ...


class ScoredAnswer(Protocol):
    @property
    def reward(self) -> float | None: ...

    @property
    def length(self) -> int: ...


class _Scored:
    __slots__ = ("length", "reward")

    def __init__(self, reward: float | None, length: int) -> None:
        self.reward = reward
        self.length = length


class Hands:
    def __init__(
        self,
        config: Config,
        *,
        inbox: Inbox,
        engines: Mapping[InstanceId, Engine],
        trainer: Trainer,
        rewards: Rewards,
        prompts: Prompts,
        store: OpenStore,
        rollouts_folder: Path,
        decode: Callable[[Sequence[int]], str],
        stop_token_ids: Sequence[int],
        listener: Listener,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._inbox = inbox
        self._engines = dict(engines)
        self._trainer = trainer
        self._rewards = rewards
        self._prompts = prompts
        self._store = store
        self._rollouts_folder = rollouts_folder
        self._decode = decode
        self._stop_token_ids = tuple(stop_token_ids)
        self._listener = listener
        self._clock = clock
        self._began = clock()
        self._tasks: set[asyncio.Task[None]] = set()
        self._manifests: dict[Version, Manifest] = {}
        self._evaluation: dict[EvaluationId, dict[int, RolloutId]] = {}
        self._reports: dict[int, StepReport] = {}
        self._moves = Moves(dict(engines), config.rollout.move_timeout_s, one_version="C1" in config.schedule.promises)
        # The law of [pace] knows no start: one engine's would take time from what another one generates.
        self._together = asyncio.Barrier(len(self._engines)) if config.pace is not None else None
        self.answers = Answers()

    def now(self) -> float:
        """Seconds since the run's start."""
        return self._clock() - self._began

    # --- the driver's side ----------------------------------------------------------------------------------------

    def begin(self, *, prompts: int | None) -> None:
        """Tell the core that the run has started, and start every engine."""
        evaluation_answers = 2 * len(self._prompts.held_out)
        self._inbox.put_nowait(m.RunStarted(at=self.now(), prompts=prompts, evaluation_answers=evaluation_answers))
        for instance in self._engines:
            self._spawn(self._join(instance))

    def start(self, command: m.Command) -> None:
        self._spawn(self._answer(command))

    def interrupt(self) -> None:
        self._inbox.put_nowait(m.Interrupted(at=self.now()))

    async def stop(self) -> None:
        """Cancel whatever still runs and wait until it has gone."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        """A task that raises, other than a command that fails, is a fault of ours: the loop has to hear of it."""
        self._tasks.discard(task)
        if not task.cancelled() and isinstance(error := task.exception(), Exception):
            self._inbox.put_nowait(error)

    async def _answer(self, command: m.Command) -> None:
        try:
            event = await self._execute(command)
        except SourceLost as error:
            self._inbox.put_nowait(error)
            return
        except Exception as error:  # noqa: BLE001 - a failure is a fact like any other
            if isinstance(error, ProcessLost) and isinstance(command, m.Load | m.Generate):
                self._lose(command.instance, one_line(error))
            saved = self.answers.salvage(command, now=self.now()) if isinstance(command, m.Generate) else 0
            event = failed(command, at=self.now(), error=one_line(error), saved_tokens=saved)
        self._inbox.put_nowait(event)

    async def _join(self, instance: InstanceId) -> None:
        engine = self._engines[instance]
        try:
            async with asyncio.timeout(self._config.run.answer_deadline_s):
                descriptor = await engine.start()
                if self._together is not None:
                    await self._together.wait()
        except Exception as error:  # noqa: BLE001 - an engine that cannot start is lost before it joined
            if self._together is not None:
                await self._together.abort()
            self._lose(instance, f"it did not start: {one_line(error)}")
            return
        self._moves.joined(instance, descriptor.node)
        self._inbox.put_nowait(m.InstanceJoined(at=self.now(), instance=instance, descriptor=descriptor))
        self._spawn(self._listen(instance))

    async def _listen(self, instance: InstanceId) -> None:
        """Collect what an engine has sampled so far, every few seconds; one that does not answer is lost."""
        engine, rollout = self._engines[instance], self._config.rollout
        while instance in self._engines:
            await asyncio.sleep(rollout.report_every_s)
            try:
                async with asyncio.timeout(rollout.no_progress_s):
                    partials = await engine.partials()
                    used = await engine.kv_tokens() if rollout.kv_overcommit > 1 else None
            except TimeoutError:
                self._lose(instance, f"it gave no sign of life for rollout.no_progress_s = {rollout.no_progress_s:g} s")
                return
            except Exception as error:  # noqa: BLE001 - silence and death mean the same here
                self._lose(instance, one_line(error))
                return
            for partial in partials:
                self.answers.report(partial)
            if used is not None:
                self._inbox.put_nowait(m.Reported(at=self.now(), instance=instance, kv_tokens=used))

    def _lose(self, instance: InstanceId, reason: str) -> None:
        if self._engines.pop(instance, None) is not None:
            saved = self.answers.salvage_all(instance, now=self.now())
            self._inbox.put_nowait(m.InstanceLost(at=self.now(), instance=instance, reason=reason, saved=saved))

    # --- commands -------------------------------------------------------------------------------------------------

    async def _execute(self, command: m.Command) -> m.Event:
        if isinstance(command, m.Generate):
            return await self._generate(command)  # its engine watches its progress; its duration has no limit
        limit = self._config.run.answer_deadline_s
        try:
            async with asyncio.timeout(limit):
                return await self._execute_in_time(command)
        except TimeoutError as error:
            what = type(command).__name__
            raise RemoteError(
                f"{what} was not done within run.answer_deadline_s = {limit:g} s; raise it or see why"
            ) from error

    async def _execute_in_time(self, command: m.Command) -> m.Event:
        match command:
            case m.Generate():
                return await self._generate(command)
            case m.Load():
                return await self._load(command)
            case m.Detach(rollout=rollout, attempt=attempt, keep=keep):
                await self._engine(command.instance).detach(rollout, attempt, keep=keep)
                return m.Detached(at=self.now(), rollout=rollout, attempt=attempt)
            case m.Score():
                return await self._score(command)
            case m.Accumulate():
                return await self._accumulate(command)
            case m.Step():
                return await self._step(command)
            case m.Publish():
                return await self._publish(command)
            case m.Close():
                return await self._close(command)
            case m.Evaluate():
                return await self._evaluate(command)
            case m.Forget():
                self._manifests.pop(command.version, None)
                return m.Forgotten(at=self.now(), version=command.version)
            case m.Export():
                await self._trainer.export()
                return m.Exported(at=self.now(), version=command.version)
            case _:
                assert_never(command)

    async def _generate(self, command: m.Generate) -> m.Generated:
        prompt = self._prompt(command)
        if command.evaluation is not None:
            self._evaluation.setdefault(command.evaluation, {})[command.member] = command.rollout
        answer = self.answers.begin(command, prompt, now=self.now())
        fallback = await self._moves.hand_over(command)
        if fallback is not None:
            self._listener.moved(command, fallback=fallback)
        forced = self._forced_length(command)
        result = await self._engine(command.instance).generate(
            GenerateRequest(
                rollout=command.rollout,
                attempt=command.attempt,
                version=command.version,
                prompt_token_ids=prompt.token_ids,
                completion_token_ids=tuple(answer.token_ids),
                max_tokens=command.max_tokens if forced is None else forced - command.generated_tokens,
                temperature=self._config.rollout.temperature,
                greedy=command.sampling == "greedy",
                stop_token_ids=self._stop_token_ids if forced is None else (),
            )
        )
        if (
            forced is not None
            and result.finish_reason == "length"
            and forced < self._config.rollout.max_completion_tokens
        ):
            result = replace(result, finish_reason="stop")  # as if it had come to its own end there
        wanted = self.answers.extend(result, now=self.now())
        if result.kept is not None:
            self._moves.keep(command.rollout, command.instance, result.kept)
            if not wanted:
                await self._moves.drop([command.rollout])
        return m.Generated(
            at=self.now(),
            rollout=command.rollout,
            segment=command.segment,
            attempt=command.attempt,
            instance=command.instance,
            version=result.version,
            reason=result.finish_reason,
            num_tokens=len(result.token_ids),
            loaded_tokens=result.loaded_tokens,
            recomputed_tokens=result.recomputed_tokens,
            resume_s=result.resume_s,
            kept_tokens=len(result.kept.token_ids) if result.kept else 0,
            kept_bytes=result.kept.nbytes if result.kept else 0,
            keep_s=result.keep_s,
        )

    def _prompt(self, command: m.Generate) -> Prompt:
        if command.group is None:
            return self._prompts.held_out[command.member // 2]
        try:
            return self._prompts.train(command.group)
        except Exception as error:
            raise SourceLost(f"the data have no prompt {command.group}: {one_line(error)}") from error

    def _forced_length(self, command: m.Generate) -> int | None:
        """In paced emulation: how many tokens this answer will have in all."""
        pace = self._config.pace
        if pace is None:
            return None
        return forced_length(
            pace,
            seed=self._config.run.seed,
            prompt=-1 if command.group is None else command.group,
            member=command.member,
            limit=self._config.rollout.max_completion_tokens,
        )

    async def _load(self, command: m.Load) -> m.Loaded:
        report = await self._engine(command.instance).load(self._manifests[command.version])
        self._listener.loaded(command, seconds=report.seconds, canary_max_abs_diff=report.canary_max_abs_diff)
        return m.Loaded(at=self.now(), instance=command.instance, version=command.version)

    async def _score(self, command: m.Score) -> m.Scored:
        answers = self.answers.of_group(command.group)
        results = await self._reward(answers)
        group = [
            trajectory(answer, reward=result.value, rewards=dict(result.values), note=result.note)
            for answer, result in zip(answers, results, strict=True)
        ]
        digest = await asyncio.to_thread(self._store.put_group, group)
        if not self.answers.forget_group(command.group):  # dropped while it was scored
            await asyncio.to_thread(self._store.remove, [command.group])
        await self._moves.drop(answer.command.rollout for answer in answers)
        return m.Scored(
            at=self.now(),
            group=command.group,
            attempt=command.attempt,
            rewards=tuple(result.value for result in results),
            digest=digest,
            note=next((result.note for result in results if result.note), ""),
        )

    async def _accumulate(self, command: m.Accumulate) -> m.Accumulated:
        try:
            group = await asyncio.to_thread(self._store.get_group, command.group)
        except RolloutFileError:
            group = None
        if group is not None:
            await self._trainer.accumulate(
                iteration=command.iteration, attempt=command.attempt, group=group, trained_version=command.trained_at
            )
        return m.Accumulated(
            at=self.now(), iteration=command.iteration, attempt=command.attempt, group=command.group, lost=group is None
        )

    async def _step(self, command: m.Step) -> m.Stepped:
        report = await self._trainer.step(iteration=command.iteration, attempt=command.attempt)
        self._reports[command.iteration] = report
        return m.Stepped(
            at=self.now(),
            iteration=command.iteration,
            attempt=command.attempt,
            improved=report.improved,
            busy_s=report.busy_s,
        )

    async def _publish(self, command: m.Publish) -> m.Published:
        manifest = await self._trainer.publish(version=command.version, parent=command.parent)
        self._manifests[command.version] = manifest
        return m.Published(at=self.now(), version=command.version, attempt=command.attempt)

    async def _close(self, command: m.Close) -> m.Closed:
        report = self._reports.pop(command.iteration, None)
        rows = await asyncio.to_thread(self._write_iteration, command, report)
        for group in command.dropped:
            await self._moves.drop(self.answers.forget_group(group))
        self._listener.closed(command, rows, report)
        return m.Closed(at=self.now(), iteration=command.iteration)

    def _write_iteration(self, command: m.Close, report: StepReport | None) -> list[RolloutRow]:
        advantages = report.advantages if report is not None else {}
        left: list[tuple[RowStatus, Sequence[GroupId]]] = [
            ("trained", command.trained),
            ("filtered", command.filtered),
            ("failed", command.failed),
        ]
        rows = [
            RolloutRow(
                trajectory=member,
                iteration=command.iteration,
                trained_at_version=command.trained_at,
                status=status,
                advantage=advantages.get((group, member.member)),
            )
            for status, groups in left
            for group in groups
            for member in self._store.get_group(group)
        ]
        write_iteration(self._rollouts_folder / f"{command.iteration}.parquet", rows)
        self._store.remove([*command.trained, *command.filtered, *command.failed, *command.dropped])
        return rows

    async def _evaluate(self, command: m.Evaluate) -> m.Evaluated:
        members = self._evaluation[command.evaluation]
        answers = [self.answers.of_rollout(rollout) for _, rollout in sorted(members.items())]
        results = await asyncio.gather(*(self._reward([answer]) for answer in answers))
        scored: dict[Sampling, list[ScoredAnswer]] = {"sampled": [], "greedy": []}
        for answer, (result,) in zip(answers, results, strict=True):
            scored[answer.command.sampling].append(_Scored(result.value, len(answer.token_ids)))
        self._listener.evaluated(command, scored)
        # Only now: a failure until here is tried again.
        for rollout in self._evaluation.pop(command.evaluation).values():
            self.answers.forget(rollout)
        return m.Evaluated(at=self.now(), evaluation=command.evaluation)

    async def _reward(self, answers: Sequence[Answer]) -> list[RewardResult]:
        """Answers that failed for reasons of infrastructure go to no reward function: they have none, not a bad one."""
        whole = [answer for answer in answers if answer.finish_reason in ("stop", "length")]
        results = await self._rewards.score(
            prompt=answers[0].prompt,
            completions=[self._decode(answer.token_ids) for answer in whole],
            completion_ids=[answer.token_ids for answer in whole],
        )
        by_answer = dict(zip((id(answer) for answer in whole), results, strict=True))
        failed = RewardResult(value=None, values={}, note="the engine failed to finish this answer")
        return [by_answer.get(id(answer), failed) for answer in answers]

    def _engine(self, instance: InstanceId) -> Engine:
        engine = self._engines.get(instance)
        if engine is None:
            raise ProcessLost(f"instance {instance} is gone")
        return engine
