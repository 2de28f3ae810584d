"""One real engine on the tiny model, shared by all tests here: it takes 15 s to start."""

import asyncio
import os
import select
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from dora_rl.config import RolloutConfig
from dora_rl.core.types import InstanceId, RolloutId, Version
from dora_rl.models.source import prepare_model
from dora_rl.runtime.engine import engine_processes
from dora_rl.runtime.instance import Instance
from dora_rl.runtime.ports import GenerateRequest, GenerateResult
from dora_rl.wire.weights import Canary, Manifest, MemoryTransport, write_version
from support import leftovers_collected

ROLLOUT = RolloutConfig(slots=8, max_prompt_tokens=160, max_completion_tokens=96, block_tokens=32, kv_cache_gib=0.125)
PROBE = tuple(range(3, 35))
ENDED_WITHIN_S = 20


class Model:
    """The tiny model as transformers computes it, and its weights."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModelForCausalLM

        self.folder = folder
        self.tensors: dict[str, Tensor] = load_file(folder / "model.safetensors")
        self._module = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def logprobs(self, prompt: tuple[int, ...], completion: tuple[int, ...], temperature: float) -> list[float]:
        ids = torch.tensor([[*prompt, *completion]])
        with torch.inference_mode():
            logprobs_TV = (self._module(ids).logits[0] / temperature).log_softmax(-1)
        return [logprobs_TV[len(prompt) + i - 1, token].item() for i, token in enumerate(completion)]

    def canary(self) -> Canary:
        return Canary(PROBE, tuple(self.logprobs(PROBE[:1], PROBE[1:], 1.0)))


class Rig:
    """An instance, its store, and the loop they live in."""

    def __init__(self, model: Model, rollout: RolloutConfig = ROLLOUT) -> None:
        self.model, self.rollout = model, rollout
        self.transport = MemoryTransport()
        self.instance = Instance(self.transport)
        self._runner = asyncio.Runner()
        self._rollouts = 0
        self.descriptor = self.run(
            self.instance.start(InstanceId("engine-0"), str(model.folder), rollout, "float32", seed=0)
        )
        self.engine_pids = tuple(engine_processes(self.instance._engine))

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self._runner.run(work)

    def published(self, version: int, **changed: Tensor) -> Manifest:
        """The model's weights as a version; tensors in `changed` replace its own, but not in the canary."""
        return write_version(self.transport, Version(version), None, self.model.tensors | changed, self.model.canary())

    def request(self, prompt: tuple[int, ...], **different: Any) -> GenerateRequest:
        self._rollouts += 1
        usual: dict[str, Any] = {
            "rollout": RolloutId(self._rollouts),
            "attempt": 0,
            "version": Version(1),
            "prompt_token_ids": prompt,
            "completion_token_ids": (),
            "max_tokens": 40,
            "temperature": 0.8,
            "greedy": False,
            "stop_token_ids": (),
        }
        return GenerateRequest(**usual | different)

    def generate(self, *requests: GenerateRequest) -> list[GenerateResult]:
        async def together() -> list[GenerateResult]:
            return await asyncio.gather(*map(self.instance.generate, requests))

        results: list[GenerateResult] = self.run(together())
        return results

    def close(self) -> None:
        ends = [os.pidfd_open(pid) for pid in self.engine_pids if Path(f"/proc/{pid}").exists()]
        with leftovers_collected():
            self.run(self.instance.shutdown())
            self._runner.close()
        assert all(map(ended, ends)), f"an engine's process outlived its shutdown: {self.engine_pids}"


def ended(process: int, within_s: float = ENDED_WITHIN_S) -> bool:
    """Whether the process behind this descriptor ends in time."""
    poll = select.poll()
    poll.register(process, select.POLLIN)
    return bool(poll.poll(within_s * 1000))


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    prepare_model("tiny:0", folder)
    return Model(folder)


@pytest.fixture(scope="session")
def running(model: Model) -> Iterator[Rig]:
    rig = Rig(model)
    yield rig
    rig.close()


@pytest.fixture
def rig(running: Rig) -> Rig:
    """The shared engine, serving the model's own weights as version 1."""
    running.run(running.instance.load(running.published(1)))
    return running
