"""The stream of prompts: which question stands at which position, and which questions are held out.

Position in, prompt out: `train(position)` depends on the seed and the position alone, never on what was asked
before, so that a resumed run, a retried group and a second machine all see the same stream. Held-out and training
prompts are told apart by what the question says, not by where it stands. Knows nothing of the schedule.
"""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from dora_rl.rl.errors import DataError
from dora_rl.rl.rows import Row, read_rows
from dora_rl.rl.tasks import ENTRIES, INSTRUCTION, Problem, Task, find_task, is_one_line
from dora_rl.wire.rollouts import Prompt

Messages = Sequence[Mapping[str, str]]
Tokenize = Callable[[Messages], Sequence[int]]

HELD_OUT_SHARE = 0.25
"""Of all questions of a task, by hash. Large, so that a task with few questions still has some to hold out."""

MAX_DRAWS = 2000
"""Draws for one prompt before its task is called exhausted."""


class Dataset(Protocol):
    held_out: tuple[Prompt, ...]

    @property
    def size(self) -> int | None:
        """Prompts in one epoch; None when the stream never repeats itself by design."""

    @property
    def skipped(self) -> int:
        """Prompts left out so far because they were longer than the limit."""

    def train(self, position: int) -> Prompt:
        """The prompt at this position of training, counted from 0."""


def open_dataset(
    *,
    source: str,
    path: str | None = None,
    tasks: Sequence[str] = (),
    worked_examples: int = 3,
    prompt_column: str = "prompt",
    answer_column: str | None = "answer",
    split: str = "train",
    on_long_prompt: str = "skip",
    seed: int,
    held_out: int,
    tokenize: Tokenize,
    max_prompt_tokens: int,
) -> Dataset:
    """Open a data source. Raises DataError, one line, about a bad file, name or limit, before anything has started.

    The `held_out` prompts are the same for every seed, so that two runs are scored on the same questions.
    """
    if source == "reasoning_gym":
        if not tasks:
            raise DataError('data.tasks is empty; name at least one task, for example tasks = ["letter_counting"]')
        recipes = tuple(find_task(name) for name in tasks)
        return TaskStream(recipes, worked_examples, seed, held_out, tokenize, max_prompt_tokens)
    if source not in ("jsonl", "parquet", "huggingface"):
        raise DataError(f'data.source must be "reasoning_gym", "jsonl", "parquet" or "huggingface", got {source!r}')
    if path is None:
        raise DataError(f'data.path is missing; name what source = "{source}" reads')
    rows = read_rows(source, Path(path), split, prompt_column, answer_column)
    return RowStream(rows, path, seed, held_out, tokenize, max_prompt_tokens, refuse_long=on_long_prompt == "refuse")


class TaskStream:
    """Endless problems of several recipes, each recipe once in every len(tasks) positions, in a shuffled order.

    A question belongs to the held-out side or to the training side by its hash, so the sides cannot meet, however
    few different questions a recipe has.
    """

    size = None

    def __init__(
        self,
        tasks: Sequence[Task],
        worked_examples: int,
        seed: int,
        held_out: int,
        tokenize: Tokenize,
        max_prompt_tokens: int,
    ) -> None:
        self._tasks = tuple(tasks)
        self._seed = seed
        self._splits = held_out > 0
        self._tokenize = tokenize
        self._max_prompt_tokens = max_prompt_tokens
        self._too_long: set[str] = set()
        examples = {task.name: task.examples(worked_examples) for task in self._tasks}
        # Turns that every prompt of a task begins with: engines share their KV.
        self._opening = {name: _opening(problems) for name, problems in examples.items()}
        # Of all tasks together: two recipes of one generator can word the same question.
        self._shown = {_normal(problem.question) for problems in examples.values() for problem in problems}
        self.held_out = self._draw_held_out(held_out)
        for position in range(len(self._tasks)):
            self.train(position)  # a task without usable questions is an error now, not in an hour

    @property
    def skipped(self) -> int:
        return len(self._too_long)

    def train(self, position: int) -> Prompt:
        block, place = divmod(position, len(self._tasks))
        order = sorted(range(len(self._tasks)), key=lambda index: _number("order", self._seed, block, index))
        return self._draw(self._tasks[order[place]], ("train", self._seed, position), asked=set())

    def _draw_held_out(self, count: int) -> tuple[Prompt, ...]:
        prompts: list[Prompt] = []
        asked: set[str] = set()
        for index in range(count):
            prompt = self._draw(self._tasks[index % len(self._tasks)], ("held_out", index), asked)
            asked.add(prompt.prompt_id)
            prompts.append(prompt)
        return tuple(prompts)

    def _draw(self, task: Task, key: tuple[str | int, ...], asked: set[str]) -> Prompt:
        """The first usable problem of the sequence that `key` names; draws of other keys are not disturbed."""
        too_long = 0
        for attempt in range(MAX_DRAWS):
            problem = task.problem(_number(task.name, *key, attempt) % ENTRIES)
            if _normal(problem.question) in self._shown or not is_one_line(problem.answer):
                continue
            if self._splits and self._is_held_out(problem) != (key[0] == "held_out"):
                continue
            prompt = self._prompt(task, problem)
            if prompt.prompt_id in asked:
                continue
            if len(prompt.token_ids) <= self._max_prompt_tokens:
                return prompt
            self._too_long.add(prompt.prompt_id)
            too_long += 1
        if too_long:
            raise DataError(
                f"task {task.name}: none of {too_long} prompts has at most rollout.max_prompt_tokens = "
                f"{self._max_prompt_tokens} tokens; raise it or lower data.worked_examples"
            )
        raise DataError(
            f"task {task.name} has too few different questions for {key[0]} prompts ({len(asked)} held out so far); "
            "lower eval.prompts or name more tasks"
        )

    def _is_held_out(self, problem: Problem) -> bool:
        return _number("split", _normal(problem.question)) < HELD_OUT_SHARE * 2**64

    def _prompt(self, task: Task, problem: Problem) -> Prompt:
        messages = (*self._opening[task.name], _turn("user", problem.question))
        return Prompt(
            prompt_id=f"{task.name}-{_number('id', _normal(problem.question)):016x}",
            messages=messages,
            token_ids=tuple(self._tokenize(messages)),
            columns={"answer": problem.answer, "task": task.name},
        )


class RowStream:
    """The rows of finite data, again and again: every training row once an epoch, in a new order each epoch.

    Both the held-out rows and an epoch's order come from sorting by hash: leaving a row out (too long, held out)
    cannot change the order of the others.
    """

    def __init__(
        self,
        rows: Sequence[Row],
        name: str,
        seed: int,
        held_out: int,
        tokenize: Tokenize,
        max_prompt_tokens: int,
        *,
        refuse_long: bool = False,
    ) -> None:
        self._seed = seed
        self._epoch: tuple[int, list[Prompt]] = (-1, [])
        token_ids = [tuple(tokenize(row.messages)) for row in rows]
        if refuse_long:
            for row, ids in zip(rows, token_ids, strict=True):
                if len(ids) > max_prompt_tokens:
                    raise DataError(
                        f"{name}, {row.name.replace('-', ' ')}: the prompt has {len(ids)} tokens, "
                        f"rollout.max_prompt_tokens = {max_prompt_tokens}; raise it, or set data.on_long_prompt = "
                        '"skip" to leave such prompts out'
                    )
        fitting = [(row, ids) for row, ids in zip(rows, token_ids, strict=True) if len(ids) <= max_prompt_tokens]
        self.skipped = len(rows) - len(fitting)
        contents = sorted({row.content for row, _ in fitting}, key=lambda content: _number("split", content))
        if not contents:
            shortest = min(map(len, token_ids), default=0)
            raise DataError(
                f"{name}: none of its {len(rows)} prompts fits rollout.max_prompt_tokens = {max_prompt_tokens}; the "
                f"shortest has {shortest} tokens, raise the limit"
            )
        if len(contents) <= held_out:
            raise DataError(
                f"{name}: {len(contents)} different prompts in {len(rows)} rows fit "
                f"rollout.max_prompt_tokens = {max_prompt_tokens}, not more than the {held_out} held out; lower "
                "eval.prompts, raise the limit or add rows"
            )
        chosen = set(contents[:held_out])
        # Of equal held-out rows the first is asked; all of them are kept out of training.
        first: dict[str, Prompt] = {}
        for row, ids in fitting:
            if row.content in chosen:
                first.setdefault(row.content, _row_prompt(row, ids))
        self.held_out = tuple(first[content] for content in contents[:held_out])
        self._rows = [_row_prompt(row, ids) for row, ids in fitting if row.content not in chosen]

    @property
    def size(self) -> int:
        return len(self._rows)

    def train(self, position: int) -> Prompt:
        epoch, place = divmod(position, len(self._rows))
        if self._epoch[0] != epoch:  # the order is kept only to save sorting it for every prompt
            order = sorted(self._rows, key=lambda prompt: _number("epoch", self._seed, epoch, prompt.prompt_id))
            self._epoch = (epoch, order)
        return self._epoch[1][place]


def _row_prompt(row: Row, token_ids: tuple[int, ...]) -> Prompt:
    return Prompt(
        prompt_id=row.name, messages=row.messages, token_ids=token_ids, columns=row.columns, is_chat=row.is_chat
    )


def _opening(examples: Sequence[Problem]) -> tuple[Mapping[str, str], ...]:
    turns = [_turn("system", INSTRUCTION)]
    for problem in examples:
        turns += [_turn("user", problem.question), _turn("assistant", problem.solution)]
    return tuple(turns)


def _turn(role: str, content: str) -> Mapping[str, str]:
    return {"role": role, "content": content}


def _normal(text: str) -> str:
    return " ".join(text.split())


def _number(*key: str | int) -> int:
    """64 random-looking bits named by `key`: the same on every machine (unlike hash()) and in any order of calls."""
    return int.from_bytes(hashlib.sha256(json.dumps(key).encode()).digest()[:8], "big")
