"""Ctrl-C once and twice, sent to a process of its own with a child that would go on for ever."""

import signal
import subprocess
import sys
from collections.abc import Iterator

import psutil
import pytest

PROGRAM = """
import subprocess, sys, time
from dora_rl.cli import stopping as signals
from dora_rl.cli.stopping import Stopping

signals.SAME_S = {same_s}
null = subprocess.DEVNULL
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], stdout=null, stderr=null)
with Stopping() as stopping:
    {body}
"""
DEAF = "with stopping.asks(lambda: print('asked', flush=True)): print('ready', flush=True); time.sleep(600)"
PLAIN = "print('ready', flush=True); time.sleep(600)"


@pytest.fixture
def start() -> Iterator[object]:
    started: list[subprocess.Popen[str]] = []

    def begin(body: str, same_s: float = 0.0) -> "subprocess.Popen[str]":
        program = PROGRAM.format(body=body, same_s=same_s)
        process = subprocess.Popen(
            [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        return process

    yield begin
    for process in started:
        process.kill() if process.poll() is None else None
        process.communicate(timeout=10)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_the_first_asks_and_the_second_ends_the_command_and_all_it_started_at_once(start, number):
    process = start(DEAF)
    (child,) = psutil.Process(process.pid).children()
    process.send_signal(number)
    assert process.stdout.readline() == "asked\n"
    assert child.is_running()
    process.send_signal(number)
    _, errors = process.communicate(timeout=10)
    assert process.returncode == 130
    assert errors == "dora-rl: ended at once; what the run's folder has is what was written until now\n"
    _, alive = psutil.wait_procs([child], timeout=10)
    assert alive == []


def test_a_signal_that_comes_twice_at_once_is_one_wish(start):
    process = start(DEAF, same_s=60.0)
    process.send_signal(signal.SIGINT)
    assert process.stdout.readline() == "asked\n"
    process.send_signal(signal.SIGINT)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.5)


def test_where_nothing_is_asked_it_is_an_interrupt_like_any_other(start):
    process = start(PLAIN)
    (child,) = psutil.Process(process.pid).children()
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=10)
    assert errors.splitlines()[-1] == "KeyboardInterrupt"
    child.kill()
