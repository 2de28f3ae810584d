"""What step 1 must show, line by line: the main job, its schedule, its proofs, its speed."""

import json
import shutil
import time
from pathlib import Path

from acceptance import evidence
from acceptance.learning_curves import plot_runs
from acceptance.means import Figures, Lines, execute, fresh_environment, judged, output_of, passed_tests, train
from dora_rl.obs.folder import RunFolder

WORK = Path("runs/accept-1")
RESULTS = Path("docs/results")
SEEDS = (0, 1)


def demo() -> Figures:
    """A fresh clone, `make demo`, and the same run with another seed."""
    clone = WORK / "clone"
    shutil.rmtree(WORK, ignore_errors=True)
    WORK.mkdir(parents=True)
    execute("git", "clone", "--quiet", ".", str(clone))
    began = time.monotonic()
    execute("make", "demo", cwd=clone, env=fresh_environment())
    minutes = (time.monotonic() - began) / 60
    (made,) = (clone / "runs").iterdir()
    made.rename(_demo_run(0))
    for seed in SEEDS[1:]:
        train(_demo_run(seed), f"run.seed={seed}")
    checks = [judged("minutes from clone to the end of the demo", minutes, "at most 20", passed=minutes <= 20)]
    for seed in SEEDS:
        gain = evidence.held_out_gain(_demo_run(seed), "sampled")
        first, last = evidence.training_reward(_demo_run(seed))
        checks += [
            judged(f"seed {seed}: held-out prompts", gain.prompts, "at least 200", passed=gain.prompts >= 200),
            judged(
                f"seed {seed}: sampled paired difference in standard errors",
                gain.mean / gain.stderr,
                "at least 3",
                passed=gain.mean >= 3 * gain.stderr,
            ),
            judged(
                f"seed {seed}: training reward, last third minus first",
                last - first,
                "at least 0.10",
                passed=last - first >= 0.10,
            ),
        ]
    _keep_demo()
    return {"checks": checks, "runs": {f"seed {seed}": evidence.scores(_demo_run(seed)) for seed in SEEDS}}


def schedule() -> Figures:
    checks = []
    for seed in SEEDS:
        overlap = evidence.overlapping_share(_demo_run(seed))
        fresh = evidence.fresh_share(_demo_run(seed))
        tail = evidence.tail_ratio(_demo_run(seed))
        checks += [
            judged(
                f"seed {seed}: iterations after 2K with two versions running at once",
                overlap,
                "at least 0.5",
                passed=overlap >= 0.5,
            ),
            judged(f"seed {seed}: groups trained at a staleness below K", fresh, "at least 0.2", passed=fresh >= 0.2),
            judged(f"seed {seed}: 99th percentile of answer length / median", tail, "at least 4", passed=tail >= 4),
        ]
    sleeps = evidence.sleeps(Path("src/dora_rl"))
    waits = [place for place in sleeps if place not in evidence.HARMLESS_SLEEPS]
    checks.append(judged("calls that sleep where work is scheduled or done", len(waits), "0", passed=not waits))
    return {"checks": checks, "sleeps": sleeps}


def recompute() -> Figures:
    checks, reports = [], {}
    for seed in SEEDS:
        report = evidence.audit(_demo_run(seed), 32)
        reports[f"seed {seed}"] = report
        own = max(one["own_max_diff"] for one in report["recomputed"])
        contrast = evidence.contrast(report)
        others = {version for one in report["recomputed"] for version in one["others"]}
        checks += [
            judged(
                f"seed {seed}: verdict", float(report["verdict"] == "pass"), "1", passed=report["verdict"] == "pass"
            ),
            judged(
                f"seed {seed}: trajectories", len(report["recomputed"]), "32", passed=len(report["recomputed"]) == 32
            ),
            judged(f"seed {seed}: largest difference under the own version", own, "at most 1e-3", passed=own <= 1e-3),
            judged(
                f"seed {seed}: smallest mean difference under another version / own",
                contrast,
                "at least 10",
                passed=contrast >= 10,
            ),
            judged(f"seed {seed}: other versions", len(others), "at least 2", passed=len(others) >= 2),
        ]
    return {"checks": checks, "reports": reports}


def tampering() -> Figures:
    found = evidence.tamper(_demo_run(0), WORK / "tampered")
    checks = [judged(f"{what}: found, named, exit status 1", float(seen), "1", passed=seen) for what, seen, _ in found]
    return {"checks": checks, "problems": {what: problems for what, _, problems in found}}


def sync() -> Figures:
    run = train(
        WORK / "sync", 'schedule.strategy="sync"', "run.iterations=3", "eval.prompts=0", "run.measure_floor=false"
    )
    worst = max(line["staleness/max"] for line in RunFolder(run).read_metrics())
    passed, count = passed_tests("tests/core/test_staleness.py", "-k", "exactly_the_commands")
    return {
        "checks": [
            judged("largest staleness of a synchronous run", worst, "0", passed=worst == 0),
            judged(
                "dora with K = 0 and sync on 500 random workloads: tests passed",
                count,
                "1",
                passed=passed and count == 1,
            ),
        ]
    }


def on_policy() -> Figures:
    run = train(
        WORK / "k0",
        "schedule.max_staleness_versions=0",
        "run.iterations=3",
        "eval.prompts=0",
        "run.measure_floor=false",
    )
    deviations = [line["policy/first_ratio_max_deviation"] for line in RunFolder(run).read_metrics()]
    worst = max(deviations)
    return {
        "checks": [judged("policy/first_ratio_max_deviation, largest", worst, "at most 1e-3", passed=worst <= 1e-3)],
        "by_iteration": deviations,
    }


def gradient() -> Figures:
    differences = evidence.gradient_differences(_demo_run(0))
    return {
        "checks": [
            judged(f"gradient, {name}: relative difference", value, "at most 1e-5", passed=value <= 1e-5)
            for name, value in differences.items()
        ]
    }


def throughput() -> Figures:
    checks, floors = [], {}
    for seed in SEEDS:
        floor = json.loads((_demo_run(seed) / "floor.json").read_text(encoding="utf-8"))
        floors[f"seed {seed}"] = floor
        checks.append(
            judged(
                f"seed {seed}: share of the floor's throughput",
                floor["share"],
                "at least 0.6",
                passed=floor["share"] >= 0.6,
            )
        )
    return {"checks": checks, "floors": floors}


def core() -> Figures:
    from dora_rl.bench.core import bench_core

    result = bench_core(_demo_run(0))
    rate = result.events_per_s
    return {
        "checks": [judged("events per second", rate, "at least 32000", passed=rate >= 32000)],
        "bench": result.to_json(),
    }


def tests() -> Figures:
    began = time.monotonic()
    output = output_of("make", "test")
    test_minutes = (time.monotonic() - began) / 60
    began = time.monotonic()
    execute("make", "check")  # its caches are warm by now
    check_s = time.monotonic() - began
    skipped = output.count(" skipped")
    return {
        "checks": [
            judged("make test, minutes", test_minutes, "at most 12", passed=test_minutes <= 12),
            judged("make check, seconds with warm caches", check_s, "at most 60", passed=check_s <= 60),
            judged("test runs that skipped something", skipped, "0", passed=skipped == 0),
        ],
        "output": output.splitlines()[-12:],
    }


LINES: Lines = {
    "tests": (tests, "the tests are quick and none is skipped"),
    "demo": (demo, "a real model learns within 20 minutes of a fresh clone, for two seeds"),
    "schedule": (schedule, "several versions run at once, staleness stays below K for many, answers have a heavy tail"),
    "recompute": (recompute, "recorded log-probabilities belong to the stamped version and to no other"),
    "tampering": (tampering, "every change of a run's records is found and named"),
    "sync": (sync, "the synchronous strategy is never stale, and dora with K = 0 is the synchronous strategy"),
    "on_policy": (on_policy, "with K = 0 the importance ratio starts at 1"),
    "gradient": (gradient, "the gradient depends neither on order, nor on micro-batches, nor on prefix sharing"),
    "throughput": (throughput, "iterations run at 60 % or more of what the machine can do"),
    "core": (core, "the scheduler handles 32,000 events a second"),
}


def _demo_run(seed: int) -> Path:
    return WORK / f"quickstart-seed-{seed}"


def _keep_demo() -> None:
    """Config, metrics and the picture of both runs, to look at without running anything."""
    folder = RESULTS / "quickstart"
    folder.mkdir(parents=True, exist_ok=True)
    for seed in SEEDS:
        run = RunFolder(_demo_run(seed))
        for file in (run.config, run.metrics, run.eval):
            shutil.copyfile(file, folder / f"seed-{seed}-{file.name}")
    plot_runs([_demo_run(seed) for seed in SEEDS], folder / "learning.png")
