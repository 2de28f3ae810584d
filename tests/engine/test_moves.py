"""Running answers move between two real engines and go on as if they had not."""

import asyncio
from dataclasses import replace
from random import Random

import pytest

from dora_rl.core.types import Version
from dora_rl.runtime.ports import GenerateRequest, GenerateResult
from engine.conftest import Rig

pytestmark = pytest.mark.engine

LENGTH = 96


@pytest.fixture(scope="module")
def rigs(model, running):
    """The shared engine and another one, both serving the model's own weights as version 1."""
    other = Rig(model)
    pair = (running, other)
    for rig in pair:
        rig.run(rig.instance.load(rig.published(1)))
    yield pair
    other.close()


def cut(rig: Rig, request: GenerateRequest, after: int) -> GenerateResult:
    """The segment up to about this many tokens, detached with its KV."""

    async def story() -> GenerateResult:
        segment = asyncio.ensure_future(rig.instance.generate(request))
        seen = 0
        while seen < after and not segment.done():
            await asyncio.sleep(0)
            seen += sum(len(partial.token_ids) for partial in await rig.instance.partials())
        await rig.instance.detach(request.rollout, request.attempt, keep=True)
        return await segment

    result: GenerateResult = rig.run(story())
    return result


def hand_over(source: Rig, target: Rig, result: GenerateResult) -> str:
    assert result.kept is not None
    why: str = target.run(target.instance.receive_kv(result.rollout, result.kept, None))
    source.run(source.instance.drop_kv(result.rollout))
    return why


@pytest.mark.parametrize("seed", range(6))
def test_a_greedy_answer_that_moves_has_the_tokens_of_one_that_stays(rigs, seed):
    rng = Random(seed)
    prompt = tuple(rng.randrange(3, 60) for _ in range(rng.choice((1, 31, 32, 33, 64, 100))))
    (whole,) = rigs[0].generate(rigs[0].request(prompt, greedy=True, max_tokens=LENGTH))
    tokens: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    request = rigs[0].request(prompt, greedy=True, max_tokens=LENGTH)
    for hop in range(rng.randint(1, 3)):
        here, there = rigs[hop % 2], rigs[(hop + 1) % 2]
        part = cut(here, request, after=rng.randint(1, 25))
        tokens, logprobs = tokens + part.token_ids, logprobs + part.logprobs
        if part.finish_reason != "detached":
            break
        assert hand_over(here, there, part) == ""
        request = there.request(prompt, greedy=True, completion_token_ids=tokens, max_tokens=LENGTH - len(tokens))
        request = replace(request, rollout=part.rollout)
    else:
        (rest,) = there.generate(request)
        assert rest.recomputed_tokens == 0
        assert rest.loaded_tokens == len(prompt) + len(tokens) - 1
        tokens, logprobs = tokens + rest.token_ids, logprobs + rest.logprobs
    assert tokens == whole.token_ids
    assert logprobs == pytest.approx(whole.logprobs, abs=1e-4)
    assert whole.version == Version(1)


def test_an_answer_that_is_told_to_leave_as_it_arrives_costs_the_engine_nothing(rigs):
    here, there = rigs
    prompt = tuple(Random(7).randrange(3, 60) for _ in range(150))
    (whole,) = here.generate(here.request(prompt, greedy=True, max_tokens=LENGTH))

    async def arrive_and_leave(request: GenerateRequest, after_s: float) -> GenerateResult:
        segment = asyncio.ensure_future(there.instance.generate(request))
        await asyncio.sleep(after_s)
        await there.instance.detach(request.rollout, request.attempt, keep=False)
        return await segment

    for after_s in (0.0, 0.0, 0.001, 0.002, 0.005):
        request = here.request(prompt, greedy=True, max_tokens=LENGTH)
        part = cut(here, request, after=4)
        assert hand_over(here, there, part) == ""
        left = LENGTH - len(part.token_ids)
        onward = replace(request, attempt=1, completion_token_ids=part.token_ids, max_tokens=left)
        gone = there.run(arrive_and_leave(onward, after_s))
        tokens = part.token_ids + gone.token_ids
        last = replace(onward, attempt=2, completion_token_ids=tokens, max_tokens=LENGTH - len(tokens))
        (rest,) = there.generate(last)
        assert tokens + rest.token_ids == whole.token_ids
