"""Inside vLLM's processes: KV of aborted requests goes into kept memory, and comes back for those that continue.

vLLM's own connector interface, both ends. Its scheduler half sees requests and block ids, its worker half the bytes;
they share nothing but the metadata of a step. What is kept is decided outside: `keep` names a request beforehand, the
abort then makes its KV readable under the paths given there. What is loaded has been verified before the request came
here. Imports vLLM at once, so only vLLM and engine_worker.py may import this module.

Three traps of the interface, each a silent corruption: a request that was preempted comes back through another list
than new ones (here: loads follow block allocation, whatever list), blocks that the local prefix cache has hit are
shared and must not be written (only what lies behind them is), and an aborted request's blocks may be reused at once
(they are held until written out).
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
)
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank
from vllm.v1.request import RequestStatus

from dora_rl.pace.law import move_s
from dora_rl.wire.kv import Bytes, checksum, is_memory_of, read_shard


@dataclass(slots=True)
class Load:
    paths: list[str]
    blocks: list[int]
    """The request's blocks, from the prefix's start."""
    start: int
    """First token to be written; those before it are in the local prefix cache. A multiple of the block size."""
    end: int


@dataclass(slots=True)
class Save:
    name: str
    request: str
    """vLLM's own id of it."""
    blocks: list[int]
    tokens: int


@dataclass
class Step(KVConnectorMetadata):  # type: ignore[misc]  # vLLM's classes are untyped to us
    """What one step's workers have to do."""

    loads: list[Load] = field(default_factory=list)
    saves: list[Save] = field(default_factory=list)


class KvConnector(KVConnectorBase_V1):  # type: ignore[misc]
    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any = None) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        self._block_tokens = int(vllm_config.cache_config.block_size)
        # The scheduler's half.
        self._next = Step()
        self._loaded: set[str] = set()
        # The worker's half.
        self._layers: list[Tensor] = []
        self._wanted: dict[str, list[str]] = {}
        self._done: dict[str, tuple[int, int, str]] = {}
        self._written: set[str] = set()

    @property
    def requires_kv_delivery(self) -> bool:
        """A save that does not come about costs a prefill, nothing else."""
        return False

    # --- scheduler ---------------------------------------------------------------------------------------------------

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        load = (request.kv_transfer_params or {}).get("load")
        if load is None or request.request_id in self._loaded:
            return 0, False  # after a preemption the memory may be gone: vLLM computes the prefix again
        # At least one token has to be computed, or there would be nothing to sample from.
        return max(0, min(load["tokens"], request.num_tokens - 1) - num_computed_tokens), False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if num_external_tokens <= 0:
            return
        load = request.kv_transfer_params["load"]
        end = min(load["tokens"], request.num_tokens - 1)
        (block_ids,) = blocks.get_block_ids()
        self._next.loads.append(Load(load["paths"], list(block_ids), end - num_external_tokens, end))
        self._loaded.add(request.request_id)

    def build_connector_meta(self, scheduler_output: Any) -> Step:
        step, self._next = self._next, Step()
        return step

    def request_finished(self, request: Any, block_ids: Sequence[int]) -> tuple[bool, None]:
        self._loaded.discard(request.request_id)
        name = (request.kv_transfer_params or {}).get("name")
        if name is None:
            return False, None
        aborted = request.status == RequestStatus.FINISHED_ABORTED
        tokens = int(request.num_computed_tokens) if aborted else 0
        held = tokens > 0
        # Also when there is nothing to keep: somebody may wait to hear it.
        self._next.saves.append(Save(name, request.request_id, list(block_ids) if held else [], tokens))
        return held, None

    # --- worker ------------------------------------------------------------------------------------------------------

    def keep(self, name: str, paths: list[str]) -> None:
        """Write this request's KV into the memory at these paths, one per rank, when it is aborted."""
        self._wanted[name] = paths

    def kept(self, name: str) -> tuple[int, int, str] | None:
        """Tokens, bytes and checksum of what was written; None as long as the request has not ended."""
        return self._done.pop(name, None)

    def forget(self, name: str) -> None:
        self._wanted.pop(name, None)
        self._done.pop(name, None)

    def register_kv_caches(self, kv_caches: dict[str, Tensor]) -> None:
        blocks = int(self._kv_cache_config.num_blocks)
        # Some backends keep K and V in front of the blocks.
        self._layers = [layer if layer.shape[0] == blocks else layer.transpose(0, 1) for layer in kv_caches.values()]

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        for load in self._get_connector_metadata().loads:
            began = time.monotonic()
            first, last = load.start // self._block_tokens, -(-load.end // self._block_tokens)
            data = read_shard(load.paths[get_tensor_model_parallel_rank()])
            target = torch.tensor(load.blocks[first:last])
            whole = np.split(data, len(self._layers))
            for layer, part in zip(self._layers, whole, strict=True):
                layer[target] = _as_blocks(part, layer)[first:last].to(layer.device)
            _stretch(load.end, began)

    def wait_for_save(self) -> None:
        if not self.has_connector_metadata():
            return
        for save in self._get_connector_metadata().saves:
            paths = self._wanted.pop(save.name, None)
            if paths is not None:
                began = time.monotonic()
                self._done[save.name] = self._write(paths[get_tensor_model_parallel_rank()], save)
                _stretch(save.tokens, began)
            if save.tokens:
                self._written.add(save.request)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, None]:
        written, self._written = self._written, set()
        return written or None, None

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Loads are complete before the step's forward pass."""

    def save_kv_layer(self, layer_name: str, kv_layer: Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """KV is kept when a request ends, not while it runs."""

    def _write(self, path: str, save: Save) -> tuple[int, int, str]:
        if not save.tokens:
            return 0, 0, ""
        source = torch.tensor(save.blocks[: -(-save.tokens // self._block_tokens)])
        parts = [layer[source].cpu().contiguous().view(torch.uint8).reshape(-1).numpy() for layer in self._layers]
        data: Bytes = np.concatenate(parts)
        try:
            # The memory may be gone, and its number another file's by now.
            if not is_memory_of(save.name, path):
                return 0, 0, ""
            with open(path, "wb") as file:
                file.write(data.data)
        except OSError:
            return 0, 0, ""  # the machine has no room: that costs one prefill, not the engine
        return save.tokens, data.size, checksum(data)


def _stretch(tokens: int, began: float) -> None:
    """In paced emulation a move lasts as long as the law says."""
    from dora_rl.runtime.engine_worker import PACE, PACER

    if PACE is not None:
        PACER.stretch(move_s(PACE, tokens), began=began)


def _as_blocks(part: Bytes, layer: Tensor) -> Tensor:
    """A layer's kept bytes as blocks of the cache's own shape."""
    flat = torch.from_numpy(part).view(layer.dtype)
    return flat.reshape(-1, *layer.shape[1:])
