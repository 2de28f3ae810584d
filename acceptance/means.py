"""How the lines of `make accept` are measured: commands with a deadline, runs, and a figure beside its limit."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

Figures = dict[str, Any]
Lines = Mapping[str, tuple[Callable[[], Figures], str]]
"""By name: what measures a line, and the line as a sentence."""

DEADLINE_S = 3600


def judged(what: str, figure: float, limit: str, *, passed: bool) -> Figures:
    return {"what": what, "figure": float(f"{figure:.5g}"), "limit": limit, "passed": passed}


def at_least(what: str, figure: float, limit: float) -> Figures:
    return judged(what, figure, f"at least {limit:g}", passed=figure >= limit)


def at_most(what: str, figure: float, limit: float) -> Figures:
    return judged(what, figure, f"at most {limit:.4g}", passed=figure <= limit)


def above(what: str, figure: float, limit: float) -> Figures:
    return judged(what, figure, f"above {limit:g}", passed=figure > limit)


def exactly(what: str, figure: float, limit: float) -> Figures:
    return judged(what, figure, f"{limit:g}", passed=figure == limit)


def train(folder: Path, *settings: str, config: str = "examples/quickstart.toml") -> Path:
    """A whole run of `config` into a folder of its own."""
    shutil.rmtree(folder, ignore_errors=True)
    sets = [part for setting in settings for part in ("--set", setting)]
    execute(sys.executable, "-m", "dora_rl.cli", "train", config, "--run-dir", str(folder), *sets)
    return folder


def execute(*command: str, cwd: Path | None = None, env: dict[str, str] | None = None) -> None:
    subprocess.run(command, cwd=cwd, env=env, check=True, timeout=DEADLINE_S)


def output_of(*command: str) -> str:
    done = subprocess.run(command, check=True, timeout=DEADLINE_S, stdout=subprocess.PIPE, text=True)
    return done.stdout.strip()


def passed_tests(*arguments: str) -> tuple[bool, int]:
    """Whether all tests passed, and how many did."""
    command = [sys.executable, "-m", "pytest", "-q", *arguments]
    done = subprocess.run(command, timeout=DEADLINE_S, stdout=subprocess.PIPE, text=True, check=False)
    count = re.search(r"(\d+) passed", done.stdout)
    return done.returncode == 0, int(count[1]) if count else 0


def fresh_environment() -> dict[str, str]:
    """Without what this process's own virtual environment has put there."""
    return {name: value for name, value in os.environ.items() if name not in ("VIRTUAL_ENV", "PYTHONPATH", "MAKEFLAGS")}
