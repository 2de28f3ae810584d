"""Makes run folders for tests: the real core under the virtual clock, with made-up tokens for what it counts."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from random import Random

from dora_rl.config import Config, config_hash, dump_config, parse_config
from dora_rl.core import messages as m
from dora_rl.core.orchestrator import Orchestrator
from dora_rl.obs.folder import RunFolder
from dora_rl.obs.journal import JournalHeader, JournalWriter
from dora_rl.sim.engine import simulate
from dora_rl.sim.world import RandomWorld, WorldConfig
from dora_rl.train.advantage import group_advantages
from dora_rl.wire.iteration_files import RolloutRow, write_iteration
from dora_rl.wire.open_store import OpenStore
from dora_rl.wire.rollouts import Segment, Trajectory, digest

GROUP_SIZE = 3


def small_config(**schedule: object) -> Config:
    return parse_config(
        {
            "run": {"iterations": 4},
            "model": {"path": "unused"},
            "rollout": {"max_completion_tokens": 24},
            "schedule": {
                "groups_per_iteration": 2,
                "group_size": GROUP_SIZE,
                "max_staleness_versions": 2,
                **schedule,
            },
        }
    )


class FilingWorld(RandomWorld):
    """A world that also keeps the run's folder, as a runtime does: scored groups in open.db, closed ones in Parquet."""

    def __init__(self, world: WorldConfig, config: Config, folder: RunFolder) -> None:
        super().__init__(world, max_tokens=config.rollout.max_completion_tokens, group_size=config.schedule.group_size)
        self.tokens = Random(world.seed)
        self.folder = folder
        self.store = OpenStore(folder.open_db)
        self.asked: dict[int, m.Generate] = {}
        self.started: dict[int, float] = {}
        self.segments: dict[int, list[Segment]] = {}
        self.last: dict[int, m.Generated] = {}
        self.members: dict[int, dict[int, int]] = {}

    def record(self, event: m.Event, commands: Sequence[m.Command]) -> None:
        if isinstance(event, m.Generated):
            asked = self.asked[event.rollout]
            if (asked.segment, asked.attempt) == (event.segment, event.attempt):
                self.last[event.rollout] = event
                if event.num_tokens:
                    start = asked.generated_tokens
                    self.segments[event.rollout].append(
                        Segment(
                            version=event.version, instance=event.instance, start=start, end=start + event.num_tokens
                        )
                    )
        if isinstance(event, m.InstanceLost):
            for rollout, tokens in event.saved:
                asked, start = self.asked[rollout], self.asked[rollout].generated_tokens
                if tokens and asked.instance == event.instance:
                    part = Segment(version=asked.version, instance=event.instance, start=start, end=start + tokens)
                    self.segments[rollout].append(part)
        for command in commands:
            if isinstance(command, m.Generate):
                self.asked[command.rollout] = command
                self.started.setdefault(command.rollout, event.at)
                kept = [part for part in self.segments.get(command.rollout, []) if part.end <= command.generated_tokens]
                self.segments[command.rollout] = kept
                if command.group is not None:
                    self.members.setdefault(command.group, {})[command.member] = command.rollout

    def answer(self, command: m.Command, now: float) -> m.Event:
        event = super().answer(command, now)
        if isinstance(event, m.Scored) and event.error is None:
            group = [
                self.trajectory(rollout, event.rewards[member])
                for member, rollout in sorted(self.members[event.group].items())
            ]
            self.store.put_group(group)
            return replace(event, digest=digest(group))
        if isinstance(command, m.Close):
            self.close(command)
        return event

    def trajectory(self, rollout: int, reward: float | None) -> Trajectory:
        asked, last, segments = self.asked[rollout], self.last[rollout], tuple(self.segments[rollout])
        length = segments[-1].end if segments else 0
        return Trajectory(
            rollout=rollout,
            group_id=asked.group,
            member=asked.member,
            prompt_id=f"prompt-{asked.group}",
            version=asked.version,
            prompt_token_ids=(1, 2, 3),
            completion_token_ids=tuple(self.tokens.randrange(50) for _ in range(length)),
            logprobs=tuple(-self.tokens.random() for _ in range(length)),
            segments=segments,
            finish_reason=last.reason,
            reward=reward,
            rewards={"exact": reward},
            dispatched_at=self.started[rollout],
            finished_at=last.at,
        )

    def close(self, command: m.Close) -> None:
        rows = []
        for status in ("trained", "filtered", "failed"):
            for name in getattr(command, status):
                group = self.store.get_group(name)
                advantages = group_advantages([one.reward for one in group])
                rows += [
                    RolloutRow(
                        trajectory=one,
                        iteration=command.iteration,
                        trained_at_version=command.trained_at,
                        status=status,
                        advantage=advantage if status == "trained" else None,
                    )
                    for one, advantage in zip(group, advantages, strict=True)
                ]
        write_iteration(self.folder.iteration_file(command.iteration), rows)
        self.store.remove([*command.trained, *command.filtered, *command.failed])


class _Killed(Exception):
    pass


def build_run(path: Path, config: Config, world: WorldConfig, *, killed_after: int | None = None) -> RunFolder:
    """A run's folder as its end leaves it, or its death after so many events: config, journal, open.db and Parquet."""
    folder = RunFolder(path)
    folder.create(dump_config(config))
    header = JournalHeader(
        run_id="test",
        program_version="0",
        config_hash=config_hash(config),
        start_time="2026-01-01T00:00:00+00:00",
        seed=config.run.seed,
    )
    filing = FilingWorld(world, config, folder)
    core = Orchestrator(config)
    events = 0
    with JournalWriter(folder.journal, header) as journal:

        def record(event: m.Event, commands: Sequence[m.Command]) -> None:
            nonlocal events
            if events == killed_after:
                raise _Killed
            events += 1
            filing.record(event, commands)
            journal.record(event, commands)

        with suppress(_Killed):
            simulate(core, filing, record)
    filing.store.close()
    return folder
