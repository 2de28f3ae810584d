"""What an answer is worth: the reward function of the demo, and how functions are loaded, checked and added up.

Knows texts and columns of one prompt group; knows nothing of processes, time limits or advantages.
"""

import importlib
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from dataclasses import dataclass
from difflib import get_close_matches
from numbers import Real
from typing import Any

from dora_rl.core.types import has_spread
from dora_rl.rl.errors import RewardError
from dora_rl.rl.signatures import AnswerGroup, Call, text_of

LARGEST = 1e6
"""Largest reward: beyond it the float32 that they are kept in cannot tell answers apart."""

ASKED_FORM = "Answer: "
"""How the last line of an answer begins; `tasks.INSTRUCTION` asks for it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Score:
    """What one completion is worth."""

    value: float | None
    """The weighted sum of the verdicts; None when a function that counts has given it none."""

    values: Mapping[str, float | None]
    """By function, before weighting."""


def exact_answer(
    prompts: Sequence[Any], completions: Sequence[Any], completion_ids: Sequence[Sequence[int]], **columns: Any
) -> list[float]:
    """1.0 when the last line is exactly `Answer: X` with X the column `answer`, else 0.0.

    Only white space may follow. An earlier line, right or wrong, counts for nothing, so guessing several times gains
    nothing; nor does saying more on the last line than the answer.
    """
    if "answer" not in columns:
        raise RewardError(f'exact_answer needs a column "answer", got {sorted(columns)}; name the data\'s column so')
    answers = [_reference(row, answer) for row, answer in enumerate(columns["answer"])]
    return [
        float(text_of(completion).rstrip().split("\n")[-1] == ASKED_FORM + answer)
        for completion, answer in zip(completions, answers, strict=True)
    ]


def digit_share(
    prompts: Sequence[Any], completions: Sequence[Any], completion_ids: Sequence[Sequence[int]], **columns: Any
) -> list[float]:
    """The share of digits among an answer's characters, 0 to 1: a goal that even random weights can learn, for
    trying out an installation."""
    texts = map(text_of, completions)
    return [sum(character.isdigit() for character in text) / max(len(text), 1) for text in texts]


def load_reward(spec: str) -> Callable[..., Any]:
    """Import the function named `module:function`. Raises RewardError, one line, when there is none."""
    module_name, colon, name = spec.partition(":")
    if module_name.endswith(".py") or module_name.startswith(".") or "/" in module_name:
        raise RewardError(
            f"reward.functions takes module:function, got {spec!r}; write the module as Python imports it, without .py "
            "and folders, and have PYTHONPATH lead to it"
        )
    if not (colon and module_name and name):
        raise RewardError(
            f"reward.functions takes module:function, got {spec!r}; for example dora_rl.rl.rewards:exact_answer"
        )
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:
        raise RewardError(
            f"reward.functions: importing {module_name!r} raised {type(error).__name__}: {_one_line(error)}; "
            "make it importable from where the run starts"
        ) from error
    function = getattr(module, name, None)
    if not callable(function):
        known = sorted(
            key
            for key, value in vars(module).items()
            if callable(value) and getattr(value, "__module__", "") == module.__name__
        )
        near = get_close_matches(name, known, n=3) or [key for key in known if not key.startswith("_")][:10]
        raise RewardError(
            f"reward.functions: {module_name} has no function {name!r}; did you mean one of {near}? Correct the name"
        )
    return function  # type: ignore[no-any-return]  # `combine` checks what it returns, on every call


def combine(
    functions: Mapping[str, Call],
    group: AnswerGroup,
    *,
    weights: Mapping[str, float] | None = None,
    shaping: Collection[str] = (),
) -> list[Score]:
    """Score one group with every function and add up the values.

    A function counts when it judges the task: its weight is not 0, it is none of `shaping`, and it judged somebody in
    the group. An answer that one of these left without a verdict (None) has no reward: without that part its sum would
    be compared with whole ones. Where no function counts nobody has one.

    Where the task's rewards are all equal, those of `shaping` functions (brevity, form) count for nothing: they would
    make a group look worth learning from in which every answer is right, or none.

    Raises RewardError naming the function, and the row where there is one, when it raises or returns something else
    than one finite number or None per completion.
    """
    count = len(group.completions)
    by_function: dict[str, list[float | None]] = {}
    for name, function in functions.items():
        try:
            values = function(group.copy())
        except (Exception, SystemExit) as error:
            row = _first_failing_row(function, group)
            where = "the whole group only" if row is None else f"row {row}"
            cause = f"{type(error).__name__}: {_one_line(error)}"
            raise RewardError(f"reward function {name} raised on {where}: {cause}; mend it or its data") from error
        by_function[name] = _checked(name, values, count)
    rows = [{name: values[row] for name, values in by_function.items()} for row in range(count)]
    factor = {name: (weights or {}).get(name, 1.0) for name in functions}
    counting = [
        name
        for name, values in by_function.items()
        if factor[name] and name not in shaping and any(value is not None for value in values)
    ]
    task = [_add_up({name: row[name] for name in counting}, factor) for row in rows]
    if not has_spread(task):
        shaping = ()
    shaped = [
        None if reward is None else reward + sum(factor[name] * (row[name] or 0.0) for name in shaping)
        for reward, row in zip(task, rows, strict=True)
    ]
    return [Score(value=_within_limit(reward), values=row) for reward, row in zip(shaped, rows, strict=True)]


def _checked(name: str, values: Any, count: int) -> list[float | None]:
    if isinstance(values, str | bytes | Mapping | Set):
        raise RewardError(f"reward function {name} returned {type(values).__name__}; return a list, one value each")
    try:
        rows = list(values)
    except TypeError:
        raise RewardError(
            f"reward function {name} returned {type(values).__name__}; return a list, one number or None per completion"
        ) from None
    if len(rows) != count:
        raise RewardError(
            f"reward function {name} returned {len(rows)} values for {count} completions; return one each"
        )
    return [_number_or_none(name, row, value) for row, value in enumerate(rows)]


def _number_or_none(name: str, row: int, value: Any) -> float | None:
    if value is None:
        return None
    # numpy's and torch's scalars are numbers to everybody but isinstance.
    try:
        value = value.item() if hasattr(value, "item") else value
        number = float(value) if isinstance(value, Real) else None
    except (ValueError, RuntimeError, OverflowError):  # an array of several, a number of four hundred digits
        number = None
    if number is None:
        raise RewardError(f"reward function {name}, row {row}: expected a number or None, got {_short(value)}")
    if not abs(number) <= LARGEST:  # a NaN fails too
        raise RewardError(
            f"reward function {name}, row {row}: got {number}, expected a number up to {LARGEST:g}; return None for an "
            "answer it cannot judge"
        )
    return number


def _short(value: Any) -> str:
    try:
        return " ".join(repr(value).split())[:80]
    except ValueError:  # too many digits to print
        return f"a value of {type(value).__name__}"


def _add_up(values: Mapping[str, float | None], factor: Mapping[str, float]) -> float | None:
    """None when a value is missing, or there is none at all."""
    verdicts = [(factor[name], value) for name, value in values.items() if value is not None]
    if not verdicts or len(verdicts) < len(values):
        return None
    return sum(weight * value for weight, value in verdicts)


def _within_limit(reward: float | None) -> float | None:
    if reward is not None and not abs(reward) <= LARGEST:
        raise RewardError(f"the weighted rewards add up to {reward:g}, at most {LARGEST:g} is expected; lower a weight")
    return reward


def _first_failing_row(function: Call, group: AnswerGroup) -> int | None:
    """Which completion alone makes it raise: an exception out of a list does not say."""
    for row in range(len(group.completions)):
        try:
            function(group.only(row).copy())
        except (Exception, SystemExit):  # noqa: BLE001 - whatever the group raised, this row does it too
            return row
    return None


def _reference(row: int, answer: Any) -> str:
    text = "" if answer is None else str(answer).strip()
    if not text or "\n" in text:
        raise RewardError(
            f"exact_answer, row {row}: the reference answer must be one line of text, got {answer!r}; mend the data"
        )
    return text


def _one_line(error: BaseException) -> str:
    # Half a surrogate pair cannot be written to any file.
    return " ".join(str(error).split()).encode("utf-8", "backslashreplace").decode("utf-8")
