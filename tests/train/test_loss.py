import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dora_rl.train.loss import grpo_loss, loss_stats

BOUNDS = {"clip_low": 0.2, "clip_high": 0.28}


def gradient(ratio: float, advantage: float) -> float:
    """d loss / d log-probability of one token with this importance ratio."""
    logprob = torch.tensor([math.log(ratio) - 1.0], dtype=torch.float64, requires_grad=True)
    loss = grpo_loss(logprob, torch.tensor([-1.0]).double(), torch.tensor([advantage]).double(), **BOUNDS)
    (grad,) = torch.autograd.grad(loss, logprob)
    return grad.item()


def test_inside_the_bounds_the_gradient_is_the_ratio_times_the_advantage():
    assert gradient(1.0, 2.0) == pytest.approx(-2.0)
    assert gradient(1.27, 2.0) == pytest.approx(-2.54)
    assert gradient(0.81, -2.0) == pytest.approx(1.62)


def test_a_good_token_is_not_pushed_above_the_upper_bound_nor_a_bad_one_below_the_lower():
    assert gradient(1.29, 1.0) == 0.0
    assert gradient(0.79, -1.0) == 0.0


def test_a_token_that_went_the_wrong_way_is_always_pulled_back():
    assert gradient(0.5, 1.0) == pytest.approx(-0.5)
    assert gradient(2.0, -1.0) == pytest.approx(2.0)


@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("behaviour", [-1e6, -math.inf])
def test_a_token_that_the_sampler_called_impossible_leaves_no_nan(advantage, behaviour):
    logprob = torch.tensor([-1.0], requires_grad=True)
    grpo_loss(logprob, torch.tensor([behaviour]), torch.tensor([advantage]), **BOUNDS).backward()
    assert logprob.grad is not None
    assert logprob.grad.isfinite().all()


@given(st.lists(st.tuples(st.floats(-5, 0), st.floats(-5, 0), st.floats(-2, 2)), min_size=2, max_size=20))
def test_the_loss_is_a_sum_so_it_does_not_matter_where_a_batch_is_cut(tokens):
    columns = torch.tensor(tokens, dtype=torch.float64).T
    cut = len(tokens) // 2
    parts = grpo_loss(*columns[:, :cut], **BOUNDS) + grpo_loss(*columns[:, cut:], **BOUNDS)
    assert parts.item() == pytest.approx(grpo_loss(*columns, **BOUNDS).item(), rel=1e-9, abs=1e-9)


@given(st.lists(st.tuples(st.floats(-5, 0), st.floats(-5, 0)), min_size=1, max_size=20))
def test_kl_is_never_negative_and_the_effective_sample_size_never_above_the_sample(tokens):
    now, behaviour = torch.tensor(tokens, dtype=torch.float64).T
    ones = torch.ones_like(now)
    stats = loss_stats(now, behaviour, ones, ones, torch.zeros(len(now), dtype=torch.long), **BOUNDS)
    assert stats["policy/kl"] >= 0.0
    assert 1 / len(now) - 1e-9 <= stats["policy/ess_share"] <= 1 + 1e-9


def test_statistics_of_two_tokens_can_be_checked_by_hand():
    now = torch.tensor([math.log(0.5), math.log(0.4)], dtype=torch.float64)
    behaviour = torch.tensor([math.log(0.5), math.log(0.2)], dtype=torch.float64)
    stats = loss_stats(
        now, behaviour, torch.tensor([1.0, 1.0]), torch.tensor([0.25, 0.75]), torch.tensor([0, 2]), **BOUNDS
    )
    assert stats == {
        "policy/loss": pytest.approx(-(1.0 + 1.28) / 2),
        "policy/kl": pytest.approx((1.0 - math.log(2)) / 2),
        "policy/clip_fraction": 0.5,
        "policy/entropy": 0.5,
        "policy/ess_share": pytest.approx(9 / 10),
        "policy/first_ratio_max_deviation": pytest.approx(1.0),
        "mismatch/mean_abs_logprob_diff": pytest.approx(math.log(2) / 2),
        "mismatch/max_abs_logprob_diff": pytest.approx(math.log(2)),
        "mismatch/by_staleness": {"0": 0.0, "2": pytest.approx(math.log(2))},
    }


def test_statistics_of_nothing_are_refused_rather_than_nan():
    empty = torch.tensor([])
    with pytest.raises(ValueError, match="one completion token or more"):
        loss_stats(empty, empty, empty, empty, empty, **BOUNDS)
