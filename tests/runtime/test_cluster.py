"""What becomes of another process's failure on its way through Ray."""

import asyncio

import pytest
from ray.exceptions import RayTaskError

from dora_rl.runtime.cluster import call
from dora_rl.runtime.ports import ProcessLost
from dora_rl.wire.errors import RemoteError


def outcome(cause: Exception) -> BaseException:
    async def remote() -> None:
        raise RayTaskError("f", "Traceback ...", cause, ip="127.0.0.1").as_instanceof_cause()

    with pytest.raises(RemoteError) as raised:
        asyncio.run(call(remote(), "engine-0"))
    return raised.value


def test_an_engine_that_is_gone_is_still_gone_on_this_side() -> None:
    error = outcome(ProcessLost("the engine's process is gone (exit codes [-9])"))
    assert isinstance(error, ProcessLost)
    assert str(error) == "engine-0: the engine's process is gone (exit codes [-9])"


def test_an_error_of_the_other_side_is_one_line_and_no_loss() -> None:
    error = outcome(ValueError("a group came twice"))
    assert not isinstance(error, ProcessLost)
    assert str(error) == "engine-0: a group came twice"
