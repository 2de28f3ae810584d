"""Faults that users reported in systems of this kind (docs/regressions.md), around fake engines and a fake trainer."""

from pathlib import Path

from dora_rl.core import messages as m
from dora_rl.core.types import GroupId, InstanceId, RolloutId, Version
from dora_rl.runtime.answers import Answers, trajectory
from dora_rl.runtime.ports import GenerateResult
from dora_rl.wire.iteration_files import read_iteration
from dora_rl.wire.rollouts import Prompt, Segment
from runtime.test_driver import make_config, run


def test_rows_carry_the_version_that_sampled_although_the_trainer_has_gone_on(tmp_path: Path) -> None:
    # Regression 2.
    done = run(tmp_path, make_config())
    sampled = {c.group: c.version for _, commands in done.journal for c in commands if isinstance(c, m.Generate)}
    rows = [row for i in range(6) for row in read_iteration(tmp_path / f"{i}.parquet")]
    assert {row.trajectory.group_id: row.trajectory.version for row in rows} == {
        row.trajectory.group_id: sampled[row.trajectory.group_id] for row in rows
    }
    assert any(row.trajectory.version < row.trained_at_version for row in rows), (
        "no group was stale: this shows nothing"
    )


def generate(*, segment: int, instance: str, has: int) -> m.Generate:
    return m.Generate(
        rollout=RolloutId(0),
        segment=segment,
        attempt=segment,
        instance=InstanceId(instance),
        version=Version(3),
        group=GroupId(0),
        evaluation=None,
        member=0,
        sampling="sampled",
        generated_tokens=has,
        max_tokens=10 - has,
    )


def result(*token_ids: int, attempt: int, reason: str) -> GenerateResult:
    return GenerateResult(
        rollout=RolloutId(0),
        attempt=attempt,
        version=Version(3),
        token_ids=token_ids,
        logprobs=(-1.0,) * len(token_ids),
        finish_reason=reason,  # type: ignore[arg-type]
    )


def test_a_segment_that_was_ended_early_has_its_version_and_instance_like_any_other() -> None:
    # Regression 6.
    answers, prompt = Answers(), Prompt(prompt_id="p", messages=(), token_ids=(1,))
    answers.begin(generate(segment=0, instance="a", has=0), prompt, now=0.0)
    answers.extend(result(5, 6, 7, attempt=0, reason="detached"), now=1.0)
    answers.begin(generate(segment=1, instance="b", has=3), prompt, now=2.0)
    answers.extend(result(attempt=1, reason="detached"), now=3.0)
    answer = answers.begin(generate(segment=2, instance="a", has=3), prompt, now=4.0)
    answers.extend(result(8, 0, attempt=2, reason="stop"), now=5.0)
    whole = trajectory(answer, reward=1.0, rewards={}, note="")
    assert whole.segments == (
        Segment(version=Version(3), instance=InstanceId("a"), start=0, end=3),
        Segment(version=Version(3), instance=InstanceId("a"), start=3, end=5),
    )
    assert whole.completion_token_ids == (5, 6, 7, 8, 0)
