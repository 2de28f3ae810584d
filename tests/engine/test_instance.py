"""A real engine on the tiny model: what it samples, what it refuses, and how it proves which weights it has."""

import asyncio
import contextlib
import json
import os
from pathlib import Path

import pytest
import torch

from dora_rl.core.messages import ProtocolError
from dora_rl.run.capacity import kv_capacity_tokens, kv_token_bytes
from dora_rl.wire.errors import RemoteError

pytestmark = pytest.mark.engine

PROMPT = tuple(3 + (7 * i) % 60 for i in range(100))


def test_the_instance_says_what_it_is(rig):
    descriptor = rig.descriptor
    assert (descriptor.slots, descriptor.devices, descriptor.max_versions) == (8, ("cpu",), 1)
    assert descriptor.layout == "4x2x32-float32-block32-tp1-cpu"
    facts = json.loads((rig.model.folder / "config.json").read_text(encoding="utf-8"))
    assert descriptor.kv_capacity_tokens == kv_capacity_tokens(rig.rollout, kv_token_bytes(facts, "float32"))


def test_sampled_tokens_carry_the_log_probabilities_that_transformers_computes(rig):
    for result in rig.generate(*(rig.request(PROMPT[:n], temperature=0.8) for n in (1, 31, 32, 33, 100))):
        assert len(result.token_ids) == len(result.logprobs) == 40
        assert (result.finish_reason, result.version) == ("length", 1)
        prompt = PROMPT[: (1, 31, 32, 33, 100)[(result.rollout - 1) % 5]]
        expected = rig.model.logprobs(prompt, result.token_ids, 0.8)
        assert result.logprobs == pytest.approx(expected, abs=1e-3)


def test_answers_to_one_prompt_differ(rig):
    results = rig.generate(*(rig.request(PROMPT) for _ in range(4)))
    assert len({result.token_ids for result in results}) == 4


def test_a_greedy_answer_takes_the_likeliest_token_and_reports_temperature_one(rig):
    (alone,) = rig.generate(rig.request(PROMPT, greedy=True))
    assert alone.logprobs == pytest.approx(rig.model.logprobs(PROMPT, alone.token_ids, 1.0), abs=1e-3)
    beside_sampled, _ = rig.generate(rig.request(PROMPT, greedy=True), rig.request(PROMPT))
    assert beside_sampled.token_ids == alone.token_ids
    assert beside_sampled.logprobs == pytest.approx(alone.logprobs, abs=1e-3)


def test_the_stop_token_is_part_of_the_answer_and_only_the_requests_own_ids_stop_it(rig):
    (whole,) = rig.generate(rig.request(PROMPT, greedy=True))
    stop = whole.token_ids[10]
    (stopped,) = rig.generate(rig.request(PROMPT, greedy=True, stop_token_ids=(stop,)))
    assert stopped.token_ids == whole.token_ids[: whole.token_ids.index(stop) + 1]
    assert stopped.finish_reason == "stop"
    assert len(stopped.logprobs) == len(stopped.token_ids)


def test_a_continuation_gives_the_rest_of_the_answer_within_what_is_left_of_the_budget(rig):
    (whole,) = rig.generate(rig.request(PROMPT, greedy=True, max_tokens=40))
    first = whole.token_ids[:25]
    (rest,) = rig.generate(rig.request(PROMPT, greedy=True, completion_token_ids=first, max_tokens=15))
    assert first + rest.token_ids == whole.token_ids
    assert rest.logprobs == pytest.approx(whole.logprobs[25:], abs=1e-3)
    with pytest.raises(ProtocolError, match="asks for 96 more tokens after 185"):
        rig.generate(rig.request((5,) * 160, completion_token_ids=first, max_tokens=96))
    with pytest.raises(ProtocolError, match="asks for 0 more tokens"):
        rig.generate(rig.request(PROMPT, max_tokens=0))


def test_members_of_a_group_share_their_prompt_in_whole_blocks(rig):
    before = rig.instance.prefix_tokens_shared
    prompt = tuple(reversed(PROMPT))
    results = rig.generate(*(rig.request(prompt) for _ in range(6)))
    assert rig.instance.prefix_tokens_shared - before == 5 * 96  # 100 tokens are three blocks of 32 and a bit
    for result in results:
        assert result.logprobs == pytest.approx(rig.model.logprobs(prompt, result.token_ids, 0.8), abs=1e-3)


def test_a_reload_shares_nothing_with_the_version_before(rig):
    rig.generate(rig.request(PROMPT))
    rig.run(rig.instance.load(rig.published(2)))
    before = rig.instance.prefix_tokens_shared
    rig.generate(rig.request(PROMPT, version=2))
    assert rig.instance.prefix_tokens_shared == before


def test_another_version_than_the_served_one_is_refused(rig):
    with pytest.raises(ProtocolError, match="wants version 2, served is 1"):
        rig.generate(rig.request(PROMPT, version=2))


def test_partial_reports_add_up_to_a_prefix_of_the_answer_and_a_detached_answer_keeps_what_it_has(rig):
    request = rig.request(PROMPT, max_tokens=90)
    reports = []

    async def story():
        answer = asyncio.ensure_future(rig.instance.generate(request))
        while sum(len(report.token_ids) for report in reports) < 20:
            reports.extend(await rig.instance.partials())
            await asyncio.sleep(0)
        with pytest.raises(ProtocolError, match=r"cannot be loaded while answers \[\d+\] run"):
            await rig.instance.load(rig.published(2))
        with pytest.raises(ProtocolError, match="runs already"):
            await rig.instance.generate(request)
        await rig.instance.detach(request.rollout, request.attempt, keep=False)
        await rig.instance.detach(request.rollout, request.attempt, keep=True)
        return await answer

    result = rig.run(story())
    reported = tuple(token for report in reports for token in report.token_ids)
    assert result.finish_reason == "detached"
    assert 20 <= len(reported) <= len(result.token_ids) < 90
    assert result.token_ids[: len(reported)] == reported
    assert result.logprobs == pytest.approx(rig.model.logprobs(PROMPT, result.token_ids, 0.8), abs=1e-3)
    assert rig.run(rig.instance.partials()) == []


@pytest.mark.parametrize(
    "name",
    ["model.embed_tokens.weight", "model.layers.3.mlp.down_proj.weight", "model.layers.0.self_attn.k_proj.weight"],
)
def test_weights_that_are_not_the_published_ones_turn_the_canary_red_and_are_not_served(rig, name):
    changed = rig.model.tensors[name] + 0.01 * torch.randn(rig.model.tensors[name].shape)
    with pytest.raises(RemoteError, match=r"serves other weights than were published"):
        rig.run(rig.instance.load(rig.published(2, **{name: changed})))
    for version in (1, 2):
        with pytest.raises(ProtocolError, match="served is None"):
            rig.generate(rig.request(PROMPT, version=version))
    assert rig.run(rig.instance.load(rig.published(3))).canary_max_abs_diff < 1e-3


def test_bytes_damaged_on_the_way_are_refused_before_they_reach_the_engine(rig):
    manifest = rig.published(2)
    manifest.tensors[5].shards[0].handle[0] ^= 1
    with pytest.raises(RemoteError, match="the bytes have checksum"):
        rig.run(rig.instance.load(manifest))
    assert staged_here() == []


def test_a_load_leaves_nothing_in_shared_memory(rig):
    assert staged_here() == []
    for pid in rig.engine_pids:
        mapped = Path(f"/proc/{pid}/maps").read_text()
        assert "/dev/shm/" not in mapped
        assert "memfd:weights" not in mapped


def test_the_decode_rate_is_measured_on_the_loaded_version(rig):
    assert rig.run(rig.instance.measure_decode(batch=4, tokens=16, prompt=PROMPT)) > 0


def staged_here() -> list[str]:
    """Names of open staged memory in this process."""
    links = []
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the listing's own descriptor
            links.append(os.readlink(entry))
    return [link for link in links if "memfd:weights" in link]
