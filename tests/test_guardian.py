"""Whoever is killed, nothing that a command has started lives on."""

import os
import signal
import subprocess
import sys

import psutil
import pytest

DEAF = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
LEAVES = f"""
import subprocess, sys
quiet = {{"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "start_new_session": True}}
print(subprocess.Popen([sys.executable, "-c", {DEAF!r}], **quiet).pid)
"""
"""Ends and leaves an orphan, to whom no parent and no group leads."""
PROGRAM = """
import os, signal, subprocess, sys, time
from dora_rl.cli.guardian import guarded

def command():
    orphan = subprocess.run([sys.executable, "-c", LEAVES], stdout=subprocess.PIPE, text=True).stdout.strip()
    if DEAF:
        signal.signal(signal.SIGINT, lambda *_: print("asked", flush=True))
    print(os.getpid(), orphan, flush=True)
    try:
        time.sleep(BODY)
    except KeyboardInterrupt:
        return 130
    return 7

signal.signal(signal.SIGHUP, signal.SIG_IGN if NOHUP else signal.SIG_DFL)  # whatever the tests were started with
sys.exit(guarded(command, grace_s=0.2, same_s=SAME))
"""


def start(
    seconds: float, *, deaf: bool = False, same_s: float = 0.0, nohup: bool = False
) -> "tuple[subprocess.Popen[str], psutil.Process, psutil.Process]":
    """The guardian, the process that does the work, and an orphan which that one has left."""
    program = f"DEAF, SAME, NOHUP, BODY, LEAVES = {deaf}, {same_s}, {nohup}, {seconds}, {LEAVES!r}\n" + PROGRAM
    guardian = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert guardian.stdout is not None
    child, orphan = (psutil.Process(int(pid)) for pid in guardian.stdout.readline().split())
    return guardian, child, orphan


def gone(*processes: psutil.Process) -> bool:
    _, alive = psutil.wait_procs(processes, timeout=20)
    return not [one for one in alive if one.status() != psutil.STATUS_ZOMBIE]


def test_a_command_that_ends_gives_its_status_and_leaves_nothing():
    guardian, child, orphan = start(0)
    _, errors = guardian.communicate(timeout=20)
    assert (guardian.returncode, errors) == (7, "")
    assert gone(child, orphan)


def test_a_command_that_is_killed_leaves_nothing_and_is_named():
    guardian, child, orphan = start(600)
    child.kill()
    _, errors = guardian.communicate(timeout=20)
    assert guardian.returncode == 128 + signal.SIGKILL
    assert errors == "dora-rl: the command was ended by SIGKILL; what it had started has been ended too\n"
    assert gone(child, orphan)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_to_the_guardian_reaches_the_command(number):
    guardian, child, orphan = start(600)
    guardian.send_signal(number)
    guardian.communicate(timeout=20)
    assert guardian.returncode == 130
    assert gone(child, orphan)


def test_who_asks_twice_ends_all_of_it_at_once():
    guardian, child, orphan = start(600, deaf=True)
    guardian.send_signal(signal.SIGINT)
    assert guardian.stdout.readline() == "asked\n"
    assert child.is_running()
    guardian.send_signal(signal.SIGINT)
    _, errors = guardian.communicate(timeout=20)
    assert guardian.returncode == 130
    assert errors == "dora-rl: ended at once; what was written until now is there\n"
    assert gone(child, orphan)


def test_a_signal_that_comes_twice_at_once_is_one_wish():
    guardian, child, _ = start(600, deaf=True, same_s=60.0)
    guardian.send_signal(signal.SIGINT)
    assert guardian.stdout.readline() == "asked\n"
    guardian.send_signal(signal.SIGINT)
    with pytest.raises(subprocess.TimeoutExpired):
        guardian.wait(0.5)
    child.kill()
    guardian.communicate(timeout=20)


def test_under_nohup_a_closed_terminal_is_no_wish():
    guardian, child, _ = start(600, nohup=True)
    guardian.send_signal(signal.SIGHUP)
    with pytest.raises(subprocess.TimeoutExpired):
        guardian.wait(0.5)
    child.kill()
    guardian.communicate(timeout=20)


def test_when_the_guardian_is_killed_the_command_is_asked_to_end():
    guardian, child, orphan = start(600)
    guardian.kill()
    guardian.communicate(timeout=20)
    assert gone(child)
    os.kill(orphan.pid, signal.SIGKILL)  # the real command ends what it has started; this one does not
