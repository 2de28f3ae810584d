"""Slices: which rows of a tensor they are, and how many bytes."""

import pytest
from hypothesis import given

from dora_rl.wire.slices import Slice
from wire.cuts import cuts, models


@given(models.flatmap(cuts))
def test_a_slice_knows_its_tensors_shape_and_size(slices):
    for slice_, tensor in slices:
        slice_.check(tensor)
        assert slice_.nbytes == tensor.nbytes
        assert slice_.part_shape == tuple(tensor.shape)


def test_rows_that_do_not_exist_are_refused():
    for shape, start, stop in (((4, 2), 3, 5), ((4, 2), 2, 1), ((), 0, 2), ((4, 2), -1, 2)):
        with pytest.raises(ValueError, match="do not exist"):
            Slice("w", "float32", shape, start, stop)
    with pytest.raises(ValueError, match="no element type"):
        Slice("w", "save", (4,), 0, 1)
