"""The whole program on a tiny model: real engines, a real trainer, and what its folder proves afterwards."""

import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from dora_rl.audit.judge import audit_run
from dora_rl.config import load_config
from dora_rl.core.replay import divergence
from dora_rl.obs.folder import RunFolder
from dora_rl.obs.journal import read_journal

pytestmark = pytest.mark.engine

TINY = Path(__file__).parents[2] / "examples" / "tiny.toml"


def command(folder: Path, *settings: str) -> list[str]:
    sets = [part for setting in settings for part in ("--set", setting)]
    return [sys.executable, "-m", "dora_rl.cli", "train", str(TINY), "--run-dir", str(folder), *sets]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "tiny"
    done = subprocess.run(command(folder, "run.iterations=8"), timeout=240, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "run finished after 8 iterations" in done.stdout
    return folder


def test_a_run_learns_and_its_folder_proves_the_three_promises(run: Path) -> None:
    report = audit_run(run, recompute=6)
    assert report.problems == []
    assert report.verdict == "pass"
    evaluations = [line for line in RunFolder(run).read_eval() if line["sampling"] == "sampled"]
    assert evaluations[-1]["score"] > evaluations[0]["score"]


def test_a_real_journal_replays_to_the_commands_that_were_given(run: Path) -> None:
    assert divergence(load_config(RunFolder(run).config), read_journal(RunFolder(run).journal)[1]) is None


def test_the_export_loads_with_transformers_and_answers(run: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(run / "export", local_files_only=True)
    tokenizer = AutoTokenizer.from_pretrained(run / "export", local_files_only=True)
    prompt = tokenizer("3 + 4", return_tensors="pt")
    assert model.generate(**prompt, max_new_tokens=4).shape[1] > prompt["input_ids"].shape[1]


def test_every_version_was_proved_to_be_the_published_one(run: Path) -> None:
    kept = [json.loads((folder / "version.json").read_text()) for folder in sorted((run / "weights").iterdir())]
    assert [one["parent"] for one in kept] == [one["version"] - 1 for one in kept]
    assert len({one["checksum"] for one in kept}) == len(kept)


def test_ten_figures_of_every_iteration_are_what_the_journal_says(run: Path) -> None:
    """Counted again from the file's lines alone, by other means than the program's."""
    entries = [json.loads(line) for line in (run / "journal.jsonl").read_text().splitlines()[1:]]
    events = [entry["event"] for entry in entries]
    commands = [command for entry in entries for command in entry["commands"]]
    asked = {(c["rollout"], c["attempt"]): c for c in commands if c["type"] == "Generate" and c["group"] is not None}
    segments = [e for e in events if e["type"] == "Generated" and (e["rollout"], e["attempt"]) in asked]
    tokens: Counter[int] = Counter()
    group_of, version_of, last = {}, {}, {}
    for event in segments:
        command = asked[event["rollout"], event["attempt"]]
        tokens[event["rollout"]] += event["num_tokens"]
        group_of[event["rollout"]], version_of[command["group"]] = command["group"], command["version"]
        last[event["rollout"]] = event["reason"]
    rewards = {e["group"]: e["rewards"] for e in events if e["type"] == "Scored"}
    stepped = [e for e in events if e["type"] == "Stepped"]
    opened = [next(e["at"] for e in events if e["type"] == "Loaded"), *(e["at"] for e in stepped)]
    closes = [c for c in commands if c["type"] == "Close"]
    for line, close, step, begin in zip(RunFolder(run).read_metrics(), closes, stepped, opened, strict=False):
        left = {*close["trained"], *close["filtered"]}
        answers = [rollout for rollout, group in group_of.items() if group in left]
        lengths = [tokens[rollout] for rollout in answers]
        ages = [close["trained_at"] - version_of[group] for group in close["trained"]]
        seconds = step["at"] - begin
        within = sum(e["num_tokens"] for e in segments if begin < e["at"] <= step["at"])
        known = [reward for group in left for reward in rewards[group] if reward is not None]
        expected = {
            "groups/trained": len(close["trained"]),
            "groups/filtered": len(close["filtered"]),
            "staleness/mean": sum(ages) / len(ages),
            "staleness/max": max(ages),
            "reward/mean": sum(known) / len(known),
            "completion/length_mean": sum(lengths) / len(lengths),
            "completion/length_max": max(lengths),
            "completion/clipped_share": sum(last[rollout] == "length" for rollout in answers) / len(answers),
            "time/iteration_s": seconds,
            "time/exposed_rollout_s": seconds - step["busy_s"],
            "throughput/generated_tokens_per_s": within / seconds,
        }
        assert {name: line[name] for name in expected} == pytest.approx(expected, abs=1e-6)


@pytest.fixture
def started(tmp_path: Path) -> Iterator["subprocess.Popen[str]"]:
    """A run that has evaluated its first version and is training."""
    process = subprocess.Popen(
        command(tmp_path / "killed", "run.iterations=500", "eval.prompts=2"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    for line in process.stdout:
        if line.lstrip().startswith("1/500"):
            break
    yield process
    if process.poll() is None:
        process.kill()
    process.wait(30)


def wait_for(condition: Callable[[], bool], within_s: float = 90.0) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, "it did not come about in time"
        time.sleep(0.1)


def test_the_answers_of_a_killed_engine_are_finished_by_the_other_and_without_any_the_run_ends_with_its_cause(
    started: "subprocess.Popen[str]", tmp_path: Path
) -> None:
    family = psutil.Process(started.pid).children(recursive=True)
    first, second = (process for process in family if "EngineCore" in " ".join(process.cmdline()))
    first.kill()
    metrics = tmp_path / "killed" / "metrics.jsonl"
    lines = len(metrics.read_text().splitlines()) if metrics.exists() else 0
    wait_for(lambda: metrics.exists() and len(metrics.read_text().splitlines()) >= lines + 2)
    second.kill()
    _, errors = started.communicate(timeout=90)
    assert started.returncode == 1, errors
    assert "and no other is left" in errors
    assert audit_run(tmp_path / "killed").problems == []
    _, alive = psutil.wait_procs(family, timeout=30)
    assert alive == []


def test_ctrl_c_ends_a_run_cleanly_and_its_folder_still_passes_the_audit(
    started: "subprocess.Popen[str]", tmp_path: Path
) -> None:
    family = psutil.Process(started.pid).children(recursive=True)
    started.send_signal(2)
    output, errors = started.communicate(timeout=90)
    assert started.returncode == 130, errors
    assert "run interrupted after" in output
    _, alive = psutil.wait_procs(family, timeout=30)
    assert alive == []
    report = audit_run(tmp_path / "killed")
    assert report.problems == []
    assert report.to_json()["c2"]["interrupted"] > 0
