import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, CohereConfig, CohereForCausalLM

from dora_rl.config import ConfigError
from dora_rl.train import model as model_module
from dora_rl.train.model import load_model, tree_backward, tree_scores
from dora_rl.train.tree import build_tree


def plain_logprobs(model, groups, temperature):
    """The definition, one answer at a time, with the model's own attention."""
    parts, entropies = [], []
    for member in (member for group in groups for member in group):
        n = len(member.completion_token_ids)
        ids = torch.tensor([[*member.prompt_token_ids, *member.completion_token_ids]])
        logprobs = (model(ids).logits[0, -n - 1 : -1] / temperature).log_softmax(-1)
        parts.append(logprobs.gather(1, ids[0, -n:, None])[:, 0])
        entropies.append(-(logprobs.exp() * logprobs).sum(-1).detach())
    return torch.cat(parts), torch.cat(entropies)


@pytest.fixture(scope="module")
def reference(tiny):
    return AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def model(tiny):
    return load_model(tiny)


@settings(max_examples=5)
@given(st.integers(0, 1000), st.booleans(), st.sampled_from((0.5, 1.0, 1.3)))
def test_log_probabilities_are_those_of_logits_divided_by_the_temperature(
    model, reference, ragged_groups, seed, share, temperature
):
    groups = ragged_groups(seed)
    scores = tree_scores(model, build_tree(groups, share=share), temperature)
    with torch.no_grad():
        logprobs, entropies = plain_logprobs(reference, groups, temperature)
    torch.testing.assert_close(scores.logprobs_T, logprobs, atol=2e-5, rtol=0)
    torch.testing.assert_close(scores.entropies_T, entropies, atol=2e-5, rtol=0)


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("chunk", [1, 2**23])
def test_the_gradient_is_that_of_automatic_differentiation(model, reference, ragged_groups, share, chunk, monkeypatch):
    monkeypatch.setattr(model_module, "_CHUNK_LOGITS", chunk)
    groups, temperature = ragged_groups(3), 0.7
    tree = build_tree(groups, share=share)
    weights = torch.linspace(-1, 2, len(tree.targets_T))
    reference.zero_grad()
    (plain_logprobs(reference, groups, temperature)[0].exp() * weights).sum().backward()
    model.zero_grad()
    tree_backward(model, tree, temperature, lambda logprobs, tokens: (logprobs.exp() * weights[tokens]).sum())
    wanted = dict(reference.named_parameters())
    for name, parameter in model.named_parameters():
        difference = (parameter.grad - wanted[name].grad).norm() / wanted[name].grad.norm()
        assert difference <= 1e-5, f"{name}: relative difference {difference:.1e}"


def test_a_folder_without_a_model_is_refused_in_one_line(tmp_path):
    with pytest.raises(ConfigError, match=r"model\.path must name") as error:
        load_model(tmp_path)
    assert "\n" not in str(error.value)


def test_a_model_that_scales_its_logits_afterwards_is_refused(tmp_path):
    config = CohereConfig(
        vocab_size=84, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, logit_scale=0.1
    )
    CohereForCausalLM(config).save_pretrained(tmp_path / "cohere")
    with pytest.raises(ConfigError, match="CohereForCausalLM changes its logits after the output layer"):
        load_model(tmp_path / "cohere")
