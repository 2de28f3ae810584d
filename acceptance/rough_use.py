"""What step 3 must show, line by line: bad input is met early, foreign rewards and data train, every end is clean."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from typing import Any

import psutil
import pyarrow as pa
import pyarrow.parquet as pq

from acceptance import whole_loop
from acceptance.bad_inputs import BAD_INPUTS, Answer, BadInput, ask, page
from acceptance.means import Figures, Lines, at_least, at_most, exactly, execute, fresh_environment
from dora_rl.audit.history import AuditError
from dora_rl.audit.judge import audit_run
from dora_rl.cli.guardian import adopt_orphans
from dora_rl.obs.folder import RunFolder

WORK = Path("runs/accept-3")
PAGE = Path("docs/errors.md")
TINY = "examples/tiny.toml"
SUMS = [
    {
        "prompt": [{"role": "user", "content": f"What is {a} + {b}?"}],
        "data_source": "sums",
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": str(a + b)},
        "extra_info": {"index": 10 * a + b},
    }
    for a in range(10)
    for b in range(10)
]
"""As verl's Parquet files have them."""


def errors() -> Figures:
    """Every bad input, run; docs/errors.md is what they answered."""
    folder = WORK / "errors"
    shutil.rmtree(folder, ignore_errors=True)

    def one(numbered: tuple[int, BadInput]) -> Answer:
        number, bad = numbered
        return ask(bad, folder / str(number))

    with ThreadPoolExecutor(2) as pool:
        answers = list(pool.map(one, enumerate(BAD_INPUTS)))
    asked = list(zip(BAD_INPUTS, answers, strict=True))
    PAGE.write_text(page(asked), encoding="utf-8")
    wrong = {
        bad.what: {"status": answer.status, "said": list(answer.lines), "run left": answer.run_left}
        for bad, answer in asked
        if not answer.good
    }
    return {
        "checks": [
            at_least("bad inputs", len(asked), 50),
            exactly("answered otherwise than by one line and status 2, or with a folder left", len(wrong), 0),
        ],
        "wrong": wrong,
    }


def foreign() -> Figures:
    """Four rewards and two files of other systems, three iterations each."""
    shutil.rmtree(WORK / "foreign", ignore_errors=True)
    folder = (WORK / "foreign").resolve()
    folder.mkdir(parents=True)
    pq.write_table(pa.Table.from_pylist(SUMS), folder / "verl.parquet")
    rows = [{"prompt": row["prompt"], "answer": row["reward_model"]["ground_truth"]} for row in SUMS]  # type: ignore[index]
    (folder / "trl.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    verl = ("data.source=parquet", f"data.path={folder}/verl.parquet", "data.answer_column=reward_model.ground_truth")
    trl = ("data.source=jsonl", f"data.path={folder}/trl.jsonl")
    checks = []
    for function, data in (("brief", trl), ("compute_score", verl), ("digits_reward_fn", trl), ("reward_func", trl)):
        run = folder / function
        sets = ("run.iterations=3", "eval.prompts=0", f"reward.functions=['foreign_rewards:{function}']", *data)
        done = _train(run, *sets)
        checks.append(exactly(f"{function}: exit status", done.returncode, 0))
        lines = RunFolder(run).read_metrics()
        checks.append(exactly(f"{function}: iterations", len(lines), 3))
        judged = [line["reward/mean"] for line in lines if line["reward/mean"] is not None]
        checks.append(exactly(f"{function}: iterations with rewards", len(judged), 3))
    return {"checks": checks}


def endings() -> Figures:
    """Ten Ctrl-C and ten kills, of the driver and of its guardian in turns, each at a random moment of the tiny run."""
    adopt_orphans()
    rng = Random(0)
    figures: dict[str, list[float]] = {how: [] for how in ("Ctrl-C", "driver killed", "guardian killed")}
    statuses: list[int] = []
    left, shared, unread = 0, 0, 0
    for number in range(20):
        how = ("Ctrl-C", "driver killed", "Ctrl-C", "guardian killed")[number % 4]
        run = WORK / "endings" / str(number)
        shutil.rmtree(run, ignore_errors=True)
        before = _shared()
        guardian = subprocess.Popen(_command(run, "run.iterations=500"), stdout=subprocess.DEVNULL)
        time.sleep(rng.uniform(2, 60))
        (driver,) = psutil.Process(guardian.pid).children()
        began = time.monotonic()
        if how == "driver killed":
            driver.kill()
        else:
            guardian.send_signal(signal.SIGINT if how == "Ctrl-C" else signal.SIGKILL)
        guardian.wait(60)
        alive = _wait_gone(30 - (time.monotonic() - began))
        seconds = time.monotonic() - began
        figures[how].append(seconds)
        if how == "Ctrl-C":
            statuses.append(guardian.returncode)
        left, shared, unread = left + len(alive), shared + len(_shared() - before), unread + (not _readable(run))
        print(f"  {number}: {how}, status {guardian.returncode}, {seconds:.1f} s, left: {alive}", flush=True)
    return {
        "checks": [
            exactly("Ctrl-C that ended with another status than 130", sum(status != 130 for status in statuses), 0),
            at_most("longest end after Ctrl-C, seconds", max(figures["Ctrl-C"]), 15),
            at_most("longest until nothing was left of a killed driver, seconds", max(figures["driver killed"]), 30),
            at_most("the same of a killed guardian", max(figures["guardian killed"]), 30),
            exactly("processes left", left, 0),
            exactly("pieces of shared memory left", shared, 0),
            exactly("folders in which something half-written passes for whole", unread, 0),
        ],
        "seconds": figures,
    }


def newcomer() -> Figures:
    """What README.md tells a newcomer, word by word, in a fresh clone: the main job, then own data with an own reward.

    Its only liberties: the own model is the one that the main job has trained, and the own run is short.
    """
    clone = WORK / "clone"
    shutil.rmtree(clone, ignore_errors=True)
    seconds: dict[str, float] = {}

    def step(command: str) -> None:
        began = time.monotonic()
        execute("bash", "-euc", command, cwd=clone, env=fresh_environment())
        seconds[command] = time.monotonic() - began

    WORK.mkdir(parents=True, exist_ok=True)
    execute("git", "clone", "--quiet", ".", str(clone))
    readme = (clone / "README.md").read_text(encoding="utf-8")
    step("make demo")
    (demo,) = (clone / "runs").iterdir()
    step(f".venv/bin/dora-rl audit {demo.relative_to(clone)} --recompute 32")
    own = _block(readme, "# my.toml")
    assert own.count(OWN_MODEL) == 1, f"README.md names no {OWN_MODEL}"
    own = own.replace(OWN_MODEL, str(demo.relative_to(clone) / "export"))
    (clone / "my.toml").write_text(own, encoding="utf-8")
    (clone / "problems.jsonl").write_text("".join(json.dumps(row) + "\n" for row in OWN_ROWS), encoding="utf-8")
    (clone / "my_rewards.py").write_text(OWN_REWARD, encoding="utf-8")
    paths, look, go = (line.split("#")[0].strip() for line in _block(readme, "export PYTHONPATH").splitlines())
    step(f"{paths}; {look}")
    step(f"{paths}; {go} --set run.iterations=3 --set rollout.max_completion_tokens=48 --run-dir runs/own")
    step(".venv/bin/dora-rl audit runs/own")
    lines = RunFolder(clone / "runs" / "own").read_metrics()
    return {
        "checks": [
            exactly("steps, each with exit status 0", len(seconds), 5),
            at_most("minutes from clone to the end of the main job", seconds["make demo"] / 60, 20),
            exactly("iterations on own data with an own reward", len(lines), 3),
            at_least("answers that the own reward told apart, as a standard deviation", _spread(lines), 1e-3),
        ],
        "seconds": {command: round(one, 1) for command, one in seconds.items()},
    }


LINES: Lines = {
    "tests": (whole_loop.tests, "the tests are quick and none is skipped"),
    "newcomer": (newcomer, "who has only the README gets the main job and a run on own data"),
    "errors": (errors, "bad input gets one line and exit status 2 before any engine starts"),
    "foreign": (foreign, "rewards and data of other systems train as they are"),
    "endings": (endings, "however a run ends, nothing is left behind and nothing half-written passes for whole"),
}

OWN_MODEL = "path/to/a/hugging-face-folder"
"""What README.md's configuration says where a person puts the own model."""

OWN_ROWS = [
    {"prompt": f"Name {n} {what}.", "answer": what}
    for n in range(2, 62)
    for what in ("animals", "rivers", "cities", "tools", "colours")
]
OWN_REWARD = """
def score(prompts, completions, completion_ids, answer, **columns):
    return [text.count(word) / 10 for text, word in zip(completions, answer)]
"""

# --- means -----------------------------------------------------------------------------------------------------------


def _block(readme: str, first: str) -> str:
    """The indented block of README.md whose first line begins so."""
    lines = readme.splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith("    " + first))
    end = next(number for number in range(start, len(lines)) if not lines[number].strip())
    return "\n".join(line[4:] for line in lines[start:end])


def _spread(lines: Sequence[Mapping[str, Any]]) -> float:
    return max(line["reward/std"] or 0.0 for line in lines)


def _command(run: Path, *sets: str) -> list[str]:
    settings = [part for setting in sets for part in ("--set", setting)]
    return [sys.executable, "-m", "dora_rl.cli", "train", TINY, "--run-dir", str(run), *settings]


def _train(run: Path, *sets: str) -> "subprocess.CompletedProcess[str]":
    environment = {**os.environ, "PYTHONPATH": "examples"}
    return subprocess.run(_command(run, *sets), env=environment, text=True, timeout=600, check=False)


def _wait_gone(seconds: float) -> list[str]:
    """The names of what lives after `seconds` of all that this process started or adopted."""
    until = time.monotonic() + seconds
    while (alive := _alive()) and time.monotonic() < until:
        psutil.wait_procs(alive, timeout=0.2)
    return [one.name() for one in alive]


def _alive() -> list[psutil.Process]:
    alive = []
    for one in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if one.status() != psutil.STATUS_ZOMBIE:
                alive.append(one)
    return alive


def _shared() -> set[str]:
    return {path.name for path in Path("/dev/shm").iterdir()}


def _readable(run: Path) -> bool:
    """A run that never began, or whose records hold together as far as they go."""
    if not (run / "journal.jsonl").exists():
        return True
    try:
        return audit_run(run).verdict == "pass"
    except AuditError:
        return False
