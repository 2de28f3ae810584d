"""How a real engine ends: stuck, killed, or orphaned."""

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from dora_rl.runtime.ports import ProcessLost
from dora_rl.wire.errors import RemoteError
from engine.conftest import ROLLOUT, Rig, ended

pytestmark = pytest.mark.engine

PROMPT = tuple(range(3, 43))


def test_an_engine_that_stands_still_or_dies_is_an_error_for_every_answer_it_has(model):
    rig = Rig(model, ROLLOUT.model_copy(update={"no_progress_s": 10.0, "move_timeout_s": 2.0}))
    (pid,) = rig.engine_pids

    async def after(sent: signal.Signals):
        """How three answers and then an order to leave end when the engine's process gets this signal."""
        requests = [rig.request(PROMPT, max_tokens=96) for _ in range(3)]
        answers = [asyncio.ensure_future(rig.instance.generate(request)) for request in requests]
        while not await rig.instance.partials():
            await asyncio.sleep(0)
        os.kill(pid, sent)
        leaving = asyncio.ensure_future(rig.instance.detach(requests[0].rollout, 0, keep=True))
        errors = await asyncio.gather(*answers, leaving, return_exceptions=True)
        return [(type(error), str(error)) for error in errors]

    try:
        rig.run(rig.instance.load(rig.published(1)))
        *answers, (kind, text) = rig.run(after(signal.SIGSTOP))
        assert kind is RemoteError
        assert "did not answer keep_kv within rollout.move_timeout_s = 2 s" in text
        for kind, text in answers:
            assert kind is RemoteError
            assert "got no token for rollout.no_progress_s = 10 s" in text
        os.kill(pid, signal.SIGCONT)
        for kind, text in rig.run(after(signal.SIGKILL)):
            assert kind is ProcessLost
            assert "exit codes [-9]" in text
        with pytest.raises(ProcessLost, match="is gone"):  # an engine that has nothing to do dies unseen otherwise
            rig.run(rig.instance.partials())
    finally:
        rig.close()


OWNER = """
import sys
from engine.conftest import Model, Rig
from pathlib import Path

if __name__ == "__main__":
    rig = Rig(Model(Path(sys.argv[1])))
    rig.run(rig.instance.load(rig.published(1)))
    print("engine", *rig.engine_pids, flush=True)
    sys.stdin.read()
"""


def test_an_engine_ends_when_the_process_that_owns_it_is_killed(model, tmp_path):
    script = tmp_path / "owner.py"
    script.write_text(OWNER)
    tests = Path(__file__).parents[1]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tests.parent / "src"), str(tests)])}
    owner = subprocess.Popen(
        [sys.executable, str(script), str(model.folder)],
        env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    with owner:
        said = next(line for line in owner.stdout if line.startswith("engine"))
        engine = os.pidfd_open(int(said.split()[1]))
        owner.kill()
        assert ended(engine)
