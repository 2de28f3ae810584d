"""The configuration: what it takes, what it refuses, and that every refusal is one line with a way out."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dora_rl.config import Config, ConfigError, config_hash, dump_config, load_config, parse_config

MODEL = {"model": {"path": "tiny:0"}}


@pytest.fixture
def toml(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text('[model]\npath = "tiny:0"\n[schedule]\nmax_staleness_versions = 2\n')
    return path


def refusal(raw: dict) -> str:
    with pytest.raises(ConfigError) as caught:
        parse_config({**MODEL, **raw})
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_a_model_is_all_one_has_to_name():
    config = parse_config(MODEL)
    assert config.model.path == "tiny:0"
    assert config.schedule.batch == config.schedule.ready_target == config.schedule.groups_per_iteration


def test_an_unknown_key_is_refused_and_the_nearest_known_one_named():
    message = refusal({"schedule": {"max_stalenes": 1}})
    assert message == "unknown setting schedule.max_stalenes; did you mean schedule.max_staleness_versions?"


def test_an_unknown_section_is_refused_and_the_nearest_known_one_named():
    assert refusal({"shedule": {}}) == "unknown section shedule; did you mean schedule?"


def test_a_missing_model_is_named():
    with pytest.raises(ConfigError, match=r"^model is required and missing"):
        parse_config({})


@pytest.mark.parametrize(
    ("raw", "setting"),
    [
        ({"schedule": {"max_staleness_versions": -1}}, "schedule.max_staleness_versions"),
        ({"schedule": {"group_size": 1}}, "schedule.group_size"),
        ({"schedule": {"strategy": "fast"}}, "schedule.strategy"),
        ({"rollout": {"temperature": 0.0}}, "rollout.temperature"),
        ({"rollout": {"temperature": 0.005}}, "rollout.temperature"),
        ({"rollout": {"temperature": 5.0}}, "rollout.temperature"),
        ({"rollout": {"block_tokens": 7}}, "rollout.block_tokens"),
        ({"train": {"learning_rate": float("inf")}}, "train.learning_rate"),
        ({"reward": {"functions": ()}}, "reward.functions"),
        ({"run": {"seed": "7"}}, "run.seed"),
        ({"train": {"share_prefix": 1}}, "train.share_prefix"),
        ({"data": {"tasks": "gcd"}}, "data.tasks"),
    ],
)
def test_a_value_out_of_bounds_or_of_the_wrong_type_is_named_with_what_came(raw, setting):
    ((_, values),) = raw.items()
    ((_, value),) = values.items()
    message = refusal(raw)
    assert message.startswith(setting)
    assert f"got {value!r}" in message


@pytest.mark.parametrize("cut", [{"top_p": 0.9}, {"top_k": 50}])
def test_sampling_that_cuts_off_probability_is_refused_because_it_biases_the_ratio(cut):
    assert "biased" in refusal({"rollout": cut})


def test_k_zero_is_allowed_and_means_on_policy():
    assert parse_config({**MODEL, "schedule": {"max_staleness_versions": 0}}).schedule.max_staleness_versions == 0


def test_set_overrides_the_file_and_takes_bare_words_numbers_and_arrays(toml):
    overrides = ["schedule.strategy=sync", "run.iterations = 3", "data.tasks=['gcd', 'chain_sum']", "run.name=a b"]
    config = load_config(toml, overrides)
    assert config.schedule.strategy == "sync"
    assert config.run.iterations == 3
    assert config.data.tasks == ("gcd", "chain_sum")
    assert config.run.name == "a b"
    assert config.schedule.max_staleness_versions == 2


def test_the_last_of_two_overrides_wins(toml):
    assert load_config(toml, ["run.seed=1", "run.seed=2"]).run.seed == 2


@pytest.mark.parametrize("override", ["seed=1", "run.seed", "run.=1", ".seed=1", ""])
def test_an_override_without_section_key_or_value_is_refused_with_an_example(toml, override):
    with pytest.raises(ConfigError, match=r"section\.key=VALUE, got .*for example"):
        load_config(toml, [override])


def test_an_override_of_an_unknown_key_is_refused_like_one_in_the_file(toml):
    with pytest.raises(ConfigError, match=r"did you mean run\.seed"):
        load_config(toml, ["run.sed=1"])


def test_a_file_that_is_missing_or_not_toml_is_refused_by_name(tmp_path):
    with pytest.raises(ConfigError, match=r"absent\.toml.*name an existing"):
        load_config(tmp_path / "absent.toml")
    broken = tmp_path / "broken.toml"
    broken.write_text("[run\n")
    with pytest.raises(ConfigError, match=r"broken\.toml is not valid TOML"):
        load_config(broken)


def test_nothing_can_be_changed_after_it_was_read():
    with pytest.raises(ValueError, match="frozen"):
        parse_config(MODEL).run.seed = 1


NAMES = st.text(st.characters(exclude_characters="/.", exclude_categories=("Cs", "Cc")), min_size=1)
configs = st.builds(
    lambda run, model, data, schedule, train: parse_config(
        {"run": run, "model": model, "data": data, "schedule": schedule, "train": train}
    ),
    run=st.fixed_dictionaries({"name": NAMES, "seed": st.integers(0, 2**31), "iterations": st.integers(1, 10**6)}),
    model=st.fixed_dictionaries({"path": st.text(), "dtype": st.sampled_from(["float32", "bfloat16"])}),
    data=st.fixed_dictionaries({"tasks": st.lists(st.text()), "path": st.none() | st.text()}),
    schedule=st.fixed_dictionaries(
        {
            "strategy": st.sampled_from(["sync", "dora"]),
            "max_staleness_versions": st.integers(0, 100),
            "ready_target_groups": st.none() | st.integers(1, 1000),
        }
    ),
    train=st.fixed_dictionaries(
        {
            "learning_rate": st.floats(0, 1, exclude_min=True),
            "max_grad_norm": st.floats(1e-9, 1e300),
            "share_prefix": st.booleans(),
        }
    ),
)


@given(configs)
def test_a_dumped_configuration_reads_back_as_the_same_one_with_the_same_hash(config: Config):
    again = parse_config(tomllib.loads(dump_config(config)))
    assert again == config
    assert config_hash(again) == config_hash(config)


def test_two_different_configurations_have_different_hashes():
    assert config_hash(parse_config(MODEL)) != config_hash(parse_config({**MODEL, "run": {"seed": 1}}))


def test_reading_a_configuration_imports_neither_torch_nor_ray_nor_vllm():
    program = "import sys, dora_rl.config; print(*{'torch', 'ray', 'vllm', 'transformers', 'numpy'} & set(sys.modules))"
    source = Path(__file__).parent.parent / "src"
    result = subprocess.run(
        [sys.executable, "-c", program], env={"PYTHONPATH": str(source)}, capture_output=True, text=True, check=True
    )
    assert result.stdout.split() == []
