"""A safetensors file that ranks write by slices is the file that anybody else would have written whole."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load, load_file, save_file

from dora_rl.wire.safetensors_file import SlicedFile
from dora_rl.wire.slices import Slice, dtype_name
from wire.cuts import cuts, models, same


@settings(max_examples=25)  # each one waits for the disk
@given(weights=models, data=st.data())
def test_slices_in_any_order_from_several_writers_make_the_file(weights, data, tmp_path_factory):
    path = tmp_path_factory.mktemp("files") / "model.safetensors"
    table = {name: (dtype_name(tensor.dtype), tuple(tensor.shape)) for name, tensor in weights.items()}
    slices = data.draw(cuts(weights).flatmap(st.permutations))
    with SlicedFile.create(path, table, {"format": "pt"}) as first, SlicedFile.open(path) as second:
        assert first.table == second.table == table
        for index, (slice_, tensor) in enumerate(slices):
            (first, second)[index % 2].write(slice_, tensor)
        for slice_, tensor in slices:
            assert same({"": second.read(slice_)}, {"": tensor})
    assert same(load(path.read_bytes()), weights)


def test_what_has_not_been_written_is_named(tmp_path):
    weights = {"a": torch.arange(4.0), "b": torch.tensor(1), "c": torch.empty(0, 2)}
    table = {name: (dtype_name(tensor.dtype), tuple(tensor.shape)) for name, tensor in weights.items()}
    with SlicedFile.create(tmp_path / "f", table) as file:
        assert sorted(file.missing()) == ["a", "b"]
        file.write(Slice.whole("b", weights["b"]), weights["b"])
        whole = Slice.whole("a", weights["a"])
        file.write(whole.cut(2, 4), weights["a"][2:])
        assert file.missing() == ["a"]
        file.write(whole.cut(0, 2), weights["a"][:2])
        assert file.missing() == []


def test_rows_of_another_tensor_are_refused(tmp_path):
    save_file({"a": torch.zeros(4, 2)}, tmp_path / "f")
    with SlicedFile.open(tmp_path / "f") as file:
        with pytest.raises(ValueError, match=r"has float32 of shape \[4, 2\], not a as float32 of shape \[4, 3\]"):
            file.write(Slice("a", "float32", (4, 3), 0, 1), torch.ones(1, 3))
        with pytest.raises(ValueError, match=r"the tensor is float64"):
            file.write(Slice("a", "float32", (4, 2), 0, 1), torch.ones(1, 2, dtype=torch.float64))
        with pytest.raises(ValueError, match="no tensor of this name"):
            file.write(Slice("b", "float32", (4, 2), 0, 1), torch.ones(1, 2))
    assert load_file(tmp_path / "f")["a"].tolist() == torch.zeros(4, 2).tolist()


@pytest.mark.parametrize(
    "content", [b"", b"\x02", b"\x02\0\0\0\0\0\0\0[]", b"\xff" * 64, b'\x08\0\0\0\0\0\0\0{"a":{}}']
)
def test_what_is_no_safetensors_file_is_refused_in_one_line(content, tmp_path):
    (tmp_path / "f").write_bytes(content)
    with pytest.raises(ValueError, match=r"^\S+ is no safetensors file[^\n]*$"):
        SlicedFile.open(tmp_path / "f")
