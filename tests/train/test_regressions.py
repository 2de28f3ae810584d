"""Faults that users reported in systems of this kind (docs/regressions.md), where they concern the trainer."""

import pytest

from dora_rl.train.advantage import group_advantages
from dora_rl.train.batch import score_group
from dora_rl.train.gradient import GradientSum
from dora_rl.train.model import load_model


def test_an_advantage_is_measured_within_its_own_group_whatever_else_is_in_the_batch(config, tiny, make_group):
    # Regression 42: the group's own standard deviation, not the batch's.
    total = GradientSum(load_model(tiny), config)
    total.add(make_group(0, rewards=(1.0, 0.0)), trained_version=0)
    total.add(make_group(1, rewards=(100.0, -300.0)), trained_version=0)
    for group, rewards in ((0, (1.0, 0.0)), (1, (100.0, -300.0))):
        assert [total.advantages[group, member] for member in (0, 1)] == group_advantages(rewards)
        assert [total.advantages[group, member] for member in (0, 1)] == pytest.approx(
            [1.0, -1.0] if rewards[0] > rewards[1] else [-1.0, 1.0], abs=1e-5
        )


def test_an_empty_answer_stays_a_member_of_its_group(make_group):
    # Regression 12: it has no tokens to learn from, but its reward counts.
    answers, rewards = [(), (8, 2), (9, 2)], (0.0, 1.0, 1.0)
    advantages, scored = score_group(make_group(answers=answers, rewards=rewards), trained_version=0)
    assert advantages == group_advantages(rewards)
    assert scored is not None
    assert (len(scored.members), scored.completion_tokens) == (3, 4)
