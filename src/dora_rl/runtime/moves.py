"""KV of answers between two instances: who keeps it, and handing it over before the answer goes on.

The driver sees handles, never the bytes: these stay on their node, or travel from actor to actor. Whatever fails here
costs a prefill and nothing else.
"""

import asyncio
import contextlib
from collections.abc import Iterable, Mapping
from dataclasses import replace

from dora_rl.core.messages import Generate
from dora_rl.core.types import InstanceId, RolloutId
from dora_rl.runtime.failures import one_line
from dora_rl.runtime.ports import Engine
from dora_rl.wire.errors import RemoteError
from dora_rl.wire.kv import KvHandle


class Moves:
    def __init__(self, engines: Mapping[InstanceId, Engine], timeout_s: float, *, one_version: bool = True) -> None:
        """`engines` names all that ever were: one whose engine died may still hold KV.

        Without `one_version` answers may go on under newer weights with the KV of older ones.
        """
        self._one_version = one_version
        self._engines = engines
        self._timeout_s = timeout_s
        self._nodes: dict[InstanceId, str] = {}
        self._kept: dict[RolloutId, tuple[InstanceId, KvHandle]] = {}

    def joined(self, instance: InstanceId, node: str) -> None:
        self._nodes[instance] = node

    def keep(self, rollout: RolloutId, instance: InstanceId, handle: KvHandle) -> None:
        """A detached segment left its KV on this instance."""
        self._kept[rollout] = (instance, handle)

    async def hand_over(self, command: Generate) -> str | None:
        """Bring an answer's KV to where its next segment will run.

        Returns why it has to be computed again instead, nothing ("") when it need not, and None when there is none.
        """
        if command.rollout not in self._kept:
            return None
        source, handle = self._kept[command.rollout]
        why = None
        if command.kept_tokens:
            try:
                async with asyncio.timeout(self._timeout_s):
                    why = await self._transfer(command, source, handle)
            except TimeoutError:
                why = f"KV was not handed over within rollout.move_timeout_s = {self._timeout_s:g} s"
            except RemoteError as error:
                why = one_line(error)
        await self.drop([command.rollout])
        return why

    async def drop(self, rollouts: Iterable[RolloutId]) -> None:
        """These answers need no KV any more."""
        for rollout in rollouts:
            if rollout in self._kept:
                source, _ = self._kept.pop(rollout)
                with contextlib.suppress(RemoteError, TimeoutError):  # a holder that is gone holds nothing
                    async with asyncio.timeout(self._timeout_s):
                        await self._engines[source].drop_kv(rollout)

    async def _transfer(self, command: Generate, source: InstanceId, handle: KvHandle) -> str:
        if not self._one_version:
            handle = replace(handle, version=command.version)
        far = self._nodes.get(command.instance) != handle.node
        data = await self._engines[source].read_kv(command.rollout) if far else None
        return await self._engines[command.instance].receive_kv(command.rollout, handle, data)
