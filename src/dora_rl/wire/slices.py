"""A slice: some rows of a tensor as a checkpoint names and shapes it, and its bytes. Knows no store and no file."""

import math
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Bytes = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Slice:
    """Rows [start, stop) along the first dimension. A scalar is one row: (0, 1)."""

    name: str
    """In a checkpoint."""
    dtype: str
    """As torch spells it, without "torch."."""
    shape: tuple[int, ...]
    """Of the whole tensor."""
    start: int
    stop: int

    def __post_init__(self) -> None:
        if not isinstance(getattr(torch, self.dtype, None), torch.dtype):
            raise ValueError(f"{self.name}: {self.dtype!r} is no element type of torch")
        if not 0 <= self.start <= self.stop <= self.rows:
            raise ValueError(
                f"{self.name}: rows {self.start} to {self.stop} of a tensor of shape {list(self.shape)} do not exist; "
                f"it has {self.rows}"
            )

    @classmethod
    def whole(cls, name: str, tensor: Tensor) -> Self:
        shape = tuple(tensor.shape)
        return cls(name, dtype_name(tensor.dtype), shape, 0, shape[0] if shape else 1)

    @property
    def rows(self) -> int:
        """Of the whole tensor."""
        return self.shape[0] if self.shape else 1

    @property
    def row_bytes(self) -> int:
        return math.prod(self.shape[1:]) * int(self.torch_dtype.itemsize)

    @property
    def nbytes(self) -> int:
        return (self.stop - self.start) * self.row_bytes

    @property
    def torch_dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype

    @property
    def part_shape(self) -> tuple[int, ...]:
        """Of the tensor that holds just these rows."""
        return (self.stop - self.start, *self.shape[1:]) if self.shape else ()

    def cut(self, start: int, stop: int) -> Self:
        """Rows [start, stop) of the same whole tensor."""
        return replace(self, start=start, stop=stop)

    def check(self, tensor: Tensor) -> None:
        """Raises ValueError unless the tensor has these rows' shape and type."""
        if tuple(tensor.shape) != self.part_shape or tensor.dtype != self.torch_dtype:
            raise ValueError(
                f"{self.name}: rows {self.start} to {self.stop} are {self.dtype} of shape {list(self.part_shape)}, the "
                f"tensor is {dtype_name(tensor.dtype)} of shape {list(tensor.shape)}"
            )


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def tensor_bytes(tensor: Tensor) -> Bytes:
    """The tensor's bytes, a view of its memory where it is contiguous and on the CPU."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    # By way of torch, because numpy has no bfloat16.
    array: Bytes = flat.view(torch.uint8).numpy()
    return array
