"""Models of random tensors, and the same cut into slices, for the tests here."""

import itertools
from collections.abc import Mapping

import torch
from hypothesis import strategies as st
from torch import Tensor

from dora_rl.wire.slices import Slice, tensor_bytes


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    """Any bits, NaN among them, in the element types that models have; sometimes not contiguous."""
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8]))
    shape = draw(st.lists(st.integers(0, 4), max_size=3))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    count = torch.Size(shape).numel() * dtype.itemsize
    bits = torch.randint(0, 256, (count,), dtype=torch.uint8, generator=generator)
    tensor = bits.view(dtype).reshape(shape) if count else torch.empty(shape, dtype=dtype)
    return tensor.T if tensor.ndim == 2 and draw(st.booleans()) else tensor


models = st.dictionaries(st.text("abc._", min_size=1, max_size=6), tensors(), min_size=1, max_size=4)


@st.composite
def cuts(draw: st.DrawFn, weights: Mapping[str, Tensor]) -> list[tuple[Slice, Tensor]]:
    """The model as slices that cover it, cut anywhere."""
    slices = []
    for name, tensor in weights.items():
        whole = Slice.whole(name, tensor)
        at = draw(st.sets(st.integers(0, whole.rows), max_size=3)) if tensor.ndim else set()
        bounds = sorted(at | {0, whole.rows})
        for start, stop in itertools.pairwise(bounds):
            slices.append((whole.cut(start, stop), tensor[start:stop] if tensor.ndim else tensor))
        if whole.rows == 0:
            slices.append((whole, tensor))
    return slices


def same(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> bool:
    """Bit for bit: NaN equals itself, and 0.0 is not -0.0."""
    facts = [
        {name: (t.dtype, t.shape, tensor_bytes(t).tobytes()) for name, t in weights.items()}
        for weights in (left, right)
    ]
    return facts[0] == facts[1]
