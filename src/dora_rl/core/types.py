"""The nouns that cross every wall of the project: identifiers, statuses and what an instance says of itself.

Plain data with next to no behaviour. Bytes (tokens, tensors, KV) are never here, only their names and sizes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal, NewType

Version = NewType("Version", int)
"""Names one set of weights; 0 is what the run started from. Never reused."""

GroupId = NewType("GroupId", int)
"""One prompt and its answers, counted from 0 in the order of dispatch; also the prompt's position in the stream."""

RolloutId = NewType("RolloutId", int)
"""One answer: of a group, or of an evaluation."""

InstanceId = NewType("InstanceId", str)
EvaluationId = NewType("EvaluationId", int)

FinishReason = Literal["stop", "length", "detached", "failed"]
"""Why a segment ended. "stop" and "length" end the trajectory too; after the others it goes on in another segment."""

Sampling = Literal["sampled", "greedy"]


class GroupStatus(StrEnum):
    """Where a dispatched group is; exactly one at a time, and the ledger adds them up."""

    RUNNING = "running"  # at least one member generates or is being scored
    PARKED = "parked"  # unfinished, and no instance works on it at the moment
    READY = "ready"  # complete and durable, without a seat
    SEATED = "seated"  # in the open (or closed, not yet stepped) batch
    TRAINED = "trained"
    FILTERED = "filtered"  # its rewards are all equal: nothing to learn from it
    FAILED = "failed"  # fewer than two members could be scored
    INTERRUPTED = "interrupted"  # the user ended the run first
    DROPPED = "dropped"  # too old to be trained (only drop_stale does this)


UNFINISHED = (GroupStatus.RUNNING, GroupStatus.PARKED)
UNSEATED = (GroupStatus.RUNNING, GroupStatus.PARKED, GroupStatus.READY)
UNTRAINED = (GroupStatus.FILTERED, GroupStatus.FAILED, GroupStatus.DROPPED)
"""Ends of a group that the iteration's close reports beside those it trained."""
FINAL = (GroupStatus.TRAINED, GroupStatus.FILTERED, GroupStatus.FAILED, GroupStatus.INTERRUPTED, GroupStatus.DROPPED)


def has_spread(rewards: Sequence[float | None]) -> bool:
    """Whether a group has anything to learn from: two rewards that differ by more than rounding, whatever their mean.

    The one definition for scheduler, trainer and whoever watches.
    """
    known = [reward for reward in rewards if reward is not None]
    return len(known) >= 2 and max(known) - min(known) > 1e-6 * max(1.0, abs(max(known)), abs(min(known)))


@dataclass(frozen=True, kw_only=True, slots=True)
class InstanceDescriptor:
    """What one rollout engine (one data-parallel group, any tensor-parallel size) says of itself when it joins."""

    node: str
    devices: tuple[str, ...]
    """Accelerators, or ("cpu",)."""

    layout: str
    """KV moves only between instances of equal layout id: shape, dtype, block size and rank of every shard."""

    slots: int
    """Answers it generates at the same time."""

    kv_capacity_tokens: int
    max_versions: int = 1
    """How many versions it can hold at the same time."""

    versions: frozenset[Version] = frozenset()
    """Those that it holds when it joins."""
