"""What a machine is too small for is said before anything starts."""

import pytest

from dora_rl.config import ConfigError, parse_config
from dora_rl.run.capacity import (
    GIB,
    Machine,
    check_capacity,
    check_kv_cache,
    kv_token_bytes,
    memory_parts,
)
from dora_rl.runtime.cluster import shared_bytes

LAPTOP = Machine(cores=2, memory_bytes=16 * GIB, shared_bytes=4 * GIB)
SMALL = {"weight_bytes": GIB // 2, "vocabulary": 49152}


def config(**rollout):
    return parse_config({"model": {"path": "tiny:0"}, "rollout": {"max_completion_tokens": 64} | rollout})


def test_a_laptop_can_hold_two_instances_of_a_small_model() -> None:
    check_capacity(config(), **SMALL, machine=LAPTOP)


@pytest.mark.parametrize(
    ("settings", "machine", "fault"),
    [
        ({"cpus_per_instance": 3}, LAPTOP, r"rollout.cpus_per_instance = 3, but this machine has 2 cores; lower it"),
        ({"instances": 17}, LAPTOP, r"= 17 threads, but this machine has 2 cores and 8 may share one"),
        ({"instances": 4, "kv_cache_gib": 3.0}, LAPTOP, r"of memory are needed, 16.0 GiB are free; most goes to the"),
        ({}, Machine(cores=2, memory_bytes=16 * GIB, shared_bytes=GIB), r"shared memory are needed .* 1.0 GiB free"),
    ],
)
def test_too_little_of_anything_is_refused_with_the_setting_to_lower(settings, machine, fault) -> None:
    with pytest.raises(ConfigError, match=fault) as caught:
        check_capacity(config(**settings), **SMALL, machine=machine)
    assert "\n" not in str(caught.value)


def test_every_instance_costs_its_weights_and_its_cache() -> None:
    one, two = (sum(memory_parts(config(instances=n, kv_cache_gib=2.0), **SMALL).values()) for n in (1, 2))
    assert two - one == pytest.approx(SMALL["weight_bytes"] + 2.0 * GIB + 0.8 * GIB)


def test_the_store_holds_all_versions_that_may_be_asked_for() -> None:
    assert shared_bytes(config(), weight_bytes=GIB) == 5 * GIB
    assert shared_bytes(config(), weight_bytes=1) == 256 * 2**20


def test_a_kv_cache_that_holds_no_whole_answer_is_refused_with_the_least_that_does() -> None:
    facts = {"num_hidden_layers": 4, "num_attention_heads": 4, "hidden_size": 128, "num_key_value_heads": 2}
    assert kv_token_bytes(facts, "float32") == 2 * 4 * 2 * 32 * 4
    assert kv_token_bytes(facts, "bfloat16") == 2 * 4 * 2 * 32 * 2
    assert kv_token_bytes({"model_type": "of another kind"}, "float32") == 0
    with pytest.raises(ConfigError, match=r"holds 0 tokens of this model, .* raise it to 0.0012 or more"):
        check_kv_cache(config(kv_cache_gib=1e-5), facts)
    check_kv_cache(config(kv_cache_gib=0.0012), facts)


def test_this_machine_says_what_it_has() -> None:
    here = Machine.here()
    assert here.cores >= 1
    assert here.memory_bytes > 0
