"""One trainer process: publication, its copy on disk, and the clock of when it was busy."""

from pathlib import Path

import pytest

from dora_rl.config import parse_config
from dora_rl.core.types import Version
from dora_rl.models.source import prepare_model
from dora_rl.train.rank import TrainerRank
from dora_rl.wire.weights import MemoryTransport, saved_versions


@pytest.fixture
def rank(tmp_path: Path) -> TrainerRank:
    prepare_model("tiny:0", tmp_path / "model")
    config = parse_config({"model": {"path": "tiny:0"}, "train": {"threads": 1}})
    return TrainerRank(config, tmp_path / "model", tmp_path / "weights", tmp_path / "export", MemoryTransport())


def test_a_copy_on_disk_that_failed_is_made_by_the_next_try(rank: TrainerRank, tmp_path: Path) -> None:
    (tmp_path / "weights").write_text("in the way")
    rank.publish(Version(0), None)
    with pytest.raises(OSError, match="weights"):
        rank.publish(Version(1), Version(0))
    (tmp_path / "weights").unlink()
    rank.publish(Version(1), Version(0))
    rank.export()
    assert list(saved_versions(tmp_path / "weights")) == [0, 1]


def test_a_version_published_twice_has_the_same_bytes(rank: TrainerRank) -> None:
    assert rank.publish(Version(0), None).checksum == rank.publish(Version(0), None).checksum
