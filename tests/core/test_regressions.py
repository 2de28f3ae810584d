"""Faults that users reported in systems of this kind (docs/regressions.md), as stories about the scheduler alone."""

from collections.abc import Sequence

import pytest

from core.test_orchestrator import A, B, Story, make_config
from dora_rl.config import ScheduleConfig
from dora_rl.core import messages as m
from dora_rl.core.orchestrator import Orchestrator
from dora_rl.core.types import GroupStatus, Version
from dora_rl.sim.engine import simulate
from dora_rl.sim.world import RandomWorld, WorldConfig

ENDED = (GroupStatus.TRAINED, GroupStatus.FILTERED, GroupStatus.FAILED)


def run(*, k: int, instances: int = 2) -> tuple[int, list[int]]:
    """Most groups outstanding at once, and every trained group's staleness, with slots for all and a slow trainer."""
    config = make_config(max_staleness_versions=k)
    core = Orchestrator(config.model_copy(update={"run": config.run.model_copy(update={"iterations": 8})}))
    world = RandomWorld(
        WorldConfig(instances=instances, slots=50, train_s=500.0, equal_rewards=0.0, missing_rewards=0.0),
        max_tokens=config.rollout.max_completion_tokens,
        group_size=config.schedule.group_size,
    )
    most, staleness, version = 0, [], {}

    def record(event: m.Event, commands: Sequence[m.Command]) -> None:
        nonlocal most
        most = max(most, core.state.dispatched - sum(core.state.counts[status] for status in ENDED))
        for command in commands:
            if isinstance(command, m.Generate):
                version[command.group] = command.version
            elif isinstance(command, m.Close):
                staleness.extend(command.trained_at - version[group] for group in command.trained)

    simulate(core, world, record)
    return most, staleness


def roomy(**schedule: object) -> Story:
    """One instance with a slot for every answer that may be outstanding: four groups of two, of version 0."""
    story = Story(make_config(**schedule))
    story.joins(A, slots=20), story.published(0), story.loaded(A, 0)
    return story


@pytest.mark.parametrize("instances", [1, 2, 7])
def test_as_many_groups_are_outstanding_with_one_instance_as_with_seven(instances: int) -> None:
    # Regression 1: B (K + 1), counted globally.
    assert run(k=1, instances=instances)[0] == 2 * (1 + 1)


@pytest.mark.parametrize("k", [0, 1, 2, 3])
def test_the_one_knob_is_all_the_lag_there_is(k: int) -> None:
    # Regression 10: a hidden constant lag would make the largest staleness another number than K.
    assert max(run(k=k)[1]) == k
    assert [name for name in ScheduleConfig.model_fields if "stale" in name or "lag" in name] == [
        "max_staleness_versions"
    ]


def test_a_late_step_of_an_attempt_that_was_lost_makes_no_second_version() -> None:
    # Regression 4: the trained version advances in one place, once a step.
    story = roomy()
    for group in (0, 1):
        story.completes(group), story.accumulated(group)
    assert story.core.state.batch.closed
    story.tell(m.RankLost, reason="killed")
    late = m.Stepped(at=story.now, iteration=0, attempt=0, improved=True, busy_s=1.0)
    assert story.core.step(late) == []
    assert (story.core.state.trained, story.core.state.batch.iteration) == (0, 0)
    story.accumulated(0), story.accumulated(1)
    story.stepped()
    assert (story.core.state.trained, story.core.state.batch.iteration) == (1, 1)
    assert [c.version for c in story.asked if isinstance(c, m.Publish)] == [0, 1]


def test_at_the_limit_a_filtered_group_makes_room_for_exactly_one_other_in_the_same_step() -> None:
    # Regression 5.
    story = roomy()
    assert story.core.state.dispatched == 4
    story.finishes(0), story.finishes(1)
    assert story.core.state.dispatched == 4, "the limit is reached although slots are free"
    commands = story.scores(0, 1.0, 1.0)
    assert [c.group for c in commands if isinstance(c, m.Generate)] == [4, 4]


def test_a_batch_takes_exactly_its_seats_and_the_other_ready_groups_come_next() -> None:
    # Regression 13: finished groups beyond the batch are not cut off.
    story = roomy()
    for group in range(4):
        story.completes(group)
    assert (story.core.state.batch.groups, len(story.core.state.ready)) == ([0, 1], 2)
    story.accumulated(0)
    (step,) = [c for c in story.accumulated(1) if isinstance(c, m.Step)]
    assert step.groups == (0, 1)
    assert [c.group for c in story.stepped() if isinstance(c, m.Accumulate)] == [2, 3]


def filtered_twice() -> Story:
    """Two groups had equal rewards, as many as one iteration may have; two that began before still run."""
    story = Story(make_config(max_filtered_groups=2))
    story.joins(A, slots=4), story.published(0), story.loaded(A, 0)
    story.completes(0, 1.0, 1.0), story.completes(1, 0.0, 0.0)
    assert {command.group for command in story.running().values()} == {2, 3}
    return story


def test_when_every_group_has_equal_rewards_the_run_stops_and_says_which_setting_did_it() -> None:
    # Regression 41: nothing to learn from is reported; nothing is advanced.
    story = filtered_twice()
    story.completes(2, 1.0, 1.0), story.completes(3, 0.0, 0.0)
    assert story.core.state.dispatched == 4
    assert "schedule.max_filtered_groups" in (story.core.state.stopped or "")
    assert (story.core.state.trained, story.core.state.batch.iteration) == (0, 0)


def test_after_too_many_equal_groups_the_batch_closes_short_with_what_it_has() -> None:
    story = filtered_twice()
    story.completes(2)
    (step,) = [c for c in story.accumulated(2) if isinstance(c, m.Step)]
    assert step.groups == (2,), "the group that still runs is due later, so nobody waits for it"
    commands = story.stepped()
    (close,) = [c for c in commands if isinstance(c, m.Close)]
    assert (close.trained, close.filtered) == ((2,), (0, 1))
    assert story.core.state.batch.fruitless == 0


def test_a_group_larger_than_every_instance_is_still_one_group_of_one_version() -> None:
    story = Story(make_config(group_size=5))
    story.joins(A, slots=1), story.joins(B, slots=1), story.published(0)
    story.loaded(A, 0), story.loaded(B, 0)
    for _ in range(5):
        (first, *_) = story.running()
        story.finishes(first)
    assert [c.group for c in story.asked if isinstance(c, m.Score)] == [0]


def test_a_load_that_fails_gives_back_what_waited_for_it_and_is_tried_again() -> None:
    # Regression 18: a reservation that leaks would keep the answers, or the instance, out of the run for ever.
    story = Story(make_config(max_attempts=5))
    story.joins(A, slots=2), story.joins(B, slots=2), story.published(0)
    story.loaded(B, 0)
    told = story.tell(m.Loaded, instance=A, version=Version(0), error="out of memory")
    assert m.Load(instance=A, version=Version(0)) in told
    story.loaded(A, 0)
    assert {command.instance for command in story.running().values()} == {A, B}
    assert all(not instance.reserved for instance in story.core.state.instances.values())


def test_new_prompts_do_not_wait_for_the_last_answer_of_the_version_before() -> None:
    # Regression 21: one answer of version 0 goes on for ever on B; A takes version 1 and begins.
    story = Story(make_config(max_staleness_versions=2))
    story.joins(A, slots=2), story.joins(B, slots=2), story.published(0)
    story.loaded(A, 0), story.loaded(B, 0)
    tail = next(rollout for rollout, command in story.running().items() if command.instance == B)
    while story.core.state.trained < 1:
        for rollout, command in story.running().items():
            if command.group != story.core.state.rollouts[tail].group:
                story.finishes(rollout)
        for group in list(story.core.state.groups.values()):
            if group.status is GroupStatus.RUNNING and not group.unfinished:
                story.scores(group.id, 0.0, 1.0)
        for group in list(story.core.state.batch.groups):
            story.accumulated(group)
        if story.core.state.batch.closed:
            story.stepped()
    story.published(1)
    for rollout, command in story.running().items():
        if command.instance == A:
            story.finishes(rollout)
    assert m.Load(instance=A, version=Version(1)) in story.asked
    story.loaded(A, 1)
    assert {command.version for command in story.running().values()} == {0, 1}
    assert tail in story.running()
