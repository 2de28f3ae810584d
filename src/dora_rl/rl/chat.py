"""Text to token ids and back, with the tokenizer and chat template that lie in the model's folder.

Reads the folder's files directly (`tokenizers` and Jinja's sandbox), because importing `transformers` takes seconds
in every process that only wants to count tokens. Knows nothing of data sets or engines.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from dora_rl.rl.errors import DataError

Messages = Sequence[Mapping[str, str]]


class Chat:
    """What a model folder says about text: `tokenizer.json`, `tokenizer_config.json` and the chat template.

    Raises DataError, one line, when one of them is missing or broken.
    """

    def __init__(self, folder: Path) -> None:
        file = folder / "tokenizer.json"
        try:
            self._tokenizer = Tokenizer.from_file(str(file))
        except Exception as error:  # tokenizers raises nothing more precise
            raise DataError(f"cannot read {file}: {error}; name a model folder that has a fast tokenizer") from error
        settings = _read_settings(folder / "tokenizer_config.json")
        self._template = _template(folder, settings)
        # bos_token, eos_token and their like, by name: templates write them.
        self._special = {
            name: _token_text(value) for name, value in settings.items() if name.endswith("_token") and value
        }

    def tokenize(self, messages: Messages) -> tuple[int, ...]:
        """Token ids of a chat that waits for the assistant's next turn.

        Raises DataError when the template refuses the messages.
        """
        turns = [dict(message) for message in messages]
        try:
            text = self._template.render(messages=turns, add_generation_prompt=True, **self._special)
        except jinja2.TemplateError as error:
            roles = [turn.get("role") for turn in turns]
            raise DataError(f"the model's chat template refuses turns of {roles}: {error}; change the data") from error
        # The template has written every special token itself: adding them again would double the first one.
        try:
            return tuple(self._tokenizer.encode(text, add_special_tokens=False).ids)
        except (TypeError, UnicodeError) as error:
            raise DataError(f"the prompt {text[:40]!r}... is no Unicode text ({error}); change the data") from error

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of an answer, special tokens left out. For rewards and people: nothing is ever re-tokenised."""
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=True))

    def decode_all(self, token_ids: Sequence[int]) -> str:
        """The same with special tokens: a prompt as the model sees it."""
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=False))


def _template(folder: Path, settings: Mapping[str, Any]) -> jinja2.Template:
    file = folder / "chat_template.jinja"
    source = file.read_text(encoding="utf-8") if file.exists() else settings.get("chat_template")
    if not isinstance(source, str):
        raise DataError(f"{folder} has no chat template; add a chat_template.jinja or name an instruction-tuned model")
    # A template is a program from a file: it runs in Jinja's sandbox, with the settings that templates are written for.
    sandbox = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    sandbox.globals["raise_exception"] = _refuse
    try:
        return sandbox.from_string(source)
    except jinja2.TemplateError as error:
        raise DataError(f"the chat template of {folder} is not valid Jinja: {error}; mend it") from error


def _read_settings(path: Path) -> dict[str, Any]:
    """An absent file says nothing; a broken one is an error."""
    if not path.exists():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise DataError(f"{path} is not valid JSON: {error}; write the model folder again") from error
    return content if isinstance(content, dict) else {}


def _token_text(value: Any) -> str:
    return str(value["content"] if isinstance(value, dict) else value)


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)
