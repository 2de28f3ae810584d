"""A checkpoint is whole or none, and a trainer that goes on from it makes the step that it would have made."""

import pytest
import torch

from dora_rl.train.checkpoint import Checkpoint, load_checkpoint, prune_checkpoints, save_checkpoint


def made(iteration=3) -> Checkpoint:
    weights = {"w": torch.arange(6.0).reshape(2, 3)}
    moments = {"w/step": torch.tensor(3.0), "w/exp_avg": torch.ones(2, 3), "w/exp_avg_sq": torch.zeros(2, 3)}
    return Checkpoint(iteration=iteration, version=2, model=weights, optimizer=moments)


def test_what_was_saved_is_what_is_loaded(tmp_path) -> None:
    save_checkpoint(tmp_path / "3", made())
    back = load_checkpoint(tmp_path / "3")
    assert (back.iteration, back.version) == (3, 2)
    assert torch.equal(back.model["w"], made().model["w"])
    assert {name: value.tolist() for name, value in back.optimizer.items()} == {
        name: value.tolist() for name, value in made().optimizer.items()
    }


def test_one_without_its_mark_or_with_another_files_bytes_is_refused(tmp_path) -> None:
    folder = tmp_path / "3"
    save_checkpoint(folder, made())
    (folder / "complete").unlink()
    with pytest.raises(ValueError, match=r"no complete checkpoint"):
        load_checkpoint(folder)
    (folder / "complete").touch()
    data = bytearray((folder / "optimizer.safetensors").read_bytes())
    data[-1] ^= 1
    (folder / "optimizer.safetensors").write_bytes(bytes(data))
    with pytest.raises(ValueError, match=r"optimizer.safetensors has checksum .* expected"):
        load_checkpoint(folder)
    (folder / "trainer.json").write_text("{")
    with pytest.raises(ValueError, match=r"does not load"):
        load_checkpoint(folder)


def test_the_newest_stay_and_what_was_not_completed_is_not_counted(tmp_path) -> None:
    for iteration in (2, 4, 10):
        save_checkpoint(tmp_path / str(iteration), made(iteration))
    (tmp_path / "12").mkdir()
    prune_checkpoints(tmp_path, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["10", "12", "4"]
