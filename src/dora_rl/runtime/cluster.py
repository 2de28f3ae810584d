"""Ray: where the processes of a run come from, on one machine and on many.

Starts or joins a cluster, starts one actor per rollout instance, and stands behind the ports with their handles. What
the trainer's actor is made of is the caller's business.
"""

import os
from collections.abc import Awaitable, Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from dora_rl.config import Config, ConfigError
from dora_rl.core.types import InstanceDescriptor, InstanceId, RolloutId, Version
from dora_rl.runtime.instance import Instance
from dora_rl.runtime.ports import (
    GenerateRequest,
    GenerateResult,
    KvData,
    LoadReport,
    Partial,
    ProcessLost,
    StepReport,
)
from dora_rl.wire.errors import RemoteError
from dora_rl.wire.kv import Bytes, KvHandle
from dora_rl.wire.rollouts import Trajectory
from dora_rl.wire.weights import Manifest, RayTransport

CPU_ENVIRONMENT = {
    # Engines and trainer share the cores; a thread that spins while it waits takes one from somebody who computes.
    "OMP_WAIT_POLICY": "PASSIVE",
    "GOMP_SPINCOUNT": "0",
    "KMP_BLOCKTIME": "0",
}


def start_cluster(config: Config, *, model_bytes: int) -> None:
    """Join the cluster that RAY_ADDRESS names, or start one on this machine for the length of this process."""
    if address := os.environ.get("RAY_ADDRESS"):
        ray.init(address=address, log_to_driver=False)
        return
    ray.init(
        # A promise to Ray, not a limit: on a small machine the processes take turns on the cores there are.
        num_cpus=max(os.cpu_count() or 1, _cpus_asked(config)),
        object_store_memory=shared_bytes(config, weight_bytes=model_bytes),
        include_dashboard=False,
        log_to_driver=False,
        logging_level="error",
    )


def shared_bytes(config: Config, *, weight_bytes: int) -> int:
    """Of the store in which published weights lie: K + 1 versions that answers may be of, one that is written, one
    that is read."""
    return max((config.schedule.max_staleness_versions + 3) * weight_bytes, 256 * 2**20)


def check_devices(config: Config) -> None:
    """Raises ConfigError when the cluster has not the GPUs asked for: Ray would wait for them without a word."""
    asked = config.rollout.instances * config.rollout.gpus_per_instance
    there = int(ray.cluster_resources().get("GPU", 0))
    if asked > there:
        raise ConfigError(
            f"rollout.instances * rollout.gpus_per_instance = {asked} GPUs, but the cluster has {there}; lower one of "
            "them (0 GPUs run on the CPU) or join a larger cluster with RAY_ADDRESS"
        )


def stop_cluster() -> None:
    ray.shutdown()


def start_engines(config: Config, model_dir: str) -> dict[InstanceId, "RemoteEngine"]:
    """One actor per instance; none of them has started its engine yet."""
    rollout = config.rollout
    environment = dict(CPU_ENVIRONMENT) if not rollout.gpus_per_instance else {}
    environment["OMP_NUM_THREADS"] = str(rollout.cpus_per_instance)
    # Ray would kill an actor's children with it, among them the process that gives shared memory back. The engine ends
    # itself when its instance is gone.
    environment["RAY_kill_child_processes_on_worker_exit"] = "0"
    actor = ray.remote(Instance).options(
        num_cpus=rollout.cpus_per_instance,
        num_gpus=rollout.gpus_per_instance,
        # Every running answer is one waiting call; the rest are loads and reports.
        max_concurrency=rollout.slots + 16,
        runtime_env={"env_vars": environment},
    )
    names = [InstanceId(f"engine-{index}") for index in range(rollout.instances)]
    return {name: RemoteEngine(name, actor.remote(RayTransport()), config, model_dir) for name in names}


def _cpus_asked(config: Config) -> int:
    return config.rollout.instances * config.rollout.cpus_per_instance + config.train.threads + config.reward.workers


async def call(reference: Awaitable[Any], who: str) -> Any:
    """Await an actor's answer; its failure becomes one line. Raises RemoteError, or ProcessLost when the actor died."""
    try:
        return await reference
    except RayActorError as error:
        raise ProcessLost(f"{who} died: {_cause(error)}") from error
    except RayTaskError as error:
        cause = error.cause if isinstance(error.cause, Exception) else error
        kind = ProcessLost if isinstance(cause, ProcessLost) else RemoteError
        raise kind(f"{who}: {_cause(cause)}") from error
    except RayError as error:
        raise RemoteError(f"{who}: {_cause(error)}") from error


def _cause(error: BaseException) -> str:
    """One line of an error: the last of a traceback, which is where Ray puts the exception itself."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    return lines[-1] if any(line.startswith(("Traceback", "File ")) for line in lines) else lines[0]


class RemoteEngine:
    """An Instance in an actor of its own."""

    def __init__(self, name: InstanceId, actor: Any, config: Config, model_dir: str) -> None:
        self._name = name
        self._actor = actor
        self._config = config
        self._model_dir = model_dir
        self._started = False

    async def start(self) -> InstanceDescriptor:
        config = self._config
        started = self._actor.start.remote(
            self._name, self._model_dir, config.rollout, config.model.dtype, config.run.seed, config.law
        )
        descriptor: InstanceDescriptor = await call(started, self._name)
        self._started = True
        return descriptor

    async def load(self, manifest: Manifest) -> LoadReport:
        report: LoadReport = await call(self._actor.load.remote(manifest), self._name)
        return report

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        result: GenerateResult = await call(self._actor.generate.remote(request), self._name)
        return result

    async def partials(self) -> Sequence[Partial]:
        partials: Sequence[Partial] = await call(self._actor.partials.remote(), self._name)
        return partials

    async def kv_tokens(self) -> int:
        tokens: int = await call(self._actor.kv_tokens.remote(), self._name)
        return tokens

    async def detach(self, rollout: RolloutId, attempt: int, *, keep: bool) -> None:
        await call(self._actor.detach.remote(rollout, attempt, keep=keep), self._name)

    async def receive_kv(self, rollout: RolloutId, handle: KvHandle, data: KvData | None) -> str:
        # Ray brings the bytes behind the reference of `read_kv` to the actor, from node to node.
        why: str = await call(self._actor.receive_kv.remote(rollout, handle, data), self._name)
        return why

    async def read_kv(self, rollout: RolloutId) -> KvData:
        data: Awaitable[Sequence[Bytes]] = self._actor.read_kv.remote(rollout)
        return data

    async def drop_kv(self, rollout: RolloutId) -> None:
        await call(self._actor.drop_kv.remote(rollout), self._name)

    async def measure_decode(self, *, batch: int, tokens: int, prompt: Sequence[int]) -> float:
        measured = self._actor.measure_decode.remote(batch=batch, tokens=tokens, prompt=tuple(prompt))
        rate: float = await call(measured, self._name)
        return rate

    async def pace_report(self) -> tuple[int, int]:
        report: tuple[int, int] = await call(self._actor.pace_report.remote(), self._name)
        return report

    async def shutdown(self) -> None:
        try:
            if self._started:  # otherwise the call would wait for the start to end
                await call(self._actor.shutdown.remote(), self._name)
        finally:
            ray.kill(self._actor)


class RemoteTrainer:
    """The trainer's ranks in their actors; one in this step."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    async def accumulate(
        self, *, iteration: int, attempt: int, group: Sequence[Trajectory], trained_version: Version
    ) -> None:
        await call(self._actor.accumulate.remote(iteration, attempt, group, trained_version), "the trainer")

    async def step(self, *, iteration: int, attempt: int) -> StepReport:
        report = await call(self._actor.step.remote(iteration, attempt), "the trainer")
        return StepReport(
            improved=report.stepped,
            reason=report.reason,
            busy_s=report.busy_s,
            tokens=report.tokens,
            stats=report.stats,
            advantages=report.advantages,
        )

    async def publish(self, *, version: Version, parent: Version | None) -> Manifest:
        # Beside `accumulate`, which may take long.
        publication = self._actor.publish.options(concurrency_group="publish").remote(version, parent)
        manifest: Manifest = await call(publication, "the trainer")
        return manifest

    async def export(self) -> None:
        await call(self._actor.export.remote(), "the trainer")

    async def pace_report(self) -> tuple[int, int]:
        report: tuple[int, int] = await call(self._actor.pace_report.remote(), "the trainer")
        return report

    async def measure_rate(self, groups: Sequence[Sequence[Trajectory]]) -> float:
        rate: float = await call(self._actor.measure_rate.remote(groups), "the trainer")
        return rate

    async def shutdown(self) -> None:
        ray.kill(self._actor)


def trainer_options(config: Config) -> Mapping[str, Any]:
    """How Ray should run the trainer's actor."""
    environment = dict(CPU_ENVIRONMENT) if not config.rollout.gpus_per_instance else {}
    environment["OMP_NUM_THREADS"] = str(config.train.threads)
    return {"num_cpus": config.train.threads, "runtime_env": {"env_vars": environment}}
