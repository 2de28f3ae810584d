"""How a reward function is called: ours, and those of other systems as they are.

Which system's a function is, its parameters say:

    ours, TRL    prompts, completions, completion_ids, and columns   all answers at once; a list of numbers or None
    OpenRLHF     queries, prompts, labels                            all answers at once; a tensor, or {"rewards": ...}
    verl         data_source, solution_str, ground_truth, ...        one answer; a number, or {"score": ...}
    AReaL        prompt, completions, prompt_ids, completion_ids     one answer, `completions` its text; a number

A function without `**` gets only the arguments that it names. Knows nothing of what values are allowed.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

from dora_rl.rl.errors import RewardError


@dataclass(frozen=True, kw_only=True, slots=True)
class AnswerGroup:
    """One prompt with its answers, as a reward function may ask for them."""

    prompt: str | Sequence[Mapping[str, str]]
    """As the data has it: text, or chat turns."""

    prompt_text: str
    """As the model sees it, chat template included."""

    prompt_ids: Sequence[int]
    completions: Sequence[str]
    completion_ids: Sequence[Sequence[int]]
    """As many as completions."""

    columns: Mapping[str, Any]
    """The other columns of the prompt's row."""

    def only(self, row: int) -> "AnswerGroup":
        return replace(self, completions=[self.completions[row]], completion_ids=[self.completion_ids[row]])

    def copy(self) -> "AnswerGroup":
        """For one function: what it changes in place it changes for itself."""
        return replace(
            self,
            prompt=deepcopy(self.prompt),
            prompt_ids=list(self.prompt_ids),
            completions=list(self.completions),
            completion_ids=[list(ids) for ids in self.completion_ids],
            columns=deepcopy(dict(self.columns)),
        )


Call = Callable[[AnswerGroup], Any]
"""A function's values for a group; nobody has looked at them yet."""


def caller(function: Callable[..., Any]) -> Call:
    """The function, to be called with a group."""
    names, takes_all = _parameters(function)
    ask = _way(names)

    def call(group: AnswerGroup) -> Any:
        return ask(lambda **arguments: function(**_taken(arguments, names, all_of_them=takes_all)), group)

    return call


def check_call(name: str, function: Callable[..., Any], columns: Mapping[str, Any]) -> None:
    """Raises RewardError when the function cannot be called with rows of these columns."""
    if inspect.iscoroutinefunction(function):
        raise RewardError(f"reward function {name} is async; write it without, it has a process of its own")
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # built in: it does not say
        return
    ask = _way({one.name for one in parameters})
    given = _GIVEN[ask] | (set(columns) if ask in (_ask_for_all, _ask_areal) else set())
    kinds = inspect.Parameter
    for one in parameters:
        if one.kind is kinds.POSITIONAL_ONLY:
            raise RewardError(f"reward function {name}: {one.name!r} is positional only; arguments are given by name")
        needed = one.default is kinds.empty and one.kind not in (kinds.VAR_POSITIONAL, kinds.VAR_KEYWORD)
        if needed and one.name not in given:
            raise RewardError(
                f"reward function {name} needs {one.name!r}, but gets only {', '.join(sorted(given))}; add that column "
                "to the data or give it a default"
            )
    if ask in (_ask_verl, _ask_openrlhf):
        _find_reference(columns)


def text_of(completion: str | Sequence[Mapping[str, str]]) -> str:
    """An answer's text, whether it comes as text or as the chat turn that it is."""
    return completion if isinstance(completion, str) else completion[-1]["content"]


def _ask_for_all(function: Callable[..., Any], group: AnswerGroup) -> Any:
    """Ours and TRL's: where the prompt is a chat, so is every completion."""
    count = len(group.completions)
    chat = not isinstance(group.prompt, str)
    completions = [[{"role": "assistant", "content": text}] if chat else text for text in group.completions]
    columns = {name: [value] * count for name, value in group.columns.items()}
    return function(
        **columns, prompts=[group.prompt] * count, completions=completions, completion_ids=group.completion_ids
    )


def _ask_openrlhf(function: Callable[..., Any], group: AnswerGroup) -> Any:
    count = len(group.completions)
    queries = [group.prompt_text + text for text in group.completions]
    values = function(queries=queries, prompts=[group.prompt_text] * count, labels=[_reference(group)] * count)
    values = values["rewards"] if isinstance(values, Mapping) else values
    return values.tolist() if hasattr(values, "tolist") else values


def _ask_verl(function: Callable[..., Any], group: AnswerGroup) -> Any:
    values = [
        function(
            data_source=group.columns.get("data_source", ""),
            solution_str=text,
            ground_truth=_reference(group),
            extra_info=group.columns.get("extra_info"),
        )
        for text in group.completions
    ]
    return [value["score"] if isinstance(value, Mapping) else value for value in values]


def _ask_areal(function: Callable[..., Any], group: AnswerGroup) -> Any:
    return [
        function(
            **{
                **group.columns,
                "prompt": group.prompt_text,
                "completions": text,
                "prompt_ids": list(group.prompt_ids),
                "completion_ids": list(ids),
            }
        )
        for text, ids in zip(group.completions, group.completion_ids, strict=True)
    ]


_SIGNATURES: tuple[tuple[set[str], Callable[[Callable[..., Any], AnswerGroup], Any]], ...] = (
    ({"solution_str", "ground_truth"}, _ask_verl),
    ({"queries", "labels"}, _ask_openrlhf),
    ({"prompt", "completions"}, _ask_areal),
)


_GIVEN: Mapping[Any, set[str]] = {
    _ask_for_all: {"prompts", "completions", "completion_ids"},
    _ask_openrlhf: {"queries", "prompts", "labels"},
    _ask_verl: {"data_source", "solution_str", "ground_truth", "extra_info"},
    _ask_areal: {"prompt", "completions", "prompt_ids", "completion_ids"},
}
"""What each way of calling gives, besides columns."""


def _reference(group: AnswerGroup) -> Any:
    """What verl calls ground truth and OpenRLHF a label."""
    return _find_reference(group.columns)


def _find_reference(columns: Mapping[str, Any]) -> Any:
    model = columns.get("reward_model")
    if isinstance(model, Mapping) and "ground_truth" in model:
        return model["ground_truth"]
    for name in ("ground_truth", "label", "answer"):
        if name in columns:
            return columns[name]
    raise RewardError(
        f"the function needs a reference answer, but the data has only the columns {sorted(columns)}; name the "
        "one that holds it with data.answer_column"
    )


def _way(names: set[str]) -> Callable[[Callable[..., Any], AnswerGroup], Any]:
    """How a function with parameters of these names wants to be called."""
    return next((ask for needed, ask in _SIGNATURES if needed <= names), _ask_for_all)


def _parameters(function: Callable[..., Any]) -> tuple[set[str], bool]:
    """Names of its parameters, and whether it takes any others too."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # built in: it does not say
        return set(), True
    kinds = inspect.Parameter
    return {one.name for one in parameters}, any(one.kind is kinds.VAR_KEYWORD for one in parameters)


def _taken(arguments: Mapping[str, Any], names: set[str], *, all_of_them: bool) -> dict[str, Any]:
    return {name: value for name, value in arguments.items() if all_of_them or name in names}
