"""Trajectories come back from every place of rest as they were put there, and damage is seen when they are read."""

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dora_rl.wire.iteration_files import (
    SCHEMA,
    RolloutRow,
    read_iteration,
    read_records,
    write_iteration,
    write_records,
)
from dora_rl.wire.open_store import OpenStore
from dora_rl.wire.rollouts import RolloutFileError, Segment, Trajectory, arrays_of, digest, facts_of, trajectory_of

finite = st.floats(allow_nan=False, allow_infinity=False)
logprob = st.floats(-40, 0, width=32)
token = st.integers(0, 2**31 - 1)


@st.composite
def trajectories(draw, group: int = 0, member: int = 0) -> Trajectory:
    length = draw(st.integers(0, 12))
    version = draw(st.integers(0, 9))
    cuts = sorted(draw(st.sets(st.integers(1, max(1, length - 1)), max_size=2)) - {length}) if length else []
    bounds = [0, *[cut for cut in cuts if cut < length], length] if length else [0]
    return Trajectory(
        rollout=draw(st.integers(0, 10**6)),
        group_id=group,
        member=member,
        prompt_id=draw(st.text(max_size=8)),
        version=version,
        prompt_token_ids=tuple(draw(st.lists(token, max_size=8))),
        completion_token_ids=tuple(draw(st.lists(token, min_size=length, max_size=length))),
        logprobs=tuple(draw(st.lists(logprob, min_size=length, max_size=length))),
        segments=tuple(
            Segment(version=version, instance=draw(st.sampled_from("ab")), start=start, end=end)
            for start, end in pairwise(bounds)
        ),
        finish_reason=draw(st.sampled_from(("stop", "length", "failed"))),
        reward=draw(st.none() | finite),
        rewards=draw(st.dictionaries(st.text(max_size=4), st.none() | finite, max_size=2)),
        dispatched_at=draw(finite),
        finished_at=draw(finite),
        extras=draw(st.dictionaries(st.text(max_size=4).filter(lambda key: key != "rollout"), token, max_size=2)),
    )


@st.composite
def groups(draw, group: int = 0) -> tuple[Trajectory, ...]:
    return tuple(draw(trajectories(group, member)) for member in range(draw(st.integers(1, 3))))


ONE = Trajectory(
    rollout=17,
    group_id=4,
    member=0,
    prompt_id="p",
    version=3,
    prompt_token_ids=(1, 2),
    completion_token_ids=(5, 6, 7),
    logprobs=(-0.5, -0.25, -1.0),
    segments=(Segment(version=3, instance="a", start=0, end=3),),
    finish_reason="stop",
    reward=1,
    rewards={"exact": 1},
    dispatched_at=1.0,
    finished_at=2.0,
)
ROW = RolloutRow(trajectory=ONE, iteration=2, trained_at_version=3, status="trained", advantage=0.5)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("rollouts")


@settings(max_examples=20)  # each one waits for the disk
@given(group=groups())
def test_a_group_comes_back_from_the_open_store_as_it_was_put_with_the_same_digest(folder, group):
    with OpenStore(folder / "open.db") as store:
        assert store.put_group(group) == digest(group)
    with OpenStore(folder / "open.db", read_only=True) as store:
        assert store.get_group(0) == group
        assert digest(store.get_group(0)) == digest(group)


@settings(max_examples=20)
@given(
    group=groups(),
    status=st.sampled_from(("trained", "filtered", "failed")),
    advantage=st.none() | finite,
    iteration=st.integers(0, 99),
)
def test_an_iteration_comes_back_from_its_file_as_it_was_written(folder, group, status, advantage, iteration):
    rows = tuple(
        RolloutRow(trajectory=one, iteration=iteration, trained_at_version=3, status=status, advantage=advantage)
        for one in group
    )
    write_iteration(folder / "0.parquet", rows)
    again = read_iteration(folder / "0.parquet")
    assert again == rows
    assert digest([row.trajectory for row in again]) == digest(group)


def test_an_iteration_file_has_exactly_the_documented_columns_with_log_probabilities_in_float32(tmp_path):
    write_iteration(tmp_path / "2.parquet", [ROW])
    assert " ".join(SCHEMA.names) == (
        "group_id member prompt_id version iteration trained_at_version status prompt_token_ids "
        "completion_token_ids logprobs segments finish_reason reward rewards advantage dispatched_at finished_at extras"
    )
    assert str(SCHEMA.field("logprobs").type.value_type) == "float"
    assert [path.name for path in tmp_path.iterdir()] == ["2.parquet"]  # the temporary name is gone


@settings(max_examples=30)
@given(group=groups(), seed=st.integers(0, 99))
def test_a_digest_depends_on_every_sampled_and_rewarded_value_and_not_on_the_members_order(group, seed):
    assert digest(group) == digest(group[::-1])
    rng = np.random.default_rng(seed)
    changes: list[dict[str, object]] = [
        {"prompt_id": group[0].prompt_id + "x"},
        {"prompt_token_ids": (*group[0].prompt_token_ids, 1)},
        {"finish_reason": "detached"},
        {"reward": -1.5 if group[0].reward != -1.5 else 0.0},
        {"rewards": {**group[0].rewards, "more": 1.0}},
        {"rollout": group[0].rollout + 1},
        {"finished_at": 1.0 if group[0].finished_at != 1.0 else 2.0},
    ]
    if n := len(group[0].completion_token_ids):
        position = int(rng.integers(n))
        tokens, logprobs = list(group[0].completion_token_ids), list(group[0].logprobs)
        tokens[position] ^= 1
        logprobs[position] = float(np.nextafter(np.float32(logprobs[position]), np.float32(-99)))
        changes += [{"completion_token_ids": tuple(tokens)}, {"logprobs": tuple(logprobs)}]
    for change in changes:
        assert digest((replace(group[0], **change), *group[1:])) != digest(group), change


def test_a_token_that_moves_from_the_prompt_to_the_completion_changes_the_digest():
    whole = replace(ONE, prompt_token_ids=(1,), completion_token_ids=(2, 6, 7))
    moved = replace(
        ONE,
        prompt_token_ids=(1, 2),
        completion_token_ids=(6, 7),
        logprobs=(-0.25, -1.0),
        segments=(Segment(version=3, instance="a", start=0, end=2),),
    )
    assert digest([whole]) != digest([moved])


def test_a_group_put_again_replaces_the_one_before_and_a_removed_one_is_an_error_in_one_line(tmp_path):
    with OpenStore(tmp_path / "open.db") as store:
        store.put_group([ONE, replace(ONE, rollout=18, member=1)])
        store.put_group([replace(ONE, group_id=5)])
        store.put_group([ONE])
        assert store.get_group(4) == (ONE,)
        assert store.group_ids() == (4, 5)
        store.remove([4, 99])
        assert store.group_ids() == (5,)
        with pytest.raises(
            RolloutFileError, match=r"^group 4 is not in .*open\.db; it was removed or never completed$"
        ):
            store.get_group(4)
        with pytest.raises(ValueError, match=r"members of one group, got those of \[4, 5\]"):
            store.put_group([ONE, replace(ONE, group_id=5)])


def test_a_group_is_durable_when_put_group_returns_even_if_the_store_is_never_closed(tmp_path):
    store = OpenStore(tmp_path / "open.db")
    store.put_group([ONE])
    with OpenStore(tmp_path / "open.db", read_only=True) as other:
        assert other.get_group(4) == (ONE,)
    store.close()


def test_reading_a_closed_store_leaves_nothing_beside_it(tmp_path):
    with OpenStore(tmp_path / "open.db") as store:
        store.put_group([ONE])
    store.close()
    with OpenStore(tmp_path / "open.db", read_only=True) as store:
        assert store.get_group(4) == (ONE,)
    assert [path.name for path in tmp_path.iterdir()] == ["open.db"]


def test_a_file_that_is_no_store_and_one_that_is_no_iteration_are_errors_in_one_line(tmp_path):
    for name in ("open.db", "0.parquet"):
        (tmp_path / name).write_text("something else entirely, and long enough to have a header")
    with pytest.raises(RolloutFileError, match=r"^cannot open .*open\.db as a store of open groups: .*$"):
        OpenStore(tmp_path / "open.db")
    with pytest.raises(RolloutFileError, match=r"^cannot read .*0\.parquet as a file of trajectories: .*$"):
        read_iteration(tmp_path / "0.parquet")


@pytest.mark.parametrize("column", ["completion_token_ids", "logprobs"])
def test_unequal_lengths_of_tokens_and_log_probabilities_are_refused_when_read(tmp_path, column):
    # Regression 33.
    write_iteration(tmp_path / "2.parquet", [ROW])
    (record,) = read_records(tmp_path / "2.parquet")
    record[column] = record[column][:-1]
    write_records(tmp_path / "2.parquet", [record])
    with pytest.raises(RolloutFileError, match=r"row 0: rollout 17: "):
        read_iteration(tmp_path / "2.parquet")


def test_a_segment_of_another_version_or_with_a_gap_is_refused_when_read(tmp_path):
    write_iteration(tmp_path / "2.parquet", [ROW])
    for key, value in (("version", 2), ("start", 1), ("end", 2)):
        (record,) = read_records(tmp_path / "2.parquet")
        record["segments"][0][key] = value
        write_records(tmp_path / "3.parquet", [record])
        with pytest.raises(RolloutFileError, match="row 0: rollout 17: segment"):
            read_iteration(tmp_path / "3.parquet")


def test_the_rollout_is_kept_beside_the_extras_of_the_run(tmp_path):
    write_iteration(tmp_path / "2.parquet", [replace(ROW, trajectory=replace(ONE, extras={"note": "slow"}))])
    (record,) = read_records(tmp_path / "2.parquet")
    assert json.loads(record["extras"]) == {"note": "slow", "rollout": 17}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("completion_token_ids", [5, None, 7]),
        ("prompt_token_ids", ["1"]),
        ("logprobs", [None, -0.25, -1.0]),
        ("segments", [None]),
        ("segments", [{"version": 3, "instance": "a", "start": 0, "end": None}]),
        ("rollout", [17]),
        ("member", "0"),
        ("finish_reason", "bored"),
        ("rewards", None),
    ],
)
def test_a_field_of_another_type_is_no_trajectory_and_is_named(field, value):
    arrays = zip(("prompt_token_ids", "completion_token_ids", "logprobs"), arrays_of(ONE), strict=True)
    facts = facts_of(ONE) | {name: array.tolist() for name, array in arrays}
    assert trajectory_of(facts) == ONE
    with pytest.raises(ValueError, match=rf"^.* - at `\$\.{field}"):
        trajectory_of(facts | {field: value})
