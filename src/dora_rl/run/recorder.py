"""Writes down what a run does, while it does it: journal, metrics, evaluations, and lines for the terminal.

Wiring between the driver's callbacks and `obs`; decides and measures nothing of its own.
"""

import datetime
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dora_rl import __version__
from dora_rl.config import Config, config_hash
from dora_rl.core import messages as m
from dora_rl.core.orchestrator import Orchestrator
from dora_rl.core.types import GroupId, InstanceId, Sampling, Version
from dora_rl.obs.console import HEADER, evaluation_text, iteration_line, summary, time_left
from dora_rl.obs.folder import RunFolder
from dora_rl.obs.journal import JournalHeader, JournalWriter
from dora_rl.obs.live import InstanceView, Snapshot, VersionView
from dora_rl.obs.metrics import evaluation_line, iteration_metrics
from dora_rl.obs.timeline import Timeline
from dora_rl.run.screen import Screen
from dora_rl.runtime.hands import ScoredAnswer
from dora_rl.runtime.ports import StepReport
from dora_rl.wire.iteration_files import RolloutRow

Print = Callable[[str], None]


class TimedOrchestrator(Orchestrator):
    """The core, and the seconds spent in it; the core itself has no clock."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.seconds = 0.0

    def step(self, event: m.Event) -> list[m.Command]:
        began = time.perf_counter()
        commands = super().step(event)
        self.seconds += time.perf_counter() - began
        return commands

    def take_seconds(self) -> float:
        seconds, self.seconds = self.seconds, 0.0
        return seconds


NOTES = 5
"""Different reasons for a missing reward that are printed as they happen; all of them are in the rollouts' extras."""


class Recorder:
    """One per run. `record` is the driver's callback; the other methods are the hands'."""

    def __init__(self, config: Config, folder: RunFolder, core: TimedOrchestrator, screen: Screen) -> None:
        self._config = config
        self._folder = folder
        self._core = core
        self._screen = screen
        self._out = screen.line
        self._began = time.monotonic()
        self._timeline = Timeline(trainer_devices=config.trainer_devices)
        self._iteration_s: list[float] = []
        self._rewards: list[float | None] = []
        self._last: Mapping[str, Any] = {}
        self._held_out = ""
        self._finished: Counter[InstanceId] = Counter()
        self._finished_of: Counter[Version] = Counter()
        """Answers that came to their end, by instance and by version."""
        self._largest_canary: float | None = None
        self._fallbacks: Counter[str] = Counter()
        self._notes: set[str] = set()
        self._told = False
        self._journal = JournalWriter(
            folder.journal,
            JournalHeader(
                run_id=folder.path.name,
                program_version=__version__,
                config_hash=config_hash(config),
                start_time=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
                seed=config.run.seed,
            ),
        )

    def record(self, event: m.Event, commands: Sequence[m.Command]) -> None:
        self._journal.record(event, commands)
        self._timeline.record(event, commands)
        if isinstance(event, m.Generated) and event.reason in ("stop", "length"):
            self._finished[event.instance] += 1
            self._finished_of[event.version] += 1
        self._screen.show(self._snapshot)
        if isinstance(event, m.InstanceJoined) and event.descriptor.slots < self._config.rollout.slots:
            self._out(
                f"  {event.instance} has {event.descriptor.slots} slots, not rollout.slots = "
                f"{self._config.rollout.slots}: its KV cache holds {event.descriptor.kv_capacity_tokens} tokens, raise "
                "rollout.kv_cache_gib"
            )
        if isinstance(event, m.Scored) and event.note and event.note not in self._notes and len(self._notes) < NOTES:
            self._notes.add(event.note)
            self._out(f"  an answer of group {event.group} has no reward: {event.note}")

    def closed(self, command: m.Close, rows: Sequence[RolloutRow], report: StepReport | None) -> None:
        prompt_tokens: dict[GroupId, int] = {}
        for row in rows:
            group = row.trajectory.group_id
            prompt_tokens[group] = prompt_tokens.get(group, 0) + len(row.trajectory.prompt_token_ids)
        if report is None:
            return  # the data ended in the middle of a batch: groups were filed, but no iteration was made
        line = iteration_metrics(
            self._timeline,
            command.iteration,
            prompt_tokens=prompt_tokens,
            stats=report.stats,
            orchestration_s=self._core.take_seconds(),
        )
        line["train/tokens"] = report.tokens
        self._folder.append_metrics(line)
        if not self._iteration_s:
            self._out(HEADER)
        duration = line["time/iteration_s"]
        assert isinstance(duration, float), f"an iteration took {duration!r}"
        self._iteration_s.append(duration)
        self._rewards.append(line["reward/mean"])  # type: ignore[arg-type]
        self._last = line
        iterations = self._config.run.iterations
        left = time_left(self._iteration_s, iterations=iterations)
        self._out(iteration_line(line, iterations=iterations, left_s=left))
        if report.reason is not None:
            self._out(f"  iteration {command.iteration + 1} made no new version: {report.reason}")
        self._timeline.forget(command.iteration)

    def evaluated(self, command: m.Evaluate, answers: Mapping[Sampling, Sequence[ScoredAnswer]]) -> None:
        for sampling, scored in answers.items():
            line = evaluation_line(
                iteration=command.iteration,
                version=command.version,
                sampling=sampling,
                rewards=[answer.reward for answer in scored],
                lengths=[answer.length for answer in scored],
            )
            self._folder.append_eval(line)
            self._held_out = evaluation_text(line)
            self._out(f"{self._held_out} ({len(scored)} prompts)")

    def moved(self, command: m.Generate, *, fallback: str) -> None:
        if fallback:
            self._fallbacks[fallback] += 1

    def loaded(self, command: m.Load, *, seconds: float, canary_max_abs_diff: float) -> None:
        self._largest_canary = max(self._largest_canary or 0.0, canary_max_abs_diff)

    def finish(self, ended: str) -> None:
        """Close the journal and print the run's summary, once."""
        if self._told:
            return
        self._told = True
        self._journal.close()
        wall_s = time.monotonic() - self._began
        metrics, evaluations = self._folder.read_metrics(), self._folder.read_eval()
        say = self._screen.result
        say("\n" + summary(metrics, evaluations, folder=self._folder.path, wall_s=wall_s, ended=ended))
        for why, times in self._fallbacks.most_common(3):
            say(f"  {'not moved':<17} {times} times: {why}")
        if (largest := self._largest_canary) is not None:
            say(f"  {'canary':<17} engines and trainer differed by at most {largest:.1e} per token")

    def _snapshot(self) -> Snapshot:
        state, last = self._core.state, self._last
        iterations = self._config.run.iterations
        views = [
            InstanceView(
                name=one.id,
                version=one.version,
                loading=one.loading,
                running=len(one.running),
                slots=one.slots,
                finished=self._finished[one.id],
            )
            for one in state.instances.values()
        ]
        return Snapshot(
            iteration=len(self._iteration_s),
            iterations=iterations,
            elapsed_s=time.monotonic() - self._began,
            left_s=time_left(self._iteration_s, iterations=iterations),
            instances=views,
            versions=self._versions(),
            seated=len(state.batch.groups),
            batch=state.batch.size,
            ready=len(state.ready),
            reward=self._rewards[-1] if self._rewards else None,
            reward_before=self._rewards[0] if len(self._rewards) > 1 else None,
            held_out=self._held_out,
            staleness=None if last.get("staleness/max") is None else (last["staleness/mean"], last["staleness/max"]),
            tokens_per_s=last.get("throughput/tokens_per_s"),
            trainer_waits=last.get("idle/trainer_share"),
            rollout_idle=last.get("idle/rollout_share"),
        )

    def _versions(self) -> list[VersionView]:
        state = self._core.state
        running = Counter(state.rollouts[r].version for one in state.instances.values() for r in one.running)
        waiting: Counter[Version] = Counter()
        for queues in (state.waiting, state.evaluating):
            waiting.update({version: len(queue) for version, queue in queues.items()})
        return [
            VersionView(version=v, running=running[v], waiting=waiting[v], finished=self._finished_of[v])
            for v in sorted({*running, *waiting})
        ]

    def close(self) -> None:
        self._journal.close()
