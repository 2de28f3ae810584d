"""What the first wish to end does to a command, in a process of its own."""

import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

PROGRAM = """
import signal, time
from dora_rl.run.stopping import Stopping

signal.signal(signal.SIGHUP, signal.SIG_DFL)  # whatever the tests were started with
with Stopping() as stopping:
    {body}
"""
DEAF = "with stopping.asks(lambda: print('asked', flush=True)): print('ready', flush=True); time.sleep(600)"
PLAIN = "print('ready', flush=True); time.sleep(600)"


@pytest.fixture
def start() -> Iterator[object]:
    started: list[subprocess.Popen[str]] = []

    def begin(body: str) -> "subprocess.Popen[str]":
        process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM.format(body=body)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
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
def test_a_command_that_works_is_asked_once_however_often_it_is_told(start, number):
    process = start(DEAF)
    process.send_signal(number)
    assert process.stdout.readline() == "asked\n"
    process.send_signal(number)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.5)


def test_where_nothing_is_asked_it_is_an_interrupt_like_any_other(start):
    process = start(PLAIN)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=10)
    assert errors.splitlines()[-1] == "KeyboardInterrupt"
