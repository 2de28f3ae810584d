"""Faults that users reported in systems of this kind (docs/regressions.md), around fake engines and a fake trainer."""

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from dora_rl.core import messages as m
from dora_rl.core.types import InstanceId
from dora_rl.runtime.fakes import FakeEngine, FakeRewards
from dora_rl.runtime.ports import LoadReport, Partial, RewardResult
from dora_rl.wire.errors import RemoteError
from dora_rl.wire.iteration_files import read_iteration
from dora_rl.wire.weights import Manifest
from runtime.test_driver import Listener, Questions, make_config, run


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


class Ends(Questions):
    """A source that dies after five prompts."""

    def train(self, position: int) -> Any:
        if position >= 5:
            raise OSError("the disk with the data is gone")
        return super().train(position)


def test_a_source_that_dies_ends_the_run_with_its_cause(tmp_path: Path) -> None:
    # Regression 19: nobody polls an empty buffer.
    with pytest.raises(RemoteError, match="no prompt 5: OSError: the disk with the data is gone"):
        run(tmp_path, make_config(), questions=Ends())


class Confused(FakeEngine):
    """Reports about an answer in a way that nobody expects."""

    async def partials(self) -> Sequence[Partial]:
        return [None]  # type: ignore[list-item]


def test_an_exception_in_a_background_task_reaches_the_main_loop(tmp_path: Path) -> None:
    # Regression 20: the task that collects reports raises, and nobody awaits it.
    engines = {InstanceId("e0"): Confused("e0", seed=0)}
    config = make_config()
    config = config.model_copy(update={"rollout": config.rollout.model_copy(update={"instances": 1})})
    with pytest.raises(AttributeError):
        run(tmp_path, config, engines=engines)


class BusyLoading(FakeEngine):
    """Answers nothing while it loads weights, which takes several health checks' time."""

    def __init__(self, name: str, *, seed: int) -> None:
        super().__init__(name, seed=seed)
        self._free = asyncio.Event()
        self._free.set()

    async def load(self, manifest: Manifest) -> LoadReport:
        self._free.clear()
        await asyncio.sleep(0.05)
        self._free.set()
        return await super().load(manifest)

    async def partials(self) -> Sequence[Partial]:
        await self._free.wait()
        return []


def test_an_engine_that_is_busy_loading_is_waited_for_and_waits_for_nobody(tmp_path: Path) -> None:
    # Regression 22.
    async def start() -> dict[InstanceId, FakeEngine]:
        return {InstanceId(f"e{i}"): BusyLoading(f"e{i}", seed=i) for i in range(2)}

    done = run(tmp_path, make_config(), engines=asyncio.run(start()))
    assert done.state.stopped is None
    assert len(done.state.instances) == 2


class LateOnce(FakeRewards):
    """The third group takes longer than it may."""

    def __init__(self) -> None:
        self.scored = 0

    async def score(self, **group: Any) -> Sequence[RewardResult]:
        self.scored += 1
        if self.scored == 3:
            return [RewardResult(value=None, values={}, note="scoring took longer") for _ in group["completions"]]
        return await super().score(**group)


class Counts(Listener):
    def __init__(self) -> None:
        super().__init__()
        self.failed: list[int] = []

    def closed(self, command: m.Close, rows: Sequence[Any], report: Any) -> None:
        super().closed(command, rows, report)
        self.failed += command.failed


def test_a_group_that_was_scored_too_late_is_counted_once(tmp_path: Path) -> None:
    # Regression 49.
    done = run(tmp_path, make_config(), rewards=LateOnce(), listener=Counts())
    assert len(done.listener.failed) == 1
    statuses: Mapping[str, int] = done.state.ledger()
    assert statuses["failed"] == 1
    late = [row for row in done.listener.rows if row.status == "failed"]
    assert len(late) == make_config().schedule.group_size
