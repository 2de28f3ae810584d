"""Exact answers, and the checks on what a reward function returns."""

import math
import sys
import types
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dora_rl.rl.errors import RewardError
from dora_rl.rl.rewards import combine, exact_answer, load_reward
from dora_rl.rl.signatures import AnswerGroup, caller, check_call

answers = st.text(st.characters(categories=("L", "N")), min_size=1, max_size=6)


def exact(completion: str, answer: object = "12") -> float:
    (value,) = exact_answer(prompts=["?"], completions=[completion], completion_ids=[[1]], answer=[answer])
    return value


def score_chat(function, turns, **columns):
    group = AnswerGroup(
        prompt=turns, prompt_text="", prompt_ids=(), completions=["a", "b"], completion_ids=[[1], [2]], columns=columns
    )
    return combine({"f": caller(function)}, group)


def score(functions, completions=("a", "b"), weights=None, **columns):
    """Every function's verdict on the completions; the row's position is its only token."""
    group = AnswerGroup(
        prompt="?",
        prompt_text="<ask>?",
        prompt_ids=(1, 2),
        completions=list(completions),
        completion_ids=[[row] for row in range(len(completions))],
        columns=columns,
    )
    return combine({name: caller(function) for name, function in functions.items()}, group, weights=weights)


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


def test_a_function_that_judged_nobody_adds_nothing():
    first, second = score({"a": lambda **_: [None, None], "b": lambda **_: [1.0, None]})
    assert (first.value, first.values) == (1.0, {"a": None, "b": 1.0})
    assert second.value is None


@pytest.mark.parametrize(
    ("weights", "shaping", "values"),
    [
        ({}, (), [1.1, 0.1, None, 1.1]),
        ({}, ("form",), [1.1, 0.1, None, 1.1]),
        ({"form": 0.0}, (), [1.0, 0.0, None, 1.0]),
        ({"right": 0.0}, (), [0.1, 0.1, 0.1, 0.1]),
    ],
)
def test_an_answer_without_a_verdict_that_counts_has_no_reward(weights, shaping, values):
    group = AnswerGroup(
        prompt="?", prompt_text="?", prompt_ids=[1], completions=["a"] * 4, completion_ids=[[1]] * 4, columns={}
    )
    functions = {"right": lambda _: [1, 0, None, 1], "form": lambda _: [0.1] * 4}
    scores = combine(functions, group, weights=weights, shaping=shaping)
    assert [one.value for one in scores] == [None if value is None else pytest.approx(value) for value in values]


def _as_told(values, **_):
    return values


@given(
    verdicts=st.lists(st.lists(st.none() | st.integers(-3, 3), min_size=3, max_size=3), min_size=1, max_size=3),
    weights=st.lists(st.sampled_from([0.0, 0.5, 2.0]), min_size=3, max_size=3),
)
def test_rewards_of_one_group_are_sums_of_the_same_parts(verdicts, weights):
    functions = {f"f{i}": partial(_as_told, values) for i, values in enumerate(verdicts)}
    scores = score(functions, completions="abc", weights=dict(zip(functions, weights, strict=False)))
    parts = {
        frozenset(name for name, value in one.values.items() if value is not None and weights[int(name[1:])])
        for one in scores
        if one.value is not None
    }
    assert len(parts) <= 1


def test_a_sum_beyond_the_largest_reward_is_refused():
    with pytest.raises(RewardError, match="add up to 5e\\+299, at most 1e\\+06"):
        score({"f": lambda **_: [0.5, 0.0]}, weights={"f": 1e300})


def test_a_function_that_changes_what_it_was_given_changes_it_for_itself():
    def spoil(completion_ids, rows, **_):
        completion_ids[0].reverse()
        completion_ids.reverse()
        rows[0]["n"] = 9
        return [0.0, 0.0]

    def look(completion_ids, rows, **_):
        assert completion_ids == [[0], [1]]
        return [row["n"] for row in rows]

    assert [one.value for one in score({"a": spoil, "b": look}, rows={"n": 1})] == [1.0, 1.0]


def test_every_column_reaches_the_function_with_one_entry_per_completion():
    seen = {}

    def remember(**arguments):
        seen.update(arguments)
        return [0.0, 0.0]

    score({"remember": remember}, answer="7", task="sum")
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


def test_weights_multiply_each_functions_values_before_they_are_added_up():
    (only,) = score({"a": lambda **_: [1.0], "b": lambda **_: [4.0]}, ["x"], weights={"a": 2.0, "b": 0.25})
    assert (only.value, only.values) == (3.0, {"a": 1.0, "b": 4.0})


# Functions of other systems


def test_a_function_of_trl_gets_turns_where_the_prompt_is_a_chat_and_text_where_it_is_text():
    def of_chat(completions, solution, log_extra=None, **kwargs):
        return [
            float(completion[0]["content"] == answer) for completion, answer in zip(completions, solution, strict=True)
        ]

    turns = [{"role": "user", "content": "?"}]
    assert [one.value for one in score_chat(of_chat, turns, solution="b")] == [0.0, 1.0]
    assert [one.value for one in score({"f": lambda completions, **_: map(len, completions)})] == [1.0, 1.0]


def test_a_function_of_verl_gets_one_answer_at_a_time_and_may_return_more_than_the_score():
    def compute_score(data_source, solution_str, ground_truth, extra_info=None):
        assert (data_source, extra_info) == ("sums", {"index": 3})
        return {"score": float(solution_str == ground_truth), "acc": True}

    truth = {"ground_truth": "a", "style": "rule"}
    columns = {"data_source": "sums", "reward_model": truth, "extra_info": {"index": 3}}
    assert [one.value for one in score({"f": compute_score}, **columns)] == [1.0, 0.0]


def test_a_function_that_names_less_gets_less():
    def compute_score(solution_str, ground_truth, method="strict"):
        return float(solution_str == ground_truth and method == "strict")

    assert [one.value for one in score({"f": compute_score}, answer="b", level="easy")] == [0.0, 1.0]


def test_a_function_of_areal_gets_one_answers_text_and_tokens_beside_the_columns():
    def reward(prompt, completions, prompt_ids, completion_ids, answer, **kwargs):
        assert (prompt, prompt_ids) == ("<ask>?", [1, 2])
        return int(completions == answer) + 10 * completion_ids[0]

    assert [one.value for one in score({"f": reward}, answer="b", task="sum")] == [0.0, 11.0]


def test_a_function_of_openrlhf_gets_prompt_and_answer_as_one_text():
    def reward_func(queries, prompts, labels, **kwargs):
        rows = zip(queries, prompts, labels, strict=True)
        rewards = [float(query.removeprefix(prompt) == label) for query, prompt, label in rows]
        return {"rewards": Tensor(rewards), "scores": Tensor(rewards), "extra_logs": {}}

    class Tensor:
        def __init__(self, values):
            self.values = values

        def tolist(self):
            return self.values

    assert [one.value for one in score({"f": reward_func}, answer="a")] == [1.0, 0.0]


def test_a_reference_that_the_data_lack_is_named():
    with pytest.raises(RewardError, match=r"raised on row 0: .*only the columns \['task'\]; name the one"):
        score({"f": lambda solution_str, ground_truth: 1.0}, task="sum")


@pytest.mark.parametrize(
    ("right", "values"),
    [
        ([1.0, 1.0, 1.0], [1.0, 1.0, 1.0]),
        ([0.0, 0.0, None], [0.0, 0.0, None]),
        ([1.0, 0.0, 1.0], [0.9, -0.2, 0.7]),
    ],
)
def test_shaping_counts_only_where_the_task_itself_tells_answers_apart(right, values):
    # Regression 16: a length penalty made groups look mixed in which every answer was right.
    group = AnswerGroup(
        prompt="?", prompt_text="?", prompt_ids=[1], completions=["a", "b", "c"], completion_ids=[[1]] * 3, columns={}
    )
    functions = {"right": lambda _: right, "brief": lambda _: [-0.1, -0.2, -0.3]}
    scores = combine(functions, group, shaping=["brief"])
    assert [score.value for score in scores] == pytest.approx(values)
    assert [score.values["brief"] for score in scores] == [-0.1, -0.2, -0.3]


@pytest.mark.parametrize(
    ("function", "fault"),
    [
        ("async def f(completions, **columns): ...", "is async"),
        (
            "def f(completions, difficulty): ...",
            "needs 'difficulty', but gets only answer, completion_ids, completions",
        ),
        ("def f(completions, /): ...", "'completions' is positional only"),
        ("def f(queries, prompts, labels, scale): ...", "needs 'scale'"),
    ],
)
def test_a_function_that_cannot_be_called_is_refused_before_it_is(function, fault):
    names: dict[str, object] = {}
    exec(function, names)  # noqa: S102
    with pytest.raises(RewardError, match=fault):
        check_call("f", names["f"], {"answer": "1"})


def test_a_function_of_another_system_is_refused_when_the_data_have_no_reference():
    def compute_score(data_source, solution_str, ground_truth, extra_info=None):
        return 0.0

    check_call("compute_score", compute_score, {"answer": "1"})
    with pytest.raises(RewardError, match="needs a reference answer"):
        check_call("compute_score", compute_score, {"difficulty": 1})
