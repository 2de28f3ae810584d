"""`rollouts/<iteration>.parquet`: every group that left the ledger in one iteration, written whole when it closes."""

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq

from dora_rl.core.types import Version
from dora_rl.wire.rollouts import RolloutFileError, Trajectory, facts_of, trajectory_of

SCHEMA: pa.Schema = pa.schema(
    [
        ("group_id", pa.int64()),
        ("member", pa.int32()),
        ("prompt_id", pa.string()),
        ("version", pa.int64()),
        ("iteration", pa.int64()),
        ("trained_at_version", pa.int64()),
        ("status", pa.string()),
        ("prompt_token_ids", pa.list_(pa.int32())),
        ("completion_token_ids", pa.list_(pa.int32())),
        ("logprobs", pa.list_(pa.float32())),
        (
            "segments",
            pa.list_(
                pa.struct(
                    [("version", pa.int64()), ("instance", pa.string()), ("start", pa.int32()), ("end", pa.int32())]
                )
            ),
        ),
        ("finish_reason", pa.string()),
        ("reward", pa.float64()),
        ("rewards", pa.map_(pa.string(), pa.float64())),
        ("advantage", pa.float64()),
        ("dispatched_at", pa.float64()),
        ("finished_at", pa.float64()),
        ("extras", pa.string()),  # JSON, the rollout's id among it: what it holds differs from run to run
    ]
)

RowStatus = Literal["trained", "filtered", "failed"]


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutRow:
    """A trajectory together with what became of it: one row of `rollouts/<iteration>.parquet`."""

    trajectory: Trajectory
    iteration: int
    trained_at_version: Version
    """The version v that the trainer held before the iteration's optimizer step."""

    status: RowStatus
    advantage: float | None
    """None for what was not trained."""


def write_iteration(path: Path, rows: Iterable[RolloutRow]) -> None:
    """Write `rollouts/<iteration>.parquet`: whole and durable under its name, or not there at all."""
    write_records(path, map(_record, rows))


def read_iteration(path: Path) -> tuple[RolloutRow, ...]:
    """Read it back. Raises RolloutFileError about the first row that is no trajectory (unequal lengths, a segment of
    another version, ...)."""
    rows = []
    for number, record in enumerate(read_records(path)):
        try:
            rows.append(row_of(record))
        except ValueError as error:
            raise RolloutFileError(f"{path}, row {number}: {error}") from error
    return tuple(rows)


def write_records(path: Path, records: Iterable[Mapping[str, Any]]) -> None:
    """Write rows as they are, column by column, unchecked: for tools that must be able to write damage."""
    table = pa.Table.from_pylist(list(records), schema=SCHEMA)
    part = path.with_name(f".{path.name}.part")
    with part.open("wb") as file:
        pq.write_table(table, file, compression="zstd")
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)  # the new name, too, has to survive
    finally:
        os.close(directory)


def read_records(path: Path) -> list[dict[str, Any]]:
    """The file's rows as plain values, unchecked but for their columns and types. Raises RolloutFileError."""
    try:
        table = pq.read_table(path)
        if table.schema.names != SCHEMA.names:
            raise RolloutFileError(f"{path} has columns {table.schema.names}, expected {SCHEMA.names}")
        rows: list[dict[str, Any]] = table.cast(SCHEMA).to_pylist()
    except (OSError, pa.ArrowException) as error:
        first_line = str(error).partition("\n")[0]
        raise RolloutFileError(f"cannot read {path} as a file of trajectories: {first_line}") from error
    return rows


def row_of(record: Mapping[str, Any]) -> RolloutRow:
    """Check one record of `read_records`. Raises ValueError when it is no trajectory."""
    nulls = [name for name, value in record.items() if value is None and name not in ("reward", "advantage")]
    if nulls:
        raise ValueError(f"columns {nulls} of member {record['member']} of group {record['group_id']} are empty")
    extras = json.loads(record["extras"])
    facts = {**record, "rollout": extras.pop("rollout"), "rewards": dict(record["rewards"]), "extras": extras}
    return RolloutRow(
        trajectory=trajectory_of(facts),
        iteration=record["iteration"],
        trained_at_version=Version(record["trained_at_version"]),
        status=record["status"],
        advantage=record["advantage"],
    )


def _record(row: RolloutRow) -> dict[str, Any]:
    facts = facts_of(row.trajectory)
    return facts | {
        "prompt_token_ids": row.trajectory.prompt_token_ids,
        "completion_token_ids": row.trajectory.completion_token_ids,
        "logprobs": row.trajectory.logprobs,
        "rewards": list(facts["rewards"].items()),
        "extras": json.dumps({**facts["extras"], "rollout": facts.pop("rollout")}, sort_keys=True),
        "iteration": row.iteration,
        "trained_at_version": row.trained_at_version,
        "status": row.status,
        "advantage": row.advantage,
    }
