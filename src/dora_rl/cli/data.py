"""`dora-rl data`: the first prompts as the model will see them, and how long all of them are. Starts no process."""

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

from dora_rl.config import Config, ConfigError
from dora_rl.rl.chat import Chat
from dora_rl.rl.datasets import Dataset, open_dataset
from dora_rl.rl.errors import DataError
from dora_rl.train.source import prepare_tokenizer
from dora_rl.wire.rollouts import Prompt

SAMPLE = 200
"""Prompts that are counted where there is no end of them."""


def open_data(config: Config, chat: Chat) -> Dataset:
    """The data set that a configuration names. Raises ConfigError about what is wrong with it."""
    data = config.data
    check_path(data.path)
    try:
        return open_dataset(
            source=data.source,
            path=data.path,
            tasks=data.tasks,
            worked_examples=data.worked_examples,
            prompt_column=data.prompt_column,
            answer_column=data.answer_column or None,
            split=data.split,
            on_long_prompt=data.on_long_prompt,
            seed=config.run.seed,
            held_out=config.eval.prompts,
            tokenize=chat.tokenize,
            max_prompt_tokens=config.rollout.max_prompt_tokens,
        )
    except DataError as error:
        raise ConfigError(str(error)) from error


def check_path(path: str | None) -> None:
    """Raises ConfigError when a path is named that leads nowhere."""
    try:
        there = path is None or Path(path).exists()
    except OSError as error:
        raise ConfigError(f"data.path: {error.strerror}; name an existing file or folder") from error
    if not there:
        raise ConfigError(f"data.path: there is no {path}; name an existing file or folder")


def show_data(config: Config, rows: int, out: Callable[[str], None]) -> None:
    with tempfile.TemporaryDirectory(prefix="dora-rl-data-") as folder:
        prepare_tokenizer(config.model.path, Path(folder))
        chat = Chat(Path(folder))
    dataset = open_data(config, chat)
    for position in range(rows if dataset.size is None else min(rows, dataset.size)):
        prompt = dataset.train(position)
        out(f"--- {prompt.prompt_id}: {len(prompt.token_ids)} tokens")
        out(chat.decode_all(prompt.token_ids))
        for name, value in prompt.columns.items():
            out(f"    {name}: {value!r}")
    known = [dataset.train(position) for position in range(dataset.size or SAMPLE)]
    out("---")
    out(f"training  {_count(dataset)}, {_lengths(known)}")
    if dataset.held_out:
        out(f"held out  {len(dataset.held_out)} prompts, {_lengths(dataset.held_out)}")
    limit = config.rollout.max_prompt_tokens
    out(f"left out  {dataset.skipped} prompts longer than rollout.max_prompt_tokens = {limit}")


def _count(dataset: Dataset) -> str:
    return f"no end of prompts, the first {SAMPLE} of them" if dataset.size is None else f"{dataset.size} prompts"


def _lengths(prompts: Sequence[Prompt]) -> str:
    lengths = [len(prompt.token_ids) for prompt in prompts]
    return f"{min(lengths)} to {max(lengths)} tokens, median {median(lengths):g}"
