"""What a person reads fits a terminal, lines up, and says what the figures say."""

from pathlib import Path

import pytest

from dora_rl.obs.console import HEADER, duration, iteration_line, paired_difference, summary, thirds, time_left
from dora_rl.obs.folder import RunFolder
from dora_rl.obs.metrics import evaluation_line

LINE = {
    "iteration": 0,
    "reward/mean": 0.25,
    "groups/trained": 8,
    "groups/filtered": 3,
    "groups/failed": 0,
    "versions/alive_max": 3,
    "versions/running_max": 2,
    "staleness/mean": 1.25,
    "staleness/max": 2,
    "staleness/histogram": {"0": 1, "2": 7},
    "throughput/tokens_per_s": 351.2,
    "throughput/generated_tokens_per_s": 40.0,
    "throughput/devices": 3,
    "completion/length_mean": 43.2,
    "time/iteration_s": 20.0,
    "time/exposed_rollout_s": 5.0,
    "idle/trainer_share": 0.25,
    "idle/rollout_share": 0.06,
    "moves/count": 5,
    "moves/bytes": 3 * 2**20,
    "moves/recomputed_tokens": 7,
}


def test_an_iteration_is_one_line_under_its_heading():
    line = iteration_line(LINE, iterations=40, left_s=754.0)
    assert line.split() == [
        "1/40",
        "0.250",
        "8",
        "3",
        "3",
        "2",
        "1.25",
        "2",
        "351",
        "43.2",
        "75%",
        "25%",
        "6%",
        "12m34s",
    ]
    headings = HEADER.splitlines()
    assert len(headings) == 2
    assert all(len(text) <= 120 for text in (*headings, line))
    # Right-aligned columns: each cell ends where its heading ends.
    assert line.index("0.250") + 5 == headings[1].index("reward") + 6
    assert len(line) == len(headings[1])


def test_what_is_unknown_is_a_dash_and_failed_groups_are_mentioned():
    unknown = dict.fromkeys(("reward/mean", "staleness/mean", "idle/trainer_share", "throughput/tokens_per_s"))
    line = iteration_line(LINE | unknown | {"groups/failed": 2}, iterations=40, left_s=None)
    assert line.split()[1] == "-"
    assert line.endswith("-  2 groups failed")


def test_the_time_left_is_that_of_the_latest_iterations():
    assert time_left([], iterations=10) is None
    assert time_left([100.0, 1.0, 1.0, 1.0, 1.0, 1.0], iterations=10) == 4.0
    assert time_left([2.0] * 10, iterations=10) == 0.0


@pytest.mark.parametrize(
    ("seconds", "text"), [(None, "-"), (0.2, "1s"), (59.0, "59s"), (725.0, "12m05s"), (12000.0, "3h20m"), (-1.0, "0s")]
)
def test_durations_have_two_units_at_most(seconds, text):
    assert duration(seconds) == text


def evaluation(version: int, sampling: str, *rewards: float | None) -> dict:
    return evaluation_line(
        iteration=version, version=version, sampling=sampling, rewards=rewards, lengths=[3] * len(rewards)
    )


def test_the_paired_difference_compares_prompt_by_prompt():
    before, after = evaluation(0, "sampled", 0.0, 0.0, 1.0, None), evaluation(9, "sampled", 1.0, 1.0, 1.0, 1.0)
    gain, error = paired_difference(before, after)
    assert gain == pytest.approx(2 / 3)
    assert error == pytest.approx(1 / 3)
    assert paired_difference(evaluation(0, "sampled", None), evaluation(9, "sampled", 1.0)) is None


def test_thirds_are_means_of_the_first_and_last_iterations():
    assert thirds([{"reward/mean": value} for value in (0.0, 0.2, 0.5, 0.5, None, 0.8, 1.0)]) == pytest.approx(
        (0.1, 0.9)
    )
    assert thirds([{"reward/mean": 0.5}]) == (0.5, 0.5)


def test_the_summary_tells_gain_staleness_throughput_and_how_to_check_it():
    evaluations = [
        evaluation(0, "sampled", 0.0, 0.0, 1.0, 0.0),
        evaluation(9, "sampled", 1.0, 1.0, 1.0, 0.0),
        evaluation(0, "greedy", 1.0, 0.0, 1.0, 0.0),
    ]
    text = summary([LINE] * 9, evaluations, folder=Path("runs/x"), wall_s=800.0)
    assert max(map(len, text.splitlines())) <= 120
    assert text.startswith("run finished after 9 iterations in 13m20s")
    for part in (
        "held-out sampled  0.250 ± 0.250 at version 0 -> 0.750 ± 0.250 at version 9 (4 prompts)",
        "difference by prompt +0.500 ± 0.289, +1.7 standard errors",
        "held-out greedy   0.500 ± 0.289 at version 0 (4 prompts)",
        "0: 9 (12%), 2: 63 (88%) of 72 trained groups",
        "351 tokens/s of prompts and answers, 40 of answers; 3 devices",
        "20.0 s an iteration; the trainer waited 25% of it",
        "dora-rl audit runs/x",
    ):
        assert part in text


def test_a_run_that_ended_before_its_first_iteration_has_a_summary_too():
    assert "run interrupted after 0 iterations" in summary([], [], folder=Path("r"), wall_s=3.0, ended="interrupted")


def test_a_runs_folder_is_made_once_and_its_lines_come_back(tmp_path):
    folder = RunFolder(tmp_path / "run")
    folder.create("[run]\n")
    assert folder.read_metrics() == folder.read_eval() == []
    folder.append_metrics({"iteration": 0, "reward/mean": None})
    folder.append_metrics({"iteration": 1, "reward/mean": 0.5})
    folder.append_eval({"score": 1.0})
    assert [line["reward/mean"] for line in folder.read_metrics()] == [None, 0.5]
    assert folder.read_eval() == [{"score": 1.0}]
    with pytest.raises(FileExistsError):
        folder.create("[run]\n")
    folder.metrics.write_text('{"iteration": 0}\n{"itera')
    with pytest.raises(ValueError, match=r"metrics\.jsonl, line 2: .*; remove or restore the line"):
        folder.read_metrics()
