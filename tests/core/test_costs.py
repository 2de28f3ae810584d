"""What a run has seen of moves and prefills decides how the next answer is moved."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dora_rl.core.costs import Costs, Line


@given(fixed=st.floats(0, 5), slope=st.floats(0, 0.1), lengths=st.lists(st.integers(1, 5000), min_size=2, unique=True))
def test_a_line_is_found_again_from_its_points(fixed: float, slope: float, lengths: list[int]) -> None:
    line = Line()
    for length in lengths:
        line.observe(length, fixed + slope * length)
    assert line.at(1000) == pytest.approx(fixed + slope * 1000, rel=1e-3, abs=1e-3)


def test_nothing_is_known_before_the_first_observation_and_both_ways_are_tried() -> None:
    costs = Costs(moving=Line(), computing=Line())
    assert costs.moving.at(100) is None
    assert costs.keep_pays(100)
    assert costs.of_move(100) == 0.0


def test_short_prefixes_are_computed_again_and_long_ones_are_moved() -> None:
    costs = Costs(moving=Line(), computing=Line())
    for tokens in (50, 200, 800):
        costs.moved(tokens, 0.1 + 0.0001 * tokens)
        costs.computed(tokens, 0.001 * tokens)
    assert not costs.keep_pays(100)
    assert costs.keep_pays(120)
    assert costs.of_move(50) == pytest.approx(0.05)
    assert costs.of_move(1000) == pytest.approx(0.2)


def test_the_way_that_is_not_taken_is_tried_now_and_then_so_that_one_bad_measurement_does_not_last() -> None:
    costs = Costs(moving=Line(), computing=Line())
    seconds = {True: 0.1, False: 0.2}
    taken = []
    for number in range(2000):
        keep = costs.choose_keep(100)
        costs.chosen(keep=keep)
        (costs.moved if keep else costs.computed)(100, 60.0 if number == 0 else seconds[keep])
        taken.append(keep)
    assert taken[:2] == [True, False]
    assert all(taken[-60:])
    assert 0.98 < sum(taken[1000:]) / 1000 < 1.0


def test_long_prefixes_whose_cost_grows_faster_do_not_hide_what_short_ones_cost() -> None:
    line = Line()
    for tokens in (50, 100, 200, 400, 800, 1200):
        line.observe(tokens, 0.0025 * tokens + 4e-7 * tokens**2)
    assert line.at(100) == pytest.approx(0.254, rel=0.1)


def test_what_a_busy_machine_did_yesterday_is_forgotten() -> None:
    line = Line()
    for _ in range(50):
        line.observe(100, 5.0)
    for _ in range(1000):
        line.observe(100, 1.0)
    assert line.at(100) == pytest.approx(1.0, abs=0.01)
