"""What an instance and its engine's own process share: who owns whom, and weights on their way, both ends.

The bytes lie in anonymous memory (memfd) that the engine maps through /proc: it has no name in /dev/shm, so
nothing is left of it however either process ends.
"""

import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypedDict

import numpy as np
import torch
from torch import Tensor

from dora_rl.wire.weights import Manifest, Transport, read_shards

OWNER_VARIABLE = "DORA_RL_ENGINE_OWNER"
"""Environment variable that tells an engine's process the process id of its instance."""

PACE_VARIABLE = "DORA_RL_PACE"
"""Environment variable with the law of [pace] as JSON, for an engine that is paced."""

PROBE = "probe-"
"""How the names of requests begin that are part of a start or a load: the law gives these one time as a whole."""

_ALIGNMENT = 64
"""Bytes; a cache line, and a multiple of every element size."""


class Slot(TypedDict):
    """One tensor in the staged memory. A dictionary because it crosses vLLM's own serialiser."""

    name: str
    dtype: str
    shape: list[int]
    offset: int


@dataclass(frozen=True, slots=True)
class Staged:
    path: str
    """Opens the memory for every process of this user while the staging process holds it."""

    slots: list[Slot]


@contextmanager
def staged(transport: Transport, manifest: Manifest, timeout_s: float) -> Iterator[Staged]:
    """A version's tensors, verified, in shared memory until the block ends. Raises what `read_shards` raises."""
    slots, size = _layout(manifest)
    offsets = {slot["name"]: slot["offset"] for slot in slots}
    descriptor = os.memfd_create(f"weights-{manifest.version}")
    try:
        os.ftruncate(descriptor, size)
        with mmap.mmap(descriptor, size) as memory:
            whole = np.frombuffer(memory, dtype=np.uint8)
            try:
                for entry, shard, array in read_shards(transport, manifest, timeout_s):
                    start = offsets[entry.name]
                    tensor = whole[start : start + _nbytes(entry.shape, entry.dtype)].view(_raw_dtype(entry.dtype))
                    region = tensor.reshape(entry.shape)[tuple(slice(*bounds) for bounds in shard.slices)]
                    region[...] = array.view(region.dtype).reshape(region.shape)
            finally:
                # A memory map cannot be closed while arrays look into it.
                del whole
                tensor = region = None  # type: ignore[assignment]
        yield Staged(f"/proc/{os.getpid()}/fd/{descriptor}", slots)
    finally:
        os.close(descriptor)


def staged_tensors(path: str, slots: list[Slot]) -> Iterator[tuple[str, Tensor]]:
    """The engine's end: views of the staged memory, valid after the stager has closed its side too."""
    with open(path, "rb") as file:
        memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    for slot in slots:
        dtype = getattr(torch, slot["dtype"])
        count = int(np.prod(slot["shape"], dtype=np.int64))
        flat = torch.frombuffer(memory, dtype=dtype, count=count, offset=slot["offset"])
        yield slot["name"], flat.reshape(slot["shape"])


def _layout(manifest: Manifest) -> tuple[list[Slot], int]:
    slots: list[Slot] = []
    offset = 0
    for entry in manifest.tensors:
        slots.append(Slot(name=entry.name, dtype=entry.dtype, shape=list(entry.shape), offset=offset))
        size = _nbytes(entry.shape, entry.dtype)
        offset += -(-size // _ALIGNMENT) * _ALIGNMENT
    return slots, offset


def _raw_dtype(dtype: str) -> np.dtype[np.generic]:
    """An unsigned integer of the same width: numpy has no bfloat16, and moving bytes needs none."""
    return np.dtype(f"u{getattr(torch, dtype).itemsize}")


def _nbytes(shape: tuple[int, ...], dtype: str) -> int:
    return int(np.prod(shape, dtype=np.int64)) * int(getattr(torch, dtype).itemsize)
