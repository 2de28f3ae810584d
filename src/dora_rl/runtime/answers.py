"""The tokens of answers on their way from engines to the store: what the core counts, this holds.

An answer lives here from its first segment until its group is durable. What engines report of unfinished segments is
held too, so that a lost engine costs at most the tokens since its last report.
"""

from dataclasses import dataclass, field

from dora_rl.core.messages import Generate
from dora_rl.core.types import FinishReason, GroupId, InstanceId, RolloutId
from dora_rl.runtime.ports import GenerateResult, Partial
from dora_rl.wire.rollouts import Prompt, Segment, Trajectory


@dataclass(slots=True, kw_only=True)
class Answer:
    command: Generate
    """The latest one."""
    prompt: Prompt
    dispatched_at: float
    finished_at: float = 0.0
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    segments: list[Segment] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    reported: list[tuple[int, float]] = field(default_factory=list)
    """Token and log-probability of what the running segment has reported so far; not yet part of the answer."""


class Answers:
    def __init__(self) -> None:
        self._answers: dict[RolloutId, Answer] = {}
        self._groups: dict[GroupId, dict[int, RolloutId]] = {}

    def begin(self, command: Generate, prompt: Prompt, *, now: float) -> Answer:
        """A segment is about to run. Cuts the answer back to what the command continues from."""
        answer = self._answers.get(command.rollout)
        if answer is None:
            answer = Answer(command=command, prompt=prompt, dispatched_at=now)
            self._answers[command.rollout] = answer
            if command.group is not None:
                self._groups.setdefault(command.group, {})[command.member] = command.rollout
        answer.command = command
        keep = command.generated_tokens
        del answer.token_ids[keep:], answer.logprobs[keep:]
        answer.segments = [part for part in answer.segments if part.end <= keep]
        answer.finish_reason, answer.reported = None, []
        return answer

    def report(self, partial: Partial) -> None:
        answer = self._answers.get(partial.rollout)
        if answer is not None and answer.command.attempt == partial.attempt and answer.finish_reason is None:
            answer.reported += zip(partial.token_ids, partial.logprobs, strict=True)

    def extend(self, result: GenerateResult, *, now: float) -> bool:
        """A segment ended; False when its group was dropped meanwhile. Raises ValueError if lists differ in length."""
        answer = self._answers.get(result.rollout)
        if answer is None:
            return False
        if len(result.token_ids) != len(result.logprobs):
            raise ValueError(
                f"rollout {result.rollout}: {len(result.token_ids)} tokens but {len(result.logprobs)} log-probabilities"
            )
        _append(answer, list(zip(result.token_ids, result.logprobs, strict=True)))
        answer.finish_reason, answer.finished_at = result.finish_reason, now
        return True

    def salvage(self, command: Generate, *, now: float) -> int:
        """A segment failed: what it had reported becomes part of the answer. Returns how many tokens that are."""
        answer = self._answers.get(command.rollout)
        if answer is None or answer.command.attempt != command.attempt or answer.finish_reason is not None:
            return 0
        saved = answer.reported[: command.max_tokens]
        _append(answer, saved)
        answer.finish_reason, answer.finished_at = "failed", now
        return len(saved)

    def salvage_all(self, instance: InstanceId, *, now: float) -> tuple[tuple[RolloutId, int], ...]:
        """The same for all that ran on an instance which is gone: answers, and how many tokens each had reported."""
        lost = [
            answer.command
            for answer in self._answers.values()
            if answer.command.instance == instance and answer.finish_reason is None
        ]
        return tuple((command.rollout, self.salvage(command, now=now)) for command in lost)

    def holds(self, rollout: RolloutId) -> bool:
        return rollout in self._answers

    def of_rollout(self, rollout: RolloutId) -> Answer:
        return self._answers[rollout]

    def of_group(self, group: GroupId) -> list[Answer]:
        """The group's answers in the order of its members."""
        return [self._answers[rollout] for _, rollout in sorted(self._groups[group].items())]

    def forget_group(self, group: GroupId) -> list[RolloutId]:
        """Returns the answers that were forgotten; none when it had been forgotten before."""
        rollouts = list(self._groups.pop(group, {}).values())
        for rollout in rollouts:
            del self._answers[rollout]
        return rollouts

    def forget(self, rollout: RolloutId) -> None:
        del self._answers[rollout]


def _append(answer: Answer, sampled: list[tuple[int, float]]) -> None:
    """Add a segment of tokens and log-probabilities; one without tokens leaves no trace."""
    if sampled:
        command, start = answer.command, len(answer.token_ids)
        answer.token_ids += [token for token, _ in sampled]
        answer.logprobs += [logprob for _, logprob in sampled]
        answer.segments.append(
            Segment(version=command.version, instance=command.instance, start=start, end=len(answer.token_ids))
        )


def trajectory(answer: Answer, *, reward: float | None, rewards: dict[str, float | None], note: str) -> Trajectory:
    """The finished answer as the store and the trainer know it; `note` says why a reward is missing."""
    command = answer.command
    assert command.group is not None, f"rollout {command.rollout} belongs to an evaluation"
    return Trajectory(
        rollout=command.rollout,
        group_id=command.group,
        member=command.member,
        prompt_id=answer.prompt.prompt_id,
        # The oldest, where a strategy lets answers go on under newer ones.
        version=answer.segments[0].version if answer.segments else command.version,
        prompt_token_ids=answer.prompt.token_ids,
        completion_token_ids=tuple(answer.token_ids),
        logprobs=tuple(answer.logprobs),
        segments=tuple(answer.segments),
        finish_reason=answer.finish_reason or "failed",
        reward=reward,
        rewards=rewards,
        dispatched_at=answer.dispatched_at,
        finished_at=answer.finished_at,
        extras={"note": note} if note else {},
    )
