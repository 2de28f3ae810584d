"""What is written into the journal is what is read from it, and damage is named by its line."""

from dataclasses import fields
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dora_rl.core import messages as m
from dora_rl.core.types import InstanceDescriptor
from dora_rl.obs.journal import JournalError, JournalHeader, JournalWriter, read_journal

HEADER = JournalHeader(
    run_id="r", program_version="0.1.0", config_hash="0123", start_time="2026-01-01T00:00:00+00:00", seed=3
)
LOADED = m.Loaded(at=1.5, instance="a", version=2)
LOAD = m.Load(instance="a", version=3)

seconds = st.floats(min_value=0, allow_nan=False, allow_infinity=False)
number = st.integers(0, 2**53)
descriptors = st.builds(
    InstanceDescriptor,
    node=st.text(max_size=5),
    devices=st.lists(st.text(max_size=3), max_size=2).map(tuple),
    layout=st.text(max_size=3),
    slots=number,
    kv_capacity_tokens=number,
    max_versions=number,
    versions=st.frozensets(st.integers(0, 20), max_size=4),
)
GROUPS = ("groups", "trained", "filtered", "failed", "dropped")
BY_NAME = {
    "at": seconds,
    "busy_s": seconds,
    "resume_s": seconds,
    "keep_s": seconds,
    "keep": st.booleans(),
    "saved": st.lists(st.tuples(number, number), max_size=3).map(tuple),
    "descriptor": descriptors,
    "instance": st.text(max_size=8),
    "reason": st.text(max_size=8),
    "digest": st.text(max_size=8),
    "note": st.text(max_size=8),
    "error": st.none() | st.text(max_size=8),
    "rewards": st.lists(st.none() | st.floats(allow_nan=False, allow_infinity=False), max_size=4).map(tuple),
    "sampling": st.sampled_from(("sampled", "greedy")),
    "improved": st.booleans(),
    "lost": st.booleans(),
    "prompts": st.none() | number,
    "parent": st.none() | number,
    "evaluation": number,
    **{name: st.lists(number, max_size=3).map(tuple) for name in GROUPS},
}


def messages(union: object) -> st.SearchStrategy[object]:
    """Any message of the union; a field that is not named above is a count or an identifier."""
    kinds = []
    for cls in get_args(union):
        values = {field.name: BY_NAME.get(field.name, number) for field in fields(cls)}
        if cls is m.Generated:
            values["reason"] = st.sampled_from(("stop", "length", "detached", "failed"))
        if cls is m.Generate:
            values |= {"group": st.none() | number, "evaluation": st.none() | number}
        kinds.append(st.builds(cls, **values))
    return st.one_of(kinds)


entries = st.tuples(messages(m.Event), st.lists(messages(m.Command), max_size=3).map(tuple))


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("journal")


def write(path: Path, *pairs: tuple[m.Event, tuple[m.Command, ...]]) -> None:
    path.unlink(missing_ok=True)
    with JournalWriter(path, HEADER) as journal:
        for event, commands in pairs:
            journal.record(event, commands)


@settings(max_examples=50)
@given(pairs=st.lists(entries, max_size=6))
def test_every_event_and_command_comes_back_as_the_same_object(folder, pairs):
    write(folder / "journal.jsonl", *pairs)
    header, read = read_journal(folder / "journal.jsonl")
    assert header == HEADER
    assert list(read) == pairs
    assert read.torn is None


def test_a_line_names_its_message_first_and_is_on_disk_before_the_journal_is_closed(tmp_path):
    journal = JournalWriter(tmp_path / "j", HEADER)
    journal.record(LOADED, [LOAD])
    assert (tmp_path / "j").read_text().splitlines()[1] == (
        '{"event":{"type":"Loaded","at":1.5,"instance":"a","version":2,"error":null},'
        '"commands":[{"type":"Load","instance":"a","version":3}]}'
    )
    journal.close()


@settings(max_examples=20)
@given(cut=st.integers(1, 40))
def test_a_torn_last_line_is_tolerated_and_reported(folder, cut):
    path = folder / "torn.jsonl"
    write(path, (LOADED, (LOAD,)), (LOADED, ()))
    path.write_bytes(path.read_bytes()[:-cut])
    _, read = read_journal(path)
    assert list(read) == [(LOADED, (LOAD,))]
    assert read.torn is not None
    assert "line 3: cut off after" in read.torn


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('"version":2', '"version":"2"', "version"),
        ('"at":1.5,', "", "at"),
        ('"Loaded"', '"Unheard"', "no event is called 'Unheard'"),
        ('"type":"Load"', '"type":"Loaded"', "no command is called 'Loaded'"),
        ('"commands"', '"comments"', "comments"),
        ('"event":', '"event"', "malformed"),
    ],
)
def test_damage_before_the_last_line_is_an_error_that_names_the_line(tmp_path, old, new, said):
    path = tmp_path / "journal.jsonl"
    write(path, (LOADED, (LOAD,)), (LOADED, ()))
    first, second, third = path.read_text().splitlines()
    path.write_text("\n".join([first, second.replace(old, new, 1), third, ""]))
    _, read = read_journal(path)
    with pytest.raises(JournalError, match=rf"^.*journal\.jsonl, line 2: .*{said}.*; the journal was damaged") as error:
        list(read)
    assert "\n" not in str(error.value)


def test_a_missing_journal_and_a_missing_header_are_errors_in_one_line(tmp_path):
    with pytest.raises(JournalError, match=r"^cannot read .*; is this a run's folder\?$"):
        read_journal(tmp_path / "journal.jsonl")
    (tmp_path / "journal.jsonl").write_text("{}\n")
    with pytest.raises(JournalError, match=r"line 1: .*; it should be the journal's header$"):
        read_journal(tmp_path / "journal.jsonl")


def test_a_journal_is_never_written_over(tmp_path):
    write(tmp_path / "j", (LOADED, ()))
    with pytest.raises(FileExistsError):
        JournalWriter(tmp_path / "j", HEADER)
