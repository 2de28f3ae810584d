import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dora_rl.core.types import has_spread
from dora_rl.train.advantage import group_advantages

rewards_of_a_group = st.lists(st.floats(-10, 10, width=32) | st.none(), min_size=0, max_size=16)


@given(rewards_of_a_group)
def test_advantages_of_a_group_with_spread_have_mean_zero_and_at_most_unit_spread(rewards):
    scored = [value for value in group_advantages(rewards) if value is not None]
    if has_spread(rewards):
        assert math.fsum(scored) == pytest.approx(0.0, abs=1e-4)
        assert math.fsum(value**2 for value in scored) / len(scored) <= 1.0 + 1e-6
        assert max(scored) > 0 > min(scored)
    else:
        assert set(scored) <= {0.0}


@given(rewards_of_a_group)
def test_a_missing_reward_counts_for_nothing_so_the_real_group_size_is_used(rewards):
    without = [reward for reward in rewards if reward is not None]
    advantages = group_advantages(rewards)
    assert [value is None for value in advantages] == [reward is None or len(without) < 2 for reward in rewards]
    if len(without) >= 2:
        assert [value for value in advantages if value is not None] == group_advantages(without)


def test_right_answers_are_worth_more_the_rarer_they_are():
    assert group_advantages([1.0, 0.0, 0.0, 0.0])[0] == pytest.approx(math.sqrt(3), rel=1e-5)
    assert group_advantages([1.0, 1.0, 1.0, 0.0])[0] == pytest.approx(1 / math.sqrt(3), rel=1e-5)


@pytest.mark.parametrize("reward", [0.0, 1.0, 0.37, -2.5])
def test_equal_rewards_have_no_spread_whatever_their_mean(reward):
    assert not has_spread([reward] * 4)
    assert group_advantages([reward] * 4) == [0.0] * 4


def test_different_rewards_have_spread_even_when_their_mean_is_that_of_a_failed_group():
    assert has_spread([-1.0, 1.0])


def test_one_scored_member_has_nobody_to_be_compared_with():
    assert group_advantages([1.0, None, None]) == [None, None, None]


@pytest.mark.parametrize("reward", [math.nan, math.inf])
def test_a_reward_that_is_no_number_is_refused(reward):
    with pytest.raises(ValueError, match="finite numbers or None, got"):
        group_advantages([1.0, reward])
