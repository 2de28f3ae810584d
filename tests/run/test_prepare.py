"""What is met before anything starts."""

from pathlib import Path

import pytest

from dora_rl.config import ConfigError, parse_config
from dora_rl.run.launch import prepare


def test_a_folder_with_somebodys_files_is_refused_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years")
    with pytest.raises(ConfigError, match="name a new one with --run-dir"):
        prepare(parse_config({"model": {"path": "tiny:0"}}), tmp_path, print)
    assert (tmp_path / "thesis.txt").read_text() == "years"


def test_a_configuration_that_cannot_run_leaves_no_folder(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no/such"):
        prepare(parse_config({"model": {"path": "no/such"}}), tmp_path / "run", print)
    assert not (tmp_path / "run").exists()


def test_a_reward_that_cannot_be_imported_is_named(tmp_path: Path) -> None:
    config = parse_config(
        {
            "model": {"path": "tiny:0"},
            "data": {"tasks": ("letter_counting",)},
            "reward": {"functions": ("no_such_module:score",)},
        }
    )
    with pytest.raises(ConfigError, match="no_such_module"):
        prepare(config, tmp_path / "run", print)
