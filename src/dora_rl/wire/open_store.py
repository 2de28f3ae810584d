"""`open.db`: finished trajectories between their reward and the closing of their iteration.

Owns an SQLite file. Knows nothing of schedules: what is stored, fetched and removed is the caller's business.
"""

import json
import sqlite3
import threading
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Self

import numpy as np

from dora_rl.core.types import GroupId
from dora_rl.wire.rollouts import RolloutFileError, Trajectory, arrays_of, digest, facts_of, trajectory_of


class OpenStore:
    """The trajectories of groups that no iteration has closed over yet. Usable from any thread.

    A group is durable (committed and synced) when `put_group` returns.
    """

    def __init__(self, path: Path, *, read_only: bool = False) -> None:
        """Open, and create unless `read_only`. Raises RolloutFileError when the file is none of ours."""
        self._path = path
        self._read_only = read_only
        self._lock = threading.Lock()
        mode = "ro" if read_only else "rwc"
        try:
            # Autocommit; the one write that needs it opens its own transaction.
            self._db = sqlite3.connect(
                f"{path.absolute().as_uri()}?mode={mode}", uri=True, check_same_thread=False, isolation_level=None
            )
            if not read_only:
                self._db.execute("PRAGMA journal_mode=WAL")
                self._db.execute("PRAGMA synchronous=FULL")
                self._db.execute(
                    "CREATE TABLE IF NOT EXISTS trajectories (group_id INTEGER, member INTEGER, facts TEXT, "
                    "prompt BLOB, completion BLOB, logprobs BLOB, PRIMARY KEY (group_id, member))"
                )
            self._db.execute("SELECT count(*) FROM trajectories").fetchone()
        except sqlite3.Error as error:
            raise RolloutFileError(f"cannot open {path} as a store of open groups: {error}") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closing twice is harmless."""
        with self._lock:
            if not self._read_only:
                # Out of WAL mode again: otherwise everyone who only reads the file leaves two more beside it. It fails
                # when somebody reads just now (or this is the second close), and then the log stays.
                with suppress(sqlite3.OperationalError, sqlite3.ProgrammingError):
                    self._db.execute("PRAGMA journal_mode=DELETE")
            self._db.close()

    def put_group(self, trajectories: Sequence[Trajectory]) -> str:
        """Store a whole group, in place of what was stored for it before, and return its digest."""
        groups = {trajectory.group_id for trajectory in trajectories}
        if len(groups) != 1:
            raise ValueError(f"put_group takes the members of one group, got those of {sorted(groups)}")
        rows = [
            (one.group_id, one.member, json.dumps(facts_of(one)), *(array.tobytes() for array in arrays_of(one)))
            for one in trajectories
        ]
        with self._lock:
            self._db.execute("BEGIN IMMEDIATE")
            try:
                self._db.execute("DELETE FROM trajectories WHERE group_id = ?", (min(groups),))
                self._db.executemany("INSERT INTO trajectories VALUES (?, ?, ?, ?, ?, ?)", rows)
                self._db.execute("COMMIT")
            except sqlite3.Error:
                self._db.execute("ROLLBACK")
                raise
        return digest(trajectories)

    def get_group(self, group_id: GroupId) -> tuple[Trajectory, ...]:
        """The group's members in order. Raises RolloutFileError when it is gone or damaged."""
        with self._lock:
            rows = self._db.execute(
                "SELECT facts, prompt, completion, logprobs FROM trajectories WHERE group_id = ? ORDER BY member",
                (group_id,),
            ).fetchall()
        if not rows:
            raise RolloutFileError(f"group {group_id} is not in {self._path}; it was removed or never completed")
        try:
            return tuple(_from_store(*row) for row in rows)
        except (ValueError, KeyError, TypeError) as error:
            raise RolloutFileError(f"group {group_id} in {self._path} is damaged: {error}") from error

    def remove(self, group_ids: Iterable[GroupId]) -> None:
        """Forget groups, those that are not there included."""
        with self._lock:
            # One statement is one transaction: either all of them are gone or none.
            names = [int(group) for group in group_ids]
            self._db.execute(
                "DELETE FROM trajectories WHERE group_id IN (SELECT value FROM json_each(?))", [str(names)]
            )

    def group_ids(self) -> tuple[GroupId, ...]:
        with self._lock:
            rows = self._db.execute("SELECT DISTINCT group_id FROM trajectories ORDER BY group_id").fetchall()
        return tuple(GroupId(group) for (group,) in rows)


def _from_store(facts: str, prompt: bytes, completion: bytes, logprobs: bytes) -> Trajectory:
    return trajectory_of(
        json.loads(facts)
        | {
            "prompt_token_ids": np.frombuffer(prompt, dtype="<i4").tolist(),
            "completion_token_ids": np.frombuffer(completion, dtype="<i4").tolist(),
            "logprobs": np.frombuffer(logprobs, dtype="<f4").tolist(),
        }
    )
