"""Weights through Ray's object store, from the actor that writes them to a process that reads them."""

import asyncio
import threading
import time

import numpy as np
import pytest
import ray
import torch

from dora_rl.core.types import InstanceId, RolloutId, Version
from dora_rl.runtime.cluster import RemoteEngine
from dora_rl.wire.errors import RemoteError
from dora_rl.wire.kv import KeptKv, KvError, KvHandle, KvShard, checksum, verify
from dora_rl.wire.weights import Canary, RayTransport, read_tensors, write_version

pytestmark = pytest.mark.engine


class Writer:
    def publish(self, value: float):
        weights = {"large": torch.full((512, 512), value, dtype=torch.bfloat16), "small": torch.tensor(value)}
        return write_version(RayTransport(), Version(1), None, weights, Canary((1, 2), (-1.0,)))


class Reader:
    def read(self, manifest):
        return {name: tensor.float().sum().item() for name, tensor in read_tensors(RayTransport(), manifest)}

    def never(self):
        threading.Event().wait()


class Holder:
    """What an instance is as far as KV is concerned that goes to another node."""

    def keep(self, size):
        self.kept = KeptKv.of("7-0", [np.arange(size, dtype=np.uint8)])
        (piece,), (path,) = self.kept.read(), self.kept.paths
        shard = KvShard(path=path, nbytes=size, checksum=checksum(piece))
        return KvHandle(node="there", version=Version(1), layout="any", token_ids=(1, 2), shards=(shard,))

    def read_kv(self, rollout):
        return self.kept.read()

    def receive_kv(self, rollout, handle, data):
        try:
            verify(handle, KeptKv.of("7-1", data))
        except KvError as error:
            return str(error)
        return ""


def end(holder):
    """Kill an actor and wait until it is dead: `ray.kill` returns before, and calls made meanwhile still succeed."""
    ray.kill(holder)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            ray.get(holder.read_kv.remote(RolloutId(7)), timeout=60)
        except ray.exceptions.RayActorError:
            return
    pytest.fail("a killed actor still answers after 60 s")


@pytest.fixture(scope="module")
def cluster():
    from support import leftovers_collected  # not at the top: actors import this file, and have no tests on their path

    ray.init(num_cpus=2, object_store_memory=128 * 2**20, include_dashboard=False, log_to_driver=False)
    yield
    with leftovers_collected():
        ray.shutdown()


def test_what_one_actor_writes_another_reads_by_the_manifest_that_the_driver_keeps(cluster):
    writer, reader = ray.remote(Writer).remote(), ray.remote(Reader).remote()
    kept = ray.get(writer.publish.remote(1.0), timeout=60)
    other = ray.get(writer.publish.remote(2.0), timeout=60)
    assert ray.get(reader.read.remote(kept), timeout=60) == {"large": 512 * 512, "small": 1}
    assert ray.get(reader.read.remote(other), timeout=60) == {"large": 2 * 512 * 512, "small": 2}
    assert kept.checksum != other.checksum


def test_bytes_that_do_not_come_are_an_error_after_the_deadline(cluster):
    late = ray.remote(Reader).remote().never.remote()
    with pytest.raises(RemoteError, match=r"gave no weights within 0\.2 s; is their writer alive\?"):
        RayTransport().get([(late, 0)], timeout_s=0.2)


def test_kv_goes_from_node_to_node_and_only_a_reference_comes_by_the_driver(cluster):
    here, there = (ray.remote(Holder).remote() for _ in range(2))
    engines = [RemoteEngine(InstanceId(name), actor, None, "") for name, actor in (("here", here), ("there", there))]
    handle = ray.get(there.keep.remote(250), timeout=60)
    other = ray.get(there.keep.remote(251), timeout=60)

    async def moved(handle):
        data = await engines[1].read_kv(RolloutId(7))
        assert isinstance(data, ray.ObjectRef)
        async with asyncio.timeout(60):
            return await engines[0].receive_kv(RolloutId(7), handle, data)

    assert asyncio.run(moved(other)) == ""
    assert "251 bytes of KV came, 250 were kept" in asyncio.run(moved(handle))
    end(there)
    with pytest.raises(RemoteError):
        asyncio.run(moved(other))
