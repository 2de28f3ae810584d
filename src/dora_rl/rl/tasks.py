"""Tasks of reasoning-gym as this project words them: a question, a worked solution, a final answer.

Owns the wording and the difficulty of each recipe. A recipe is a pure function of an entry number, so that every
machine draws the same problems. Knows nothing of tokens, splits or positions in a run.

A recipe called NAME_steps has worked examples that solve the problem line by line; its answers are as long as the
problem asks for, which is what gives a mixture of recipes its heavy tail.
"""

import difflib
import operator
from collections.abc import Callable, Iterator, Mapping, Set
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

UNSUITED = {
    "acre": "it makes all its entries before the first",
    "composite": "it is made of other tasks; name those",
    "gsm_symbolic": "it makes all its entries before the first",
    "knight_swap": "its entries depend on the process's hash seed",
    "list_functions": "it draws from the module-level random generator",
    "polynomial_multiplication": "its entries depend on the process's hash seed",
    "pool_matrix": "it reseeds numpy's global generator",
    "propositional_logic": "some of its entries have no answer",
    "ransom_note": "its entries depend on the process's hash seed",
    "time_intervals": "its questions depend on today's date",
    "word_ladder": "it has too few entries",
}
"""Tasks of reasoning-gym 0.1.25 that are no function of the entry number, or none that can be called at any number."""


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
    example_entries: tuple[int, ...] = ()
    """Entries shown as the first worked examples (more are taken from entry 0 on); their questions are never asked.
    Fixed for all runs, so that every prompt of the task begins with the same tokens and engines share their KV.
    Chosen to have different answers: a model of this size repeats the answer that it has just seen."""

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
                f"task {self.name} has only {len(found)} different worked examples, "
                f"but data.worked_examples asks for {count}; lower it"
            )
        return tuple(found.values())

    @cached_property
    def _entries(self) -> Any:
        entries = reasoning_gym.create_dataset(self.generator, seed=0, size=ENTRIES, **self.options)
        if self.generator == "isomorphic_strings":
            # It draws from a set, whose order differs between processes.
            entries.letters = _Ordered(entries.letters)
        return entries


class _Ordered(frozenset[str]):
    """A set with one order in every process."""

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(super().__iter__()))

    def __sub__(self, other: Set[object]) -> "_Ordered":
        return _Ordered(super().__sub__(other))


def find_task(name: str) -> Task:
    """The recipe of this name, or else reasoning-gym's task as it stands. Raises DataError."""
    if name in RECIPES:
        return RECIPES[name]
    if name in UNSUITED:
        raise DataError(f"data.tasks: {name} cannot be used, {UNSUITED[name]}; remove it")
    if name in DATASETS:
        task = Task(name, name)
        if not any(is_one_line(task.problem(number).answer) for number in range(8)):
            raise DataError(f"data.tasks: answers of {name} do not fit on one line, as the asked form needs; remove it")
        return task
    nearest = difflib.get_close_matches(name, [*RECIPES, *DATASETS], n=1, cutoff=0.0)[0]
    raise DataError(f"data.tasks: no task is called {name!r}; did you mean {nearest!r}?")


def is_one_line(answer: object) -> bool:
    """Whether "Answer: X" on one line can say it."""
    return isinstance(answer, str) and answer != "" and answer == answer.strip() and "\n" not in answer


def _letter_counting(entry: Entry) -> Problem:
    letter, words = entry["metadata"]["target_letter"], entry["metadata"]["span"]
    return Problem(f'How many "{letter}" are in "{" ".join(words)}"?', "", entry["answer"])


def _letter_counting_steps(entry: Entry) -> Problem:
    """Goes through the words first; longer texts make longer answers."""
    problem = _letter_counting(entry)
    return Problem(problem.question, ", ".join(entry["metadata"]["span"]), problem.answer)


def _arithmetic(entry: Entry) -> Problem:
    return Problem(f"{entry['metadata']['expression']} = ?", "", entry["answer"])


def _arithmetic_steps(entry: Entry) -> Problem:
    """One operation a line, from left to right, each starting from the result so far."""
    problem = _arithmetic(entry)
    first, *rest = entry["metadata"]["expression"].split(" ")
    so_far, lines = int(first), []
    for sign, term in zip(rest[::2], rest[1::2], strict=True):
        result = OPERATIONS[sign](so_far, int(term))
        lines.append(f"{so_far} {sign} {term} = {result}")
        so_far = result
    return Problem(problem.question, "\n".join(lines), problem.answer)


def _gcd(entry: Entry) -> Problem:
    first, second = entry["metadata"]["numbers"]
    return Problem(f"Greatest common divisor of {first} and {second}?", "", entry["answer"])


def _isomorphic_strings(entry: Entry) -> Problem:
    first, second = entry["metadata"]["words"]
    return Problem(f"Are {first} and {second} isomorphic?", "", "Yes" if entry["metadata"]["solution"] else "No")


def _isomorphic_strings_steps(entry: Entry) -> Problem:
    """Pairs the letters up first."""
    problem = _isomorphic_strings(entry)
    pairs = (first + second for first, second in zip(*entry["metadata"]["words"], strict=True))
    return Problem(problem.question, " ".join(pairs), problem.answer)


def _syllogism(entry: Entry) -> Problem:
    data = entry["metadata"]
    premises = f"{data['premise1']}. {data['premise2']}."
    return Problem(f"{premises} Does it follow that {data['conclusion']}?", "", entry["answer"])


def _syllogism_steps(entry: Entry) -> Problem:
    """Repeats the premises first."""
    problem = _syllogism(entry)
    return Problem(
        problem.question, f"{entry['metadata']['premise1']}.\n{entry['metadata']['premise2']}.", problem.answer
    )


OPERATIONS: Mapping[str, Callable[[int, int], int]] = {"+": operator.add, "-": operator.sub, "*": operator.mul}

ONE_DIGIT = {"min_digits": 1, "max_digits": 1}
SHORT_STRINGS = {"min_string_length": 2, "max_string_length": 5}
EVEN = {"invalid_ratio": 0.5}
"""About as many syllogisms that hold as ones that do not: always saying the same gains nothing."""

RECIPES: Mapping[str, Task] = {
    task.name: task
    for task in (
        Task("letter_counting", "letter_counting", {"min_words": 2, "max_words": 5}, _letter_counting, (8, 10)),
        Task(
            "letter_counting_steps",
            "letter_counting",
            {"min_words": 3, "max_words": 14},
            _letter_counting_steps,
            (49, 59),
        ),
        Task("products", "products", {"min_terms": 2, "max_terms": 3, **ONE_DIGIT}, _arithmetic, (12, 8)),
        Task("products_of_digits", "products", {"min_terms": 2, "max_terms": 2, **ONE_DIGIT}, _arithmetic),
        Task("products_steps", "products", {"min_terms": 2, "max_terms": 3, **ONE_DIGIT}, _arithmetic_steps, (12, 8)),
        Task("chain_sum", "chain_sum", {"min_terms": 2, "max_terms": 2, "max_digits": 2}, _arithmetic),
        Task("chain_sum_steps", "chain_sum", {"min_terms": 2, "max_terms": 4, **ONE_DIGIT}, _arithmetic_steps),
        Task("gcd", "gcd", {"min_value": 2, "max_value": 30}, _gcd, (14, 15)),
        Task("isomorphic_strings", "isomorphic_strings", SHORT_STRINGS, _isomorphic_strings, (26, 12)),
        Task("isomorphic_strings_steps", "isomorphic_strings", SHORT_STRINGS, _isomorphic_strings_steps, (26, 12)),
        Task("syllogism", "syllogism", EVEN, _syllogism, (0, 4)),
        Task("syllogism_steps", "syllogism", EVEN, _syllogism_steps, (0, 4)),
    )
}
