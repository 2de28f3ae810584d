"""`dora-rl train`, from a configuration to a finished run's folder: starts every process and connects them.

prepare      model, data and folder; everything a person can get wrong is met here, before a process starts
processes    Ray, the trainer's rank, the instances, the reward workers
drive        the core's loop, until it is done
measure      what this machine could have done, with the same processes, for comparison
stop         every process, on every path
"""

import asyncio
import contextlib
import datetime
import shutil
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import ray

from dora_rl.cli.pacing import report_pace
from dora_rl.cli.recorder import Print, Recorder, TimedOrchestrator
from dora_rl.cli.throughput import measure_floor
from dora_rl.config import Config, ConfigError, dump_config
from dora_rl.core.types import InstanceId
from dora_rl.obs.folder import RunFolder
from dora_rl.rl.chat import Chat
from dora_rl.rl.datasets import Dataset, open_dataset
from dora_rl.rl.errors import DataError, RewardError
from dora_rl.rl.rewards import load_reward
from dora_rl.runtime.cluster import (
    RemoteEngine,
    RemoteTrainer,
    check_devices,
    start_cluster,
    start_engines,
    stop_cluster,
    trainer_options,
)
from dora_rl.runtime.driver import Inbox, drive
from dora_rl.runtime.hands import Hands
from dora_rl.runtime.rewards import RewardPool
from dora_rl.train.rank import TrainerRank
from dora_rl.train.source import prepare_model, stop_token_ids
from dora_rl.wire.errors import RemoteError
from dora_rl.wire.open_store import OpenStore
from dora_rl.wire.weights import RayTransport


@dataclass(frozen=True, kw_only=True, slots=True)
class Prepared:
    """A run of which nothing has started yet."""

    config: Config
    folder: RunFolder
    model_dir: Path
    chat: Chat
    dataset: Dataset
    stop_token_ids: tuple[int, ...]


def default_folder(config: Config) -> Path:
    now = datetime.datetime.now(datetime.UTC)
    return Path("runs") / f"{config.run.name}-{now:%Y%m%d-%H%M%S}"


def prepare(config: Config, path: Path, out: Print) -> Prepared:
    """Make the run's folder with its model in it, and open the data. Raises ConfigError, and then leaves no folder."""
    folder, existed = RunFolder(path), path.exists()
    try:
        folder.create(dump_config(config))
    except OSError as error:
        raise ConfigError(f"{path} cannot become a run's folder ({error}); name a new one with --run-dir") from error
    try:
        # Cheap mistakes first: converting a model takes half a minute.
        for name in config.reward.functions:
            load_reward(name)
        if config.data.path is not None and not Path(config.data.path).is_file():
            raise DataError(f"data.path: there is no file {config.data.path}; name an existing one")
        out(f"preparing {config.model.path} and its data")
        model_dir = path / "model"
        prepare_model(config.model.path, model_dir)
        chat = Chat(model_dir)
        dataset = open_dataset(
            source=config.data.source,
            path=config.data.path,
            tasks=config.data.tasks,
            worked_examples=config.data.worked_examples,
            prompt_column=config.data.prompt_column,
            answer_column=config.data.answer_column or None,
            seed=config.run.seed,
            held_out=config.eval.prompts,
            tokenize=chat.tokenize,
            max_prompt_tokens=config.rollout.max_prompt_tokens,
        )
        if dataset.skipped:
            limit = config.rollout.max_prompt_tokens
            out(f"{dataset.skipped} prompts are longer than rollout.max_prompt_tokens = {limit} and left out")
        return Prepared(
            config=config,
            folder=folder,
            model_dir=model_dir,
            chat=chat,
            dataset=dataset,
            stop_token_ids=stop_token_ids(model_dir),
        )
    except (DataError, RewardError) as error:
        _remove(path, keep=existed)
        raise ConfigError(str(error)) from error
    except BaseException:
        _remove(path, keep=existed)
        raise


def _remove(path: Path, *, keep: bool) -> None:
    """Take back what `prepare` made; a folder that was there before stays, empty as it was."""
    for inside in path.iterdir():
        if inside.is_dir():
            shutil.rmtree(inside)
        else:
            inside.unlink()
    if not keep:
        path.rmdir()


@dataclass(frozen=True, kw_only=True, slots=True)
class Processes:
    engines: dict[InstanceId, RemoteEngine]
    trainer: RemoteTrainer
    rewards: RewardPool


@asynccontextmanager
async def processes(run: Prepared) -> AsyncIterator[Processes]:
    """Everything that runs beside the driver; all of it has ended when the block is left, however that happens."""
    config = run.config
    model_dir = run.model_dir.resolve()
    start_cluster(config, model_bytes=sum(file.stat().st_size for file in model_dir.glob("*.safetensors")))
    engines: dict[InstanceId, RemoteEngine] = {}
    rewards: RewardPool | None = None
    try:
        check_devices(config)
        actor = ray.remote(concurrency_groups={"publish": 1})(TrainerRank).options(**trainer_options(config))
        path = run.folder.path.resolve()
        trainer = RemoteTrainer(actor.remote(config, model_dir, path / "weights", path / "export", RayTransport()))
        engines = start_engines(config, str(model_dir))
        rewards = RewardPool(config.reward.functions, workers=config.reward.workers, timeout_s=config.reward.timeout_s)
        yield Processes(engines=engines, trainer=trainer, rewards=rewards)
    finally:
        ended = [engine.shutdown() for engine in engines.values()]
        if rewards is not None:
            ended.append(rewards.shutdown())
        try:
            # Whoever does not end in time is ended with the cluster; the run's own result must not be lost over it.
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(asyncio.gather(*ended, return_exceptions=True), timeout=60)
        finally:
            stop_cluster()


async def train(run: Prepared, out: Print) -> int:
    """Run to the end. Returns the exit status: 0 done, 1 failed (the reason is printed), 130 interrupted."""
    config, core, inbox = run.config, TimedOrchestrator(run.config), Inbox()
    recorder = Recorder(config, run.folder, core, out)
    out(f"starting {config.rollout.instances} instances and the trainer; the run's folder is {run.folder.path}")
    try:
        async with processes(run) as others:
            with OpenStore(run.folder.open_db) as store:
                hands = Hands(
                    config,
                    inbox=inbox,
                    engines=others.engines,
                    trainer=others.trainer,
                    rewards=others.rewards,
                    prompts=run.dataset,
                    store=store,
                    rollouts_folder=run.folder.rollouts,
                    decode=run.chat.decode,
                    stop_token_ids=run.stop_token_ids,
                    listener=recorder,
                )
                hands.begin(prompts=_prompts(run))
                with _interruptible(hands.interrupt):
                    await drive(core, hands, inbox, recorder.record)
                await hands.stop()
            if core.state.stopped is not None:
                raise RemoteError(core.state.stopped)
            recorder.finish("interrupted" if core.state.interrupted else "finished")
            if config.pace is not None:
                await report_pace(run.folder.path, others.engines.values(), others.trainer, out)
            if config.run.measure_floor and not core.state.interrupted:
                try:
                    await measure_floor(run.folder, config, others.engines.values(), others.trainer, out)
                except (RemoteError, ValueError) as error:
                    out(f"the throughput floor could not be measured: {error}")
    finally:
        recorder.close()
    return 130 if core.state.interrupted else 0


def _prompts(run: Prepared) -> int | None:
    """How many training prompts the run may use in all; None: as many as it needs."""
    size, epochs = run.dataset.size, run.config.data.epochs
    return None if size is None or epochs == 0 else size * epochs


class _interruptible:
    """While the block runs, Ctrl-C (or a polite kill) calls a function instead of raising wherever it strikes."""

    def __init__(self, interrupt: Callable[[], None]) -> None:
        self._interrupt = interrupt

    def __enter__(self) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, self._interrupt)

    def __exit__(self, *_: object) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().remove_signal_handler(number)
