"""What a terminal shows is what the scheduler knows."""

from io import StringIO
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from core.test_staleness import draw_run
from dora_rl.core import messages as m
from dora_rl.obs.folder import RunFolder
from dora_rl.obs.live import InstanceView, Snapshot, VersionView, picture
from dora_rl.run.recorder import Recorder, TimedOrchestrator
from dora_rl.run.screen import Lines, LiveScreen
from dora_rl.sim.engine import simulate
from dora_rl.sim.world import RandomWorld

NOW = Snapshot(
    iteration=3,
    iterations=18,
    elapsed_s=95.0,
    left_s=480.0,
    instances=[InstanceView(name="engine-0", version=2, loading=3, running=5, slots=8, finished=41)],
    versions=[VersionView(version=2, running=5, waiting=7, finished=30)],
    seated=4,
    batch=10,
    ready=1,
    reward=0.25,
    reward_before=0.125,
    held_out="held-out sampled: 0.229 ± 0.027 at version 0",
    staleness=(1.5, 2),
    tokens_per_s=812.0,
    trainer_waits=0.06,
    rollout_idle=0.31,
)


class Seen(Lines):
    """A terminal that keeps every picture's numbers."""

    def __init__(self) -> None:
        super().__init__(quiet=True)
        self.pictures: list[Snapshot] = []

    def show(self, now) -> None:
        self.pictures.append(now())


@settings(max_examples=20)
@given(seed=st.integers(0, 2**32))
def test_answers_by_instance_and_by_version_are_the_same_answers(seed: int, tmp_path_factory) -> None:
    config, world = draw_run(seed)
    core, screen = TimedOrchestrator(config), Seen()
    folder = RunFolder(Path(tmp_path_factory.mktemp("run")))
    recorder = Recorder(config, folder, core, screen)
    ended = 0

    def record(event: m.Event, commands: list[m.Command]) -> None:
        nonlocal ended
        recorder.record(event, commands)
        ended += isinstance(event, m.Generated) and event.reason in ("stop", "length")
        now = screen.pictures[-1]
        assert sum(one.running for one in now.instances) == sum(one.running for one in now.versions)
        assert all(one.running <= one.slots for one in now.instances)
        assert now.seated <= now.batch
        lost = ended - sum(one.finished for one in now.instances)
        assert lost >= 0, "an instance that is gone takes its count with it"

    simulate(core, RandomWorld(world, max_tokens=1000, group_size=config.schedule.group_size), record)
    recorder.close()
    assert screen.pictures[-1].versions == []


def test_the_picture_has_every_number_in_words() -> None:
    console = Console(width=160, file=StringIO())
    console.print(picture(NOW))
    text = console.file.getvalue()
    for words in (
        "iteration 3/18",
        "1m35s, 8m00s left",
        "4 of 10 groups in the batch, 1 ready",
        "reward 0.250 (first 0.125)",
        "staleness 1.50, at most 2",
        "812 tokens/s",
        "trainer waits 6%, rollout idle 31%",
        "held-out sampled: 0.229",
        "engine-0",
        "2 -> 3",
        "5/8",
    ):
        assert words in text, text


def test_once_the_result_is_told_no_picture_follows_it() -> None:
    terminal = StringIO()
    with LiveScreen(Console(width=120, file=terminal, force_terminal=True)) as screen:
        screen.show(lambda: NOW)
        assert "iteration 3/18" in terminal.getvalue()
        screen.result("run finished")
        before = len(terminal.getvalue())
        screen.show(lambda: NOW)
        screen.result("canary")
    assert "iteration" not in terminal.getvalue()[before:]
    assert terminal.getvalue().rstrip().endswith("canary")
