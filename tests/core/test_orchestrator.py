"""Stories about the scheduler: events in, commands out."""

from collections.abc import Iterator

import pytest

from dora_rl.config import Config, parse_config
from dora_rl.core import messages as m
from dora_rl.core.orchestrator import Orchestrator
from dora_rl.core.state import check
from dora_rl.core.types import GroupId, InstanceDescriptor, InstanceId, RolloutId, Version

A, B = InstanceId("a"), InstanceId("b")


class Story:
    """A core and a clock; keeps what was asked so that it can be answered by name."""

    def __init__(self, config: Config, *, prompts: int | None = None, answers: int = 0) -> None:
        self.core = Orchestrator(config)
        self.now = 0.0
        self.asked: list[m.Command] = []
        self.tell(m.RunStarted, prompts=prompts, evaluation_answers=answers)

    def tell(self, kind: type[m.Event], **facts: object) -> list[m.Command]:
        self.now += 1.0
        commands = self.core.step(kind(at=self.now, **facts))  # type: ignore[arg-type]
        self.asked += commands
        check(self.core.state)
        return commands

    def joins(self, instance: InstanceId, *, slots: int) -> list[m.Command]:
        descriptor = InstanceDescriptor(
            node="n", devices=("cpu",), layout="l", slots=slots, kv_capacity_tokens=slots * 1000
        )
        return self.tell(m.InstanceJoined, instance=instance, descriptor=descriptor)

    def running(self) -> dict[RolloutId, m.Generate]:
        alive = {r for i in self.core.state.instances.values() for r in i.running}
        latest = {c.rollout: c for c in self.asked if isinstance(c, m.Generate)}
        return {rollout: latest[rollout] for rollout in sorted(alive)}

    def finishes(self, rollout: int, **facts: object) -> list[m.Command]:
        command = self.running()[RolloutId(rollout)]
        facts = {"reason": "stop", "num_tokens": 10} | facts
        return self.tell(
            m.Generated,
            rollout=command.rollout,
            segment=command.segment,
            attempt=command.attempt,
            instance=command.instance,
            version=facts.pop("version", command.version),
            **facts,
        )

    def scores(self, group: int, *rewards: float | None, attempt: int = 0) -> list[m.Command]:
        return self.tell(m.Scored, group=GroupId(group), attempt=attempt, rewards=rewards, digest="")

    def completes(self, group: int, *rewards: float | None) -> list[m.Command]:
        for rollout, command in self.running().items():
            if command.group == group:
                self.finishes(rollout)
        return self.scores(group, *(rewards or (0.0, 1.0)))

    def accumulated(self, group: int, **facts: object) -> list[m.Command]:
        batch = self.core.state.batch
        return self.tell(m.Accumulated, iteration=batch.iteration, attempt=batch.attempt, group=GroupId(group), **facts)

    def stepped(self, *, improved: bool = True) -> list[m.Command]:
        batch = self.core.state.batch
        return self.tell(m.Stepped, iteration=batch.iteration, attempt=batch.attempt, improved=improved, busy_s=1.0)

    def published(self, version: int, **facts: object) -> list[m.Command]:
        return self.tell(m.Published, version=Version(version), attempt=facts.pop("attempt", 0), **facts)

    def loaded(self, instance: InstanceId, version: int) -> list[m.Command]:
        return self.tell(m.Loaded, instance=instance, version=Version(version))


def make_config(**schedule: object) -> Config:
    return parse_config(
        {
            "model": {"path": "tiny:0"},
            "run": {"iterations": 4},
            "rollout": {"max_completion_tokens": 100, "max_prompt_tokens": 100},
            "schedule": {"groups_per_iteration": 2, "group_size": 2, "max_staleness_versions": 1} | schedule,
        }
    )


def kinds(commands: list[m.Command]) -> list[str]:
    return [type(command).__name__ for command in commands]


def generates(commands: list[m.Command]) -> list[tuple[int, str, int]]:
    return [(c.rollout, c.instance, c.version) for c in commands if isinstance(c, m.Generate)]


@pytest.fixture
def story() -> Iterator[Story]:
    """Two instances of two slots, version 0 published."""
    story = Story(make_config())
    story.joins(A, slots=2)
    story.joins(B, slots=2)
    story.published(0)
    yield story
    check(story.core.state)


def test_work_is_dispatched_only_once_an_instance_serves_a_published_version(story: Story) -> None:
    fresh = Story(make_config())
    assert fresh.asked == [m.Publish(version=Version(0), parent=None, attempt=0)]
    assert fresh.joins(A, slots=2) == []
    assert fresh.published(0) == [m.Load(instance=A, version=Version(0))]
    assert generates(fresh.loaded(A, 0)) == [(0, A, 0), (1, A, 0)]


def test_members_of_a_group_start_together_on_one_instance(story: Story) -> None:
    assert generates(story.loaded(A, 0)) == [(0, A, 0), (1, A, 0)]
    assert generates(story.loaded(B, 0)) == [(2, B, 0), (3, B, 0)]


def test_an_old_answer_goes_on_under_its_version_while_a_new_one_starts_elsewhere(story: Story) -> None:
    story.loaded(A, 0)
    story.loaded(B, 0)
    story.finishes(2), story.finishes(3)
    story.scores(1, 0.0, 1.0), story.accumulated(1)
    story.completes(2), story.accumulated(2)
    story.stepped()
    commands = story.published(1)
    assert m.Load(instance=B, version=Version(1)) not in commands, "B still runs answers of version 0"
    for rollout, command in story.running().items():
        if command.instance == B:
            commands = story.finishes(rollout)
    assert m.Load(instance=B, version=Version(1)) in commands
    story.loaded(B, 1)
    assert {command.version for command in story.running().values()} == {0, 1}


def test_filtered_groups_give_their_room_back_at_once(story: Story) -> None:
    story.loaded(A, 0)
    story.loaded(B, 0)
    before = story.core.state.unseated[Version(0)]
    story.finishes(0)
    assert kinds(story.finishes(1))[0] == "Score"
    story.scores(0, 1.0, 1.0)
    assert story.core.state.ledger()["filtered"] == 1
    assert story.core.state.unseated[Version(0)] <= before


def test_a_group_with_one_reward_left_fails_and_one_with_two_is_trained(story: Story) -> None:
    three = Story(make_config(group_size=3))
    three.joins(A, slots=6), three.published(0), three.loaded(A, 0)
    three.completes(0, None, None, 1.0)
    three.completes(1, None, 0.0, 1.0)
    assert three.core.state.ledger()["failed"] == 1
    assert three.core.state.batch.groups == [1]


def test_rewards_without_spread_are_filtered_whatever_their_mean(story: Story) -> None:
    story.loaded(A, 0)
    story.completes(0, 0.37, 0.37)
    assert story.core.state.ledger()["filtered"] == 1


def test_an_answer_of_a_foreign_version_is_refused_not_relabelled(story: Story) -> None:
    story.loaded(A, 0)
    with pytest.raises(m.ProtocolError, match="rollout 0 is of version 0, but version 7 answered it"):
        story.finishes(0, version=Version(7))


def test_an_answer_that_nobody_waits_for_is_refused(story: Story) -> None:
    story.loaded(A, 0)
    with pytest.raises(m.ProtocolError, match="rollout 99, attempt 0: an answer that nobody waits for"):
        story.tell(
            m.Generated,
            rollout=RolloutId(99),
            segment=0,
            attempt=0,
            instance=A,
            version=Version(0),
            reason="stop",
            num_tokens=1,
        )


def test_a_failed_segment_continues_under_the_same_version_with_what_is_left_of_its_budget(story: Story) -> None:
    story.loaded(A, 0)
    (again,) = [c for c in story.finishes(0, reason="failed", num_tokens=30) if isinstance(c, m.Generate)]
    assert (again.rollout, again.version, again.generated_tokens, again.max_tokens) == (0, 0, 30, 70)
    assert (again.segment, again.attempt) == (1, 1)


def test_a_segment_that_ends_with_nothing_left_of_its_budget_is_a_truncated_answer(story: Story) -> None:
    story.loaded(A, 0)
    commands = story.finishes(0, reason="detached", num_tokens=100)
    assert [c for c in commands if isinstance(c, m.Generate) and c.rollout == 0] == []
    assert story.core.state.rollouts[RolloutId(0)].finished == "length"


def test_one_answer_that_cannot_be_had_costs_its_group_a_member_not_its_life() -> None:
    story = Story(make_config(max_attempts=2))
    story.joins(A, slots=2), story.published(0), story.loaded(A, 0)
    story.finishes(0, reason="failed", num_tokens=0, error="out of luck")
    story.finishes(0, reason="failed", num_tokens=0, error="out of luck")
    assert kinds(story.finishes(1))[0] == "Score"


def test_the_last_instance_to_be_lost_ends_the_run_with_its_cause(story: Story) -> None:
    story.loaded(A, 0)
    story.tell(m.InstanceLost, instance=B, reason="bad luck")
    assert not story.core.done
    assert story.tell(m.InstanceLost, instance=A, reason="out of memory") == []
    assert story.core.done
    assert story.core.state.stopped == "instance a was lost, and no other is left: out of memory"


def test_what_a_lost_instance_ran_goes_on_from_the_tokens_that_it_had_reported() -> None:
    story = Story(make_config(), prompts=2)
    story.joins(A, slots=2), story.joins(B, slots=2), story.published(0)
    story.loaded(A, 0), story.loaded(B, 0)
    lost = [command.rollout for command in story.running().values() if command.instance == A]
    story.finishes(2), story.finishes(3)
    commands = story.tell(m.InstanceLost, instance=A, reason="killed", saved=((lost[0], 7),))
    again = {c.rollout: (c.instance, c.segment, c.generated_tokens) for c in commands if isinstance(c, m.Generate)}
    assert again == {lost[0]: (B, 1, 7), lost[1]: (B, 1, 0)}


def test_what_a_lost_instance_ran_goes_on_elsewhere_and_its_late_answer_is_absorbed() -> None:
    story = Story(make_config())
    story.joins(A, slots=2), story.joins(B, slots=4), story.published(0)
    story.loaded(A, 0), story.loaded(B, 0)
    lost = [command for command in story.running().values() if command.instance == A]
    story.tell(m.InstanceLost, instance=A, reason="killed")
    late = lost[0]
    story.tell(
        m.Generated,
        rollout=late.rollout,
        segment=late.segment,
        attempt=late.attempt,
        instance=A,
        version=late.version,
        reason="failed",
        num_tokens=0,
    )
    assert story.core.state.rollouts[late.rollout].attempt == late.attempt + 1


def test_a_failed_publication_is_given_again_with_the_same_version(story: Story) -> None:
    fresh = Story(make_config())
    assert fresh.published(0, error="disk full") == [m.Publish(version=Version(0), parent=None, attempt=1)]
    assert fresh.core.state.published == -1
    assert fresh.core.state.trained == 0


def test_an_iteration_without_a_gradient_makes_no_version(story: Story) -> None:
    story.loaded(A, 0)
    story.loaded(B, 0)
    for group in (0, 1):
        story.completes(group), story.accumulated(group)
    story.stepped(improved=False)
    assert story.core.state.trained == 0
    assert story.core.state.batch.iteration == 1


def test_data_that_is_lost_after_it_was_seated_is_sampled_again_under_its_own_version(story: Story) -> None:
    story.loaded(A, 0)
    story.completes(0)
    commands = story.accumulated(0, lost=True)
    assert story.core.state.batch.groups == []
    for rollout in [r for r, c in story.running().items() if c.instance == A]:
        commands += story.finishes(rollout)
    again = [(c.version, c.generated_tokens) for c in commands if isinstance(c, m.Generate) and c.group == 0]
    assert again == [(0, 0), (0, 0)]


def test_a_lost_rank_makes_its_groups_ready_again_and_late_answers_are_absorbed(story: Story) -> None:
    story.loaded(A, 0)
    story.completes(0)
    stale = m.Accumulated(at=99.0, iteration=0, attempt=0, group=GroupId(0))
    commands = story.tell(m.RankLost, reason="killed")
    assert [(c.group, c.attempt) for c in commands if isinstance(c, m.Accumulate)] == [(0, 1)]
    assert story.core.step(stale) == []
    assert story.core.state.batch.accumulating == 1


def test_an_instance_drains_for_a_version_that_is_due_and_that_nobody_serves() -> None:
    story = Story(make_config(groups_per_iteration=1, max_staleness_versions=1))
    story.joins(A, slots=2), story.published(0), story.loaded(A, 0)  # group 0 runs on A
    story.joins(B, slots=2)
    story.loaded(B, 0)  # group 1 runs on B
    story.completes(1), story.accumulated(1), story.stepped(), story.published(1)
    story.tell(m.InstanceLost, instance=A, reason="killed")
    assert list(story.core.state.waiting) == [0], "group 0 waits, and its deadline is version 1"
    story.loaded(B, 1)
    assert story.core.state.draining == {B: 0}
    story.finishes(4)
    assert m.Load(instance=B, version=Version(0)) in story.finishes(5)


def test_evaluation_answers_come_before_new_groups_and_count_for_slots() -> None:
    story = Story(make_config(), answers=3)
    story.joins(A, slots=2), story.published(0)
    commands = [c for c in story.loaded(A, 0) if isinstance(c, m.Generate)]
    assert [(c.evaluation, c.member, c.sampling) for c in commands] == [(0, 0, "sampled"), (0, 1, "greedy")]
    assert story.core.state.dispatched == 0


def test_an_instance_whose_kv_cache_holds_no_whole_answer_is_refused_in_words() -> None:
    story = Story(make_config())
    descriptor = InstanceDescriptor(node="n", devices=("cpu",), layout="l", slots=4, kv_capacity_tokens=150)
    story.tell(m.InstanceJoined, instance=A, descriptor=descriptor)
    assert story.core.state.stopped is not None
    assert "raise rollout.kv_cache_gib" in story.core.state.stopped


def test_ctrl_c_leaves_a_ledger_that_adds_up(story: Story) -> None:
    story.loaded(A, 0)
    assert story.tell(m.Interrupted) == []
    ledger = story.core.state.ledger()
    assert ledger["dispatched"] == ledger["interrupted"] > 0


def test_while_one_instance_changes_version_the_other_takes_new_groups_of_the_one_it_holds() -> None:
    story = Story(make_config(max_staleness_versions=2))
    story.joins(A, slots=2), story.joins(B, slots=4), story.published(0)
    story.loaded(A, 0), story.loaded(B, 0)
    for group in (0, 1):
        story.completes(group), story.accumulated(group)
    story.stepped(), story.published(1)
    assert list(story.core.state.switching) == [A], "the one with the least left to run"
    (group,) = {c.group for c in story.running().values() if c.instance == A}
    assert group is not None
    story.completes(group)
    assert story.core.state.instances[A].loading == 1
    other = next(c.group for c in story.running().values() if c.instance == B)
    assert other is not None
    started = [c for r in list(story.running()) if story.running()[r].group == other for c in story.finishes(r)]
    assert {(c.instance, c.version) for c in started if isinstance(c, m.Generate)} == {(B, 0)}


def test_an_instance_told_to_change_leaves_waiting_answers_to_one_that_holds_their_version() -> None:
    story = Story(make_config(max_staleness_versions=2, group_size=3))
    story.joins(A, slots=3), story.joins(B, slots=3), story.published(0)
    story.loaded(A, 0), story.loaded(B, 0)
    for group in (0, 1):
        story.completes(group), story.accumulated(group)
    story.stepped(), story.published(1)
    (told,) = story.core.state.switching
    other = B if told == A else A
    failing = next(r for r, c in story.running().items() if c.instance == told)
    finishing = next(r for r, c in story.running().items() if c.instance == other)
    assert generates(story.finishes(failing, reason="failed", num_tokens=1)) == []
    assert generates(story.finishes(finishing)) == [(failing, other, 0)]
