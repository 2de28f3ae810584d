"""Scoring refuses what the model could not have sampled, in one line, instead of failing deep inside torch."""

from dataclasses import replace

import pytest

from dora_rl.models.source import prepare_model
from dora_rl.train.score import score, unfit
from dora_rl.wire.rollouts import Segment, Trajectory

ONE = Trajectory(
    rollout=17,
    group_id=4,
    member=0,
    prompt_id="p",
    version=0,
    prompt_token_ids=(5, 9),
    completion_token_ids=(3, 4),
    logprobs=(-0.5, -0.25),
    segments=(Segment(version=0, instance="a", start=0, end=2),),
    finish_reason="stop",
    reward=1.0,
    rewards={},
    dispatched_at=0.0,
    finished_at=1.0,
)


def test_foreign_tokens_and_an_empty_prompt_are_refused_and_an_answer_without_tokens_is_not(tmp_path):
    prepare_model("tiny:0", tmp_path)
    empty = replace(ONE, prompt_token_ids=(), completion_token_ids=(), logprobs=(), segments=())
    assert unfit(tmp_path, [ONE, empty]) == {}
    assert [len(scores) for scores in score(tmp_path, tmp_path, [ONE, empty], 1.0)] == [2, 0]
    for change, said in (
        ({"completion_token_ids": (3, 10**6)}, "trajectory 17: token 1000000 is none of the model's"),
        ({"prompt_token_ids": (-1,)}, "trajectory 17: token -1 is none of the model's"),
        ({"prompt_token_ids": ()}, "trajectory 17: its prompt is empty"),
    ):
        with pytest.raises(ValueError, match=f"^{said}"):
            score(tmp_path, tmp_path, [replace(ONE, **change)], 1.0)
