"""`dora-rl bench core`: how many events a second the scheduler handles on one core, without anything around it.

Replays recorded events through fresh cores and times `step` alone. The events are those of a run's journal, or, when
no run is given, of a simulated one of the size of a large cluster.
"""

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dora_rl.bench.machine import machine
from dora_rl.config import Config, ConfigError, load_config, parse_config
from dora_rl.core.messages import Command, Event, Generated
from dora_rl.core.orchestrator import Orchestrator
from dora_rl.obs.folder import RunFolder
from dora_rl.obs.journal import read_journal
from dora_rl.sim.engine import simulate
from dora_rl.sim.world import RandomWorld, WorldConfig

ENOUGH_EVENTS = 200_000


@dataclass(frozen=True, kw_only=True, slots=True)
class CoreBench:
    source: str
    events: int
    seconds: float
    answers_share: float
    """Share of the events that are finished answers."""

    @property
    def events_per_s(self) -> float:
        return self.events / self.seconds

    def to_json(self) -> dict[str, Any]:
        return {
            "machine": machine(),
            "source": self.source,
            "events": self.events,
            "seconds": self.seconds,
            "events_per_s": self.events_per_s,
            "answers_share": self.answers_share,
        }

    def to_text(self) -> str:
        return (
            f"{self.events_per_s:,.0f} events per second on one core: {self.events:,} events of {self.source} "
            f"in {self.seconds:.2f} s, {self.answers_share:.0%} of them finished answers"
        )


def bench_core(run_folder: Path | None = None) -> CoreBench:
    """Raises ConfigError or JournalError when the folder holds no run."""
    if run_folder is None:
        config, events = _simulated()
        source = "a simulated run with 64 instances"
    else:
        folder = RunFolder(run_folder)
        config = load_config(folder.config)
        events = [event for event, _ in read_journal(folder.journal)[1]]
        if not events:
            raise ConfigError(f"{folder.journal} holds no event; name the folder of a run that has begun")
        source = str(run_folder)
    total, seconds = 0, 0.0
    while total < ENOUGH_EVENTS:
        core = Orchestrator(config)
        began = time.perf_counter()
        for event in events:
            core.step(event)
        seconds += time.perf_counter() - began
        total += len(events)
    share = Counter(type(event) for event in events)[Generated] / len(events)
    return CoreBench(source=source, events=total, seconds=seconds, answers_share=share)


def _simulated() -> tuple[Config, list[Event]]:
    config = parse_config(
        {
            "model": {"path": "tiny:0"},
            "run": {"iterations": 12},
            "rollout": {"max_completion_tokens": 1000},
            "schedule": {"max_staleness_versions": 3, "groups_per_iteration": 512, "group_size": 16},
        }
    )
    world = RandomWorld(
        WorldConfig(instances=64, slots=128, train_s=300.0, answer_s=60.0),
        max_tokens=config.rollout.max_completion_tokens,
        group_size=config.schedule.group_size,
    )
    events: list[Event] = []

    def record(event: Event, commands: Sequence[Command]) -> None:
        events.append(event)

    simulate(Orchestrator(config), world, record)
    return config, events
