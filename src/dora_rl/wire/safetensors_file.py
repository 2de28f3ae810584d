"""A safetensors file that is written by slices: of tensors that no process ever holds whole, from several at once.

One process creates the file with its header and its full size; then every process that opens it puts its rows in
place. Knows the file's format; knows nothing of what is in it.
"""

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import torch
from torch import Tensor

from dora_rl.wire.slices import Slice, tensor_bytes

Table = Mapping[str, tuple[str, tuple[int, ...]]]
"""Name to (dtype as torch spells it, shape of the whole tensor)."""

_CODES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e8m0fnu": "F8_E8M0",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint64": "U64",
    "uint32": "U32",
    "uint16": "U16",
    "uint8": "U8",
    "bool": "BOOL",
    "complex64": "C64",
}
_DTYPES = {code: dtype for dtype, code in _CODES.items()}
_LARGEST_HEADER = 100_000_000
"""Bytes: what the format allows."""


@dataclass(frozen=True, slots=True)
class _Place:
    dtype: str
    shape: tuple[int, ...]
    offset: int
    """Of the tensor's first byte in the file."""


class SlicedFile:
    """An open file of whole tensors, written by slices. Close it, or use it as a context."""

    def __init__(self, path: Path, descriptor: int, places: Mapping[str, _Place]) -> None:
        self.path = path
        self._descriptor = descriptor
        self._places = places
        self._written: dict[str, list[tuple[int, int]]] = {}

    @classmethod
    def create(cls, path: Path, table: Table, metadata: Mapping[str, str] | None = None) -> Self:
        """Write the header and give the file its full size, all zeros. Raises FileExistsError when it is there."""
        # Wide elements first, so that every tensor begins at a multiple of its element's size.
        order = sorted(table, key=lambda name: (-_itemsize(table[name][0]), name))
        header: dict[str, object] = {"__metadata__": dict(metadata or {"format": "pt"})}
        end = 0
        for name in order:
            dtype, shape = table[name]
            if dtype not in _CODES:
                raise ValueError(f"{name}: a safetensors file cannot hold {dtype}")
            start, end = end, end + math.prod(shape) * _itemsize(dtype)
            header[name] = {"dtype": _CODES[dtype], "shape": list(shape), "data_offsets": [start, end]}
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            _write_all(descriptor, len(text).to_bytes(8, "little") + text, 0)
            os.ftruncate(descriptor, 8 + len(text) + end)
            return cls(path, descriptor, _places(path, descriptor))
        except BaseException:
            os.close(descriptor)
            raise

    @classmethod
    def open(cls, path: Path) -> Self:
        """One that `create` or anybody else has made. Raises ValueError when it is no safetensors file."""
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            return cls(path, descriptor, _places(path, descriptor))
        except BaseException:
            os.close(descriptor)
            raise

    @property
    def table(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        return {name: (place.dtype, place.shape) for name, place in self._places.items()}

    def write(self, slice_: Slice, tensor: Tensor) -> None:
        """Put these rows in place. Raises ValueError when the file's tensor is another one."""
        slice_.check(tensor)
        offset = self._offset(slice_)
        _write_all(self._descriptor, tensor_bytes(tensor).data, offset)
        self._written.setdefault(slice_.name, []).append((slice_.start, slice_.stop))

    def read(self, slice_: Slice) -> Tensor:
        """These rows, with memory of their own."""
        offset = self._offset(slice_)
        tensor = torch.empty(slice_.part_shape, dtype=slice_.torch_dtype)
        memory, done = tensor_bytes(tensor).data, 0
        while done < len(memory):
            got = os.preadv(self._descriptor, [memory[done:]], offset + done)
            if not got:
                raise ValueError(f"{self.path} ends within {slice_.name}; it was cut short")
            done += got
        return tensor

    def missing(self) -> list[str]:
        """Names of the tensors of which rows have not been written through this object."""
        return [name for name, place in self._places.items() if not self._is_whole(name, place)]

    def flush(self) -> None:
        """Return when the bytes are on the disk."""
        os.fsync(self._descriptor)

    def close(self) -> None:
        """Closing twice is harmless."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _offset(self, slice_: Slice) -> int:
        place = self._places.get(slice_.name)
        if place is None or (place.dtype, place.shape) != (slice_.dtype, slice_.shape):
            there = f"{place.dtype} of shape {list(place.shape)}" if place else "no tensor of this name"
            raise ValueError(
                f"{self.path} has {there}, not {slice_.name} as {slice_.dtype} of shape {list(slice_.shape)}"
            )
        return place.offset + slice_.start * slice_.row_bytes

    def _is_whole(self, name: str, place: _Place) -> bool:
        reached = 0
        for start, stop in sorted(self._written.get(name, ())):
            if start > reached:
                return False
            reached = max(reached, stop)
        return math.prod(place.shape) == 0 or reached == (place.shape[0] if place.shape else 1)


def _places(path: Path, descriptor: int) -> dict[str, _Place]:
    size = os.fstat(descriptor).st_size
    length = int.from_bytes(os.pread(descriptor, 8, 0), "little")
    if not 2 <= length <= min(_LARGEST_HEADER, size - 8):
        raise ValueError(f"{path} is no safetensors file: a header of {length} bytes in a file of {size}")
    try:
        header = json.loads(os.pread(descriptor, length, 8))
        header.pop("__metadata__", None)
        return {
            name: _Place(_DTYPES[facts["dtype"]], tuple(facts["shape"]), 8 + length + facts["data_offsets"][0])
            for name, facts in header.items()
        }
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is no safetensors file: its header does not read ({error!r})") from error


def _write_all(descriptor: int, data: bytes | memoryview, offset: int) -> None:
    rest = memoryview(data)
    while rest:
        done = os.pwrite(descriptor, rest, offset)
        rest, offset = rest[done:], offset + done


def _itemsize(dtype: str) -> int:
    return int(getattr(torch, dtype).itemsize)
