"""Turns `model.path` into a Hugging Face folder: float32 weights, tokenizer with chat template, end-of-answer tokens.

Three sources: a folder, a package that carries one GGUF file, a tiny random model. Knows nothing of training.
"""

# mypy: allow-untyped-calls
# transformers annotates little of what it lets one call.

import importlib.util
import json
import shutil
from pathlib import Path

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging

from dora_rl.config import ConfigError
from dora_rl.models.files import save_model
from dora_rl.models.tiny import tiny_model, tiny_tokenizer

_PACKAGE, _TINY = "package:", "tiny:"
_END_OF_TURN = ("<|im_end|>", "<|eot_id|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "</s>")
"""Tokens with which chat models end an answer. Some folders forget to name theirs as an end-of-sequence token."""


def prepare_model(path: str, out: Path) -> None:
    """Write config, generation config, tokenizer and model.safetensors (float32) to `out`.

    The folder appears whole or not at all. Raises ConfigError, one line, when the source is missing.
    """
    _quiet()
    tokenizer = _tokenizer(path)  # the quicker half, so that its faults come first
    model = _model(path)
    _name_stop_tokens(model, tokenizer)
    _write(model, tokenizer, out)


def prepare_tokenizer(path: str, out: Path) -> None:
    """Write the model's tokenizer alone, chat template included. Raises ConfigError as `prepare_model` does."""
    _quiet()
    _tokenizer(path).save_pretrained(out)


def stop_token_ids(folder: Path) -> tuple[int, ...]:
    """The tokens that end an answer, ascending, as `prepare_model` wrote them."""
    file = folder / "generation_config.json"
    try:
        ids = json.loads(file.read_text(encoding="utf-8")).get("eos_token_id")
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {file}: {error}; prepare the model again") from error
    if ids is None:
        raise ConfigError(f"{file} names no eos_token_id; prepare the model again")
    return tuple(sorted({ids} if isinstance(ids, int) else set(ids)))


def _quiet() -> None:
    """The terminal belongs to the run."""
    logging.disable_progress_bar()
    logging.set_verbosity_error()


def _tokenizer(path: str) -> PreTrainedTokenizerBase:
    if path.startswith(_TINY):
        _tiny_seed(path)
        tokenizer: PreTrainedTokenizerBase = tiny_tokenizer()
    elif path.startswith(_PACKAGE):
        file = _packaged(path)
        tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name, local_files_only=True)
    else:
        folder = _folder(path)
        try:
            tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        except (OSError, ValueError) as error:
            raise _unloadable(path, error) from error
    if tokenizer.chat_template is None:
        raise ConfigError(
            f"model.path = {path!r}: its tokenizer has no chat template; choose an instruction-tuned model"
        )
    return tokenizer


def _model(path: str) -> PreTrainedModel:
    if path.startswith(_TINY):
        return tiny_model(seed=_tiny_seed(path))
    if path.startswith(_PACKAGE):
        return _dequantised(_packaged(path))
    folder = _folder(path)
    try:
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, local_files_only=True, use_safetensors=True, trust_remote_code=False
        )
    except (OSError, ValueError) as error:
        raise _unloadable(path, error) from error
    return model


def _tiny_seed(path: str) -> int:
    seed = path.removeprefix(_TINY)
    if not seed.isdecimal() or int(seed) >= 2**63:
        raise ConfigError(
            f"model.path = {path!r}: expected tiny:SEED with a number below 2^63, got {seed!r}; for example tiny:0"
        )
    return int(seed)


def _folder(path: str) -> Path:
    folder = Path(path)
    if not (folder / "config.json").is_file():
        raise ConfigError(
            f"model.path = {path!r} is no Hugging Face folder (no config.json in it); name one, or package:NAME, or "
            "tiny:SEED"
        )
    return folder


def _unloadable(path: str, error: Exception) -> ConfigError:
    why = " ".join(str(error).split())
    return ConfigError(f"model.path = {path!r} does not load: {why[:200]}; it should be a Hugging Face folder, whole")


def _packaged(path: str) -> Path:
    """The package's GGUF file. The package is found, never imported: its own dependencies are not ours."""
    name = path.removeprefix(_PACKAGE)
    spec = importlib.util.find_spec(name) if name.isidentifier() else None
    if spec is None or spec.origin is None:
        raise ConfigError(
            f"model.path names the package {name!r}, which is not installed; pip install it or name a folder"
        )
    files = sorted(Path(spec.origin).parent.glob("*.gguf"))
    if len(files) != 1:
        raise ConfigError(
            f"package {name!r} should carry one .gguf file, got {[f.name for f in files]}; name another package"
        )
    return files[0]


def _dequantised(file: Path) -> PreTrainedModel:
    quantized = AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float32, local_files_only=True
    )
    facts = quantized.config.to_dict()
    config = AutoConfig.for_model(facts.pop("model_type"), **facts)
    if hasattr(config, "quantization_config"):
        del config.quantization_config  # it would make every later load ask for the GGUF quantizer
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(quantized.state_dict(), strict=True)
    model.tie_weights()
    return model


def _name_stop_tokens(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Every way the model knows to end an answer goes into its generation config, which the engine obeys."""
    generation = model.generation_config
    if generation is None:
        raise ConfigError(f"{type(model).__name__} cannot generate text; choose a causal language model")
    named = generation.eos_token_id
    stops = set(named) if isinstance(named, list) else {named} - {None}
    vocabulary = tokenizer.get_vocab()
    template = str(tokenizer.chat_template)
    stops |= {vocabulary[token] for token in _END_OF_TURN if token in vocabulary and token in template}
    if isinstance(tokenizer.eos_token_id, int):
        stops.add(tokenizer.eos_token_id)
    if not stops:
        raise ConfigError("the model names no end-of-sequence token, so its answers would never end; choose another")
    generation.eos_token_id = sorted(stops)


def _write(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, out: Path) -> None:
    partial = out.with_name(out.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    # One file, whatever the size: the audit and the weight store read model.safetensors by name.
    save_model(model, partial)
    tokenizer.save_pretrained(partial)
    shutil.rmtree(out, ignore_errors=True)
    partial.rename(out)
