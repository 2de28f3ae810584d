"""Recorded log-probabilities belong to the stamped version: shown on a tiny model and four sets of weights."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from audit.builder import small_config
from dora_rl.audit.recompute import Again, draw, judge, recompute_logprobs
from dora_rl.models.source import prepare_model
from dora_rl.train.score import score
from dora_rl.wire.rollouts import Segment, Trajectory
from dora_rl.wire.weights import Canary, MemoryTransport, load_saved, save_version, write_version

CONFIG = small_config()


def answer(rollout: int, version: int, length: int = 6) -> Trajectory:
    tokens = tuple((7 * rollout + 3 * i) % 40 + 3 for i in range(length))
    return Trajectory(
        rollout=rollout,
        group_id=rollout // 3,
        member=rollout % 3,
        prompt_id="p",
        version=version,
        prompt_token_ids=(5, 9, 11, 13),
        completion_token_ids=tokens,
        logprobs=(0.0,) * length,
        segments=(Segment(version=version, instance="a", start=0, end=length),) if length else (),
        finish_reason="stop",
        reward=1.0,
        rewards={},
        dispatched_at=0.0,
        finished_at=1.0,
    )


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> tuple[Path, list[Trajectory]]:
    """A folder with a model and versions 3 to 6 of it, and two answers of each of 3 to 5, scored."""
    folder = tmp_path_factory.mktemp("recompute")
    prepare_model("tiny:0", folder / "model")
    save_version_of(folder, 3, noise=0.0)
    for version in (4, 5, 6):
        save_version_of(folder, version, noise=0.02)
    rows = []
    for version in (3, 4, 5):
        answers = [answer(2 * version + i, version) for i in range(2)]
        scores = score(folder / "model", folder / "weights" / str(version), answers, CONFIG.rollout.temperature)
        rows += [replace(one, logprobs=tuple(values)) for one, values in zip(answers, scores, strict=True)]
    return folder, rows


def save_version_of(folder: Path, version: int, *, noise: float) -> None:
    """The model's weights with some noise of their own."""
    from safetensors.torch import load_file

    generator = torch.Generator().manual_seed(version)
    tensors = {
        name: tensor + noise * torch.randn(tensor.shape, generator=generator)
        for name, tensor in load_file(folder / "model" / "model.safetensors").items()
    }
    manifest = write_version(MemoryTransport(), version, version - 1, tensors, Canary((1, 2), (-0.5,)))
    save_version(folder / "weights" / str(version), manifest, tensors)


def test_answers_under_their_own_version_pass_and_are_told_from_every_other(run):
    folder, rows = run
    again = recompute_logprobs(folder, CONFIG, rows, 6, made=7)
    assert again.problems == again.notes == []
    recomputed = again.recomputed
    assert sorted((one.trajectory, one.version) for one in recomputed) == [(i, i // 2) for i in range(6, 12)]
    for one in recomputed:
        assert one.own_max_diff <= 1e-3
        assert set(one.others) == {3, 4, 5, 6} - {one.version}
        assert min(one.others.values()) > 10 * one.own_max_diff


def test_an_answer_stamped_with_another_version_fails_and_is_named(run):
    folder, rows = run
    wrong = replace(rows[0], version=4, segments=(Segment(version=4, instance="a", start=0, end=6),))
    problems = recompute_logprobs(folder, CONFIG, [wrong, *rows[1:]], 6, made=7).problems
    assert any(problem.startswith(f"recompute: trajectory {wrong.rollout} ") for problem in problems)
    assert any(f"trajectories [{wrong.rollout}, " in problem for problem in problems)  # nor told from version 3


def test_fewer_than_two_other_versions_with_different_weights_is_a_failure(run, tmp_path):
    folder, rows = run
    shutil.copytree(folder, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "weights" / "6")
    shutil.rmtree(tmp_path / "run" / "weights" / "5")
    problems = recompute_logprobs(tmp_path / "run", CONFIG, rows, 4, made=7).problems
    assert len(problems) == 2
    for version, problem in zip((3, 4), problems, strict=True):
        assert problem.startswith(f"recompute: version {version} can be told from 1 other kept versions")


def test_versions_with_equal_weights_count_as_one():
    diffs = {6: {3: torch.zeros(2), 4: torch.zeros(2), 5: torch.ones(2)}}
    again = Again()
    judge([answer(6, 3, 2)], {3: "x", 4: "x", 5: "y"}, diffs, again, made=3)
    assert [set(one.others) for one in again.recomputed] == [{5}]
    assert len(again.problems) == 1
    assert "told from 1 other" in again.problems[0]


@pytest.mark.parametrize(
    ("own", "other", "said"),
    [
        (2e-3, 1.0, "differs by 2.0e-03 under its own version"),
        (float("nan"), 1.0, "differs by nan under its own version"),
        (1e-4, 9e-4, "expected 10 times more under the other"),
        (0.0, 0.0, "expected 10 times more under the other"),
    ],
)
def test_limits_are_kept_token_by_token_and_version_by_version(own, other, said):
    diffs = {6: {3: torch.tensor([0.0, own]), 4: torch.tensor([0.0, other]), 5: torch.ones(2)}}
    again = Again()
    judge([answer(6, 3, 2)], {3: "x", 4: "y", 5: "z"}, diffs, again, made=3)
    assert any(said in problem for problem in again.problems), again.problems


def test_weights_that_were_changed_on_disk_are_found(run, tmp_path):
    folder, rows = run
    shutil.copytree(folder, tmp_path / "run")
    path = tmp_path / "run" / "weights" / "4" / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(ValueError, match="checksum"):
        load_saved(path.parent)
    problems = recompute_logprobs(tmp_path / "run", CONFIG, rows, 6, made=7).problems
    assert any(problem.startswith("recompute: version 4: ") and "checksum" in problem for problem in problems)


def test_asking_for_more_answers_than_were_made_is_noted_and_for_more_than_were_kept_is_a_failure(run):
    folder, rows = run
    again = recompute_logprobs(folder, CONFIG, rows, 7, made=7)
    assert (again.problems, again.notes) == ([], ["recompute: 7 trajectories were asked for, but only 6 were made"])
    older = answer(1000, 0)
    problems = recompute_logprobs(folder, CONFIG, [*rows, older], 7, made=7).problems
    assert problems[0].startswith("recompute: 7 trajectories were asked for, but only 6 belong to the kept versions")


def test_answers_are_drawn_by_seed_evenly_over_the_kept_versions():
    pool = [answer(3 * i + version, version) for version in range(3) for i in range(9)] + [answer(99, 2, length=0)]
    drawn = draw(pool, [1, 2], 7, seed=0)
    assert [one.version for one in drawn] == [1, 2, 1, 2, 1, 2, 1]
    assert drawn == draw(pool[::-1], [2, 1], 7, seed=0)
    assert drawn != draw(pool, [1, 2], 7, seed=1)
    assert len(draw(pool, [1, 2], 99, seed=0)) == 18


def test_a_run_that_made_too_few_versions_to_tell_them_apart_passes_with_a_note(run, tmp_path):
    folder, answers = run
    shutil.copytree(folder, tmp_path / "run")
    for version in (5, 6):
        shutil.rmtree(tmp_path / "run" / "weights" / str(version))
    again = recompute_logprobs(tmp_path / "run", CONFIG, answers, 4, made=2)
    assert again.problems == []
    assert [note.partition(" ")[2][:9] for note in again.notes] == ["version 3", "version 4"]
    assert all(note.endswith("but the run made only 2 versions in all") for note in again.notes)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"completion_token_ids": (10**6,) * 6}, "token 1000000 is none of the model's"),
        ({"prompt_token_ids": (-1,)}, "token -1 is none of the model's"),
        ({"prompt_token_ids": ()}, "its prompt is empty"),
    ],
)
def test_an_answer_that_the_model_could_not_have_sampled_is_named_and_the_others_are_compared(run, change, said):
    folder, answers = run
    again = recompute_logprobs(folder, CONFIG, [replace(answers[0], **change), *answers[1:]], 6, made=7)
    (problem,) = again.problems
    assert problem.startswith(f"recompute: trajectory {answers[0].rollout}: {said}")
    assert len(again.recomputed) == 5


def test_weights_that_say_another_version_than_their_folder_are_found(run, tmp_path):
    folder, answers = run
    shutil.copytree(folder, tmp_path / "run")
    path = tmp_path / "run" / "weights" / "4" / "version.json"
    path.write_text(path.read_text().replace('"version": 4', '"version": "4"'))
    problems = recompute_logprobs(tmp_path / "run", CONFIG, answers, 6, made=7).problems
    assert any("4 says that it holds version '4'; restore the folder" in problem for problem in problems)
