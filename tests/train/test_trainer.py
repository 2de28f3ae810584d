import math
import shutil
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from dora_rl.train.check import gradient_difference
from dora_rl.train.gradient import GradientSum
from dora_rl.train.model import load_model
from dora_rl.train.score import score
from dora_rl.train.trainer import Trainer


@pytest.fixture
def trainer(config, tiny):
    return Trainer(config, tiny)


def on_policy(groups, tiny, temperature=0.8):
    """The same answers, recorded with the log-probabilities that the untrained model gives them."""
    flat = [member for group in groups for member in group]
    scores = iter(score(tiny, tiny, flat, temperature))
    return [[replace(member, logprobs=tuple(next(scores))) for member in group] for group in groups]


def train(trainer, iteration, groups, *, attempt=1, version=0):
    for group in groups:
        trainer.accumulate(iteration, attempt, group, version)
    return trainer.step(iteration, attempt)


def changed(trainer, before):
    return any(not torch.equal(tensor, before[name]) for name, tensor in trainer.state_tensors().items())


@settings(max_examples=3)
@given(st.integers(0, 1000))
def test_the_gradient_does_not_depend_on_order_split_or_sharing(config, tiny, ragged_groups, seed):
    differences = gradient_difference(config, tiny, on_policy(ragged_groups(seed), tiny))
    assert differences.keys() == {"order", "split", "sharing"}
    assert max(differences.values()) <= 1e-5, differences


def test_the_gradient_check_sees_a_gradient_that_differs(config, tiny, ragged_groups):
    model = load_model(tiny)
    gradients = []
    for groups in (ragged_groups(1), ragged_groups(2)):
        total = GradientSum(model, config)
        for group in groups:
            total.add(group, trained_version=0)
        total.finish()
        gradients.append(torch.cat([grad.flatten().clone() for grad in total.gradients()]))
    assert (gradients[0] - gradients[1]).norm() > 1e-2 * gradients[0].norm()


def test_on_policy_every_first_ratio_is_one(trainer, tiny, ragged_groups):
    report = train(trainer, 1, on_policy(ragged_groups(5), tiny))
    assert report.stats["policy/first_ratio_max_deviation"] <= 1e-3
    assert report.stats["policy/clip_fraction"] == 0.0
    assert report.stats["policy/ess_share"] == pytest.approx(1.0, abs=1e-5)
    assert report.stats["mismatch/by_staleness"].keys() == {"0"}


def test_another_temperature_on_the_trainers_side_would_be_seen(trainer, tiny, ragged_groups):
    report = train(trainer, 1, on_policy(ragged_groups(5), tiny, temperature=1.0))
    assert report.stats["policy/first_ratio_max_deviation"] > 0.01


def test_the_better_answer_becomes_likelier_and_the_worse_one_less_likely(trainer, tiny, make_group, tmp_path):
    (group,) = on_policy([make_group()], tiny)
    assert train(trainer, 1, [group]).stepped
    save_file(trainer.state_tensors(), tmp_path / "model.safetensors")
    good, bad = score(tiny, tmp_path, group, 0.8)
    assert good[0] > group[0].logprobs[0]
    assert bad[0] < group[1].logprobs[0]


def test_a_batch_without_spread_makes_no_step_and_says_so(trainer, make_group):
    before = trainer.state_tensors()
    report = train(trainer, 1, [make_group(rewards=(1.0, 1.0)), make_group(1, rewards=(None, 1.0))])
    assert (report.stepped, report.tokens) == (False, 0)
    assert report.reason == "no group of the batch has two rewards that differ"
    assert report.advantages == {(0, 0): 0.0, (0, 1): 0.0, (1, 0): None, (1, 1): None}
    assert set(report.stats.values()) == {None}
    assert not changed(trainer, before)


def test_an_empty_batch_makes_no_step(trainer):
    assert not trainer.step(1, 1).stepped


def test_a_gradient_that_is_not_finite_changes_nothing(config, tiny, make_group, tmp_path):
    broken = shutil.copytree(tiny, tmp_path / "broken")
    tensors = load_file(broken / "model.safetensors")
    tensors["model.norm.weight"][0] = math.inf
    save_file(tensors, broken / "model.safetensors", metadata={"format": "pt"})
    trainer = Trainer(config, broken)
    before = trainer.state_tensors()
    report = train(trainer, 1, [make_group()])
    assert (report.stepped, report.reason) == (False, "the gradient's norm is nan")
    assert not changed(trainer, before)


@pytest.mark.parametrize("logprob", [math.nan, -math.inf])
def test_an_answer_recorded_without_a_probability_is_refused_by_name(trainer, make_group, logprob):
    with pytest.raises(ValueError, match="rollout 300: the engine recorded log-probability"):
        trainer.accumulate(1, 1, make_group(3, logprobs=[(-1.0, logprob), (-1.0, -1.0)]), 0)


def test_what_stands_on_an_unscored_member_reaches_nothing(config, tiny, make_group):
    answers, rewards = [(8, 2), (9, 9, 9, 2), (10, 2)], (1.0, None, 0.0)
    scored = make_group(answers=answers, rewards=rewards)
    scored[1] = replace(scored[1], logprobs=(math.nan,) * 4)
    alone = [scored[0], scored[2]]
    with_it, without = (train(Trainer(config, tiny), 1, [group]) for group in (scored, alone))
    assert with_it.stats == without.stats
    assert with_it.stepped


def test_answers_cut_at_the_limit_are_trained_and_counted_like_others(config, tiny, make_group):
    ended, cut = make_group(), make_group(finish_reason="length")
    assert train(Trainer(config, tiny), 1, [ended]).stats == train(Trainer(config, tiny), 1, [cut]).stats


def test_an_end_token_is_learned_although_it_is_the_padding_token_too(config, tiny, make_group):
    assert AutoTokenizer.from_pretrained(tiny).pad_token_id == 2
    group = make_group(answers=[(2,), (8,)])
    total = GradientSum(load_model(tiny), config)
    total.add(group, trained_version=0)
    total.finish()
    assert total.completion_tokens == 2
    end_of_turn = dict(load_model(tiny).named_parameters())["model.embed_tokens.weight"].shape[0] - 82
    assert total.gradients()[0][end_of_turn].norm() > 0


def test_a_newer_attempt_throws_away_what_older_ones_added(config, tiny, ragged_groups):
    groups = on_policy(ragged_groups(7), tiny)
    clean, retried = Trainer(config, tiny), Trainer(config, tiny)
    for group in groups[:3]:
        retried.accumulate(1, 1, group, 0)
    assert train(retried, 1, groups, attempt=2).stats == train(clean, 1, groups).stats
    assert not changed(retried, clean.state_tensors())


def test_a_batch_is_never_stepped_twice_nor_a_group_added_twice(trainer, make_group):
    trainer.accumulate(1, 2, make_group(), 0)
    with pytest.raises(ValueError, match="group 0 came twice"):
        trainer.accumulate(1, 2, make_group(), 0)
    with pytest.raises(ValueError, match="iteration 1 attempt 1 came while iteration 1 attempt 2 is open"):
        trainer.accumulate(1, 1, make_group(1), 0)
    with pytest.raises(ValueError, match="iteration 2 attempt 1 came while iteration 1 attempt 2 is open"):
        trainer.step(2, 1)
    trainer.step(1, 2)
    with pytest.raises(ValueError, match="iteration 1 came after iteration 1 was finished"):
        trainer.step(1, 3)


def test_staleness_is_counted_from_the_version_that_sampled(trainer, make_group):
    groups = [make_group(0, version=4), make_group(1, version=6)]
    report = train(trainer, 1, groups, version=6)
    assert report.stats["mismatch/by_staleness"].keys() == {"0", "2"}


def test_the_learning_rate_is_full_by_the_second_iteration_and_never_zero(trainer):
    assert [trainer.learning_rate(i) for i in (1, 2, 3)] == [5e-4, 1e-3, 1e-3]


def test_measuring_the_rate_leaves_weights_and_open_batch_alone(config, tiny, ragged_groups):
    groups = on_policy(ragged_groups(9), tiny)
    measured, plain = Trainer(config, tiny), Trainer(config, tiny)
    for group in groups:
        measured.accumulate(1, 1, group, 0)
        plain.accumulate(1, 1, group, 0)
    assert measured.measure_rate(groups) > 0
    assert measured.step(1, 1).stats == plain.step(1, 1).stats
    assert not changed(measured, plain.state_tensors())


def test_the_canary_is_what_transformers_computes_and_changes_with_the_weights(trainer, tiny, make_group):
    canary = trainer.canary()
    ids = torch.tensor([canary.token_ids])
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32)(ids).logits[0, :-1]
    wanted = logits.log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0].tolist()
    assert canary.logprobs == pytest.approx(wanted, abs=2e-5)
    train(trainer, 1, [make_group()])
    after = trainer.canary()
    assert after.token_ids == canary.token_ids
    assert after.logprobs != pytest.approx(wanted, abs=2e-5)


def test_the_export_loads_with_its_tokenizer_and_holds_the_trained_weights(trainer, make_group, tmp_path):
    train(trainer, 1, [make_group()])
    trainer.export(tmp_path / "export")
    exported = dict(AutoModelForCausalLM.from_pretrained(tmp_path / "export").named_parameters())
    tensors = trainer.state_tensors()
    assert exported.keys() == tensors.keys()
    assert all(torch.equal(exported[name], tensor) for name, tensor in tensors.items())
    chat = [{"role": "user", "content": "2 + 2?"}]
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "export")
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert text == "<|im_start|>user\n2 + 2?<|im_end|>\n<|im_start|>assistant\n"


def test_scores_under_weights_of_another_shape_are_refused(tiny, make_group, tmp_path):
    save_file({"model.norm.weight": torch.ones(128)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="should hold the 38 tensors"):
        score(tiny, tmp_path, make_group(), 1.0)
