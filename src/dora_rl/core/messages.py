"""Everything that crosses the core's wall: events are past-tense facts, commands are imperatives.

Every command is answered by exactly one event, failure included; its docstring names the event. Facts that nobody
asked for (an instance joined or died, a rank or data was lost, the user pressed Ctrl-C) are events too. Messages
count and name things; tokens, tensors and KV never travel in them. All times are seconds since the run's start.
"""

from dataclasses import dataclass

from dora_rl.core.types import (
    EvaluationId,
    FinishReason,
    GroupId,
    InstanceDescriptor,
    InstanceId,
    RolloutId,
    Sampling,
    Version,
)

# --- events: facts nobody asked for -----------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class RunStarted:
    at: float
    prompts: int | None
    """How many training prompts there are in all; None: they never end."""
    evaluation_answers: int
    """Answers of one evaluation, sampled and greedy together; 0: none is made."""


@dataclass(frozen=True, kw_only=True, slots=True)
class InstanceJoined:
    at: float
    instance: InstanceId
    descriptor: InstanceDescriptor


@dataclass(frozen=True, kw_only=True, slots=True)
class InstanceLost:
    at: float
    instance: InstanceId
    reason: str
    saved: tuple[tuple[RolloutId, int], ...] = ()
    """Answers that ran there, with the tokens that they had reported since their segment began."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Reported:
    """How full an instance's KV cache is."""

    at: float
    instance: InstanceId
    kv_tokens: int
    """Of its running answers, what they share counted once."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankLost:
    """A trainer rank died: the gradient of the open batch is gone, the weights of `trained` are not."""

    at: float
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class DataLost:
    """The finished answers of a ready group are gone."""

    at: float
    group: GroupId


@dataclass(frozen=True, kw_only=True, slots=True)
class Interrupted:
    """The user asked the run to end now."""

    at: float


# --- events: answers --------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Loaded:
    at: float
    instance: InstanceId
    version: Version
    error: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Generated:
    """One segment ended; `num_tokens` counts the tokens that this segment added."""

    at: float
    rollout: RolloutId
    segment: int
    attempt: int
    instance: InstanceId
    version: Version
    reason: FinishReason
    num_tokens: int
    error: str | None = None
    loaded_tokens: int = 0
    """Prefix tokens whose KV came from where the answer ran before."""
    recomputed_tokens: int = 0
    """Prefix tokens of a continued answer that were computed again."""
    resume_s: float = 0.0
    """Of a continued answer: from its arrival at the instance to the first token, in seconds."""
    kept_tokens: int = 0
    """Of a detached segment: tokens whose KV was kept for the next one."""
    kept_bytes: int = 0
    keep_s: float = 0.0
    """Seconds it took to keep them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Detached:
    """The instance was told; how the segment ended is in its own Generated, which may have come before."""

    at: float
    rollout: RolloutId
    attempt: int
    error: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Scored:
    """The group's rewards are known and its answers are durable. None takes a member out of the advantage."""

    at: float
    group: GroupId
    attempt: int
    rewards: tuple[float | None, ...]
    digest: str
    """Of the durable record (wire.rollouts.digest), so that the audit sees every later change of it."""
    note: str = ""
    """Why a reward is missing, if one is."""
    error: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Accumulated:
    """The trainer holds the group's data, or (`lost`) the data is gone and the group must be repaired."""

    at: float
    iteration: int
    attempt: int
    group: GroupId
    lost: bool = False
    error: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Stepped:
    """`improved`: the optimizer stepped and the trainer holds one more version; otherwise there was no gradient."""

    at: float
    iteration: int
    attempt: int
    improved: bool
    busy_s: float
    """Seconds in which the trainer computed for this batch."""
    error: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Published:
    at: float
    version: Version
    attempt: int
    error: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Closed:
    at: float
    iteration: int
    error: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluated:
    at: float
    evaluation: EvaluationId
    error: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Forgotten:
    at: float
    version: Version
    error: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Exported:
    at: float
    version: Version
    error: str | None = None


# --- commands ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """Bring a version onto an instance that runs nothing. Answered by Loaded."""

    instance: InstanceId
    version: Version


@dataclass(frozen=True, kw_only=True, slots=True)
class Generate:
    """Sample one segment of one answer. Answered by Generated."""

    rollout: RolloutId
    segment: int
    attempt: int
    instance: InstanceId
    version: Version
    group: GroupId | None
    """None: an answer of `evaluation`."""
    evaluation: EvaluationId | None
    member: int
    """Position in the group, or among the evaluation's answers."""
    sampling: Sampling
    generated_tokens: int
    """Tokens that earlier segments of this answer have: the prefix to continue from."""
    max_tokens: int
    """What is left of the answer's budget."""
    kept_tokens: int = 0
    """Tokens of the prefix whose KV was kept and fits this instance; 0: the prefix has to be computed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Detach:
    """End a running segment now. Answered by Detached."""

    rollout: RolloutId
    attempt: int
    instance: InstanceId
    keep: bool
    """Whether its KV is worth keeping; otherwise the next segment computes the prefix again."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Score:
    """Reward the group's answers and make them durable. Answered by Scored."""

    group: GroupId
    attempt: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Accumulate:
    """Give a seated group to the trainer, which adds its gradient when it suits. Answered by Accumulated."""

    iteration: int
    attempt: int
    group: GroupId
    trained_at: Version
    """The version that the trainer holds; the gradient is of the next one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """Close the batch: finish its gradient and make one optimizer step. Answered by Stepped."""

    iteration: int
    attempt: int
    groups: tuple[GroupId, ...]
    version: Version
    """The version that this step makes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Publish:
    """Write a version to the weight store; a retry writes the same bytes. Answered by Published."""

    version: Version
    parent: Version | None
    attempt: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Close:
    """Write the iteration's file: every group that left the ledger in it. Answered by Closed."""

    iteration: int
    trained_at: Version
    trained: tuple[GroupId, ...]
    filtered: tuple[GroupId, ...]
    failed: tuple[GroupId, ...]
    dropped: tuple[GroupId, ...] = ()
    """Thrown away as too old: forgotten, and in no file."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluate:
    """Score an evaluation whose answers are complete. Answered by Evaluated."""

    evaluation: EvaluationId
    version: Version
    iteration: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Forget:
    """Free a version's weights: nothing refers to it any more. Answered by Forgotten."""

    version: Version


@dataclass(frozen=True, kw_only=True, slots=True)
class Export:
    """Write the newest weights in Hugging Face format. Answered by Exported."""

    version: Version


Event = (
    RunStarted
    | InstanceJoined
    | InstanceLost
    | Reported
    | RankLost
    | DataLost
    | Interrupted
    | Loaded
    | Generated
    | Detached
    | Scored
    | Accumulated
    | Stepped
    | Published
    | Closed
    | Evaluated
    | Forgotten
    | Exported
)
Command = Load | Generate | Detach | Score | Accumulate | Step | Publish | Close | Evaluate | Forget | Export


class ProtocolError(RuntimeError):
    """A driver broke the contract: an answer nobody asked for, an illegal order, a foreign version."""
