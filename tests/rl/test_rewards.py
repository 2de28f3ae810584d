"""Exact answers, and the checks on what a reward function returns."""

import math
import sys
import types

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dora_rl.rl.errors import RewardError
from dora_rl.rl.rewards import combine, exact_answer, load_reward

answers = st.text(st.characters(categories=("L", "N")), min_size=1, max_size=6)


def exact(completion: str, answer: object = "12") -> float:
    (value,) = exact_answer(prompts=["?"], completions=[completion], completion_ids=[[1]], answer=[answer])
    return value


def score(functions, completions=("a", "b"), **columns):
    """Every function's verdict on the completions; the row's position is its only token."""
    return combine(
        functions,
        prompts=["?"] * len(completions),
        completions=list(completions),
        completion_ids=[[row] for row in range(len(completions))],
        columns=columns,
    )


@given(work=st.text(max_size=40), answer=answers, space=st.text(" \n\t", max_size=3))
def test_the_right_last_line_is_worth_one_whatever_stands_before_it(work, answer, space):
    assert exact(f"{work}\nAnswer: {answer}{space}", answer) == 1.0


@given(answer=answers, other=answers, chatter=st.text(st.characters(categories=("L", "P")), min_size=1, max_size=9))
def test_nothing_but_the_right_last_line_is_worth_anything(answer, other, chatter):
    assert exact(f"Answer: {answer}\n{chatter}", answer) == 0.0
    assert exact(f"Answer: {answer} {chatter}", answer) == 0.0
    assert exact(f"{chatter} Answer: {answer}", answer) == 0.0
    assert exact(f"Answer: {other}", answer) == float(other == answer)


@pytest.mark.parametrize(
    "completion",
    [
        "",
        "12",
        "Answer: ",
        "Answer: 1",
        "Answer: 12.",
        "Answer: 12 12",
        "Answer: 12 or 13",
        "Answer:12",
        "answer: 12",
        " Answer: 12",
        "**Answer: 12**",
        "Answer: 12\nAnswer: 13",
        "Answer: 12\nAnswer: ",
        "Answer: 12\n\nThat is the total.",
        "Answer: Answer: 12",
        "Answer: 0012",
    ],
)
def test_an_answer_that_is_nearly_right_is_worth_nothing(completion):
    assert exact(completion) == 0.0


def test_of_several_answers_only_the_last_counts():
    assert exact("Answer: 11\nAnswer: 12") == 1.0
    guesses = "\n".join(f"Answer: {guess}" for guess in range(20))
    assert exact(guesses) == 0.0


def test_a_number_in_the_data_is_compared_as_it_is_written():
    assert exact("Answer: 12", 12) == 1.0
    assert exact("Answer: 12", 12.0) == 0.0


@pytest.mark.parametrize("answer", ["", "  ", "two\nlines", None])
def test_a_reference_that_no_answer_can_match_is_an_error_with_its_row(answer):
    with pytest.raises(RewardError, match="row 0: the reference answer must be one line"):
        exact("Answer: 12", answer)


def test_a_missing_answer_column_is_named():
    with pytest.raises(RewardError, match=r'needs a column "answer", got \[\'solution\'\]'):
        exact_answer(prompts=["?"], completions=["x"], completion_ids=[[1]], solution=["x"])


def test_a_function_is_found_by_module_and_name():
    assert load_reward("dora_rl.rl.rewards:exact_answer") is exact_answer


@pytest.mark.parametrize(
    ("spec", "fault"),
    [
        ("exact_answer", "takes module:function, got 'exact_answer'"),
        ("no_such_module_here:f", "importing 'no_such_module_here' raised ModuleNotFoundError"),
        ("dora_rl.rl.rewards:exakt", "has no function 'exakt'"),
        ("dora_rl.rl.rewards:ASKED_FORM", "has no function 'ASKED_FORM'"),
    ],
)
def test_a_function_that_is_not_there_is_a_one_line_error(spec, fault):
    with pytest.raises(RewardError, match=fault) as caught:
        load_reward(spec)
    assert "\n" not in str(caught.value)


def test_a_module_that_fails_to_import_says_why(monkeypatch, tmp_path):
    (tmp_path / "broken_rewards.py").write_text("raise OSError('no\\nlicence')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(RewardError, match="raised OSError: no licence"):
        load_reward("broken_rewards:f")


def test_values_are_added_up_and_kept_by_function():
    first, second = score({"long": lambda **_: [1, 0.5], "kind": lambda **_: [2, 3]})
    assert (first.value, first.values) == (3.0, {"long": 1.0, "kind": 2.0})
    assert (second.value, second.values) == (3.5, {"long": 0.5, "kind": 3.0})


def test_a_none_adds_nothing_and_only_nones_stay_none():
    first, second = score({"a": lambda **_: [None, None], "b": lambda **_: [1.0, None]})
    assert (first.value, first.values) == (1.0, {"a": None, "b": 1.0})
    assert second.value is None


def test_every_column_reaches_the_function_with_one_entry_per_completion():
    seen = {}

    def remember(**arguments):
        seen.update(arguments)
        return [0.0, 0.0]

    score({"remember": remember}, answer=["7", "7"], task=["sum", "sum"])
    assert seen == {
        "prompts": ["?", "?"],
        "completions": ["a", "b"],
        "completion_ids": [[0], [1]],
        "answer": ["7", "7"],
        "task": ["sum", "sum"],
    }


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_no_number_is_an_error_naming_function_and_row(bad):
    with pytest.raises(RewardError, match=r"function f, row 1: got -?(nan|inf)"):
        score({"f": lambda **_: [0.0, bad]})


@pytest.mark.parametrize(
    ("returned", "fault"),
    [
        ([1.0], "returned 1 values for 2 completions"),
        ([1.0, 1.0, 1.0], "returned 3 values for 2 completions"),
        (1.0, "returned float; return a list"),
        ([1.0, "good"], "row 1: expected a number or None, got 'good'"),
    ],
)
def test_a_wrong_count_or_type_is_an_error(returned, fault):
    with pytest.raises(RewardError, match=fault):
        score({"f": lambda **_: returned})


def test_an_exception_names_the_function_and_the_row_that_raises_it():
    def parse(completions, **_):
        return [float(completion) for completion in completions]

    with pytest.raises(RewardError, match="reward function parse raised on row 1: ValueError: could not convert"):
        score({"parse": parse}, completions=["1", "one", "uno"])


def test_an_exception_with_text_that_no_file_takes_becomes_one_that_can_be_written():
    def broken(**_):
        raise ValueError("a file called \udcff")

    with pytest.raises(RewardError) as error:
        score({"broken": broken})
    assert str(error.value).encode("utf-8").count(b"\\udcff") == 1


def test_numbers_of_other_libraries_are_numbers():
    numpy = sys.modules.get("numpy") or types.SimpleNamespace(float32=float)
    (only,) = score({"f": lambda **_: [numpy.float32(0.5)]}, completions=["a"])
    assert only.value == 0.5


def test_a_column_of_the_wrong_length_is_an_error():
    with pytest.raises(RewardError, match="2 completions came with 1 entries of 'answer'"):
        score({"f": lambda **_: [0.0, 0.0]}, answer=["7"])
