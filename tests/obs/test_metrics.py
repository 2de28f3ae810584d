"""A run told by hand, so that every figure can be checked on paper; and simulated runs, whose shares must add up."""

import json
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from audit.builder import small_config
from dora_rl.core import messages as m
from dora_rl.core.orchestrator import Orchestrator
from dora_rl.core.types import InstanceDescriptor
from dora_rl.obs.metrics import FROM_TRAINER, Metrics, evaluation_line, iteration_metrics
from dora_rl.obs.timeline import Timeline
from dora_rl.sim.engine import simulate
from dora_rl.sim.world import RandomWorld, WorldConfig

KEYS = [
    *("iteration", "version", "reward/mean", "reward/std"),
    *("completion/length_mean", "completion/length_max", "completion/clipped_share"),
    *("groups/trained", "groups/filtered", "groups/failed", "groups/dropped"),
    *("staleness/mean", "staleness/max", "staleness/histogram"),
    *("versions/alive_max", "versions/running_max", "time/iteration_s", "time/exposed_rollout_s"),
    *("idle/trainer_share", "idle/rollout_share", "idle/slots_share", "time/orchestration_share"),
    *("throughput/tokens_per_s", "throughput/trained_tokens_per_s", "throughput/generated_tokens_per_s"),
    *("throughput/filtered_generated_tokens", "throughput/devices"),
    *FROM_TRAINER,
    *("moves/count", "moves/bytes", "moves/recomputed_tokens"),
]
"""interfaces.md's, and those that docs/metrics.md adds."""


def joined(name: str, at: float = 0.0) -> m.InstanceJoined:
    descriptor = InstanceDescriptor(node="n", devices=("cpu",), layout="l", slots=2, kv_capacity_tokens=1000)
    return m.InstanceJoined(at=at, instance=name, descriptor=descriptor)


def generate(rollout: int, instance: str, version: int, *, group: int | None, tokens: int = 0, attempt: int = 0):
    return m.Generate(
        rollout=rollout,
        segment=attempt,
        attempt=attempt,
        instance=instance,
        version=version,
        group=group,
        evaluation=0 if group is None else None,
        member=rollout % 2,
        sampling="sampled",
        generated_tokens=tokens,
        max_tokens=100 - tokens,
    )


def generated(at: float, rollout: int, instance: str, version: int, *, tokens: int, reason="stop", attempt: int = 0):
    return m.Generated(
        at=at,
        rollout=rollout,
        segment=attempt,
        attempt=attempt,
        instance=instance,
        version=version,
        reason=reason,
        num_tokens=tokens,
    )


def scored(at: float, group: int, *rewards: float | None) -> m.Scored:
    return m.Scored(at=at, group=group, attempt=0, rewards=rewards, digest="")


def stepped(at: float, iteration: int, *, busy_s: float, improved: bool = True) -> m.Stepped:
    return m.Stepped(at=at, iteration=iteration, attempt=0, improved=improved, busy_s=busy_s)


def accumulate(iteration: int, group: int) -> m.Accumulate:
    return m.Accumulate(iteration=iteration, attempt=0, group=group, trained_at=iteration)


def step(iteration: int, *groups: int) -> m.Step:
    return m.Step(iteration=iteration, attempt=0, groups=groups, version=iteration + 1)


def close(iteration: int, *, trained=(), filtered=(), failed=()) -> m.Close:
    return m.Close(iteration=iteration, trained_at=iteration, trained=trained, filtered=filtered, failed=failed)


def told(*entries: tuple[m.Event, Sequence[m.Command]], trainer_devices: int = 1) -> Timeline:
    timeline = Timeline(trainer_devices=trainer_devices)
    for event, commands in entries:
        timeline.record(event, commands)
    return timeline


STORY: list[tuple[m.Event, Sequence[m.Command]]] = [
    # Two engines of two slots. Iteration 0 lasts from second 10 to second 30.
    (joined("a"), []),
    (joined("b"), []),
    (m.RunStarted(at=10.0, prompts=None, evaluation_answers=2), []),
    (m.Loaded(at=10.0, instance="a", version=0), [generate(0, "a", 0, group=0), generate(1, "a", 0, group=0)]),
    (m.Loaded(at=12.0, instance="b", version=0), [generate(2, "b", 0, group=1)]),
    (generated(14.0, 0, "a", 0, tokens=10), [generate(3, "a", 0, group=1)]),
    (generated(16.0, 1, "a", 0, tokens=30, reason="length"), [m.Score(group=0, attempt=0)]),
    (scored(17.0, 0, 1.0, 0.0), [accumulate(0, 0)]),
    (generated(18.0, 2, "b", 0, tokens=5), []),
    (generated(20.0, 3, "a", 0, tokens=7), [m.Score(group=1, attempt=0)]),
    (scored(21.0, 1, 1.0, 1.0), [generate(4, "b", 0, group=2)]),
    (m.Accumulated(at=22.0, iteration=0, attempt=0, group=0), [step(0, 0)]),
    (stepped(30.0, 0, busy_s=9.0), [close(0, trained=(0,), filtered=(1,)), m.Publish(version=1, parent=0, attempt=0)]),
    # Iteration 1 lasts to second 40: engine a takes version 1 while b still runs an answer of version 0.
    (m.Loaded(at=32.0, instance="a", version=1), [generate(6, "a", 1, group=3), generate(7, "a", 1, group=3)]),
    (generated(33.0, 4, "b", 0, tokens=50), [generate(5, "b", 0, group=2)]),
    (generated(36.0, 5, "b", 0, tokens=10), [m.Score(group=2, attempt=0)]),
    (scored(36.0, 2, 0.0, 0.5), [accumulate(1, 2)]),
    (m.Accumulated(at=36.0, iteration=1, attempt=0, group=2), [step(1, 2)]),
    (stepped(40.0, 1, busy_s=12.0), [close(1, trained=(2,))]),
]

PROMPTS = {0: 8, 1: 8, 2: 20, 3: 8}


def test_the_first_iteration_counts_from_the_runs_start_to_its_step():
    line = iteration_metrics(told(*STORY), 0, prompt_tokens=PROMPTS, orchestration_s=0.2)
    figures = {
        "iteration": 0,
        "version": 0,
        "reward/mean": 0.75,  # of 1, 0 and the filtered 1, 1
        "completion/length_mean": 13.0,
        "completion/length_max": 30,
        "completion/clipped_share": 0.25,
        "groups/trained": 1,
        "groups/filtered": 1,
        "groups/failed": 0,
        "groups/dropped": 0,
        "staleness/mean": 0.0,
        "versions/alive_max": 1,
        "versions/running_max": 1,
        "time/iteration_s": 20.0,
        "time/exposed_rollout_s": 11.0,
        "idle/trainer_share": 0.55,
        # a works from 10 to 20, b from 12 to 18 and from 21 to 30: 25 of 40 seconds.
        "idle/rollout_share": 0.375,
        # a: 2 slots for 6 s, 1 for 4 s; b: 1 slot for 15 s: 31 of 80 slot-seconds.
        "idle/slots_share": 49 / 80,
        "time/orchestration_share": 0.01,
        "throughput/tokens_per_s": (8 + 40 + 8 + 12) / 20,
        "throughput/trained_tokens_per_s": 48 / 20,
        "throughput/generated_tokens_per_s": 52 / 20,
        "throughput/filtered_generated_tokens": 12,
        "throughput/devices": 3,
    }
    assert {key: line[key] for key in figures} == pytest.approx(figures)
    assert line["reward/std"] == pytest.approx(0.1875**0.5)
    assert line["staleness/histogram"] == {"0": 1}


def test_the_second_iteration_has_two_versions_alive_and_running_and_a_stale_group():
    line = iteration_metrics(told(*STORY), 1, prompt_tokens=PROMPTS)
    assert line["versions/alive_max"] == line["versions/running_max"] == 2
    assert line["staleness/histogram"] == {"1": 1}
    assert line["staleness/mean"] == line["staleness/max"] == 1
    assert line["throughput/tokens_per_s"] == (20 + 60) / 10
    # The trainer says that it was busy for longer than the iteration lasted: nothing was exposed, and nothing negative.
    assert line["time/exposed_rollout_s"] == line["idle/trainer_share"] == 0.0


def test_a_line_has_exactly_the_documented_keys_and_null_for_what_does_not_apply():
    line = iteration_metrics(told(*STORY), 0)
    assert list(line) == KEYS
    nulls = {key for key, value in line.items() if value is None}
    unknown_prompts = {"throughput/tokens_per_s", "throughput/trained_tokens_per_s"}
    assert nulls == {*FROM_TRAINER, "time/orchestration_share", *unknown_prompts}


def test_the_trainers_figures_pass_through_and_what_json_cannot_say_becomes_null():
    stats = {"policy/loss": 0.5, "policy/kl": float("nan"), "mismatch/by_staleness": {0: 1e-6, 1: float("inf")}, "x": 1}
    line = iteration_metrics(told(*STORY), 0, stats=stats)
    assert (line["policy/loss"], line["policy/kl"]) == (0.5, None)
    assert line["mismatch/by_staleness"] == {"0": 1e-6, "1": None}
    assert "x" not in line
    assert json.loads(json.dumps(line, allow_nan=False)) == line


def test_throughput_counts_every_device_and_does_not_depend_on_the_trainers():
    # Regression 48.
    one, eight = (iteration_metrics(told(*STORY, trainer_devices=n), 0, prompt_tokens=PROMPTS) for n in (1, 8))
    assert one["throughput/tokens_per_s"] == eight["throughput/tokens_per_s"]
    assert (one["throughput/devices"], eight["throughput/devices"]) == (3, 10)


def test_an_iteration_without_groups_has_no_means_and_no_division_by_zero():
    line = iteration_metrics(
        told(
            (m.Loaded(at=5.0, instance="a", version=0), [step(0)]),
            (stepped(5.0, 0, busy_s=0.0, improved=False), [close(0)]),
        ),
        0,
        prompt_tokens={},
    )
    assert line["time/iteration_s"] == 0.0
    assert [line[key] for key in ("reward/mean", "idle/trainer_share", "idle/rollout_share", "staleness/max")] == [
        None
    ] * 4


def test_evaluation_answers_keep_an_engine_busy_but_are_no_training_throughput_and_no_running_version():
    evaluation = [
        (joined("a"), []),
        (m.RunStarted(at=0.0, prompts=None, evaluation_answers=1), []),
        (m.Loaded(at=0.0, instance="a", version=0), [generate(0, "a", 0, group=None)]),
        (generated(5.0, 0, "a", 0, tokens=40), [step(0)]),
        (stepped(10.0, 0, busy_s=5.0), [close(0)]),
    ]
    line = iteration_metrics(told(*evaluation), 0, prompt_tokens={})
    assert line["idle/rollout_share"] == 0.5
    assert line["throughput/generated_tokens_per_s"] == line["versions/running_max"] == 0


def test_a_late_answer_of_a_lost_engine_counts_once_and_its_time_ends_with_it():
    line = iteration_metrics(
        told(
            (joined("a"), []),
            (joined("b"), []),
            (m.RunStarted(at=0.0, prompts=None, evaluation_answers=0), []),
            (m.Loaded(at=0.0, instance="b", version=0), []),
            (m.Loaded(at=0.0, instance="a", version=0), [generate(0, "a", 0, group=0)]),
            (m.InstanceLost(at=4.0, instance="a", reason="x"), [generate(0, "b", 0, group=0, attempt=1)]),
            (generated(5.0, 0, "a", 0, tokens=30), []),
            (generated(6.0, 0, "b", 0, tokens=30, attempt=1), [step(0)]),
            (stepped(10.0, 0, busy_s=1.0), [close(0)]),
        ),
        0,
    )
    assert line["throughput/generated_tokens_per_s"] == 3.0
    assert line["idle/rollout_share"] == pytest.approx(1 - (4 + 2) / (4 + 10))


def test_a_step_of_an_attempt_whose_rank_was_lost_ends_no_iteration():
    # Regression 4: what advances once must not be advanced in two places.
    late = m.Stepped(at=7.0, iteration=0, attempt=0, improved=True, busy_s=1.0)
    retried = m.Step(iteration=0, attempt=1, groups=(0,), version=1)
    timeline = told(
        (joined("a"), []),
        (m.RunStarted(at=0.0, prompts=None, evaluation_answers=0), []),
        (m.Loaded(at=0.0, instance="a", version=0), [generate(0, "a", 0, group=0), generate(1, "a", 0, group=0)]),
        (generated(2.0, 0, "a", 0, tokens=1), []),
        (generated(2.0, 1, "a", 0, tokens=1), []),
        (scored(3.0, 0, 0.0, 1.0), [accumulate(0, 0)]),
        (m.Accumulated(at=4.0, iteration=0, attempt=0, group=0), [step(0, 0)]),
        (m.RankLost(at=5.0, reason="x"), [m.Accumulate(iteration=0, attempt=1, group=0, trained_at=0)]),
        (m.Accumulated(at=6.0, iteration=0, attempt=1, group=0), [retried]),
        (late, []),
    )
    with pytest.raises(LookupError, match="iteration 0 has no Close"):
        iteration_metrics(timeline, 0)
    timeline.record(m.Stepped(at=9.0, iteration=0, attempt=1, improved=True, busy_s=3.0), [close(0, trained=(0,))])
    line = iteration_metrics(timeline, 0)
    assert (line["time/iteration_s"], line["staleness/histogram"]) == (9.0, {"0": 1})


def simulated(seed: int, *, strategy: str, losses: bool) -> list[Metrics]:
    """Measured as a real run is: each line when the iteration's Close has been commanded."""
    world = WorldConfig(seed=seed, slots=4, evaluation_answers=4, sigma=1.5, failure=0.05, failures=4)
    joins = RandomWorld(world, max_tokens=1, group_size=1).joins(7, at=20.0)
    lost = (m.InstanceLost(at=15.0, instance="engine-0", reason="x"), joins, m.RankLost(at=30.0, reason="x"))
    world = WorldConfig(**{name: getattr(world, name) for name in world.__slots__} | {"losses": lost if losses else ()})
    config = small_config(strategy=strategy)
    timeline, lines = Timeline(), []

    def record(event: m.Event, commands: Sequence[m.Command]) -> None:
        timeline.record(event, commands)
        for command in commands:
            if isinstance(command, m.Close):
                lines.append(iteration_metrics(timeline, command.iteration))
                timeline.forget(command.iteration)

    core = Orchestrator(config)
    simulate(core, RandomWorld(world, max_tokens=24, group_size=3), record)
    return lines


@settings(max_examples=25)
@given(seed=st.integers(0, 10**6), strategy=st.sampled_from(("dora", "sync")), losses=st.booleans())
def test_shares_of_any_simulated_run_lie_between_0_and_1_and_times_add_up_to_the_iteration(seed, strategy, losses):
    # Regression 47.
    lines = simulated(seed, strategy=strategy, losses=losses)
    assert [line["iteration"] for line in lines] == list(range(4))
    for line in lines:
        for share in ("idle/trainer_share", "idle/rollout_share", "idle/slots_share"):
            assert 0.0 <= line[share] <= 1.0
        assert line["idle/slots_share"] >= line["idle/rollout_share"] - 1e-9  # an idle engine's slots are all empty
        assert 0.0 <= line["time/exposed_rollout_s"] <= line["time/iteration_s"]
        assert line["time/exposed_rollout_s"] == pytest.approx(line["idle/trainer_share"] * line["time/iteration_s"])
        assert sum(line["staleness/histogram"].values()) == line["groups/trained"]
        assert line["staleness/max"] <= (0 if strategy == "sync" else 2)
        assert 0 <= line["versions/running_max"] <= line["versions/alive_max"] <= 4


def test_an_evaluation_line_keeps_prompts_in_order_and_gives_the_standard_error_of_their_mean():
    line = evaluation_line(
        iteration=3, version=2, sampling="greedy", rewards=[1.0, 0.0, None, 1.0], lengths=[1, 2, 3, 4]
    )
    assert line["score"] == pytest.approx(2 / 3)
    assert line["stderr"] == pytest.approx((1 / 3 / 3) ** 0.5)
    assert (line["prompts"], line["length_mean"], line["rewards"]) == (4, 2.5, [1.0, 0.0, None, 1.0])
