"""The test that sampled tokens must pass, on samples of which it is known how they were drawn."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from acceptance.chance import drawn_from

PROMPT = (5, 9, 11)


def answers(folder, *, temperature: float, cut: int = 0):
    """Sampled with transformers: 150 answers of 24 tokens, from the probabilities to the power 1/temperature."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    rows = torch.tensor([PROMPT] * 150)
    with torch.inference_mode():
        for _ in range(24):
            probabilities = torch.softmax(model(rows).logits[:, -1] / temperature, -1)
            rows = torch.cat([rows, torch.multinomial(probabilities, 1, generator=generator)], dim=1)
    return [(row[len(PROMPT) :].tolist(), cut) for row in rows]


@pytest.mark.parametrize("cut", [0, 10])
def test_what_the_model_sampled_passes(tiny, cut):
    assert drawn_from(tiny, PROMPT, answers(tiny, temperature=1.0, cut=cut)) > 0.01


def test_what_was_sampled_a_little_colder_fails(tiny):
    assert drawn_from(tiny, PROMPT, answers(tiny, temperature=0.5)) < 0.001


def test_a_token_that_comes_too_often_fails(tiny):
    sampled = [
        ([7 if place % 8 == 0 else token for place, token in enumerate(row)], 0)
        for row, _ in answers(tiny, temperature=1.0)
    ]
    assert drawn_from(tiny, PROMPT, sampled) < 0.001
