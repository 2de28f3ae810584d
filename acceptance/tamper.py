"""Five ways to falsify a finished run, each applied to a copy of its folder: the audit must find every one.

Each function changes `rollouts/*.parquet`, as consistently as a file alone allows, and returns what it did, with the
name of the trajectory or group that the audit has to give.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dora_rl.wire.iteration_files import read_records, write_records

Record = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Tampering:
    what: str
    name: str
    """Text that one of the audit's problems must contain."""


def change_version_stamp(run: Path) -> Tampering:
    """Stamp a trajectory, segments included, with the version before."""
    path, records = _file(run, lambda record: record["version"] > 0)
    record = next(record for record in records if record["version"] > 0)
    record["version"] -= 1
    for segment in record["segments"]:
        segment["version"] -= 1
    write_records(path, records)
    return Tampering(f"stamped {_trajectory(record)} with version {record['version']}", _trajectory(record))


def delete_trajectory(run: Path) -> Tampering:
    path, records = _file(run, _trained)
    record = next(filter(_trained, records))
    write_records(path, [other for other in records if other is not record])
    return Tampering(f"deleted {_trajectory(record)}", _trajectory(record))


def train_one_iteration_late(run: Path) -> Tampering:
    """Move a trained group into the next iteration's file, with the columns of its new place."""
    for path in _paths(run)[:-1]:
        records = read_records(path)
        later = path.with_name(f"{int(path.stem) + 1}.parquet")
        group = next((record["group_id"] for record in records if _trained(record)), None)
        if group is None or not later.exists():
            continue
        others = read_records(later)
        place = {key: others[0][key] for key in ("iteration", "trained_at_version")}
        moved = [record | place for record in records if record["group_id"] == group]
        write_records(path, [record for record in records if record["group_id"] != group])
        write_records(later, others + moved)
        return Tampering(f"moved group {group} from iteration {path.stem} to {later.stem}", f"group {group}")
    raise ValueError(f"{run / 'rollouts'} has no two iterations in a row; tamper with a longer run")


def swap_logprobs(run: Path) -> Tampering:
    """Exchange two neighbouring log-probabilities of one trajectory."""

    def swappable(record: Record) -> bool:
        return _swap(record) is not None

    path, records = _file(run, swappable)
    record = next(filter(swappable, records))
    i = _swap(record) or 0
    values = record["logprobs"]
    values[i], values[i + 1] = values[i + 1], values[i]
    write_records(path, records)
    label = _trajectory(record)
    return Tampering(f"swapped log-probabilities {i} and {i + 1} of {label}", label)


def shorten_answer(run: Path) -> Tampering:
    """Cut the last token off, from every token-wise list."""

    def long(record: Record) -> bool:
        return len(record["completion_token_ids"]) > 1

    path, records = _file(run, long)
    record = next(filter(long, records))
    for column in ("completion_token_ids", "logprobs"):
        record[column] = record[column][:-1]
    record["segments"][-1]["end"] -= 1
    record["segments"] = [segment for segment in record["segments"] if segment["end"] > segment["start"]]
    write_records(path, records)
    return Tampering(f"shortened {_trajectory(record)} by a token", _trajectory(record))


TAMPERINGS: tuple[Callable[[Path], Tampering], ...] = (
    change_version_stamp,
    delete_trajectory,
    train_one_iteration_late,
    swap_logprobs,
    shorten_answer,
)


def _paths(run: Path) -> list[Path]:
    return sorted((run / "rollouts").glob("*.parquet"), key=lambda path: int(path.stem))


def _file(run: Path, wanted: Callable[[Record], bool]) -> tuple[Path, list[Record]]:
    """The first file that has such a row."""
    for path in _paths(run):
        records = read_records(path)
        if any(map(wanted, records)):
            return path, records
    raise ValueError(f"{run / 'rollouts'} has no row to tamper with in this way; take a longer run")


def _trained(record: Record) -> bool:
    return bool(record["status"] == "trained")


def _swap(record: Record) -> int | None:
    """Position of the first pair of neighbours that differ."""
    values = record["logprobs"]
    return next((i for i in range(len(values) - 1) if values[i] != values[i + 1]), None)


def _trajectory(record: Record) -> str:
    return f"trajectory {json.loads(record['extras'])['rollout']}"
