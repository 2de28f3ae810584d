"""Promises broken as a faulty scheduler or runtime would record it: journal, digests and files agree with one another.

Each function changes a copy of a finished run and returns a text that one of the audit's problems must contain.
"""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from dora_rl.wire.iteration_files import read_records, row_of, write_records
from dora_rl.wire.rollouts import digest

Record = dict[str, Any]


def load_under_an_answer(run: Path) -> str:
    """Another version is loaded, and the first one again, while an answer is sampled."""
    with Journal(run) as journal:
        for i, asked in journal.commands("Generate"):
            if asked["group"] is not None:
                for version in (asked["version"], asked["version"] + 1):
                    load = {"type": "Load", "instance": asked["instance"], "version": version}
                    loaded = load | {"type": "Loaded", "at": 0.0, "error": None}
                    journal.rows.insert(i + 1, {"event": loaded, "commands": []})
                    journal.rows[i]["commands"].append(load)
                return f"was running on {asked['instance']} when version {version} was loaded there"
    raise AssertionError("nothing was asked for")


def load_before_the_last_answer_came(run: Path) -> str:
    """An instance is told to load before its last answer has come."""
    with Journal(run) as journal:
        for i, load in journal.commands("Load"):
            for j in range(i, 0, -1):
                event = journal.rows[j]["event"]
                if event["type"] == "Generated" and event["instance"] == load["instance"]:
                    journal.rows[i]["commands"].remove(load)
                    journal.rows[j - 1]["commands"].append(load)
                    return f"trajectory {event['rollout']} "
    raise AssertionError("no load came after an answer")


def cut_short_at_a_lower_limit(run: Path) -> str:
    return _cut_short(run, "length")


def cut_short_as_detached(run: Path) -> str:
    return _cut_short(run, "detached")


def given_up_without_failures(run: Path) -> str:
    return _cut_short(run, "failed")


def begun_again_for_being_long(run: Path) -> str:
    """An answer has twenty tokens, is told to end, and is asked for from the beginning."""
    with Journal(run) as journal:
        for i, asked in journal.commands("Generate"):
            if asked["group"] is None or asked["generated_tokens"]:
                continue
            again = asked | {"segment": asked["segment"] + 1, "attempt": asked["attempt"] + 1}
            for row in journal.rows[i + 1 :]:
                if _answers(row["event"], asked):
                    row["event"].update(segment=again["segment"], attempt=again["attempt"])
            names = {key: asked[key] for key in ("rollout", "segment", "attempt", "instance", "version")}
            cut = {"type": "Generated", "at": 0.0, "reason": "detached", "num_tokens": 20, "error": None} | names
            journal.rows.insert(i + 1, {"event": cut, "commands": [again]})
            return (
                f"trajectory {asked['rollout']} (member {asked['member']} of group {asked['group']}) goes on from token"
            )
    raise AssertionError("nothing was asked for")


def sampled_again_after_it_was_scored(run: Path) -> str:
    """The members of a scored group are asked for once more, though nothing was lost."""
    with Journal(run) as journal:
        asked = {command["rollout"]: command for _, command in journal.commands("Generate")}
        i = next(i for i, row in enumerate(journal.rows) if i and row["event"]["type"] == "Scored")
        group = journal.rows[i]["event"]["group"]
        journal.rows[i]["commands"] += [one for one in asked.values() if one["group"] == group]
        return f"of group {group}) was asked for after its group was scored"


def advantages_of_nothing(run: Path) -> str:
    return _scale_advantages(run, 0.0)


def advantages_a_thousand_times_too_large(run: Path) -> str:
    return _scale_advantages(run, 1000.0)


FORGERIES: tuple[Callable[[Path], str], ...] = (
    load_under_an_answer,
    load_before_the_last_answer_came,
    cut_short_at_a_lower_limit,
    cut_short_as_detached,
    given_up_without_failures,
    begun_again_for_being_long,
    sampled_again_after_it_was_scored,
    advantages_of_nothing,
    advantages_a_thousand_times_too_large,
)


class Journal:
    """The journal's lines as plain values, written back at the end."""

    def __init__(self, run: Path) -> None:
        self._path = run / "journal.jsonl"
        self.rows: list[Record] = [json.loads(line) for line in self._path.read_text().splitlines()]

    def __enter__(self) -> "Journal":
        return self

    def __exit__(self, *_: object) -> None:
        self._path.write_text("".join(json.dumps(row) + "\n" for row in self.rows))

    def commands(self, name: str) -> Iterator[tuple[int, Record]]:
        for i, row in enumerate(self.rows):
            yield from ((i, one) for one in row.get("commands", []) if one["type"] == name)


def _answers(event: Record, asked: Record) -> bool:
    keys = ("rollout", "segment", "attempt")
    return event["type"] == "Generated" and all(event[key] == asked[key] for key in keys)


def _cut_short(run: Path, reason: str) -> str:
    """A trained answer has three tokens, in journal, digest and file alike."""
    with Journal(run) as journal:
        for path in sorted((run / "rollouts").iterdir()):
            records = read_records(path)
            for record in records:
                if record["status"] == "trained" and len(record["segments"]) == 1 and record["segments"][0]["end"] > 3:
                    for column in ("completion_token_ids", "logprobs"):
                        record[column] = record[column][:3]
                    record["segments"][0]["end"] = 3
                    record["finish_reason"] = reason
                    rollout, group = json.loads(record["extras"])["rollout"], record["group_id"]
                    events = [row["event"] for row in journal.rows[1:]]
                    answer = [e for e in events if e["type"] == "Generated" and e["rollout"] == rollout][-1]
                    answer.update(num_tokens=3, reason=reason)
                    scored = [e for e in events if e["type"] == "Scored" and e["group"] == group][-1]
                    scored["digest"] = digest([row_of(one).trajectory for one in records if one["group_id"] == group])
                    write_records(path, records)
                    return f"trajectory {rollout} "
    raise AssertionError("no answer is long enough")


def _scale_advantages(run: Path, factor: float) -> str:
    for path in sorted((run / "rollouts").iterdir()):
        records = read_records(path)
        known = [record for record in records if record["advantage"] is not None]
        if known:
            for record in known:
                record["advantage"] *= factor
            write_records(path, records)
            return f"group {known[0]['group_id']}: advantages do not follow from its rewards"
    raise AssertionError("nothing was trained")
