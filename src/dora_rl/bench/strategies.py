"""`dora-rl bench strategies`: all strategies on equal hardware, under one law of durations (`[pace]`).

    search    every split of the devices and every in-flight limit in the simulator, the same grid for every strategy
    ratios    the same search where training costs more or less, in the simulator
    measure   each strategy's best one with real engines and a real trainer, paced by the same law

A strategy is the classical one where it has one: synchronous and one-step-off trainers begin when their batch is full;
`sync+` is the synchronous one that computes groups as they come, as the others do.
"""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

from dora_rl.bench.machine import machine
from dora_rl.config import Config, ConfigError, PaceConfig, dump_config
from dora_rl.core import messages as m
from dora_rl.core.orchestrator import Orchestrator
from dora_rl.obs.folder import RunFolder
from dora_rl.obs.journal import read_journal
from dora_rl.obs.metrics import Metrics, iteration_metrics
from dora_rl.obs.timeline import Timeline
from dora_rl.pace.clock import MAX_OVERRUNS
from dora_rl.pace.law import move_s
from dora_rl.sim.engine import simulate
from dora_rl.sim.paced import PacedWorld

WARM_UP = 3
"""Iterations at the start, and one at the end, that do not count."""

TRIES = 3
"""A run in which this machine was too slow for the law, as when others use it, is made again so many times at most."""

SEARCH_SEEDS = 3
"""Runs of each variant: a split that only happens to be good for one run's lengths is not the best one."""

RUN_S = 3600
"""Limit of one measured run."""

IN_FLIGHT = (0.25, 0.5, 1.0, 2.0)
"""`ready_target_groups` in batches."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Contender:
    name: str
    strategy: str
    placement: str = "disaggregated"
    early_training: bool = True
    kv: str = "keep"


CONTENDERS = (
    Contender(name="sync", strategy="sync", early_training=False),
    Contender(name="sync+", strategy="sync"),
    Contender(name="sync colocated", strategy="sync", placement="colocated", early_training=False),
    Contender(name="one_step_off", strategy="one_step_off", early_training=False),
    Contender(name="partial keep", strategy="partial"),
    Contender(name="partial recompute", strategy="partial", kv="recompute"),
    Contender(name="partial colocated", strategy="partial", placement="colocated", early_training=False),
    Contender(name="drop_stale", strategy="drop_stale"),
    Contender(name="dora", strategy="dora"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """Means over the iterations that count; interfaces of `bench strategies --json`."""

    contender: str
    strategy: str
    placement: str
    devices: int
    instances: int
    ready_target_groups: int
    iteration_minutes: float
    tokens_per_second: float
    exposed_rollout_minutes: float
    exposed_rollout_share: float
    idle_share_rollout: float
    idle_share_trainer: float
    mean_staleness_versions: float
    max_staleness_versions: int
    moves: float
    """An iteration."""
    moved_gib: float
    recomputed_tokens: float
    orchestration_share: float
    """Of instance-time: deciding, loading weights and moving answers."""
    promises_broken: tuple[str, ...]
    overruns: float | None = None
    """Share of the paced pieces of work that this machine could not do in the law's time; None: simulated."""

    @property
    def valid(self) -> bool:
        return self.overruns is None or self.overruns <= MAX_OVERRUNS


def devices(config: Config) -> int:
    law = _law(config)
    return config.rollout.instances + law.trainer_devices


def variants(config: Config, contender: Contender) -> Iterator[Config]:
    """Every split of the configuration's devices and every in-flight limit, for one contender."""
    total = devices(config)
    splits = [(total, total)] if contender.placement == "colocated" else [(r, total - r) for r in range(1, total)]
    limited = contender.strategy not in ("sync", "one_step_off")  # those have no limit of their own
    for instances, trainer_devices in splits:
        for share in IN_FLIGHT if limited else (1.0,):
            schedule = config.schedule.model_copy(
                update={
                    "strategy": contender.strategy,
                    "placement": contender.placement,
                    "kv": contender.kv,
                    "ready_target_groups": max(1, round(share * config.schedule.batch)),
                }
            )
            pace = _law(config).model_copy(
                update={"trainer_devices": trainer_devices, "early_training": contender.early_training}
            )
            rollout = config.rollout.model_copy(update={"instances": instances})
            yield config.model_copy(update={"schedule": schedule, "pace": pace, "rollout": rollout})


def simulated(config: Config, contender: Contender) -> Row:
    """The configuration under the virtual clock."""
    timeline = Timeline(trainer_devices=config.trainer_devices)
    lines: list[Metrics] = []
    moving = _Moving(config)

    def record(event: m.Event, commands: Sequence[m.Command]) -> None:
        timeline.record(event, commands)
        moving.record(event, commands)
        for command in commands:
            if isinstance(command, m.Close):
                groups = (*command.trained, *command.filtered, *command.failed)
                prompts = dict.fromkeys(groups, _law(config).prompt_tokens * config.schedule.group_size)
                lines.append(iteration_metrics(timeline, command.iteration, prompt_tokens=prompts, orchestration_s=0.0))
                timeline.forget(command.iteration)

    core = Orchestrator(config)
    simulate(core, PacedWorld(config), record)
    if core.state.stopped is not None:
        raise ConfigError(f"the simulated run of {contender.name} stopped: {core.state.stopped}")
    return _row(config, contender, lines, moving)


def search(config: Config, contender: Contender) -> list[tuple[Config, Row]]:
    """All variants, best (most tokens per second, mean over SEARCH_SEEDS) first."""
    found = []
    for variant in variants(config, contender):
        run = variant.run
        seeded = [variant.model_copy(update={"run": run.model_copy(update={"seed": s})}) for s in range(SEARCH_SEEDS)]
        found.append((variant, _mean([simulated(one, contender) for one in seeded])))
    return sorted(found, key=lambda pair: -pair[1].tokens_per_second)


def measured(config: Config, contender: Contender, folder: Path) -> Row:
    """The configuration with real engines and a real trainer. Raises ConfigError when the run fails."""
    file = folder.with_suffix(".toml")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(dump_config(config), encoding="utf-8")
    command = [sys.executable, "-m", "dora_rl.cli", "train", str(file), "--run-dir", str(folder)]
    try:
        done = subprocess.run(command, timeout=RUN_S, capture_output=True, text=True, check=False)
    except subprocess.TimeoutExpired as error:
        raise ConfigError(
            f"the paced run of {contender.name} was not done within {RUN_S} s ({' '.join(command)}); the law of [pace] "
            "makes it too long, or this machine does not keep up: see its journal"
        ) from error
    if done.returncode != 0:
        said = done.stderr.strip().splitlines() or ["it said nothing"]
        raise ConfigError(f"the paced run of {contender.name} failed ({' '.join(command)}): {said[-1]}")
    moving = _Moving(config)
    _, entries = read_journal(RunFolder(folder).journal)
    for event, commands in entries:
        moving.record(event, commands)
    pace = json.loads((folder / "pace.json").read_text(encoding="utf-8"))
    row = _row(config, contender, RunFolder(folder).read_metrics(), moving)
    return replace(row, overruns=pace["share"])


def bench_strategies(
    config: Config,
    *,
    folder: Path | None,
    repeats: int,
    only: Sequence[str],
    say: Callable[[str], None],
    ratios: Sequence[float] = (),
) -> dict[str, Any]:
    """Search for every contender; with a folder also measure the best variants there, `repeats` times each.

    `ratios` multiply the law's cost of training; for each the search is made again.

    Repeats go round the contenders, so that what this machine does at one hour falls on all of them.
    """
    names = [contender.name for contender in CONTENDERS]
    if unknown := set(only) - set(names):
        raise ConfigError(f"--only got {min(unknown)!r}; one of these is needed: {', '.join(names)}")
    if not all(0 < ratio < 1e6 for ratio in ratios):
        raise ConfigError(f"--ratios needs numbers above 0 and below 1e6, got {', '.join(map(str, ratios))}")
    if folder is not None and folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"--run-dir {folder} is taken; name a new folder for the measured runs")
    chosen = [contender for contender in CONTENDERS if not only or contender.name in only]
    say(
        f"the best of every split of {devices(config)} devices (rollout + trainer) and every limit of groups that may "
        "lie ready, for each strategy; exposed: the trainer waits for answers"
    )
    found: dict[Contender, list[tuple[Config, Row]]] = {}
    for contender in chosen:
        found[contender] = search(config, contender)
        say(f"{contender.name:<18} simulated  {_text(found[contender][0][1])}")
    by_ratio = [{"ratio": ratio, "rows": _at_ratio(config, chosen, ratio, say)} for ratio in ratios]
    runs: dict[Contender, list[Row]] = {contender: [] for contender in chosen}
    for repeat, contender in product(range(repeats), chosen):
        if folder is not None:
            best, _ = found[contender][0]
            seeded = best.model_copy(update={"run": best.run.model_copy(update={"seed": repeat})})
            runs[contender].append(
                _valid(seeded, contender, folder / f"{contender.name.replace(' ', '-')}-{repeat}", say)
            )
    rows = [_median(runs[contender]) if runs[contender] else found[contender][0][1] for contender in chosen]
    return {
        "machine": machine(),
        "rows": [asdict(row) for row in rows],
        "runs": [asdict(row) for contender in chosen for row in runs[contender]],
        "sweep": [asdict(row) for contender in chosen for _, row in found[contender]],
        "ratios": by_ratio,
    }


def _at_ratio(
    config: Config, chosen: Sequence[Contender], ratio: float, say: Callable[[str], None]
) -> list[dict[str, Any]]:
    law = _law(config)
    pace = law.model_copy(update={"train_token_s": law.train_token_s * ratio})
    rows = [search(config.model_copy(update={"pace": pace}), contender)[0][1] for contender in chosen]
    for row in rows:
        say(f"{row.contender:<18} simulated  {_text(row)}, training costs {ratio:g} times as much")
    return [asdict(row) for row in rows]


def _valid(config: Config, contender: Contender, folder: Path, say: Callable[[str], None]) -> Row:
    """Measured until it was valid, or for the last time."""
    for attempt in range(TRIES):
        run = measured(config, contender, folder.with_name(f"{folder.name}-again-{attempt}") if attempt else folder)
        say(f"{contender.name:<18} measured   {_text(run)}")
        if run.valid:
            break
    return run


def _mean(rows: Sequence[Row]) -> Row:
    means: dict[str, Any] = {
        part.name: fmean(getattr(row, part.name) for row in rows)
        for part in fields(Row)
        if part.type in (float, "float")
    }
    return replace(rows[0], **means, max_staleness_versions=max(row.max_staleness_versions for row in rows))


def _median(runs: Sequence[Row]) -> Row:
    return sorted(runs, key=lambda row: row.tokens_per_second)[len(runs) // 2]


class _Moving:
    """Instance-time that loading weights and moving answers took.

    Of a move: what its copies (or the prefix computed again) keep the engine from decoding, by the law, and the time in
    which the answer's own slot stands still.
    """

    def __init__(self, config: Config) -> None:
        self.seconds = 0.0
        self._law = _law(config)
        self._slots = config.rollout.slots
        self._loads: dict[str, float] = {}

    def record(self, event: m.Event, commands: Sequence[m.Command]) -> None:
        if isinstance(event, m.Generated):
            if event.kept_tokens:
                self.seconds += move_s(self._law, event.kept_tokens) + event.keep_s / self._slots
            if event.loaded_tokens:
                self.seconds += move_s(self._law, event.loaded_tokens) + event.resume_s / self._slots
            elif event.recomputed_tokens:
                self.seconds += self._law.prefill_token_s * event.recomputed_tokens + event.resume_s / self._slots
        if isinstance(event, m.Loaded) and event.instance in self._loads:
            self.seconds += event.at - self._loads.pop(event.instance)
        for command in commands:
            if isinstance(command, m.Load):
                self._loads[command.instance] = event.at


def _row(config: Config, contender: Contender, lines: Sequence[Metrics], moving: _Moving) -> Row:
    counted: Any = [line for line in lines if WARM_UP <= int(str(line["iteration"])) < len(lines) - 1]
    if not counted:
        raise ConfigError(f"run.iterations = {len(lines)} leaves none to measure; at least {WARM_UP + 2} are needed")
    total_s = sum(line["time/iteration_s"] for line in lines)  # type: ignore[misc]
    decided = fmean(line["time/orchestration_share"] or 0.0 for line in counted)

    def mean(name: str) -> float:
        return fmean(line[name] for line in counted)

    return Row(
        contender=contender.name,
        strategy=contender.strategy,
        placement=contender.placement,
        devices=counted[-1]["throughput/devices"],
        instances=config.rollout.instances,
        ready_target_groups=config.schedule.ready_target,
        iteration_minutes=mean("time/iteration_s") / 60,
        tokens_per_second=fmean(line["throughput/tokens_per_s"] * line["time/iteration_s"] for line in counted)
        / mean("time/iteration_s"),
        exposed_rollout_minutes=mean("time/exposed_rollout_s") / 60,
        exposed_rollout_share=mean("time/exposed_rollout_s") / mean("time/iteration_s"),
        idle_share_rollout=mean("idle/rollout_share"),
        idle_share_trainer=mean("idle/trainer_share"),
        mean_staleness_versions=mean("staleness/mean"),
        max_staleness_versions=max(line["staleness/max"] for line in counted),
        moves=mean("moves/count"),
        moved_gib=sum(line["moves/bytes"] for line in counted) / 2**30,
        recomputed_tokens=mean("moves/recomputed_tokens"),
        orchestration_share=decided + moving.seconds / (total_s * config.rollout.instances),
        promises_broken=tuple(sorted({"C1", "C2", "C3"} - set(config.schedule.promises))),
    )


def _text(row: Row) -> str:
    text = (
        f"{row.instances} + {row.devices - row.instances} devices, {row.ready_target_groups:>3} ready: "
        f"{row.iteration_minutes * 60:6.1f} s an iteration, {row.exposed_rollout_minutes * 60:5.1f} s exposed, "
        f"{row.tokens_per_second:6.0f} tokens/s, staleness {row.mean_staleness_versions:.1f}"
    )
    if row.promises_broken:
        text += f", breaks {', '.join(row.promises_broken)}"
    if row.overruns is None:
        return text
    return f"{text}, {row.overruns:.1%} overrun" + ("" if row.valid else f": invalid, {MAX_OVERRUNS:.0%} allowed")


def _law(config: Config) -> PaceConfig:
    if config.pace is None:
        raise ConfigError("bench strategies needs the law of durations: give a configuration with a [pace] section")
    return config.pace
