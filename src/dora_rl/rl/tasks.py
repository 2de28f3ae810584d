"""Tasks of reasoning-gym as this project words them: a question, a worked solution, a final answer.

Owns the wording and the difficulty of each recipe. A recipe is a pure function of an entry number, so that every
machine draws the same problems. Knows nothing of tokens, splits or positions in a run.

A recipe called NAME_steps has worked examples that solve the problem line by line; its answers are as long as the
problem asks for, which is what gives a mixture of recipes its heavy tail.
"""

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import reasoning_gym
from reasoning_gym.factory import DATASETS

from dora_rl.rl.errors import DataError

INSTRUCTION = 'End with "Answer: X".'
"""The system turn of every prompt: the form that `rewards.exact_answer` wants on the last line."""

ENTRIES = 2**40
"""Entry numbers of one recipe; reasoning-gym seeds its generator with them."""

UNREPEATABLE = {
    "list_functions": "it draws from the module-level random generator",
    "pool_matrix": "it reseeds numpy's global generator",
    "time_intervals": "its questions depend on today's date",
    "propositional_logic": "some of its entries have no answer",
}
"""Tasks of reasoning-gym 0.1.25 that are not a function of the entry number."""


@dataclass(frozen=True, slots=True)
class Problem:
    question: str
    work: str
    """Lines that lead to the answer; empty where it is given at once."""

    answer: str

    @property
    def solution(self) -> str:
        """What a perfect answer says; the last line is the asked form."""
        return f"{self.work}\nAnswer: {self.answer}" if self.work else f"Answer: {self.answer}"


Entry = Mapping[str, Any]
"""What reasoning-gym makes: question, answer, metadata."""


@dataclass(frozen=True)
class Task:
    name: str
    generator: str
    """Name in reasoning-gym."""

    options: Mapping[str, Any] = field(default_factory=dict)
    write: Callable[[Entry], Problem] = lambda entry: Problem(entry["question"].strip(), "", entry["answer"])
    example_entries: tuple[int, ...] = (0, 1, 2, 3, 4, 5, 6, 7)
    """Entries shown as worked examples, in this order; their questions are never asked. Fixed for all runs, so that
    every prompt of the task begins with the same tokens and engines share their KV."""

    def problem(self, number: int) -> Problem:
        """Problem `number` (0 <= number < ENTRIES), the same on every machine."""
        return self.write(self._entries[number])

    def examples(self, count: int) -> tuple[Problem, ...]:
        """The first `count` worked examples, all with different questions."""
        found: dict[str, Problem] = {}
        for number in (*self.example_entries, *range(1000)):
            if len(found) == count:
                break
            problem = self.problem(number)
            if is_one_line(problem.answer):
                found.setdefault(problem.question, problem)
        if len(found) < count:
            raise DataError(
                f"task {self.name} has only {len(found)} different worked examples, data.worked_examples asks for {count}; lower it"
            )
        return tuple(found.values())

    @cached_property
    def _entries(self) -> Any:
        return reasoning_gym.create_dataset(self.generator, seed=0, size=ENTRIES, **self.options)


def find_task(name: str) -> Task:
    """The recipe of this name, or else reasoning-gym's task as it stands. Raises DataError."""
    if name in RECIPES:
        return RECIPES[name]
    if name in UNREPEATABLE:
        raise DataError(f"data.tasks: {name} cannot be used, {UNREPEATABLE[name]}; remove it")
    if name in DATASETS:
        return Task(name, name)
    nearest = difflib.get_close_matches(name, [*RECIPES, *DATASETS], n=1, cutoff=0.0)[0]
    raise DataError(f"data.tasks: no task is called {name!r}; did you mean {nearest!r}?")


def is_one_line(answer: object) -> bool:
    """Whether "Answer: X" on one line can say it."""
    return isinstance(answer, str) and answer != "" and answer == answer.strip() and "\n" not in answer


def _letter_counting(entry: Entry) -> Problem:
    letter, words = entry["metadata"]["target_letter"], entry["metadata"]["span"]
    return Problem(f'How many "{letter}" are in "{" ".join(words)}"?', "", entry["answer"])


def _letter_counting_steps(entry: Entry) -> Problem:
    """One word a line with its own count and the total so far."""
    letter, words = entry["metadata"]["target_letter"], entry["metadata"]["span"]
    lines, total = [], 0
    for word in words:
        total += word.lower().count(letter)
        lines.append(f"{word}: {total}")
    return Problem(f'Count the letter "{letter}" word by word: {" ".join(words)}', "\n".join(lines), entry["answer"])


def _arithmetic(entry: Entry) -> Problem:
    return Problem(f"{entry['metadata']['expression']} = ?", "", entry["answer"])


def _chain_sum_steps(entry: Entry) -> Problem:
    """One operation a line, each starting from the total so far."""
    expression = entry["metadata"]["expression"]
    first, *rest = expression.split(" ")
    total, lines = int(first), []
    for sign, term in zip(rest[::2], rest[1::2], strict=True):
        after = total + int(term) if sign == "+" else total - int(term)
        lines.append(f"{total} {sign} {term} = {after}")
        total = after
    return Problem(f"Step by step: {expression}", "\n".join(lines), entry["answer"])


def _isomorphic_strings(entry: Entry) -> Problem:
    first, second = entry["metadata"]["words"]
    return Problem(f"Are {first} and {second} isomorphic?", "", "Yes" if entry["metadata"]["solution"] else "No")


def _syllogism(entry: Entry) -> Problem:
    meta = entry["metadata"]
    return Problem(
        f"{meta['premise1']}. {meta['premise2']}. Does it follow that {meta['conclusion']}?", "", entry["answer"]
    )


def _gcd(entry: Entry) -> Problem:
    a, b = entry["metadata"]["numbers"]
    return Problem(f"Greatest common divisor of {a} and {b}?", "", entry["answer"])


def _gcd_steps(entry: Entry) -> Problem:
    """Euclid's remainders, one a line."""
    a, b = sorted(entry["metadata"]["numbers"], reverse=True)
    lines = []
    while b:
        lines.append(f"{a} mod {b} = {a % b}")
        a, b = b, a % b
    return Problem(
        f"Greatest common divisor of {entry['metadata']['numbers'][0]} and {entry['metadata']['numbers'][1]} step by step?",
        "\n".join(lines),
        entry["answer"],
    )


def _spell_backward(entry: Entry) -> Problem:
    return Problem(f"Spell {entry['metadata']['word']} backward.", "", entry["answer"])


def _spell_backward_steps(entry: Entry) -> Problem:
    word = entry["metadata"]["word"]
    return Problem(
        f"Spell {word} backward, letter by letter.", f"{' '.join(word)}\n{' '.join(reversed(word))}", entry["answer"]
    )


def _word_sequence_reversal(entry: Entry) -> Problem:
    words = entry["metadata"]["words"]
    return Problem(f"Reverse the order: {' '.join(words)}", "", " ".join(reversed(words)))


def _number_sorting(entry: Entry) -> Problem:
    meta = entry["metadata"]
    order = "smallest" if meta["direction"] == "ascending" else "largest"
    return Problem(f"Sort, {order} first: {' '.join(meta['original_numbers'])}", "", " ".join(meta["sorted_numbers"]))


def _needle_haystack(entry: Entry) -> Problem:
    return Problem(entry["question"].replace(" Reply only with a name.", "").replace("\n", " "), "", entry["answer"])


def _leg_counting(entry: Entry) -> Problem:
    return Problem(f"How many legs have {entry['question'].split('if you have ')[1].strip()}", "", entry["answer"])


def _number_filtering(entry: Entry) -> Problem:
    meta = entry["metadata"]
    verb, kind = meta["operation"].split("_")
    return Problem(
        f"{verb.capitalize()} the numbers {kind} than {meta['filter_value']}: {' '.join(meta['original_numbers'])}",
        "",
        " ".join(meta["result"]) or "none",
    )


def _number_format(entry: Entry) -> Problem:
    raise NotImplementedError


DIGITS = {"min_digits": 1, "max_digits": 1}

RECIPES: dict[str, Task] = {
    task.name: task
    for task in (
        Task("letter_counting", "letter_counting", {"min_words": 3, "max_words": 6}, _letter_counting),
        Task("letter_counting_short", "letter_counting", {"min_words": 1, "max_words": 3}, _letter_counting),
        Task("letter_counting_steps", "letter_counting", {"min_words": 3, "max_words": 10}, _letter_counting_steps),
        Task("products", "products", {"min_terms": 2, "max_terms": 3, **DIGITS}, _arithmetic),
        Task("products_of_digits", "products", {"min_terms": 2, "max_terms": 2, **DIGITS}, _arithmetic),
        Task("chain_sum", "chain_sum", {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2}, _arithmetic),
        Task("chain_sum3", "chain_sum", {"min_terms": 3, "max_terms": 3, **DIGITS}, _arithmetic),
        Task("chain_sum_steps", "chain_sum", {"min_terms": 3, "max_terms": 8, **DIGITS}, _chain_sum_steps),
        Task("isomorphic_strings", "isomorphic_strings", {"min_string_length": 2, "max_string_length": 6}, _isomorphic_strings),
        Task("syllogism", "syllogism", {}, _syllogism),
        Task("gcd", "gcd", {"min_value": 2, "max_value": 30}, _gcd),
        Task("gcd_steps", "gcd", {"min_value": 2, "max_value": 40}, _gcd_steps),
        Task("spell_backward", "spell_backward", {"min_word_len": 3, "max_word_len": 4}, _spell_backward),
        Task("spell_backward_steps", "spell_backward", {"min_word_len": 3, "max_word_len": 8}, _spell_backward_steps),
        Task("word_sequence_reversal", "word_sequence_reversal", {"min_words": 2, "max_words": 3}, _word_sequence_reversal),
        Task("number_sorting", "number_sorting", {"min_numbers": 3, "max_numbers": 4, "max_decimals": 0, "min_value": 1.0, "max_value": 99.0}, _number_sorting),
        Task("needle_haystack", "needle_haystack", {"min_num_statements": 2, "max_num_statements": 4}, _needle_haystack),
        Task("leg_counting", "leg_counting", {"min_animals": 1, "max_animals": 2, "max_instances": 5}, _leg_counting),
        Task("number_filtering", "number_filtering", {"min_numbers": 3, "max_numbers": 5, "max_decimals": 0, "min_value": 1.0, "max_value": 99.0}, _number_filtering),
    )
}  # fmt: skip
