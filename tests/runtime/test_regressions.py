"""Faults that users reported in systems of this kind (docs/regressions.md), around fake engines and a fake trainer."""

from pathlib import Path

from dora_rl.core import messages as m
from dora_rl.wire.iteration_files import read_iteration
from runtime.test_driver import make_config, run


def test_rows_carry_the_version_that_sampled_although_the_trainer_has_gone_on(tmp_path: Path) -> None:
    # Regression 2.
    done = run(tmp_path, make_config())
    sampled = {c.group: c.version for _, commands in done.journal for c in commands if isinstance(c, m.Generate)}
    rows = [row for i in range(6) for row in read_iteration(tmp_path / f"{i}.parquet")]
    assert {row.trajectory.group_id: row.trajectory.version for row in rows} == {
        row.trajectory.group_id: sampled[row.trajectory.group_id] for row in rows
    }
    assert any(row.trajectory.version < row.trained_at_version for row in rows), (
        "no group was stale: this shows nothing"
    )
