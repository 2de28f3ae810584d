"""A run that kept its promises passes, however it went and however it ended; one changed value makes it fail."""

import json
import shutil
import sqlite3
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from acceptance.tamper import TAMPERINGS
from audit.builder import build_run, small_config
from audit.forgeries import FORGERIES
from dora_rl.audit import recompute
from dora_rl.audit.checks import advantages
from dora_rl.audit.history import AuditError
from dora_rl.audit.judge import audit_run
from dora_rl.core import messages as m
from dora_rl.sim.world import RandomWorld, WorldConfig
from dora_rl.train.advantage import group_advantages
from dora_rl.wire.iteration_files import SCHEMA, read_records, write_records
from dora_rl.wire.open_store import OpenStore

CALM = WorldConfig(seed=5, slots=4, evaluation_answers=4)


def stormy(seed: int) -> WorldConfig:
    """Failures of every kind, a lost engine with its replacement, a lost trainer rank."""
    world = WorldConfig(seed=seed, slots=4, evaluation_answers=4, failure=0.1, failures=8, sigma=1.2)
    joins = RandomWorld(world, max_tokens=1, group_size=1).joins(7, at=40.0)
    lost = m.InstanceLost(at=35.0, instance="engine-0", reason="killed")
    return replace(world, losses=(lost, joins, m.RankLost(at=55.0, reason="killed")))


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory) -> Path:
    """A finished run; tests change copies of it."""
    return build_run(tmp_path_factory.mktemp("audit") / "run", small_config(), CALM).path


@pytest.fixture
def run(whole_run, tmp_path) -> Path:
    return Path(shutil.copytree(whole_run, tmp_path / "run"))


def problems(run: Path) -> list[str]:
    report = audit_run(run)
    assert (report.verdict == "fail") == bool(report.problems)
    return report.problems


def change_journal(run: Path, change: Callable[[dict[str, Any]], bool]) -> None:
    """Apply `change` to the journal's entries until it says that it has changed one."""
    lines = [json.loads(line) for line in (run / "journal.jsonl").read_text().splitlines()]
    assert any(change(entry) for entry in lines[1:]), "nothing in this journal to change"
    (run / "journal.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.mark.parametrize("seed", range(6))
def test_a_run_with_failures_and_losses_passes_and_every_group_is_in_the_ledger(tmp_path, seed):
    build_run(tmp_path / "run", small_config(), stormy(seed))
    report = audit_run(tmp_path / "run")
    assert report.problems == []
    ledger = dict(report.c2)
    assert ledger.pop("dispatched") == sum(ledger.values()) >= 8
    assert ledger["trained"] == 8
    assert report.c3["bound"] == 2
    assert 0 <= (report.c3["max"] or 0) <= 2


@pytest.mark.parametrize("killed_after", [0, 1, 7, 20, 40, 60, 80])
def test_a_run_that_was_killed_at_any_moment_passes_with_its_unfinished_groups_counted(tmp_path, killed_after):
    run = build_run(tmp_path / "run", small_config(), CALM, killed_after=killed_after)
    with run.journal.open("ab") as journal:
        journal.write(b'{"event":{"type":"Gener')
    report = audit_run(run.path)
    assert report.problems == []
    assert any("the run was killed there" in note for note in report.notes)
    ledger = dict(report.c2)
    assert ledger.pop("dispatched") == sum(ledger.values())


def test_an_interrupted_run_passes_and_its_unfinished_groups_are_counted_as_interrupted(tmp_path):
    world = replace(CALM, losses=(m.Interrupted(at=60.0),))
    run = build_run(tmp_path / "run", small_config(), world)
    report = audit_run(run.path)
    assert report.problems == []
    assert report.c2["interrupted"] > 0
    assert report.c2["running"] == report.c2["ready"] == report.c2["seated"] == 0


@pytest.mark.parametrize("prompts", [0, 1, 3, 5])
def test_a_run_whose_data_end_passes_with_every_prompt_in_the_ledger(tmp_path, prompts):
    run = build_run(tmp_path / "run", small_config(), replace(CALM, prompts=prompts, equal_rewards=0.5))
    report = audit_run(run.path)
    assert report.problems == []
    assert report.c2["dispatched"] == report.c2["trained"] + report.c2["filtered"] + report.c2["failed"] == prompts


def test_the_synchronous_strategy_promises_staleness_zero_whatever_the_setting_says(tmp_path):
    build_run(tmp_path / "run", small_config(strategy="sync"), CALM)
    assert audit_run(tmp_path / "run").c3 == {"bound": 0, "max": 0}


def test_what_a_strategy_throws_away_is_counted_where_it_promises_nothing_else(tmp_path):
    build_run(tmp_path / "run", small_config(strategy="drop_stale", max_staleness_versions=0), CALM)
    report = audit_run(tmp_path / "run")
    assert report.verdict == "pass"
    assert report.c2["dropped"] > 0
    after_the_last_close = report.c2["running"] + report.c2["ready"]
    assert report.not_promised == {"C2": report.c2["dropped"] + after_the_last_close}


def test_the_report_has_exactly_the_documented_keys_and_reads_well(whole_run):
    report = audit_run(whole_run)
    read = json.loads(report.dumps())
    assert list(read) == ["verdict", "c1", "c2", "c3", "recomputed", "problems", "not_promised", "notes"]
    assert list(read["c2"]) == [
        *("dispatched", "running", "ready", "seated", "trained", "filtered", "failed", "dropped"),
        *("interrupted", "rolled_back"),
    ]
    assert list(read["c3"]) == ["bound", "max"]
    text = report.to_text().splitlines()
    assert text[0] == "verdict: pass"
    assert "8 trained" in text[2]
    assert text[3].endswith(f"largest {report.c3['max']}, bound 2 versions")


# --- falsified runs ---


@pytest.mark.parametrize("tamper", TAMPERINGS, ids=lambda tamper: tamper.__name__)
def test_each_of_the_five_falsifications_makes_the_audit_fail_and_is_named(run, tamper):
    assert problems(run) == []
    done = tamper(run)
    found = problems(run)
    assert any(f"{done.name} " in problem for problem in found), f"{done.what}: {found}"
    text = audit_run(run).to_text()
    assert text.startswith("verdict: fail")
    assert done.name in text


def changed(column: str, value: Any, rng: Random) -> Any:
    """Another value of the same type."""
    match column, value:
        case "status", str():
            return rng.choice([other for other in ("trained", "filtered", "failed") if other != value])
        case (("reward" | "advantage"), None):
            return 0.5
        case _, int():
            return value + rng.choice([-1, 1, 100])
        case _, float():
            return value + rng.choice([-0.25, 0.25])
        case "extras", str():
            return json.dumps(json.loads(value) | {rng.choice(["rollout", "note"]): 10**6})
        case _, str():
            return value + "x"
        case "rewards", list():
            return [(value[0][0], 0.123)]
        case "segments", list():
            field = rng.choice(["version", "instance", "start", "end"])
            return [value[0] | {field: changed(field, value[0][field], rng)}, *value[1:]]
        case "logprobs", list():
            i = rng.randrange(len(value))
            return [*value[:i], float(np.nextafter(np.float32(value[i]), np.float32(-9))), *value[i + 1 :]]
        case _, list():
            i = rng.randrange(len(value))
            return rng.choice([value[:i] + value[i + 1 :], [*value[:i], value[i] + 1, *value[i + 1 :]], [*value, 7]])
    raise AssertionError(f"no way to change {column} = {value!r}")


@pytest.mark.parametrize("column", SCHEMA.names)
@settings(max_examples=3)  # each one waits for the disk
@given(seed=st.integers(0, 10**6))
def test_any_changed_field_of_any_trajectory_is_found(whole_run, column, seed):
    rng = Random(seed)
    path = rng.choice(sorted((whole_run / "rollouts").iterdir()))
    before = path.read_bytes()
    records = read_records(path)
    record = rng.choice(records)
    record[column] = changed(column, record[column], rng)
    try:
        write_records(path, records)
        assert problems(whole_run)
    finally:
        path.write_bytes(before)


def test_a_deleted_file_a_repeated_group_and_a_stranger_in_the_folder_are_found(run):
    files = sorted((run / "rollouts").iterdir())
    first = files[0].read_bytes()
    groups = {record["group_id"] for record in read_records(files[0])}
    files[0].unlink()
    assert {f"C2: group {group} was closed" for group in groups} == {
        problem.rpartition(" as ")[0] for problem in problems(run)
    }
    files[0].write_bytes(first)
    (run / "rollouts" / "9.parquet").write_bytes(first)
    assert any("is 2 times in rollouts/0.parquet, expected once" in problem for problem in problems(run))
    (run / "rollouts" / "9.parquet").rename(run / "rollouts" / "copy.parquet")
    assert "named after no iteration" in "".join(problems(run))
    (run / "rollouts" / "copy.parquet").write_bytes(b"PAR1")
    assert len(problems(run)) == 1


def test_a_group_that_open_db_lost_or_changed_is_found(tmp_path):
    run = build_run(tmp_path / "run", small_config(), CALM, killed_after=40)
    with OpenStore(run.open_db) as store:
        (name, *_) = store.group_ids()
        group = store.get_group(name)
        store.put_group([replace(group[0], prompt_id="another"), *group[1:]])
        assert any(f"trajectory {group[0].rollout} (member 0 of group {name})" in text for text in problems(run.path))
        store.remove([name])
        assert f"C2: group {name} was scored and is in no file" in "".join(problems(run.path))
        store.put_group([replace(one, group_id=999) for one in group])
        assert "C2: group 999 is in open.db, but the journal never dispatched it" in problems(run.path)


def test_an_answer_under_a_version_that_its_instance_never_loaded_is_found(run):
    def unload(entry: dict[str, Any]) -> bool:
        event = entry["event"]
        if event["type"] != "Loaded" or event["version"] == 0:
            return False
        event["version"] = 0
        return True

    change_journal(run, unload)
    assert any("which held no version " in problem for problem in problems(run))


def test_an_answer_relabelled_with_the_version_that_came_back_is_found(run):
    # Regression 2.
    def relabel(entry: dict[str, Any]) -> bool:
        event = entry["event"]
        if event["type"] == "Generated":
            event["version"] += 1
        return bool(event["type"] == "Generated")

    change_journal(run, relabel)
    assert any("asked of version 0, answered by 1" in problem for problem in problems(run))


def test_a_step_that_made_no_version_but_is_counted_as_one_is_found(run):
    def not_improved(entry: dict[str, Any]) -> bool:
        improved = entry["event"].get("improved", False)
        entry["event"]["improved"] = False
        return bool(improved)

    change_journal(run, not_improved)
    assert any(problem.startswith("C3: ") and "recounted" in problem for problem in problems(run))


def test_a_group_that_no_file_and_no_journal_line_mentions_again_is_found(run):
    """C2 against a run that forgets: the first group's answers never come, and the run ends all the same."""

    def forget(entry: dict[str, Any]) -> bool:
        for command in entry["commands"]:
            if command["type"] == "Close" and command["trained"]:
                command["trained"].pop()
                return True
        return False

    change_journal(run, forget)
    assert any("although the run came to its end" in problem or "never closed" in problem for problem in problems(run))


def test_a_relaxed_bound_in_the_configuration_does_not_match_the_journals_hash(run):
    text = (run / "config.toml").read_text()
    assert "max_staleness_versions = 2" in text
    (run / "config.toml").write_text(text.replace("max_staleness_versions = 2", "max_staleness_versions = 3"))
    (problem,) = problems(run)
    assert problem.startswith("config.toml has hash ")


def test_a_bound_below_what_was_trained_is_a_broken_promise_that_names_the_trajectories(tmp_path, whole_run):
    assert audit_run(whole_run).c3["max"] == 2
    text = (whole_run / "config.toml").read_text()
    run = Path(shutil.copytree(whole_run, tmp_path / "run"))
    (run / "config.toml").write_text(text.replace("max_staleness_versions = 2", "max_staleness_versions = 1"))
    late = [problem for problem in problems(run) if problem.startswith("C3: trajectory ")]
    assert late
    assert all("2 versions old, the bound is 1" in problem for problem in late)


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("config.toml", None, "name an existing TOML file"),
        ("journal.jsonl", None, "name the folder that dora-rl train has printed"),
        ("journal.jsonl", "", "line 1 is no header"),
        ("journal.jsonl", '{"config_hash": "x"}\n{"event"\n', "line 2: .*; the journal was damaged, restore it"),
        (
            "journal.jsonl",
            '{"config_hash": "x"}\n{"commands": []}\n',
            "line 2: Object missing required field `event`; the journal was damaged",
        ),
    ],
)
def test_a_folder_that_cannot_be_judged_is_an_error_in_one_line(run, name, text, said):
    (run / name).unlink()
    if text is not None:
        (run / name).write_text(text)
    with pytest.raises(AuditError, match=said) as error:
        audit_run(run)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("forge", FORGERIES, ids=lambda forge: forge.__name__)
def test_a_promise_broken_in_journal_digests_and_files_alike_makes_the_audit_fail_and_is_named(run, forge):
    name = forge(run)
    found = problems(run)
    assert any(name in problem for problem in found), f"{name}: {found}"


def test_an_answer_may_begin_again_after_the_journal_says_that_its_groups_data_are_gone(tmp_path):
    lost = tuple(m.DataLost(at=float(at), group=group) for at in range(20, 100, 4) for group in range(10))
    run = build_run(tmp_path / "run", small_config(), replace(CALM, losses=lost))
    entries = [json.loads(line) for line in run.journal.read_text().splitlines()[1:]]
    asked = [one for entry in entries for one in entry["commands"] if one["type"] == "Generate"]
    begun = Counter(one["rollout"] for one in asked if one["generated_tokens"] == 0)
    assert max(begun.values()) > 1, "no group was repaired"
    assert problems(run.path) == []
    for killed_after in range(30, 90, 12):
        cut = build_run(
            tmp_path / str(killed_after), small_config(), replace(CALM, losses=lost), killed_after=killed_after
        )
        assert problems(cut.path) == []


def test_lost_data_of_a_group_that_was_never_dispatched_is_no_error(tmp_path):
    run = build_run(tmp_path / "run", small_config(), replace(CALM, losses=(m.DataLost(at=9.0, group=10**6),)))
    assert problems(run.path) == []


def test_a_journal_cut_to_its_header_is_found_by_each_of_the_files_that_show_more(run):
    journal = run / "journal.jsonl"
    journal.write_text(journal.read_text().partition("\n")[0] + "\n")
    (run / "open.db").unlink()
    assert any("rollouts/ has iterations [0, 1, 2, 3]" in problem for problem in problems(run))
    shutil.rmtree(run / "rollouts")
    assert problems(run) == []
    (run / "metrics.jsonl").write_text('{"iteration": 0, "version": 0}\n{"iterat')
    (run / "weights" / "1").mkdir(parents=True)
    (run / "weights" / ".2.partial").mkdir()
    assert [problem.partition(",")[0] for problem in problems(run)] == [
        "C2: weights/ has versions [1]",
        "C2: metrics.jsonl has iterations [0]",
    ]


@pytest.mark.parametrize(
    "header", ["1", "null", "[]", '"config_hash"', '["config_hash"]', '{"config_hash":["x"]}', "{"]
)
def test_a_first_line_that_is_no_header_is_an_error_in_one_line(run, header):
    journal = run / "journal.jsonl"
    journal.write_text("\n".join([header, *journal.read_text().split("\n")[1:]]))
    with pytest.raises(AuditError, match=r"^.*journal\.jsonl, line 1 is no header .*; expected a journal .*$"):
        audit_run(run)


@pytest.mark.parametrize(
    ("kind", "field", "value"),
    [
        *(("Generated", "num_tokens", value) for value in ("5", [1], None, 5.5, -1)),
        *(("Generated", "rollout", value) for value in ("0", [0], {})),
        *(("Scored", "rewards", value) for value in (None, 5, "abc", ["a"])),
        *(("Scored", "digest", value) for value in (5, None)),
        *(("Scored", "group", value) for value in ("0", [0], 10**6)),
        ("Loaded", "version", "0"),
        ("Stepped", "improved", "no"),
        ("InstanceJoined", "descriptor", {"max_versions": 0, "versions": []}),
        ("Generated", "type", "Imagined"),
    ],
)
def test_a_journal_line_with_a_field_of_another_type_is_an_error_in_one_line_that_names_it(run, kind, field, value):
    def damage(entry: dict[str, Any]) -> bool:
        found = entry["event"]["type"] == kind
        if found:
            entry["event"][field] = value
        return bool(found)

    change_journal(run, damage)
    with pytest.raises(AuditError, match=r"^.*journal\.jsonl, line \d+: .*; the journal was damaged, restore it$"):
        audit_run(run)


def test_a_line_nested_too_deeply_is_an_error_in_one_line(run):
    for line in ("[" * 100_000 + "]" * 100_000, '{"event":{"type":"RankLost","x":' + "[" * 100_000):
        with (run / "journal.jsonl").open("r+") as journal:
            journal.seek(0, 2)
            end = journal.tell()
            journal.write(line + "\n")
        with pytest.raises(AuditError, match="the journal was damaged, restore it"):
            audit_run(run)
        with (run / "journal.jsonl").open("r+") as journal:
            journal.truncate(end)


@pytest.mark.parametrize("column", ["prompt_token_ids", "completion_token_ids", "logprobs", "segments"])
def test_a_null_in_a_list_of_a_stored_trajectory_is_a_problem_that_names_its_group(run, column):
    path = run / "rollouts" / "1.parquet"
    records = read_records(path)
    records[0][column][0] = None
    write_records(path, records)
    name = f"member {records[0]['member']} of group {records[0]['group_id']}"
    assert any(problem.startswith(f"C1: {name}") and "it is no trajectory" in problem for problem in problems(run))


def test_advantages_are_told_again_as_the_trainer_computes_them():
    rng = Random(3)
    for _ in range(200):
        scale = 10.0 ** rng.randrange(-9, 9)
        rewards = [rng.choice([None, rng.random() * scale, 0.0]) for _ in range(rng.randrange(1, 6))]
        told, computed = ([9e9 if one is None else one for one in f(rewards)] for f in (advantages, group_advantages))
        assert told == pytest.approx(computed, rel=1e-9)


def test_recompute_draws_from_open_db_too_and_knows_how_many_versions_the_run_made(tmp_path, monkeypatch):
    run = build_run(tmp_path / "run", small_config(), CALM, killed_after=40)
    with OpenStore(run.open_db, read_only=True) as store:
        waiting = {one.rollout for group in store.group_ids() for one in store.get_group(group)}
    given: dict[str, Any] = {}

    def spy(folder, config, trajectories, count, *, made):
        given.update(rollouts={one.rollout for one in trajectories}, made=made)
        return recompute.Again(notes=["a note"])

    monkeypatch.setattr(recompute, "recompute_logprobs", spy)
    report = audit_run(run.path, recompute=3)
    assert report.problems == []
    assert "a note" in report.notes
    assert waiting
    assert waiting <= given["rollouts"]
    assert given["made"] == run.journal.read_text().count('"type":"Published"')


def test_a_damaged_record_in_open_db_is_a_problem_that_names_its_group(tmp_path):
    run = build_run(tmp_path / "run", small_config(), CALM, killed_after=40)
    with OpenStore(run.open_db, read_only=True) as store:
        name = store.group_ids()[0]
    for facts in ("null", '{"rollout": 1}', "[" * 100_000):
        with closing(sqlite3.connect(run.open_db)) as db, db:
            db.execute("UPDATE trajectories SET facts = ? WHERE group_id = ?", (facts, name))
        assert any(f"C2: group {name} in " in text and " is damaged: " in text for text in problems(run.path))
