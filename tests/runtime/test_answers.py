"""What the driver holds of answers that are on their way."""

from dora_rl.core.messages import Generate
from dora_rl.core.types import FinishReason, GroupId, InstanceId, RolloutId, Version
from dora_rl.runtime.answers import Answers, trajectory
from dora_rl.runtime.ports import GenerateResult, Partial
from dora_rl.wire.rollouts import Prompt, Segment

PROMPT = Prompt(prompt_id="p", messages=(), token_ids=(1, 2))


def command(*, segment: int = 0, instance: str = "a", generated_tokens: int = 0) -> Generate:
    return Generate(
        rollout=RolloutId(7),
        segment=segment,
        attempt=segment,
        instance=InstanceId(instance),
        version=Version(3),
        group=GroupId(0),
        evaluation=None,
        member=0,
        sampling="sampled",
        generated_tokens=generated_tokens,
        max_tokens=10 - generated_tokens,
    )


def partial(*tokens: int, attempt: int = 0) -> Partial:
    return Partial(
        rollout=RolloutId(7), attempt=attempt, token_ids=tokens, logprobs=tuple(-float(token) for token in tokens)
    )


def result(*tokens: int, attempt: int, reason: FinishReason = "stop") -> GenerateResult:
    return GenerateResult(
        rollout=RolloutId(7),
        attempt=attempt,
        version=Version(3),
        token_ids=tokens,
        logprobs=tuple(-float(token) for token in tokens),
        finish_reason=reason,
    )


def test_what_a_failed_segment_had_reported_is_kept_and_the_next_one_continues_from_it() -> None:
    answers = Answers()
    answers.begin(command(), PROMPT, now=1.0)
    answers.report(partial(5, 6))
    answers.report(partial(8))
    assert answers.salvage(command(), now=2.0) == 3
    answer = answers.begin(command(segment=1, instance="b", generated_tokens=3), PROMPT, now=3.0)
    assert answer.token_ids == [5, 6, 8]
    answers.extend(result(9, 2, attempt=1), now=4.0)
    done = trajectory(answer, reward=1.0, rewards={}, note="")
    assert done.completion_token_ids == (5, 6, 8, 9, 2)
    assert done.logprobs == (-5.0, -6.0, -8.0, -9.0, -2.0)
    assert [(part.instance, part.start, part.end) for part in done.segments] == [("a", 0, 3), ("b", 3, 5)]


def test_a_late_report_of_an_attempt_that_is_over_counts_for_nothing() -> None:
    answers = Answers()
    answers.begin(command(), PROMPT, now=1.0)
    assert answers.salvage(command(), now=2.0) == 0
    answers.begin(command(segment=1), PROMPT, now=3.0)
    answers.report(partial(5, attempt=0))
    assert answers.of_rollout(RolloutId(7)).reported == []


def test_a_segment_that_fails_before_it_has_begun_has_nothing_to_keep() -> None:
    assert Answers().salvage(command(), now=1.0) == 0


def test_a_segment_that_was_ended_early_has_its_version_and_instance_like_any_other() -> None:
    # Regression 6.
    answers = Answers()
    answers.begin(command(), PROMPT, now=0.0)
    answers.extend(result(5, 6, 7, attempt=0, reason="detached"), now=1.0)
    answers.begin(command(segment=1, instance="b", generated_tokens=3), PROMPT, now=2.0)
    answers.extend(result(attempt=1, reason="detached"), now=3.0)
    answer = answers.begin(command(segment=2, generated_tokens=3), PROMPT, now=4.0)
    answers.extend(result(8, 0, attempt=2), now=5.0)
    whole = trajectory(answer, reward=1.0, rewards={}, note="")
    assert whole.segments == (
        Segment(version=Version(3), instance=InstanceId("a"), start=0, end=3),
        Segment(version=Version(3), instance=InstanceId("a"), start=3, end=5),
    )
    assert whole.completion_token_ids == (5, 6, 7, 8, 0)
