"""`dora-rl data`: the first prompts as the model will see them, and how long all of them are. Starts no process."""

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

from dora_rl.config import Config
from dora_rl.models.source import prepare_tokenizer
from dora_rl.rl.chat import Chat
from dora_rl.rl.datasets import Dataset
from dora_rl.run.prompts import open_data
from dora_rl.wire.rollouts import Prompt

SAMPLE = 200
"""Prompts that are counted where there is no end of them."""


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
