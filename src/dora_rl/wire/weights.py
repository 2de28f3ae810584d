"""The weight store: a version of the weights as a manifest that names its bytes.

Ranks write shards, instances read what they need, and whoever keeps the manifest keeps the bytes alive; to
forget a version is to drop its manifest. Also the form a version takes on disk. Knows tensors and bytes; knows
nothing of what the versions are for.
"""

import json
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import Tensor

from dora_rl.core.types import Version
from dora_rl.wire.errors import RemoteError
from dora_rl.wire.files import flush, readable_like_others
from dora_rl.wire.slices import Slice as Slice

Bytes = NDArray[np.uint8]
Handle = Any
"""What a transport gives for one array; only the same kind of transport understands it."""

GET_TIMEOUT_S = 60.0
"""Longest wait for one version's bytes: two orders of magnitude above what 540 MB take on one machine."""

_TENSORS, _FACTS = "model.safetensors", "version.json"


@dataclass(frozen=True, slots=True)
class Canary:
    """Raw (temperature 1) next-token log-probabilities of a fixed probe; logprobs[i] belongs to token_ids[i + 1]."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.token_ids) < 2 or len(self.logprobs) != len(self.token_ids) - 1:
            raise ValueError(
                f"a canary of {len(self.token_ids)} tokens (at least 2) needs one log-probability less, "
                f"got {len(self.logprobs)}"
            )


@dataclass(frozen=True, slots=True)
class Shard:
    slices: tuple[tuple[int, int], ...]
    """[start, stop) in every dimension of the whole tensor."""

    handle: Handle
    checksum: str
    """xxh3-128 of the shard's contiguous little-endian bytes."""


@dataclass(frozen=True, slots=True)
class TensorEntry:
    name: str
    dtype: str
    """As torch spells it, without "torch."."""

    shape: tuple[int, ...]
    shards: tuple[Shard, ...]


@dataclass(frozen=True, slots=True)
class Manifest:
    version: Version
    parent: Version | None
    """The version it was trained from; None for the first."""

    tensors: tuple[TensorEntry, ...]
    checksum: str
    """Of names, dtypes, shapes and bytes: equal exactly when the weights are, however they are sharded."""

    canary: Canary


class Transport(Protocol):
    """Carries arrays between processes. Arrays that `get` returns may be read-only views of shared memory."""

    def put(self, arrays: Sequence[Bytes]) -> list[Handle]: ...

    def get(self, handles: Sequence[Handle], timeout_s: float) -> list[Bytes]: ...


class MemoryTransport:
    """Within one process: the handle is the array."""

    def put(self, arrays: Sequence[Bytes]) -> list[Handle]:
        return [array.copy() for array in arrays]

    def get(self, handles: Sequence[Handle], timeout_s: float) -> list[Bytes]:
        return list(handles)


class RayTransport:
    """Ray's object store; a handle is (object reference, position in that object).

    The process that puts owns the objects, and its death loses them. They are freed when the last manifest that
    names them, in any process, is dropped.
    """

    def put(self, arrays: Sequence[Bytes]) -> list[Handle]:
        import ray

        # One object for all: arrays travel as out-of-band buffers, so nothing is joined or copied twice, and a
        # version costs one round trip instead of one per tensor.
        reference = ray.put(list(arrays))
        return [(reference, position) for position in range(len(arrays))]

    def get(self, handles: Sequence[Handle], timeout_s: float) -> list[Bytes]:
        import ray

        references = list(dict.fromkeys(reference for reference, _ in handles))
        try:
            objects = dict(zip(references, ray.get(references, timeout=timeout_s), strict=True))
        except ray.exceptions.GetTimeoutError as error:
            raise RemoteError(
                f"the object store gave no weights within {timeout_s:g} s; is their writer alive?"
            ) from error
        except ray.exceptions.RayError as error:
            reason = str(error).splitlines()[0]
            raise RemoteError(f"the object store has lost the weights ({reason}); publish them again") from error
        return [objects[reference][position] for reference, position in handles]


def write_version(
    transport: Transport, version: Version, parent: Version | None, tensors: Mapping[str, Tensor], canary: Canary
) -> Manifest:
    """Put every tensor, whole, into the transport. The caller may change the tensors once this has returned."""
    ordered = {name: tensors[name] for name in sorted(tensors)}
    arrays = [tensor_bytes(tensor) for tensor in ordered.values()]
    handles = transport.put(arrays)
    entries = tuple(
        TensorEntry(
            name=name,
            dtype=_dtype_name(tensor),
            shape=tuple(tensor.shape),
            shards=(Shard(tuple((0, size) for size in tensor.shape), handle, _checksum(array)),),
        )
        for (name, tensor), handle, array in zip(ordered.items(), handles, arrays, strict=True)
    )
    # One shard is the whole tensor, so its checksum is the tensor's own.
    checksum = _joint_checksum((entry.name, entry.dtype, entry.shape, entry.shards[0].checksum) for entry in entries)
    return Manifest(version=version, parent=parent, tensors=entries, checksum=checksum, canary=canary)


def read_shards(
    transport: Transport, manifest: Manifest, timeout_s: float = GET_TIMEOUT_S
) -> Iterator[tuple[TensorEntry, Shard, Bytes]]:
    """The bytes of every shard, verified, perhaps read-only. Raises RemoteError about late, lost or damaged ones."""
    wanted = [(entry, shard) for entry in manifest.tensors for shard in entry.shards]
    arrays = transport.get([shard.handle for _, shard in wanted], timeout_s)
    for (entry, shard), array in zip(wanted, arrays, strict=True):
        found = _checksum(array)
        if found != shard.checksum:
            raise RemoteError(
                f"version {manifest.version}, {entry.name}: the bytes have checksum {found}, their manifest says "
                f"{shard.checksum}; publish the version again"
            )
        yield entry, shard, array


def read_tensors(
    transport: Transport, manifest: Manifest, timeout_s: float = GET_TIMEOUT_S
) -> Iterator[tuple[str, Tensor]]:
    """Whole tensors, each with memory of its own, in the manifest's order."""
    shards = read_shards(transport, manifest, timeout_s)
    for entry in manifest.tensors:
        tensor = torch.empty(entry.shape, dtype=getattr(torch, entry.dtype))
        for _ in entry.shards:
            _, shard, array = next(shards)
            region = tensor[tuple(slice(*bounds) for bounds in shard.slices)]
            part = torch.empty(region.shape, dtype=tensor.dtype)
            tensor_bytes(part)[:] = array
            region.copy_(part)
        yield entry.name, tensor


def weights_checksum(tensors: Mapping[str, Tensor]) -> str:
    """What `Manifest.checksum` of these tensors would be."""
    return _joint_checksum(
        (name, _dtype_name(tensor), tuple(tensor.shape), _checksum(tensor_bytes(tensor)))
        for name, tensor in sorted(tensors.items())
    )


def tensor_bytes(tensor: Tensor) -> Bytes:
    """The tensor's bytes, a view of its memory where it is contiguous and on the CPU."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    # By way of torch, because numpy has no bfloat16.
    array: Bytes = flat.view(torch.uint8).numpy()
    return array


def _checksum(array: Bytes) -> str:
    return xxhash.xxh3_128_hexdigest(array.data)


def _dtype_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _joint_checksum(facts: Iterable[tuple[str, str, tuple[int, ...], str]]) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(list(facts)).encode())


# --- on disk ---


@dataclass(frozen=True, slots=True)
class SavedVersion:
    """What a version's folder says of itself."""

    version: Version
    parent: Version | None
    checksum: str
    canary: Canary


def save_version(folder: Path, manifest: Manifest, tensors: Mapping[str, Tensor]) -> None:
    """Write `folder` so that it is there whole or not at all; one that is there already is left as it is.

    Raises ValueError when the tensors are not the ones that the manifest was written from, or when the folder
    holds other weights: a version is never reused.
    """
    found = weights_checksum(tensors)
    if found != manifest.checksum:
        raise ValueError(
            f"version {manifest.version}: the tensors to save have checksum {found}, their manifest says "
            f"{manifest.checksum}; save the tensors that were published"
        )
    if folder.exists():
        there = _read_facts(folder)
        if (there.version, there.checksum) != (manifest.version, manifest.checksum):
            raise ValueError(
                f"{folder} holds version {there.version} ({there.checksum}), not version {manifest.version} "
                f"({manifest.checksum}); move it away"
            )
        return
    partial = folder.with_name(f".{folder.name}.partial")
    if partial.exists():  # left by a process that died while it wrote
        shutil.rmtree(partial)
    partial.mkdir(parents=True)
    save_file(
        {name: tensor.detach().contiguous() for name, tensor in tensors.items()}, partial / _TENSORS, {"format": "pt"}
    )
    readable_like_others([partial / _TENSORS])
    facts = SavedVersion(manifest.version, manifest.parent, manifest.checksum, manifest.canary)
    (partial / _FACTS).write_text(json.dumps(asdict(facts)), encoding="utf-8")
    for path in (partial / _TENSORS, partial / _FACTS, partial):
        flush(path)
    partial.rename(folder)
    flush(folder.parent)


def load_saved(folder: Path) -> tuple[SavedVersion, dict[str, Tensor]]:
    """The facts and the tensors, verified. Raises ValueError when the folder is damaged, OSError when it is missing."""
    facts = _read_facts(folder)
    tensors: dict[str, Tensor] = load_file(folder / _TENSORS)
    found = weights_checksum(tensors)
    if found != facts.checksum:
        raise ValueError(
            f"{folder}: the tensors have checksum {found}, {_FACTS} says {facts.checksum}; "
            "the folder was changed or damaged, restore it"
        )
    return facts, tensors


def saved_versions(weights_dir: Path) -> dict[Version, Path]:
    """Complete versions in this folder, oldest first; half-written ones are not among them."""
    folders = weights_dir.iterdir() if weights_dir.exists() else ()
    complete = (folder for folder in folders if not folder.name.startswith(".") and (folder / _FACTS).exists())
    return dict(sorted((_read_facts(folder).version, folder) for folder in complete))


def prune(weights_dir: Path, keep: int) -> None:
    """Delete all but the newest `keep` complete versions."""
    versions = list(saved_versions(weights_dir).values())
    for folder in versions[: max(0, len(versions) - keep)]:
        # Renamed first: a folder that is being deleted is half-written too.
        doomed = folder.rename(folder.with_name(f".{folder.name}.partial"))
        shutil.rmtree(doomed)


def _read_facts(folder: Path) -> SavedVersion:
    try:
        raw = json.loads((folder / _FACTS).read_text(encoding="utf-8"))
        canary = Canary(tuple(raw["canary"]["token_ids"]), tuple(raw["canary"]["logprobs"]))
        return SavedVersion(raw["version"], raw["parent"], raw["checksum"], canary)
    except (KeyError, TypeError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{folder / _FACTS} is not a version's description ({error!r}); restore the folder") from error
