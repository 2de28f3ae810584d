"""Groups made to measure, and the tiny model that they are trained on."""

import random
from collections.abc import Callable, Sequence

import pytest

from dora_rl.config import Config, parse_config
from dora_rl.core.types import GroupId, InstanceId, RolloutId, Version
from dora_rl.wire.rollouts import Segment, Trajectory

EOS = 2  # of the tiny model, whose padding token it is too
FIRST, LAST = 3, 80  # its ordinary characters

GroupMaker = Callable[..., list[Trajectory]]


def make_group(
    group_id: int = 0,
    *,
    prompt: Sequence[int] = (5, 6, 7),
    answers: Sequence[Sequence[int]] = ((8, EOS), (9, EOS)),
    rewards: Sequence[float | None] = (1.0, 0.0),
    logprobs: Sequence[Sequence[float]] | None = None,
    version: int = 0,
    finish_reason: str = "stop",
) -> list[Trajectory]:
    return [
        Trajectory(
            rollout=RolloutId(100 * group_id + member),
            group_id=GroupId(group_id),
            member=member,
            prompt_id=f"row-{group_id}",
            version=Version(version),
            prompt_token_ids=tuple(prompt),
            completion_token_ids=tuple(answer),
            logprobs=tuple(logprobs[member]) if logprobs else (-4.0,) * len(answer),
            segments=(Segment(version=Version(version), instance=InstanceId("i"), start=0, end=len(answer)),),
            finish_reason=finish_reason,  # type: ignore[arg-type]
            reward=rewards[member],
            rewards={},
            dispatched_at=0.0,
            finished_at=1.0,
        )
        for member, answer in enumerate(answers)
    ]


def ragged_groups(seed: int, *, groups: int = 4) -> list[list[Trajectory]]:
    """Groups of different sizes, prompt and answer lengths; some prompts and some answers begin alike."""
    rng = random.Random(seed)
    common = [rng.randint(FIRST, LAST) for _ in range(6)]
    made = []
    for group_id in range(groups):
        prompt = (common if rng.random() < 0.5 else []) + [rng.randint(FIRST, LAST) for _ in range(rng.randint(1, 20))]
        size = rng.randint(2, 5)
        answers = []
        for _ in range(size):
            answer = [rng.randint(FIRST, FIRST + 2) for _ in range(rng.randint(0, 12))]
            answers.append([*answer, EOS])
        rewards: list[float | None] = [rng.choice((0.0, 0.5, 1.0, None)) for _ in range(size - 2)]
        made.append(make_group(group_id, prompt=prompt, answers=answers, rewards=[1.0, *rewards, 0.0]))
    return made


@pytest.fixture(scope="session", name="make_group")
def make_group_fixture() -> GroupMaker:
    return make_group


@pytest.fixture(scope="session", name="ragged_groups")
def ragged_groups_fixture() -> Callable[..., list[list[Trajectory]]]:
    return ragged_groups


@pytest.fixture(scope="session", name="config")
def config_fixture() -> Config:
    return parse_config(
        {
            "model": {"path": "tiny:0"},
            "rollout": {"temperature": 0.8},
            "train": {"micro_batch_tokens": 64, "learning_rate": 1e-3, "threads": 1},
        }
    )
