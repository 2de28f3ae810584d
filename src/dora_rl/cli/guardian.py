"""The process that a person starts: it lets a child do the work, and ends whatever the child leaves behind.

A run is a tree of processes, and one that is killed cannot end those that it started. So every command runs in a child
of this process, which the kernel gives all orphans of the tree (a Linux "subreaper"), whoever started them: they get a
moment to end by themselves and are killed then. Whoever asks this process to end, asks the child, always by SIGINT (Ray
answers SIGTERM with a page of addresses); when this process is killed, the kernel does. Who asks a second time, ends
everything at once: this process is never too busy to hear it.
"""

import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable

from dora_rl.run.stopping import ASKING, INTERRUPTED

GRACE_S = 5.0
"""How long orphans may take to end by themselves; engines and Ray's processes take about three seconds."""
END_S = 10.0
"""How long killed processes may take to vanish."""
SAME_S = 0.5
"""A terminal or a shell signals whole groups: what comes within this time of the first signal is the same wish."""
PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36


def guarded(command: Callable[[], int], *, grace_s: float = GRACE_S, same_s: float = SAME_S) -> int:
    """Run the command in a child; its exit status. 128 + n when signal n ended it.

    To be called before any thread is started.
    """
    adopt_orphans()
    guardian = os.getpid()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {*ASKING, signal.SIGCHLD})
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job would ignore it
        _prctl(PR_SET_PDEATHSIG, signal.SIGINT)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        if os.getppid() != guardian:
            raise KeyboardInterrupt  # it was killed before it could be watched
        return command()
    status, at_once = _wait(child, same_s)
    _end_orphans(0.0 if at_once else grace_s)
    if at_once:
        return INTERRUPTED
    if status >= 0:
        return status
    print(
        f"dora-rl: the command was ended by {signal.Signals(-status).name}; what it had started has been ended too",
        file=sys.stderr,
    )
    return 128 - status


def adopt_orphans() -> None:
    """From now on a process whose parent ends becomes a child of this one, if it descends from it."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)


def _wait(child: int, same_s: float) -> tuple[int, bool]:
    """Pass the first wish on, end the child at the second; its exit status, and whether it was ended so."""
    asked_at: float | None = None
    at_once = False
    while True:
        got = signal.sigwaitinfo({*ASKING, signal.SIGCHLD})
        if got.si_signo == signal.SIGCHLD:
            for pid, status in _reap():
                if pid == child:
                    return os.waitstatus_to_exitcode(status), at_once
        elif not _ignored(got.si_signo):
            now = time.monotonic()
            if asked_at is None:
                asked_at = now
                if got.si_pid != 0:  # 0: a terminal, which has told the child too
                    os.kill(child, signal.SIGINT)
            elif now - asked_at > same_s and not at_once:
                at_once = True
                print("dora-rl: ended at once; what was written until now is there", file=sys.stderr, flush=True)
                os.kill(child, signal.SIGKILL)


def _ignored(number: int) -> bool:
    """A closed terminal under nohup."""
    return number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN


def _reap() -> list[tuple[int, int]]:
    """Every child that has ended since, with its wait status."""
    ended: list[tuple[int, int]] = []
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return ended
        if pid == 0:
            return ended
        ended.append((pid, status))


def _end_orphans(grace_s: float) -> None:
    """Whoever asks now, asks for less grace."""
    import psutil

    this = psutil.Process()
    kill_at = time.monotonic() + grace_s
    give_up_at = kill_at + END_S
    while (left := this.children(recursive=True)) and time.monotonic() < give_up_at:
        if time.monotonic() >= kill_at:
            for process in left:
                try:
                    process.kill()
                except psutil.NoSuchProcess:
                    continue
        got = signal.sigtimedwait({*ASKING, signal.SIGCHLD}, 0.1)
        if got is not None and got.si_signo != signal.SIGCHLD:  # a terminal's too
            kill_at = time.monotonic()
        _reap()


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}, {value}) failed; dora-rl needs Linux")
