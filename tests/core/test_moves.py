"""Stories about answers that move: which, when, and what becomes of their KV."""

import pytest

from core.test_orchestrator import A, B, Story, kinds, make_config
from dora_rl.config import Config
from dora_rl.core import messages as m
from dora_rl.core.types import RolloutId, Version


def roomy(**schedule: object) -> Config:
    """A run whose end is far away."""
    config = make_config(**{"max_staleness_versions": 3, "ready_target_groups": 2} | schedule)
    return config.model_copy(update={"run": config.run.model_copy(update={"iterations": 100})})


@pytest.fixture
def story() -> Story:
    """Two instances that serve version 0 and have a few more slots than there may be answers."""
    story = Story(roomy())
    story.joins(A, slots=10), story.joins(B, slots=10)
    story.published(0)
    story.loaded(A, 0), story.loaded(B, 0)
    return story


def detached(story: Story, rollout: int, *, kept: int = 0) -> list[m.Command]:
    return story.finishes(rollout, reason="detached", num_tokens=5, kept_tokens=kept, kept_bytes=kept, keep_s=0.1)


def makes_room_for_version_1(story: Story) -> list[m.Command]:
    """A batch is stepped and version 1 published: what follows."""
    groups = sorted({c.group for c in story.running().values() if c.group is not None})
    for group in groups[:2]:
        story.completes(group)
    for group in groups[:2]:
        story.accumulated(group)
    story.stepped()
    return story.published(1)


def told(commands: list[m.Command]) -> list[tuple[int, str, bool]]:
    return [(c.rollout, c.instance, c.keep) for c in commands if isinstance(c, m.Detach)]


def test_when_a_version_is_published_an_instance_gives_its_answers_to_one_that_goes_on_with_theirs(
    story: Story,
) -> None:
    commands = makes_room_for_version_1(story)
    leaving = told(commands)
    assert leaving, "nobody was told to leave"
    assert len({instance for _, instance, _ in leaving}) == 1
    assert [keep for _, _, keep in leaving][:2] == [True, False], "nothing is known of costs yet, so both are tried"
    source = leaving[0][1]
    target = B if source == A else A
    for rollout, _, keep in leaving:
        commands = detached(story, rollout, kept=20 if keep else 0)
        (again,) = [c for c in commands if isinstance(c, m.Generate) and c.rollout == rollout]
        assert (again.instance, again.version, again.segment, again.generated_tokens) == (target, 0, 1, 5)
        assert again.kept_tokens == (20 if keep else 0)
    rest = [r for r, c in story.running().items() if c.instance == source]
    for rollout in rest:
        commands = story.finishes(rollout)
    assert m.Load(instance=source, version=Version(1)) in story.asked


def test_kv_is_of_no_use_where_the_layout_is_another_one() -> None:
    story = Story(roomy())
    story.joins(A, slots=6)
    story.published(0), story.loaded(A, 0)
    descriptor = story.core.state.instances[A].descriptor
    running = next(iter(story.running()))
    story.core.state.rollouts[running].kept_layout = "other"
    story.core.state.rollouts[running].kept_tokens = 9
    assert descriptor.layout != "other"
    commands = story.finishes(running, reason="failed", num_tokens=3)
    (again,) = [c for c in commands if isinstance(c, m.Generate) and c.rollout == running]
    assert again.kept_tokens == 0


def test_an_answer_that_ended_before_it_could_leave_has_simply_ended(story: Story) -> None:
    (rollout, _, _), *_ = told(makes_room_for_version_1(story))
    commands = story.finishes(rollout)
    assert not [c for c in commands if isinstance(c, m.Generate) and c.rollout == rollout]
    assert rollout not in [r for r, _, _ in told(story.tell(m.Detached, rollout=RolloutId(rollout), attempt=0))]


def test_an_instance_that_cannot_be_told_keeps_its_answer(story: Story) -> None:
    (rollout, source, _), *_ = told(makes_room_for_version_1(story))
    commands = story.tell(m.Detached, rollout=RolloutId(rollout), attempt=0, error="the engine is busy")
    assert rollout not in [r for r, _, _ in told(commands)]
    assert story.running()[RolloutId(rollout)].instance == source
    assert story.core.state.rollouts[RolloutId(rollout)].detaching is False


def test_a_move_that_costs_more_than_it_frees_is_not_made(story: Story) -> None:
    for tokens in (1, 10, 100):
        story.core.state.costs.moved(tokens, 1e6)
        story.core.state.costs.computed(tokens, 1e6)
    assert told(makes_room_for_version_1(story)) == []


def overcommitted(*, prompts: int | None = None) -> Story:
    """Two instances whose KV cache holds three whole answers, with slots for six; room for eight answers in all."""
    config = roomy(max_staleness_versions=1)
    config = config.model_copy(update={"rollout": config.rollout.model_copy(update={"kv_overcommit": 2.0})})
    story = Story(config, prompts=prompts)
    for name in (A, B):
        story.tell(
            m.InstanceJoined,
            instance=name,
            descriptor=m.InstanceDescriptor(
                node="n", devices=("cpu",), layout="l", slots=6, kv_capacity_tokens=3 * config.max_model_tokens
            ),
        )
    story.published(0)
    story.loaded(A, 0)
    if prompts is None:
        story.loaded(B, 0)
    return story


def test_an_instance_whose_kv_cache_is_nearly_full_gives_its_youngest_answers_up_before_the_engine_has_to() -> None:
    story = overcommitted()
    running = [r for r, c in story.running().items() if c.instance == A]
    assert told(story.tell(m.Reported, instance=A, kv_tokens=300)) == []
    leaving = told(story.tell(m.Reported, instance=A, kv_tokens=590))
    assert 1 <= len(leaving) < len(running)
    assert {rollout for rollout, _, _ in leaving} == set(running[-len(leaving) :])
    (again,) = [c for c in detached(story, leaving[0][0], kept=9) if isinstance(c, m.Generate)]
    assert again.instance == B
    assert story.core.state.instances[A].free == 0
    story.tell(m.Reported, instance=A, kv_tokens=100)
    assert story.core.state.instances[A].free > 0


def test_its_last_answer_stays_however_full_it_is() -> None:
    story = overcommitted(prompts=1)
    first, command = next(iter(story.running().items()))
    story.finishes(first)
    assert told(story.tell(m.Reported, instance=command.instance, kv_tokens=600)) == []


def test_the_data_of_a_group_that_moved_is_repaired_like_any_other(story: Story) -> None:
    (rollout, _, _), *_ = told(makes_room_for_version_1(story))
    detached(story, rollout, kept=20)
    group = story.core.state.rollouts[RolloutId(rollout)].group
    assert group is not None
    story.completes(group)
    assert "Generate" in kinds(story.accumulated(group, lost=True))
    assert story.core.state.kept_bytes == 0
