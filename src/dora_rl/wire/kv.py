"""KV of an answer between two instances: where its bytes lie, and the proof that they are the right ones.

The bytes lie in anonymous memory (memfd), which has no name in /dev/shm: nothing is left of it however a process
ends. Whoever holds the `KeptKv` keeps them alive; whoever has the handle can read them, on the same node through
/proc, from another one as an array that a transport carried. Knows bytes and checksums; knows no engine.
"""

import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
import xxhash
from numpy.typing import NDArray

from dora_rl.core.types import Version

Bytes = NDArray[np.uint8]


class KvError(ValueError):
    """KV that is missing, damaged or not what the handle says: the prefix has to be computed again."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KvShard:
    """One rank's part."""

    path: str
    """Opens the memory for every process of this user on the same node, while its holder lives."""
    nbytes: int
    checksum: str
    """xxh3-128 of its bytes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KvHandle:
    """What the next instance has to know of kept KV: the light message of a move."""

    node: str
    version: Version
    layout: str
    """Shape, element type, block and ranks (InstanceDescriptor.layout): bytes mean the same only where it is equal."""
    token_ids: tuple[int, ...]
    """The tokens whose KV it is, from the prompt's first one on."""
    shards: tuple[KvShard, ...]

    @property
    def nbytes(self) -> int:
        return sum(shard.nbytes for shard in self.shards)

    def check(self, *, version: Version | None, layout: str) -> None:
        """Raises KvError when it means nothing to an instance of this version and layout."""
        if (self.version, self.layout) != (version, layout):
            raise KvError(
                f"KV of version {self.version} and layout {self.layout} came to an instance of version {version} and "
                f"layout {layout}; the prefix is computed again"
            )


class KeptKv:
    """Anonymous memory for one answer's KV, one piece per rank."""

    def __init__(self, descriptors: Sequence[int]) -> None:
        self._descriptors = list(descriptors)

    @classmethod
    def empty(cls, name: str, ranks: int) -> Self:
        return cls([os.memfd_create(f"kv-{name}") for _ in range(ranks)])

    @classmethod
    def opened(cls, handle: KvHandle) -> Self:
        """Another process's memory on this node, which stays when that process lets go of it or dies.

        Raises KvError when it is gone already.
        """
        kept = cls([])
        try:
            for shard in handle.shards:
                kept._descriptors.append(os.open(shard.path, os.O_RDONLY))
        except OSError as error:
            kept.close()
            raise KvError(f"KV at {shard.path} is gone ({error.strerror}); the prefix is computed again") from error
        return kept

    @classmethod
    def of(cls, name: str, pieces: Sequence[Bytes]) -> Self:
        """Holds bytes that came from another node."""
        kept = cls.empty(name, len(pieces))
        for descriptor, piece in zip(kept._descriptors, pieces, strict=True):
            with os.fdopen(os.dup(descriptor), "wb") as file:
                file.write(piece.data)
        return kept

    @property
    def paths(self) -> list[str]:
        return [f"/proc/{os.getpid()}/fd/{descriptor}" for descriptor in self._descriptors]

    def read(self) -> list[Bytes]:
        return [read_shard(path) for path in self.paths]

    def close(self) -> None:
        """Free the memory once no engine maps it; closing twice is harmless."""
        descriptors, self._descriptors = self._descriptors, []
        for descriptor in descriptors:
            os.close(descriptor)


def is_memory_of(name: str, path: str) -> bool:
    """Whether a path of `KeptKv` still leads to memory that was made under this name."""
    try:
        return os.readlink(path).startswith(f"/memfd:kv-{name} ")
    except OSError:
        return False


def read_shard(path: str) -> Bytes:
    """The bytes at a shard's path, mapped. Raises KvError when its holder is gone."""
    try:
        with Path(path).open("rb") as file:
            if not os.fstat(file.fileno()).st_size:
                return np.empty(0, dtype=np.uint8)
            return np.frombuffer(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ), dtype=np.uint8)
    except OSError as error:
        raise KvError(f"KV at {path} is gone ({error.strerror}); the prefix is computed again") from error


def checksum(data: Bytes) -> str:
    return xxhash.xxh3_128_hexdigest(data.data)


def verify(handle: KvHandle, memory: KeptKv) -> None:
    """Raises KvError unless this memory holds the handle's bytes, all of them."""
    pieces = memory.read()
    if len(pieces) != len(handle.shards):
        raise KvError(f"KV of {len(pieces)} ranks came, of {len(handle.shards)} was kept; the prefix is computed again")
    for shard, data in zip(handle.shards, pieces, strict=True):
        if data.size != shard.nbytes:
            raise KvError(f"{data.size} bytes of KV came, {shard.nbytes} were kept; the prefix is computed again")
        if checksum(data) != shard.checksum:
            raise KvError("KV is damaged (its checksum differs); the prefix is computed again")
