"""`checkpoints/<iteration>/`: what a trainer needs to go on from there. Tensors and JSON, nothing that executes.

model.safetensors       the weights
optimizer.safetensors   AdamW's step count and both moments of every parameter
trainer.json            iteration, version, checksums of both
complete                written last: a folder without it is no checkpoint
"""

import json
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from safetensors.torch import load_file, save_file
from torch import Tensor

from dora_rl.wire.files import flush, readable_like_others
from dora_rl.wire.weights import weights_checksum

_MODEL, _OPTIMIZER, _FACTS, _MARK = "model.safetensors", "optimizer.safetensors", "trainer.json", "complete"


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    iteration: int
    """How many are complete: the next one has this number, counted from 0."""
    version: int
    """Of the weights."""
    model_checksum: str
    optimizer_checksum: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    iteration: int
    version: int
    model: Mapping[str, Tensor]
    optimizer: Mapping[str, Tensor]
    """By `<parameter>/<name in AdamW's state>`."""


def save_checkpoint(folder: Path, checkpoint: Checkpoint) -> None:
    """Write `folder` so that only a whole one has the mark. Raises OSError when the disk is full."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    files = {_MODEL: checkpoint.model, _OPTIMIZER: checkpoint.optimizer}
    for name, tensors in files.items():
        save_file({key: tensor.detach().contiguous() for key, tensor in tensors.items()}, folder / name)
    readable_like_others(folder / name for name in files)
    facts = Facts(
        iteration=checkpoint.iteration,
        version=checkpoint.version,
        model_checksum=weights_checksum(checkpoint.model),
        optimizer_checksum=weights_checksum(checkpoint.optimizer),
    )
    (folder / _FACTS).write_text(json.dumps(asdict(facts)), encoding="utf-8")
    for name in (*files, _FACTS):
        flush(folder / name)
    (folder / _MARK).touch()
    for path in (folder / _MARK, folder, folder.parent):
        flush(path)


def load_checkpoint(folder: Path) -> Checkpoint:
    """Read it back. Raises ValueError, one line, when it is not whole or not what was written."""
    if not (folder / _MARK).exists():
        raise ValueError(f"{folder} is no complete checkpoint (no file {_MARK!r} in it); take an older one")
    try:
        facts = Facts(**json.loads((folder / _FACTS).read_text(encoding="utf-8")))
        model, optimizer = load_file(folder / _MODEL), load_file(folder / _OPTIMIZER)
    except (OSError, TypeError, ValueError) as error:
        raise ValueError(f"{folder} does not load: {str(error).splitlines()[0]}; take an older checkpoint") from error
    for name, tensors, wanted in (
        (_MODEL, model, facts.model_checksum),
        (_OPTIMIZER, optimizer, facts.optimizer_checksum),
    ):
        if (found := weights_checksum(tensors)) != wanted:
            raise ValueError(f"{folder / name} has checksum {found}, expected {wanted}; take an older checkpoint")
    return Checkpoint(iteration=facts.iteration, version=facts.version, model=model, optimizer=optimizer)


def prune_checkpoints(folder: Path, keep: int) -> None:
    """Delete all but the newest `keep` complete ones."""
    whole = sorted((path for path in folder.glob("*") if (path / _MARK).exists()), key=lambda path: int(path.name))
    for path in whole[: max(0, len(whole) - keep)]:
        (path / _MARK).unlink()  # half-deleted is not whole
        shutil.rmtree(path)
