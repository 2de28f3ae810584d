"""Weights through Ray's object store, from the actor that writes them to a process that reads them."""

import threading

import pytest
import ray
import torch

from dora_rl.core.types import Version
from dora_rl.wire.errors import RemoteError
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
