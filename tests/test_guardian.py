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
import os, subprocess, sys, time
from dora_rl.cli.guardian import guarded

def command():
    orphan = subprocess.run([sys.executable, "-c", LEAVES], stdout=subprocess.PIPE, text=True).stdout.strip()
    print(os.getpid(), orphan, flush=True)
    try:
        time.sleep(BODY)
    except KeyboardInterrupt:
        return 130
    return 7

sys.exit(guarded(command, grace_s=0.2))
"""


def start(seconds: float) -> "tuple[subprocess.Popen[str], psutil.Process, psutil.Process]":
    """The guardian, the process that does the work, and an orphan which that one has left."""
    program = PROGRAM.replace("LEAVES", repr(LEAVES)).replace("BODY", str(seconds))
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


def test_when_the_guardian_is_killed_the_command_is_asked_to_end():
    guardian, child, orphan = start(600)
    guardian.kill()
    guardian.communicate(timeout=20)
    assert gone(child)
    os.kill(orphan.pid, signal.SIGKILL)  # the real command ends what it has started; this one does not
