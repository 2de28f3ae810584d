"""How instances are shared out among versions: whole ones, all of them, one at least where there is work."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dora_rl.core.balance import partition

works = st.dictionaries(st.integers(0, 9), st.integers(0, 500), max_size=6)


@pytest.mark.parametrize(
    ("work", "instances", "expected"),
    [
        ({3: 10}, 4, {3: 4}),
        ({2: 10, 3: 10}, 4, {2: 2, 3: 2}),
        ({2: 1, 3: 100}, 4, {2: 1, 3: 3}),  # a tail has one instance, however small it is
        ({1: 1, 2: 1, 3: 100}, 4, {1: 1, 2: 1, 3: 2}),
        ({2: 5, 3: 5}, 3, {2: 1, 3: 2}),  # the newest wins a tie
        ({2: 50, 3: 10}, 3, {2: 2, 3: 1}),
        ({1: 5, 2: 5, 3: 5}, 2, {3: 1, 1: 1}),  # too few instances: the newest, then the earliest deadline
        ({1: 5, 2: 5}, 1, {2: 1}),
        ({1: 0, 2: 7}, 2, {2: 2}),
        ({}, 3, {}),
        ({2: 3, 3: 90}, 1, {3: 1}),
    ],
)
def test_instances_follow_the_work(work: dict[int, int], instances: int, expected: dict[int, int]) -> None:
    assert partition(work, instances, newest=max(work, default=0)) == expected


@given(work=works, instances=st.integers(0, 12))
def test_the_parts_are_whole_sum_to_all_and_leave_nobody_out_while_there_are_enough(
    work: dict[int, int], instances: int
) -> None:
    newest = max(work, default=0)
    parts = partition(work, instances, newest=newest)
    wanting = {version for version, answers in work.items() if answers > 0}
    assert set(parts) <= wanting
    assert all(count >= 1 for count in parts.values())
    assert sum(parts.values()) == (instances if wanting else 0)
    if len(wanting) <= instances:
        assert set(parts) == wanting


@given(work=works, instances=st.integers(1, 12), more=st.integers(1, 500))
def test_more_work_never_means_fewer_instances(work: dict[int, int], instances: int, more: int) -> None:
    newest = max(work, default=0)
    before = partition(work, instances, newest=newest)
    after = partition({**work, newest: work.get(newest, 0) + more}, instances, newest=newest)
    assert after.get(newest, 0) >= before.get(newest, 0)
