"""Trajectories as they travel from engine to trainer and rest on disk.

Tokens and log-probabilities go as the engine made them: never re-tokenised, never relabelled.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from dora_rl.core.types import FinishReason, GroupId, InstanceId, RolloutId, Version


@dataclass(frozen=True, kw_only=True, slots=True)
class Segment:
    """A run of completion tokens [start, end) sampled by one version on one instance without interruption."""

    version: Version
    instance: InstanceId
    start: int
    end: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """One row of the data set, ready for the engine."""

    prompt_id: str
    """Names the row for ever, whatever its position in the stream; held-out rows never share one with training."""

    messages: tuple[Mapping[str, str], ...]
    """Chat turns, worked examples included."""

    token_ids: tuple[int, ...]
    columns: Mapping[str, Any] = field(default_factory=dict)
    """The row's other columns, as the reward receives them."""

    is_chat: bool = True
    """Whether the data has it as chat turns; otherwise as text, which is the only turn's."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Trajectory:
    """One finished answer. Every token-wise list has the completion's length, the end-of-sequence token included."""

    rollout: RolloutId
    group_id: GroupId
    member: int
    prompt_id: str
    version: Version
    """Stamped at dispatch; every segment carries the same one."""

    prompt_token_ids: tuple[int, ...]
    completion_token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    """log softmax(logits / temperature) of each sampled token under `version`, in nats."""

    segments: tuple[Segment, ...]
    finish_reason: FinishReason
    reward: float | None
    rewards: Mapping[str, float | None]
    dispatched_at: float
    finished_at: float
    extras: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        n = len(self.completion_token_ids)
        if len(self.logprobs) != n:
            raise ValueError(
                f"rollout {self.rollout}: {n} completion tokens but {len(self.logprobs)} log-probabilities"
            )
        covered = 0
        for segment in self.segments:
            if segment.start != covered or segment.version < self.version:
                raise ValueError(
                    f"rollout {self.rollout}: segment {segment} does not continue at token {covered} "
                    f"under version {self.version}"
                )
            covered = segment.end
        if covered != n:
            raise ValueError(f"rollout {self.rollout}: segments cover {covered} of {n} completion tokens")


class RolloutFileError(ValueError):
    """A file of trajectories is damaged or does not hold what was asked for."""


def digest(group: Sequence[Trajectory]) -> str:
    """Over all that was sampled and rewarded: 16 hexadecimal digits a member, in the order of members, joined by "-".

    What becomes of the group later (iteration, status, advantage) is no part of it, so that the digest taken when the
    group became durable still holds for the rows of the iteration's file, member by member.
    """
    return "-".join(map(_digest, sorted(group, key=lambda one: (one.member, one.rollout))))


def _digest(trajectory: Trajectory) -> str:
    arrays = arrays_of(trajectory)
    facts = facts_of(trajectory)
    # Lengths first: otherwise a token could move from the prompt to the completion unseen.
    facts["lengths"] = [array.size for array in arrays]
    state = hashlib.blake2b(json.dumps(facts, sort_keys=True, separators=(",", ":")).encode() + b"\0", digest_size=8)
    for array in arrays:
        state.update(array.tobytes())
    return state.hexdigest()


def facts_of(trajectory: Trajectory) -> dict[str, Any]:
    """All but the token-wise lists, in JSON's types."""
    return {
        "rollout": trajectory.rollout,
        "group_id": trajectory.group_id,
        "member": trajectory.member,
        "prompt_id": trajectory.prompt_id,
        "version": trajectory.version,
        "segments": [
            {"version": part.version, "instance": part.instance, "start": part.start, "end": part.end}
            for part in trajectory.segments
        ],
        "finish_reason": trajectory.finish_reason,
        # A reward function may return an int; stored columns are floats, and both must hash alike.
        "reward": _float(trajectory.reward),
        "rewards": {name: _float(value) for name, value in trajectory.rewards.items()},
        "dispatched_at": float(trajectory.dispatched_at),
        "finished_at": float(trajectory.finished_at),
        "extras": dict(trajectory.extras),
    }


def _float(value: float | None) -> float | None:
    return None if value is None else float(value)


def arrays_of(trajectory: Trajectory) -> tuple[NDArray[Any], ...]:
    """Prompt, completion and log-probabilities as they are stored, little-endian."""
    return (
        np.asarray(trajectory.prompt_token_ids, dtype="<i4"),
        np.asarray(trajectory.completion_token_ids, dtype="<i4"),
        np.asarray(trajectory.logprobs, dtype="<f4"),
    )


def trajectory_of(facts: Mapping[str, Any]) -> Trajectory:
    """From `facts_of` and the token-wise lists. Raises ValueError, one line, when it is no trajectory: a field that is
    missing or of another type included."""
    return msgspec.convert(dict(facts), Trajectory)
