"""Engines, trainer and rewards that live in the driver's own process, for tests of everything around them.

They obey the ports to the letter and yield to the event loop wherever a real one would, but no process starts and
nothing sleeps: `turns` event-loop turns stand for time.
"""

import asyncio
from collections.abc import Sequence
from random import Random

from dora_rl.core.types import FinishReason, GroupId, InstanceDescriptor, RolloutId, Version
from dora_rl.runtime.ports import (
    GenerateRequest,
    GenerateResult,
    KvData,
    LoadReport,
    Partial,
    ProcessLost,
    RewardResult,
    StepReport,
)
from dora_rl.wire.errors import RemoteError
from dora_rl.wire.kv import Bytes, KvHandle
from dora_rl.wire.rollouts import Prompt, Trajectory
from dora_rl.wire.weights import Canary, Manifest


async def _turns(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


class FakeEngine:
    """Samples tokens 1 to 9 until a 0 (its stop token) comes or the budget ends."""

    def __init__(self, name: str, *, seed: int, slots: int = 8, dies_after: int | None = None) -> None:
        self.name = name
        self.version: Version | None = None
        self.running: dict[RolloutId, GenerateRequest] = {}
        self.loads = 0
        self._detached: dict[RolloutId, bool] = {}
        self._received: dict[RolloutId, int] = {}
        self._rng = Random(seed)
        self._slots = slots
        self._left = dies_after

    async def start(self) -> InstanceDescriptor:
        await _turns(3)
        return InstanceDescriptor(
            node="here", devices=("fake",), layout="fake", slots=self._slots, kv_capacity_tokens=10**6
        )

    async def load(self, manifest: Manifest) -> LoadReport:
        if self.running:
            raise RemoteError(f"{self.name} was told to load while it runs {sorted(self.running)}")
        await _turns(5)
        self.version = manifest.version
        self.loads += 1
        return LoadReport(seconds=0.0, canary_max_abs_diff=0.0)

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        if request.version != self.version:
            raise RemoteError(f"{self.name} holds version {self.version}, asked for {request.version}")
        if len(self.running) >= self._slots:
            raise RemoteError(f"{self.name} has {self._slots} slots and runs as many answers already")
        self.running[request.rollout] = request
        received = self._received.pop(request.rollout, 0)
        prefix = (*request.prompt_token_ids, *request.completion_token_ids)
        try:
            tokens: list[int] = []
            while len(tokens) < request.max_tokens and (not tokens or tokens[-1] != 0):
                if request.rollout in self._detached:
                    break
                await _turns(1)
                self._die_if_due()
                tokens.append(self._rng.choice((0, *range(1, 10), *range(1, 10))))
        finally:
            del self.running[request.rollout]
            keep = self._detached.pop(request.rollout, False)
        reason: FinishReason = "length" if len(tokens) == request.max_tokens else "detached"
        if tokens and tokens[-1] == 0:
            reason = "stop"
        kept = None
        if keep and reason == "detached":
            whole = (*prefix, *tokens)
            kept = KvHandle(node="here", version=request.version, layout="fake", token_ids=whole, shards=())
        continued = bool(request.completion_token_ids and tokens)
        return GenerateResult(
            rollout=request.rollout,
            attempt=request.attempt,
            version=request.version,
            token_ids=tuple(tokens),
            logprobs=tuple(-1.0 - token / 10 for token in tokens),
            finish_reason=reason,
            loaded_tokens=received if continued else 0,
            recomputed_tokens=len(prefix) - 1 - received if continued else 0,
            kept=kept,
        )

    async def kv_tokens(self) -> int:
        return 0

    async def detach(self, rollout: RolloutId, attempt: int, *, keep: bool) -> None:
        request = self.running.get(rollout)
        if request is not None and request.attempt == attempt:
            self._detached[rollout] = keep

    async def receive_kv(self, rollout: RolloutId, handle: KvHandle, data: KvData | None) -> str:
        await _turns(1)
        self._received[rollout] = len(handle.token_ids) - 1
        return ""

    async def read_kv(self, rollout: RolloutId) -> Sequence[Bytes]:
        return []

    async def drop_kv(self, rollout: RolloutId) -> None: ...

    def _die_if_due(self) -> None:
        if self._left is not None:
            self._left -= 1
            if self._left < 0:
                raise ProcessLost(f"{self.name} was killed")

    async def partials(self) -> Sequence[Partial]:
        return []

    async def pace_report(self) -> tuple[int, int]:
        return 0, 0

    async def measure_decode(self, *, batch: int, tokens: int, prompt: Sequence[int]) -> float:
        return 1000.0

    async def shutdown(self) -> None:
        self.version = None


class FakeTrainer:
    """Counts what it is given; `refuses` publications fail first."""

    def __init__(self, *, refuses: int = 0) -> None:
        self.version = Version(0)
        self.batches: list[list[GroupId]] = []
        self.published: list[Version] = []
        self.exported = False
        self._open: dict[int, list[Sequence[Trajectory]]] = {}
        self._refuses = refuses

    async def accumulate(
        self, *, iteration: int, attempt: int, group: Sequence[Trajectory], trained_version: Version
    ) -> None:
        await _turns(2)
        self._open.setdefault(iteration, []).append(group)

    async def step(self, *, iteration: int, attempt: int) -> StepReport:
        await _turns(40)
        groups = self._open.pop(iteration)
        self.batches.append([group[0].group_id for group in groups])
        self.version = Version(self.version + 1)
        members = [member for group in groups for member in group]
        return StepReport(
            improved=True,
            busy_s=0.0,
            tokens=sum(len(one.prompt_token_ids) + len(one.completion_token_ids) for one in members),
            stats={"policy/loss": 0.0},
            advantages={(one.group_id, one.member): one.reward for one in members},
        )

    async def publish(self, *, version: Version, parent: Version | None) -> Manifest:
        await _turns(5)
        if self._refuses:
            self._refuses -= 1
            raise RemoteError("the weight store is full; free some of it")
        self.published.append(version)
        canary = Canary(token_ids=(1, 2), logprobs=(-1.0,))
        return Manifest(version=version, parent=parent, tensors=(), checksum=str(version), canary=canary)

    async def export(self) -> None:
        self.exported = True

    async def pace_report(self) -> tuple[int, int]:
        return 0, 0

    async def measure_rate(self, groups: Sequence[Sequence[Trajectory]]) -> float:
        return 1000.0

    async def shutdown(self) -> None: ...


class FakeRewards:
    """An answer is worth the share of its tokens that are odd, so that groups have spread."""

    async def score(
        self, *, prompt: Prompt, completions: Sequence[str], completion_ids: Sequence[Sequence[int]]
    ) -> Sequence[RewardResult]:
        await _turns(1)
        values = [sum(token % 2 for token in ids) / max(len(ids), 1) for ids in completion_ids]
        return [RewardResult(value=value, values={"odd": value}) for value in values]

    async def shutdown(self) -> None: ...
