"""KV at one instance that is on its way: out of its engine, in memory here, or about to enter its engine.

The engine's half is kv_connector.py; between instances moves.py carries handles. Whatever fails here costs a prefill.
"""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from dora_rl.config import RolloutConfig
from dora_rl.core.messages import ProtocolError
from dora_rl.core.types import InstanceDescriptor, RolloutId, Version
from dora_rl.runtime.ports import GenerateRequest, ProcessLost
from dora_rl.wire.errors import RemoteError
from dora_rl.wire.kv import Bytes, KeptKv, KvError, KvHandle, KvShard, verify

Ask = Callable[..., Awaitable[list[Any]]]
"""Calls a method of the engine's workers by name; one answer a rank."""


@dataclass(frozen=True, slots=True)
class Received:
    """Verified KV of an answer that is about to continue here."""

    handle: KvHandle
    memory: KeptKv
    seconds: float
    """That it took to receive it."""

    def tokens_of(self, request: GenerateRequest) -> int:
        """How many tokens of this request's prefix it holds; 0 when it is another answer's."""
        prefix = (*request.prompt_token_ids, *request.completion_token_ids)
        common = min(len(prefix), len(self.handle.token_ids))
        mine = self.handle.version == request.version and prefix[:common] == self.handle.token_ids[:common]
        return common if mine else 0


class InstanceKv:
    def __init__(self, ask: Ask, descriptor: InstanceDescriptor, rollout: RolloutConfig) -> None:
        self._ask = ask
        self._descriptor = descriptor
        self._rollout = rollout
        self._kept: dict[RolloutId, KeptKv] = {}
        """Of answers that were detached here, until it has been received elsewhere."""
        self._received: dict[RolloutId, Received] = {}
        self._closing: set[asyncio.Task[None]] = set()

    # --- out of the engine --------------------------------------------------------------------------------------------

    async def order(self, name: str, memory: KeptKv) -> None:
        """Have the engine write the KV of the request of this name into this memory when it is aborted."""
        await self._ask("keep_kv", name, memory.paths)

    async def collect(
        self, name: str, memory: KeptKv, request: GenerateRequest, sampled: Sequence[int], *, aborted: bool
    ) -> KvHandle | None:
        """The handle of what was ordered, once the engine has written it; None when there is nothing in time.

        With a handle the memory stays until `drop`; otherwise it is the caller's to close.
        """
        facts: list[Any] = []
        # By rank: tokens, bytes and checksum of what it has written; each is told once.
        # The segment is complete whatever becomes of its KV, even if the engine is gone.
        with contextlib.suppress(TimeoutError, RemoteError):
            async with asyncio.timeout(self._rollout.move_timeout_s):
                if not aborted:
                    await self._ask("forget_kv", name)
                # Each call waits for the engine's next step, in which it writes.
                while aborted and (not facts or None in facts):
                    news = await self._ask("kept_kv", name)
                    facts = [one if one is not None else new for one, new in zip_longest(facts, news)]
        if not facts or any(one is None or one[0] == 0 for one in facts):
            return None
        self._kept[request.rollout] = memory
        tokens = [*request.prompt_token_ids, *request.completion_token_ids, *sampled]
        return KvHandle(
            node=self._descriptor.node,
            version=request.version,
            layout=self._descriptor.layout,
            # The engine may have computed more than it has handed out; what it has handed out is the answer.
            token_ids=tuple(tokens[: min(one[0] for one in facts)]),
            shards=tuple(
                KvShard(path=path, nbytes=size, checksum=digest)
                for path, (_, size, digest) in zip(memory.paths, facts, strict=True)
            ),
        )

    def read(self, rollout: RolloutId) -> Sequence[Bytes]:
        kept = self._kept.get(rollout)
        if kept is None:
            raise RemoteError(f"no KV of rollout {rollout} is kept here")
        return kept.read()

    def drop(self, rollout: RolloutId) -> None:
        if kept := self._kept.pop(rollout, None):
            kept.close()

    # --- into the engine ----------------------------------------------------------------------------------------------

    async def receive(
        self, rollout: RolloutId, handle: KvHandle, data: Sequence[Bytes] | None, serving: Version | None
    ) -> str:
        """Take over what another instance has kept, if it is whole and fits here. Returns why not, or nothing."""
        began = time.monotonic()
        memory: KeptKv | None = None
        try:
            handle.check(version=serving, layout=self._descriptor.layout)
            memory = KeptKv.opened(handle) if data is None else KeptKv.of(str(rollout), data)
            async with asyncio.timeout(self._rollout.move_timeout_s):
                await asyncio.to_thread(verify, handle, memory)  # many bytes, and others wait for the loop
        except (KvError, OSError, TimeoutError) as error:
            if memory is not None:
                memory.close()
            limit = self._rollout.move_timeout_s
            return str(error) or f"KV was not verified within rollout.move_timeout_s = {limit:g} s"
        if older := self._received.pop(rollout, None):
            older.memory.close()
        self._received[rollout] = Received(handle, memory, time.monotonic() - began)
        return ""

    def take(self, rollout: RolloutId) -> Received | None:
        """What has come for this answer; the caller closes it once the engine has loaded it."""
        return self._received.pop(rollout, None)

    def release(self, received: Received, *, loaded: bool) -> None:
        """Free what came for an answer that has ended, once the engine cannot want it any more."""
        if loaded:
            received.memory.close()
        else:
            # It was told to leave before its first token: a step in which it is loaded may be under way.
            closing = asyncio.get_running_loop().create_task(self._close_behind(received.memory))
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)

    async def _close_behind(self, memory: KeptKv) -> None:
        """Close it after the engine has answered a call, which it does between two steps."""
        try:
            # One that is gone or shut down takes no more steps.
            with contextlib.suppress(TimeoutError, ProcessLost, ProtocolError):
                async with asyncio.timeout(self._rollout.no_progress_s):
                    while not await self._passed():
                        pass
        finally:
            memory.close()

    async def _passed(self) -> bool:
        try:
            await self._ask("forget_kv", "")
        except ProcessLost:
            raise
        except RemoteError:
            return False
        return True
