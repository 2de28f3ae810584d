"""What the driver's hands need of the other processes, as protocols: engines, trainer, rewards.

Ray actors stand behind them in a run (cluster.py), fakes in fast tests (fakes.py). Every method raises RemoteError
when the other side failed, and ProcessLost when it is gone.
"""

from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from dora_rl.core.types import FinishReason, GroupId, InstanceDescriptor, RolloutId, Version
from dora_rl.wire.errors import RemoteError
from dora_rl.wire.kv import Bytes, KvHandle
from dora_rl.wire.rollouts import Prompt, Trajectory
from dora_rl.wire.weights import Manifest


class SourceLost(RemoteError):
    """The prompts have failed: there is nothing to ask any more."""


class ProcessLost(RemoteError):
    """The other process is gone."""


KvData = Sequence[Bytes] | Awaitable[Sequence[Bytes]]
"""Bytes of KV, one piece a rank, or what stands for them: so that they go from process to process, past the driver."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerateRequest:
    """One segment to sample: token ids in."""

    rollout: RolloutId
    attempt: int
    version: Version
    prompt_token_ids: tuple[int, ...]
    completion_token_ids: tuple[int, ...]
    """What earlier segments of this answer have sampled; the engine continues from there."""
    max_tokens: int
    """What is left of the answer's budget, in tokens."""
    temperature: float
    greedy: bool
    stop_token_ids: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerateResult:
    """Token ids out, with the processed log-probability of each (nats); both lists have one length."""

    rollout: RolloutId
    attempt: int
    version: Version
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: FinishReason
    loaded_tokens: int = 0
    """Prefix tokens whose KV was loaded."""
    recomputed_tokens: int = 0
    """Prefix tokens that had to be computed although an earlier segment had done so."""
    resume_s: float = 0.0
    """Of a continued answer: seconds from the request to its first token."""
    kept: KvHandle | None = None
    """Of a detached segment: KV of all that it has."""
    keep_s: float = 0.0
    """Seconds it took to keep it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Partial:
    """Tokens of an unfinished answer since the last report."""

    rollout: RolloutId
    attempt: int
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadReport:
    seconds: float
    canary_max_abs_diff: float
    """Largest difference between the engine's and the trainer's log-probabilities of the probe, in nats."""


class Engine(Protocol):
    """A rollout engine that holds one version at a time."""

    async def start(self) -> InstanceDescriptor: ...
    async def load(self, manifest: Manifest) -> LoadReport: ...
    async def generate(self, request: GenerateRequest) -> GenerateResult: ...
    async def partials(self) -> Sequence[Partial]: ...
    async def kv_tokens(self) -> int:
        """KV of its running answers in tokens of whole blocks, prompts that they share counted once."""
        ...

    async def detach(self, rollout: RolloutId, attempt: int, *, keep: bool) -> None:
        """End a running segment; with `keep` its result has a handle to its KV. One that has ended is left alone."""
        ...

    async def receive_kv(self, rollout: RolloutId, handle: KvHandle, data: KvData | None) -> str:
        """Take over KV that another instance has kept, for this rollout's next segment here; its bytes come as `data`
        when that is on another node. Returns why not, or nothing: the segment computes the prefix again then."""
        ...

    async def read_kv(self, rollout: RolloutId) -> KvData:
        """KV that is kept here, for an instance on another node."""
        ...

    async def drop_kv(self, rollout: RolloutId) -> None:
        """KV that is kept here is needed no more."""
        ...

    async def pace_report(self) -> tuple[int, int]:
        """Paced pieces of work so far, and how many took longer than the law says."""
        ...

    async def measure_decode(self, *, batch: int, tokens: int, prompt: Sequence[int]) -> float: ...
    async def shutdown(self) -> None: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class StepReport:
    """What one optimizer step did. `stats` uses the names of metrics.jsonl."""

    improved: bool
    reason: str | None = None
    """Why it made no new version."""
    busy_s: float
    """Seconds in which some rank computed, stepped or published since the last report."""
    tokens: int
    stats: Mapping[str, Any] = field(default_factory=dict)
    advantages: Mapping[tuple[GroupId, int], float | None] = field(default_factory=dict)
    """By group and member."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardResult:
    """What one answer is worth."""

    value: float | None
    """The sum over the reward functions; None takes the answer out of its group's advantage."""
    values: Mapping[str, float | None]
    """By reward function."""
    note: str = ""
    """Why there is no value."""


class Rewards(Protocol):
    async def score(
        self, *, prompt: Prompt, completions: Sequence[str], completion_ids: Sequence[Sequence[int]]
    ) -> Sequence[RewardResult]:
        """One result per completion of this prompt, in order."""
        ...

    async def shutdown(self) -> None: ...


class Trainer(Protocol):
    """One SPMD group of ranks behind one handle."""

    async def accumulate(
        self, *, iteration: int, attempt: int, group: Sequence[Trajectory], trained_version: Version
    ) -> None: ...
    async def step(self, *, iteration: int, attempt: int) -> StepReport: ...
    async def publish(self, *, version: Version, parent: Version | None) -> Manifest: ...
    async def export(self) -> None: ...
    async def pace_report(self) -> tuple[int, int]:
        """Paced groups and steps so far, and how many took longer than the law says."""
        ...

    async def measure_rate(self, groups: Sequence[Sequence[Trajectory]]) -> float: ...
    async def shutdown(self) -> None: ...
