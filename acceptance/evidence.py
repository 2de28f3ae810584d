"""What a finished run shows of itself: figures read from its folder, and checks made on copies of it."""

import ast
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median, quantiles
from typing import Any

from acceptance.tamper import TAMPERINGS
from dora_rl.config import load_config
from dora_rl.obs.console import paired_difference, staleness_totals, thirds
from dora_rl.obs.folder import RunFolder
from dora_rl.wire.iteration_files import RolloutRow, read_iteration
from dora_rl.wire.rollouts import Trajectory

HARMLESS_SLEEPS = frozenset(
    {
        "runtime/hands.py: _listen",  # how often engines are asked how far they are
        "runtime/instance.py: measure_decode",  # only after a run
        "runtime/fakes.py: _turns",  # sleep(0): a turn of the event loop, in tests
        "pace/clock.py: stretch",  # only with a [pace] section, as the next two
        "runtime/instance.py: load",
        "train/rank.py: publish",
        "bench/engines.py: run",  # benchmarks that wait for an answer to have so many tokens
        "bench/migration.py: _moved",
    }
)


@dataclass(frozen=True, slots=True)
class Gain:
    mean: float
    stderr: float
    prompts: int


def held_out_gain(run: Path, sampling: str) -> Gain:
    """The paired difference of the same prompts, after the run minus before it."""
    before, after = _evaluations(run, sampling)
    paired = paired_difference(before, after)
    if paired is None or paired[1] is None:
        raise ValueError(f"{run}: no two prompts were scored both before and after; raise eval.prompts")
    return Gain(paired[0], paired[1], int(after["prompts"]))


def training_reward(run: Path) -> tuple[float, float]:
    """Mean training reward of the first and the last third of the iterations."""
    first, last = thirds(RunFolder(run).read_metrics())
    if first is None or last is None:
        raise ValueError(f"{run}: no rewards in metrics.jsonl; is this a finished run?")
    return first, last


def scores(run: Path) -> dict[str, Any]:
    """Held-out score with its standard error, before and after, and the paired difference; both ways of answering."""
    result: dict[str, Any] = {}
    for sampling in ("sampled", "greedy"):
        before, after = _evaluations(run, sampling)
        gain = held_out_gain(run, sampling)
        result[sampling] = {
            "before": [before["score"], before["stderr"]],
            "after": [after["score"], after["stderr"]],
            "difference": [gain.mean, gain.stderr],
        }
    result["training_reward_thirds"] = training_reward(run)
    return result


def overlapping_share(run: Path) -> float:
    """Share of the iterations after 2K in which answers of two versions ran at the same moment."""
    running = [int(line["versions/running_max"]) for line in _after_warm_up(run)]
    return sum(count >= 2 for count in running) / len(running)


def fresh_share(run: Path) -> float:
    """Share of the groups trained after iteration 2K whose staleness was below K."""
    bound = load_config(RunFolder(run).config).schedule.max_staleness_versions
    counts = staleness_totals(_after_warm_up(run))
    fresh = sum(groups for staleness, groups in counts.items() if staleness < bound)
    return fresh / sum(counts.values())


def tail_ratio(run: Path) -> float:
    """99th percentile of the answers' lengths over their median."""
    lengths = [len(row.trajectory.completion_token_ids) for row in _rows(run)]
    ratio: float = quantiles(lengths, n=100)[98] / median(lengths)
    return ratio


def sleeps(source: Path) -> list[str]:
    """Every function that calls something named sleep, as `file: function`."""
    found = []
    for file in sorted(source.rglob("*.py")):
        for function in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef) and any(map(_is_sleep, ast.walk(function))):
                found.append(f"{file.relative_to(source).as_posix()}: {function.name}")
    return found


def audit(run: Path, recompute: int) -> dict[str, Any]:
    """The report of `dora-rl audit RUN --recompute N --json`, whatever its verdict."""
    report: dict[str, Any] = json.loads(_audit(run, "--recompute", str(recompute), "--json").stdout)
    return report


def contrast(report: dict[str, Any]) -> float:
    """Smallest ratio, over pairs of versions, of the mean difference under the other one to the largest under the own.

    Smaller than the ratio of means that the audit itself judges, since a largest difference is above its mean.
    """
    own: dict[int, list[float]] = {}
    other: dict[tuple[int, int], list[float]] = {}
    for one in report["recomputed"]:
        own.setdefault(one["version"], []).append(one["own_max_diff"])
        for version, difference in one["others"].items():
            other.setdefault((one["version"], int(version)), []).append(difference)
    return min(fmean(differences) / max(own[pair[0]]) for pair, differences in other.items())


def tamper(run: Path, scratch: Path) -> Iterator[tuple[str, bool, list[str]]]:
    """Each falsification of a copy: what it was, whether the audit found and named it, and what the audit said."""
    for falsify in TAMPERINGS:
        shutil.rmtree(scratch, ignore_errors=True)
        shutil.copytree(run, scratch, ignore=shutil.ignore_patterns("weights", "export", "model"))
        done = falsify(scratch)
        audited = _audit(scratch, "--json")
        problems = json.loads(audited.stdout)["problems"]
        named = any(done.name in problem for problem in problems)
        yield falsify.__name__.replace("_", " "), audited.returncode == 1 and named, problems
    shutil.rmtree(scratch)


def gradient_differences(run: Path, groups: int = 6) -> dict[str, float]:
    """`train.check.gradient_difference` on the last trained groups of a run, under the weights that it started from."""
    from dora_rl.train.check import gradient_difference

    by_group: dict[int, list[Trajectory]] = {}
    for row in _rows(run):
        if row.status == "trained":
            by_group.setdefault(row.trajectory.group_id, []).append(row.trajectory)
    recorded = list(by_group.values())[-groups:]
    return gradient_difference(load_config(RunFolder(run).config), run / "model", recorded)


def _evaluations(run: Path, sampling: str) -> tuple[dict[str, Any], dict[str, Any]]:
    lines = [line for line in RunFolder(run).read_eval() if line["sampling"] == sampling]
    if len(lines) < 2:
        raise ValueError(f"{run}: {len(lines)} {sampling} evaluations, two are needed; is this a finished run?")
    return lines[0], lines[-1]


def _after_warm_up(run: Path) -> list[dict[str, Any]]:
    """The metrics of the iterations after 2K, when the oldest version that may be trained can be K behind."""
    first = 2 * load_config(RunFolder(run).config).schedule.max_staleness_versions
    return [line for line in RunFolder(run).read_metrics() if line["iteration"] >= first]


def _rows(run: Path) -> Iterator[RolloutRow]:
    for file in sorted((run / "rollouts").glob("*.parquet"), key=lambda path: int(path.stem)):
        yield from read_iteration(file)


def _audit(run: Path, *options: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "dora_rl.cli", "audit", str(run), *options]
    return subprocess.run(command, timeout=3600, stdout=subprocess.PIPE, text=True, check=False)


def _is_sleep(node: ast.AST) -> bool:
    if not isinstance(node, ast.Call):
        return False
    function = node.func
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    return name == "sleep"
