"""The driver, its hands, the store and the core together, around fake engines and a fake trainer."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dora_rl.config import Config, parse_config
from dora_rl.core import messages as m
from dora_rl.core.orchestrator import Orchestrator
from dora_rl.core.replay import divergence
from dora_rl.core.state import check
from dora_rl.core.types import InstanceId
from dora_rl.runtime.driver import drive
from dora_rl.runtime.fakes import FakeEngine, FakeRewards, FakeTrainer
from dora_rl.runtime.hands import Hands
from dora_rl.runtime.ports import RewardResult
from dora_rl.wire.iteration_files import RolloutRow, read_iteration
from dora_rl.wire.open_store import OpenStore
from dora_rl.wire.rollouts import Prompt


class Questions:
    """An endless stream of prompts, and two that are held out."""

    held_out = (
        Prompt(prompt_id="held-0", messages=(), token_ids=(1, 2)),
        Prompt(prompt_id="held-1", messages=(), token_ids=(1, 3)),
    )

    def train(self, position: int) -> Prompt:
        return Prompt(prompt_id=f"train-{position}", messages=(), token_ids=(1, 2, 3 + position))


class Listener:
    def __init__(self) -> None:
        self.rows: list[RolloutRow] = []
        self.evaluations: list[Any] = []

    def closed(self, command: m.Close, rows: Sequence[RolloutRow], report: Any) -> None:
        self.rows += rows

    def evaluated(self, command: m.Evaluate, answers: Any) -> None:
        self.evaluations.append((command, answers))

    def loaded(self, command: m.Load, *, seconds: float, canary_max_abs_diff: float) -> None: ...

    def moved(self, command: m.Generate, *, fallback: str) -> None: ...


def make_config(**schedule: Any) -> Config:
    return parse_config(
        {
            "model": {"path": "tiny:0"},
            "run": {"iterations": 6},
            "rollout": {"max_completion_tokens": 40, "report_every_s": 0.01},
            "schedule": {"groups_per_iteration": 3, "group_size": 4} | schedule,
        }
    )


def run(tmp_path: Path, config: Config, **fakes: Any) -> SimpleNamespace:
    async def main() -> SimpleNamespace:
        engines = fakes.get("engines") or {InstanceId(f"e{i}"): FakeEngine(f"e{i}", seed=i) for i in range(2)}
        trainer = fakes.get("trainer") or FakeTrainer()
        core, inbox = Orchestrator(config), asyncio.Queue()
        listener = fakes.get("listener") or Listener()
        journal: list[tuple[m.Event, tuple[m.Command, ...]]] = []

        def record(event: m.Event, commands: Sequence[m.Command]) -> None:
            journal.append((event, tuple(commands)))
            check(core.state)

        with OpenStore(tmp_path / "open.db") as store:
            hands = Hands(
                config,
                inbox=inbox,
                engines=engines,
                trainer=trainer,
                rewards=fakes.get("rewards") or FakeRewards(),
                prompts=fakes.get("questions") or Questions(),
                store=store,
                rollouts_folder=tmp_path,
                decode=str,
                stop_token_ids=(0,),
                listener=listener,
            )
            hands.begin(prompts=fakes.get("prompts"))
            await asyncio.wait_for(drive(core, hands, inbox, record), 30)
            await hands.stop()
        return SimpleNamespace(
            state=core.state, journal=journal, listener=listener, trainer=trainer, engines=engines, hands=hands
        )

    return asyncio.run(main())


def test_a_run_trains_every_group_once_and_its_files_say_so(tmp_path: Path) -> None:
    done = run(tmp_path, make_config())
    rows = [row for i in range(6) for row in read_iteration(tmp_path / f"{i}.parquet")]
    trained = [g for batch in done.trainer.batches for g in batch]
    assert [len(batch) for batch in done.trainer.batches] == [3] * 6
    assert len(trained) == len(set(trained))
    assert sorted({r.trajectory.group_id for r in rows if r.status == "trained"}) == sorted(trained)
    assert all(r.trained_at_version - r.trajectory.version <= 2 for r in rows)
    assert done.trainer.exported


def test_the_journal_of_a_real_driver_replays_to_the_same_commands(tmp_path: Path) -> None:
    config = make_config()
    assert divergence(config, run(tmp_path, config).journal) is None


def test_the_held_out_prompts_are_answered_before_and_after_sampled_and_greedily(tmp_path: Path) -> None:
    (before, answers), (after, _) = run(tmp_path, make_config()).listener.evaluations
    assert (before.version, before.iteration, after.version, after.iteration) == (0, 0, 6, 6)
    assert {name: len(scored) for name, scored in answers.items()} == {"sampled": 2, "greedy": 2}


def test_what_is_thrown_away_is_named_when_an_iteration_closes_and_leaves_nothing_behind(tmp_path: Path) -> None:
    done = run(tmp_path, make_config(strategy="drop_stale", max_staleness_versions=0))
    closes = [command for _, commands in done.journal for command in commands if isinstance(command, m.Close)]
    dropped = [group for close in closes for group in close.dropped]
    assert dropped
    assert len(dropped) == len(set(dropped))
    asked = {c.rollout for _, cs in done.journal for c in cs if isinstance(c, m.Generate) and c.group in dropped}
    assert not [rollout for rollout in asked if done.hands.answers.holds(rollout)]
    with OpenStore(tmp_path / "open.db") as store:
        assert not set(dropped) & set(store.group_ids())
    rows = [row for i in range(6) for row in read_iteration(tmp_path / f"{i}.parquet")]
    assert not set(dropped) & {row.trajectory.group_id for row in rows}


def test_a_failed_publication_is_tried_again_and_never_renumbers(tmp_path: Path) -> None:
    done = run(tmp_path, make_config(max_attempts=3), trainer=FakeTrainer(refuses=2))
    assert done.trainer.published == list(range(7))
    assert done.state.trained == 6


def test_a_publication_that_keeps_failing_ends_the_run_with_its_cause(tmp_path: Path) -> None:
    done = run(tmp_path, make_config(max_attempts=3), trainer=FakeTrainer(refuses=3))
    assert done.state.stopped == (
        "publication of version 0 failed 3 times: RemoteError: the weight store is full; free some of it"
    )


def test_nothing_is_dispatched_before_an_engine_serves_the_first_version(tmp_path: Path) -> None:
    seen: set[str] = set()
    for event, commands in run(tmp_path, make_config()).journal:
        seen.add(type(event).__name__)
        if any(isinstance(command, m.Generate) for command in commands):
            break
    assert {"Published", "Loaded"} <= seen


def test_a_lost_engine_ends_the_run_with_its_cause(tmp_path: Path) -> None:
    engines = {InstanceId("e0"): FakeEngine("e0", seed=0, dies_after=100)}
    config = make_config()
    config = config.model_copy(update={"rollout": config.rollout.model_copy(update={"instances": 1})})
    done = run(tmp_path, config, engines=engines)
    assert done.state.stopped == "instance e0 was lost, and no other is left: ProcessLost: e0 was killed"


def test_what_a_lost_engine_ran_is_finished_by_the_others(tmp_path: Path) -> None:
    engines = {InstanceId(f"e{i}"): FakeEngine(f"e{i}", seed=i, dies_after=100 if i else None) for i in range(2)}
    done = run(tmp_path, make_config(), engines=engines)
    assert done.state.stopped is None
    assert list(done.state.instances) == ["e0"]
    assert done.trainer.exported


@pytest.mark.parametrize("prompts", [1, 5, 7])
def test_when_the_data_ends_the_last_batch_closes_short_and_the_run_ends(tmp_path: Path, prompts: int) -> None:
    done = run(tmp_path, make_config(), prompts=prompts)
    assert sum(len(batch) for batch in done.trainer.batches) == prompts
    assert done.trainer.exported


class NoRewards(FakeRewards):
    async def score(self, **group: Any) -> list[RewardResult]:
        note = "score raised on row 0: KeyError"
        return [RewardResult(value=None, values={}, note=note) for _ in group["completions"]]


def test_rewards_that_are_always_missing_end_the_run_and_say_why(tmp_path: Path) -> None:
    done = run(tmp_path, make_config(max_filtered_groups=5), rewards=NoRewards(), prompts=1000)
    assert done.state.stopped is not None
    assert done.state.stopped.endswith("the last failure: score raised on row 0: KeyError")


class FailsOnce(Listener):
    """A disk that was full for a moment."""

    def evaluated(self, command: m.Evaluate, answers: Any) -> None:
        self.evaluations.append((command, answers))
        if len(self.evaluations) == 1:
            raise OSError("no space left on device")


def test_an_evaluation_that_could_not_be_written_is_scored_again(tmp_path: Path) -> None:
    done = run(tmp_path, make_config(), listener=FailsOnce())
    assert done.state.stopped is None
    assert [command.version for command, _ in done.listener.evaluations] == [0, 0, 6]
