"""A made-up Llama of 0.8 million parameters with a character tokenizer: real code paths, and no download."""

# mypy: allow-untyped-calls
# transformers annotates little of what it lets one call.

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_CHARACTERS = "\n abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.,:;?!+-*/=()<>'\""
_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """One token per character, <|endoftext|> for unknown ones. Pads with its end-of-turn token, as SmolLM2 does."""
    vocabulary = {token: i for i, token in enumerate((*_SPECIAL, *_CHARACTERS))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=_SPECIAL[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token=_SPECIAL[0],
        bos_token=_SPECIAL[1],
        eos_token=_SPECIAL[2],
        pad_token=_SPECIAL[2],
        chat_template=_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def tiny_model(*, seed: int) -> LlamaForCausalLM:
    """Random weights drawn from `seed`; the process's own random state is left as it was."""
    tokenizer = tiny_tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,  # the smallest that vLLM's CPU attention takes
        max_position_embeddings=4096,
        # Wider than usual: with 0.02 every next-token distribution is flat and no test could tell two versions apart.
        initializer_range=0.1,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: LlamaForCausalLM = LlamaForCausalLM(config).float()
    return model
