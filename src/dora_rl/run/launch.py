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
import json
import os
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import ray

from dora_rl.config import Config, ConfigError, dump_config
from dora_rl.core.types import InstanceId
from dora_rl.models.source import prepare_model, prepare_tokenizer, stop_token_ids
from dora_rl.obs.folder import RunFolder
from dora_rl.rl.chat import Chat
from dora_rl.rl.datasets import Dataset
from dora_rl.rl.errors import DataError, RewardError
from dora_rl.rl.rewards import load_reward
from dora_rl.rl.signatures import check_call
from dora_rl.run.capacity import check_capacity, check_kv_cache
from dora_rl.run.pacing import report_pace
from dora_rl.run.prompts import check_path, open_data
from dora_rl.run.recorder import Print, Recorder, TimedOrchestrator
from dora_rl.run.screen import Screen
from dora_rl.run.stopping import INTERRUPTED, Stopping
from dora_rl.run.throughput import measure_floor
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
from dora_rl.wire.errors import RemoteError
from dora_rl.wire.open_store import OpenStore
from dora_rl.wire.weights import RayTransport

END_S = 5.0
"""How long engines and workers may take to end by themselves."""


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
    folder = RunFolder(path)
    try:
        made = _first_missing(path)
        folder.create(dump_config(config))
    except (OSError, ValueError) as error:  # a name that is too long, or that is no text
        raise ConfigError(f"{path} cannot become a run's folder ({error}); name a new one with --run-dir") from error
    try:
        # Cheap mistakes first: converting a model takes half a minute.
        functions = {name: load_reward(name) for name in config.reward.functions}
        check_path(config.data.path)
        out(f"preparing {config.model.path} and its data")
        model_dir = path / "model"
        prepare_tokenizer(config.model.path, model_dir)
        chat = Chat(model_dir)
        dataset = open_data(config, chat)
        for name, function in functions.items():
            check_call(name, function, dataset.train(0).columns)
        prepare_model(config.model.path, model_dir)
        check_model(config, model_dir)
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
        _remove(path, made)
        raise ConfigError(str(error)) from error
    except BaseException:
        _remove(path, made)
        raise


def check_model(config: Config, folder: Path) -> None:
    """Raises ConfigError when answers would be longer than the model can read, or this machine is too small for it."""
    facts = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    longest = facts.get("max_position_embeddings")
    if longest is not None and config.max_model_tokens > longest:
        raise ConfigError(
            f"rollout.max_prompt_tokens + rollout.max_completion_tokens = {config.max_model_tokens} tokens, but the "
            f"model reads {longest}; lower one of them"
        )
    check_kv_cache(config, facts)
    if "RAY_ADDRESS" not in os.environ:
        weights = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
        check_capacity(config, weight_bytes=weights, vocabulary=facts.get("vocab_size", 0))


def _first_missing(path: Path) -> Path | None:
    """The outermost folder that has to be made for this one; None when it is there."""
    missing = [one for one in (path, *path.parents) if not one.exists()]
    return missing[-1] if missing else None


def _remove(path: Path, made: Path | None) -> None:
    """Take back what `prepare` made; a folder that was there before stays, empty as it was."""
    for inside in path.iterdir():
        if inside.is_dir():
            shutil.rmtree(inside)
        else:
            inside.unlink()
    if made is not None:
        for folder in (path, *path.parents):
            folder.rmdir()
            if folder == made:
                return


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
        folders = path / "weights", path / "export"
        trainer = RemoteTrainer(actor.remote(config, model_dir, *folders, RayTransport(), path / "checkpoints"))
        engines = start_engines(config, str(model_dir))
        rewards = RewardPool(
            config.reward.functions,
            workers=config.reward.workers,
            timeout_s=config.reward.timeout_s,
            decode=run.chat.decode_all,
            weights=config.reward.weights,
            shaping=config.reward.shaping,
            stop_on_error=config.reward.on_error == "stop",
        )
        yield Processes(engines=engines, trainer=trainer, rewards=rewards)
    finally:
        ended = [engine.shutdown() for engine in engines.values()]
        if rewards is not None:
            ended.append(rewards.shutdown())
        try:
            # Whoever does not end in time is ended with the cluster; the run's own result must not be lost over it.
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(asyncio.gather(*ended, return_exceptions=True), END_S)
        finally:
            stop_cluster()


async def train(run: Prepared, screen: Screen, stopping: Stopping) -> int:
    """Run to the end. Returns the exit status: 0 done, 130 interrupted. Raises RemoteError, a failed run's reason."""
    config, core = run.config, TimedOrchestrator(run.config)
    recorder = Recorder(config, run.folder, core, screen)
    screen.line(f"starting {config.rollout.instances} instances and the trainer; the run's folder is {run.folder.path}")
    this, loop = asyncio.current_task(), asyncio.get_running_loop()
    assert this is not None
    try:
        with stopping.asks(lambda: loop.call_soon_threadsafe(this.cancel)):
            async with processes(run) as others:
                await _drive(run, core, others, recorder, stopping)
                if core.state.stopped is not None:
                    raise RemoteError(core.state.stopped)
                recorder.finish("interrupted" if core.state.interrupted else "finished")
                if not core.state.interrupted:
                    await _measure(run, others, screen)
    except asyncio.CancelledError:  # asked to end before the first answer, or while it measured
        recorder.finish("interrupted")
        return INTERRUPTED
    finally:
        recorder.close()
    return INTERRUPTED if core.state.interrupted else 0


async def _drive(
    run: Prepared, core: TimedOrchestrator, others: Processes, recorder: Recorder, stopping: Stopping
) -> None:
    """The core's loop, until it is done; from here on an interrupt is an event like others."""
    inbox, loop = Inbox(), asyncio.get_running_loop()
    with OpenStore(run.folder.open_db) as store:
        hands = Hands(
            run.config,
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
        try:
            with stopping.asks(lambda: loop.call_soon_threadsafe(hands.interrupt)):
                await drive(core, hands, inbox, recorder.record)
        finally:
            await hands.stop()


async def _measure(run: Prepared, others: Processes, screen: Screen) -> None:
    """What this machine could have done, with the same processes."""
    engines, trainer = others.engines.values(), others.trainer
    if run.config.pace is not None:
        await report_pace(run.folder.path, engines, trainer, screen.result)
    if run.config.run.measure_floor:
        try:
            await measure_floor(run.folder, run.config, engines, trainer, screen.result)
        except (RemoteError, ValueError) as error:
            screen.line(f"the throughput floor could not be measured: {error}")


def _prompts(run: Prepared) -> int | None:
    """How many training prompts the run may use in all; None: as many as it needs."""
    size, epochs = run.dataset.size, run.config.data.epochs
    return None if size is None or epochs == 0 else size * epochs
