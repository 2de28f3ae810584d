"""KV on its way: what arrives is what was kept, or it is refused in one line."""

import os

import numpy as np
import pytest

from dora_rl.core.types import Version
from dora_rl.wire.kv import KeptKv, KvError, KvHandle, KvShard, checksum, is_memory_of, verify

PIECES = [np.arange(1000, dtype=np.uint8), np.arange(500, dtype=np.uint8)[::-1].copy()]


@pytest.fixture
def kept():
    memory = KeptKv.of("test", PIECES)
    yield memory
    memory.close()


def handle(memory: KeptKv) -> KvHandle:
    shards = tuple(
        KvShard(path=path, nbytes=piece.size, checksum=checksum(piece))
        for path, piece in zip(memory.paths, PIECES, strict=True)
    )
    return KvHandle(node="here", version=Version(3), layout="l", token_ids=(1, 2), shards=shards)


def test_bytes_stay_readable_after_their_first_holder_has_let_go(kept):
    mine = KeptKv.opened(handle(kept))
    verify(handle(kept), mine)
    told = handle(kept)
    kept.close()
    verify(told, mine)
    assert [piece.tolist() for piece in mine.read()] == [piece.tolist() for piece in PIECES]
    mine.close()


def test_what_is_gone_is_an_error(kept):
    told = handle(kept)
    kept.close()
    with pytest.raises(KvError, match="is gone .*; the prefix is computed again"):
        KeptKv.opened(told)


def test_a_flipped_byte_and_a_missing_one_are_found(kept):
    told = handle(kept)
    flipped = [PIECES[0].copy(), PIECES[1]]
    flipped[0][700] ^= 1
    for pieces, said in ((flipped, "checksum"), ([PIECES[0], PIECES[1][:-1]], "499 bytes of KV came, 500 were kept")):
        damaged = KeptKv.of("damaged", pieces)
        with pytest.raises(KvError, match=said):
            verify(told, damaged)
        damaged.close()


@pytest.mark.parametrize(("version", "layout"), [(4, "l"), (3, "m"), (None, "l")])
def test_kv_of_another_version_or_layout_is_refused(kept, version, layout):
    handle(kept).check(version=Version(3), layout="l")
    with pytest.raises(KvError, match="the prefix is computed again"):
        handle(kept).check(version=version, layout=layout)


def test_nothing_of_it_has_a_name_in_shared_memory(kept):
    assert not [name for name in os.listdir("/dev/shm") if "kv-test" in name]


def test_a_path_whose_memory_is_gone_leads_to_nobody_elses(kept):
    (path, _), (other,) = kept.paths, KeptKv.empty("other", 1).paths
    assert is_memory_of("test", path)
    assert not is_memory_of("tes", path)
    assert not is_memory_of("test", other)
    kept.close()
    assert not is_memory_of("test", path)
