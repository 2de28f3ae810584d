"""The reward pool with real Ray workers: whatever a function does, the group gets None or its rewards, never a 0."""

import asyncio
import sys
from contextlib import asynccontextmanager

import pytest

from dora_rl.runtime.rewards import RewardPool, named
from dora_rl.wire.errors import RemoteError
from dora_rl.wire.rollouts import Prompt
from support import leftovers_collected

EXACT = "dora_rl.rl.rewards:exact_answer"

FUNCTIONS = '''
import os
import threading
from pathlib import Path


def length(completions, **_):
    return [float(len(completion)) for completion in completions]


def hang_on_hang(completions, **_):
    """Waits for ever on a completion that says so."""
    if "hang" in completions:
        threading.Event().wait()
    return [1.0] * len(completions)


def die_on_die(completions, **_):
    if "die" in completions:
        os._exit(1)
    return [1.0] * len(completions)


def die_once(completions, mark, **_):
    """Dies the first time only: the file `mark` remembers that it has."""
    if not Path(mark[0]).exists():
        Path(mark[0]).touch()
        os._exit(1)
    return [1.0] * len(completions)


def parse(completions, **_):
    return [float(completion) for completion in completions]
'''

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def functions(tmp_path_factory):
    """A user's module of reward functions, importable here and in the workers; Ray runs while the module is tested."""
    import ray

    folder = tmp_path_factory.mktemp("user")
    (folder / "user_rewards.py").write_text(FUNCTIONS)
    path = ":".join([str(folder), *(entry for entry in sys.path if entry)])
    ray.init(
        num_cpus=1,
        include_dashboard=False,
        log_to_driver=False,
        configure_logging=False,
        runtime_env={"env_vars": {"PYTHONPATH": path}},
    )
    yield "user_rewards"
    with leftovers_collected():
        ray.shutdown()


@asynccontextmanager
async def pool(*specs, timeout_s=30.0, workers=1, stop_on_error=False):
    """With a deadline: a pool that hangs is a failure of the test, not of the patience of whoever runs it."""
    opened = RewardPool(specs, workers=workers, timeout_s=timeout_s, decode=str, stop_on_error=stop_on_error)
    try:
        async with asyncio.timeout(120):
            yield opened
    finally:
        await opened.shutdown()


def prompt(**columns) -> Prompt:
    question = ({"role": "user", "content": "?"},)
    return Prompt(prompt_id="p", messages=question, token_ids=(1,), columns=columns, is_chat=False)


async def score(opened, *completions, **columns):
    return await opened.score(
        prompt=prompt(**columns), completions=completions, completion_ids=[(row,) for row in range(len(completions))]
    )


def test_a_group_gets_the_sum_of_its_functions_and_each_of_them(functions):
    async def story():
        async with pool(EXACT, f"{functions}:length", workers=2) as opened:
            groups = await asyncio.gather(
                *(score(opened, "Answer: 4", f"Answer: {n}", answer="4") for n in range(3, 6))
            )
        for group, second in zip(groups, (0.0, 1.0, 0.0), strict=True):
            assert [dict(result.values) for result in group] == [
                {"exact_answer": 1.0, "length": 9.0},
                {"exact_answer": second, "length": 9.0},
            ]
            assert [result.value for result in group] == [10.0, 9.0 + second]
            assert [result.note for result in group] == ["", ""]

    asyncio.run(story())


def test_an_empty_group_needs_no_worker(functions):
    async def story():
        async with pool(EXACT) as opened:
            assert await score(opened) == []

    asyncio.run(story())


def test_a_function_that_hangs_costs_its_group_the_rewards_and_nobody_else(functions):
    async def story():
        async with pool(f"{functions}:hang_on_hang", timeout_s=3.0) as opened:
            slow, quick = await asyncio.gather(score(opened, "hang", "x"), score(opened, "x"))
        assert [result.value for result in slow] == [None, None]
        assert all("longer than reward.timeout_s = 3 s" in result.note for result in slow)
        assert [result.value for result in quick] == [1.0]

    asyncio.run(story())


def test_an_exception_costs_the_group_its_rewards_and_names_function_and_row(functions):
    async def story():
        async with pool(f"{functions}:parse") as opened:
            broken = await score(opened, "1", "one")
            whole = await score(opened, "1", "2")
        assert [result.value for result in broken] == [None, None]
        assert all("prompt p: reward function parse raised on row 1: ValueError" in result.note for result in broken)
        assert all("\n" not in result.note for result in broken)
        assert [result.value for result in whole] == [1.0, 2.0]

    asyncio.run(story())


def test_an_exception_is_an_error_where_the_run_is_to_stop_at_it(functions):
    async def story():
        async with pool(f"{functions}:parse", stop_on_error=True) as opened:
            with pytest.raises(RemoteError, match="reward function parse raised on row 1"):
                await score(opened, "1", "one")

    asyncio.run(story())


def test_a_worker_that_dies_by_chance_is_replaced_and_its_group_scored(functions, tmp_path):
    async def story():
        async with pool(f"{functions}:die_once") as opened:
            results = await score(opened, "a", "b", mark=str(tmp_path / "died"))
        assert (tmp_path / "died").exists()
        assert [result.value for result in results] == [1.0, 1.0]

    asyncio.run(story())


def test_a_group_that_kills_two_workers_has_no_rewards_and_the_next_group_has(functions):
    async def story():
        async with pool(f"{functions}:die_on_die") as opened:
            deadly = await score(opened, "die", "x")
            harmless = await score(opened, "x")
        assert [result.value for result in deadly] == [None, None]
        assert all(result.note.startswith("prompt p: two reward workers died scoring it: ") for result in deadly)
        assert [result.value for result in harmless] == [1.0]

    asyncio.run(story())


def test_a_pool_that_cannot_start_says_why_to_every_caller(functions):
    async def story():
        async with pool("no_such_rewards:f", workers=2) as opened:
            answers = await asyncio.gather(*(score(opened, "x") for _ in range(3)), return_exceptions=True)
            answers += [await asyncio.gather(score(opened, "x"), return_exceptions=True)]
        for answer in [*answers[:3], *answers[3]]:
            assert isinstance(answer, RemoteError)
            assert "cannot start a reward worker: reward.functions: importing 'no_such_rewards'" in str(answer)
            assert "\n" not in str(answer)

    asyncio.run(story())


def test_after_a_shutdown_nothing_waits(functions):
    async def story():
        async with pool(EXACT) as opened:
            await opened.shutdown()
            with pytest.raises(RemoteError, match="shut down"):
                await score(opened, "x", answer="x")

    asyncio.run(story())


def test_a_cancelled_group_gives_its_worker_back(functions):
    async def story():
        async with pool(f"{functions}:hang_on_hang", timeout_s=60.0) as opened:
            assert [result.value for result in await score(opened, "x")] == [1.0]
            waiting = asyncio.create_task(score(opened, "hang"))
            await asyncio.wait([waiting], timeout=1.0)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            assert [result.value for result in await score(opened, "x")] == [1.0]

    asyncio.run(story())


def test_functions_are_called_by_their_short_names_unless_two_share_one(functions):
    assert list(named(["a:f", "a:g"])) == ["f", "g"]
    assert list(named(["a:f", "b:f", "a:g"])) == ["a:f", "b:f", "g"]
