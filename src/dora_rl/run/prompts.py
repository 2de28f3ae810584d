"""The data set that a configuration names."""

from pathlib import Path

from dora_rl.config import Config, ConfigError
from dora_rl.rl.chat import Chat
from dora_rl.rl.datasets import Dataset, open_dataset
from dora_rl.rl.errors import DataError


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
