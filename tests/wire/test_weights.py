"""The weight store: what goes in comes out, and damage is found."""

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from dora_rl.core.types import Version
from dora_rl.wire.errors import RemoteError
from dora_rl.wire.weights import (
    Canary,
    Manifest,
    MemoryTransport,
    Shard,
    TensorEntry,
    load_saved,
    prune,
    read_tensors,
    save_version,
    saved_versions,
    tensor_bytes,
    weights_checksum,
    write_version,
)

CANARY = Canary(token_ids=(3, 1, 2), logprobs=(-0.5, -2.25))


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


def write(weights: Mapping[str, Tensor], *, version: int = 1) -> tuple[MemoryTransport, Manifest]:
    transport = MemoryTransport()
    return transport, write_version(transport, Version(version), None, weights, CANARY)


def same(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> bool:
    """Bit for bit: NaN equals itself, and 0.0 is not -0.0."""
    facts = [
        {name: (t.dtype, t.shape, tensor_bytes(t).tobytes()) for name, t in weights.items()}
        for weights in (left, right)
    ]
    return facts[0] == facts[1]


@given(models)
def test_weights_come_out_of_the_store_as_they_went_in(weights):
    transport, manifest = write(weights)
    assert same(dict(read_tensors(transport, manifest)), weights)


@given(models, st.data())
def test_one_flipped_bit_is_found_when_it_is_read(weights, data):
    transport, manifest = write(weights)
    filled = [entry for entry in manifest.tensors if entry.shards[0].handle.size]
    assume(filled)
    shard = data.draw(st.sampled_from(filled)).shards[0]
    shard.handle[data.draw(st.integers(0, shard.handle.size - 1))] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(RemoteError, match="the bytes have checksum"):
        list(read_tensors(transport, manifest))


@given(models, models)
def test_versions_have_equal_checksums_exactly_when_their_weights_are_equal(left, right):
    for a, b in ((left, left), (left, right)):
        assert (write(a)[1].checksum == write(dict(reversed(b.items())), version=2)[1].checksum) == same(a, b)
    assert write(left)[1].checksum == weights_checksum(left)


def test_the_caller_may_go_on_training_while_the_version_is_read():
    weights = {"w": torch.ones(3)}
    transport, manifest = write(weights)
    weights["w"] += 1
    assert dict(read_tensors(transport, manifest))["w"].tolist() == [1, 1, 1]


def test_a_tensor_that_two_ranks_wrote_is_joined_from_its_shards():
    whole = torch.arange(12, dtype=torch.bfloat16).reshape(4, 3)
    transport, manifest = write({"top": whole[:1], "rest": whole[1:]})
    rest, top = (entry.shards[0] for entry in manifest.tensors)
    shards = (
        Shard(((0, 1), (0, 3)), top.handle, top.checksum),
        Shard(((1, 4), (0, 3)), rest.handle, rest.checksum),
    )
    joined = Manifest(Version(1), None, (TensorEntry("w", "bfloat16", (4, 3), shards),), manifest.checksum, CANARY)
    assert same(dict(read_tensors(transport, joined)), {"w": whole})


def test_a_canary_without_a_log_probability_for_every_token_but_the_first_is_refused():
    with pytest.raises(ValueError, match="needs one log-probability less"):
        Canary(token_ids=(1, 2, 3), logprobs=(-1.0,))


@settings(max_examples=25)  # each one waits for the disk
@given(weights=models)
def test_a_saved_version_comes_back_with_its_facts(weights, tmp_path_factory):
    folder = tmp_path_factory.mktemp("weights") / "7"
    manifest = write_version(MemoryTransport(), Version(7), Version(6), weights, CANARY)
    save_version(folder, manifest, weights)
    facts, loaded = load_saved(folder)
    assert same(loaded, weights)
    assert (facts.version, facts.parent, facts.checksum, facts.canary) == (7, 6, manifest.checksum, CANARY)


def save(weights_dir: Path, version: int, value: float = 1.0) -> Path:
    weights = {"w": torch.full((2,), value)}
    folder = weights_dir / str(version)
    save_version(folder, write(weights, version=version)[1], weights)
    return folder


def test_weights_that_are_not_the_published_ones_are_not_saved(tmp_path):
    _, manifest = write({"w": torch.ones(2)})
    with pytest.raises(ValueError, match="save the tensors that were published"):
        save_version(tmp_path / "1", manifest, {"w": torch.zeros(2)})
    assert saved_versions(tmp_path) == {}


def test_a_saved_version_is_never_replaced_by_other_weights(tmp_path):
    save(tmp_path, 1, value=1.0)
    save(tmp_path, 1, value=1.0)
    with pytest.raises(ValueError, match="move it away"):
        save(tmp_path, 1, value=2.0)


def test_a_byte_changed_on_disk_is_found(tmp_path):
    file = save(tmp_path, 3) / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(ValueError, match="was changed or damaged"):
        load_saved(tmp_path / "3")


def test_a_changed_description_is_an_error_that_names_the_file(tmp_path):
    description = save(tmp_path, 3) / "version.json"
    description.write_text(json.dumps({"version": 3}))
    with pytest.raises(ValueError, match=r"version\.json is not a version's description"):
        load_saved(tmp_path / "3")


def test_a_version_that_was_only_half_written_is_not_listed_and_can_be_written_again(tmp_path):
    save(tmp_path, 1)
    # What a process leaves that dies at any moment before the last step, the rename.
    save(tmp_path, 2).rename(tmp_path / ".2.partial")
    assert list(saved_versions(tmp_path)) == [1]
    save(tmp_path, 2)
    assert list(saved_versions(tmp_path)) == [1, 2]


def test_pruning_keeps_the_newest_by_number_not_by_name(tmp_path):
    for version in (9, 10, 11):
        save(tmp_path, version)
    prune(tmp_path, keep=2)
    assert saved_versions(tmp_path) == {10: tmp_path / "10", 11: tmp_path / "11"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["10", "11"]
