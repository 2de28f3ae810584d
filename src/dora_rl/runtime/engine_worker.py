"""What runs inside vLLM's own processes: taking weights, keeping KV, and ending when the owner ends.

Named to vLLM as executor and worker extension (runtime/engine.py); imports vLLM at once, so nothing else here
may import this module at its top.
"""

import multiprocessing
import os
import select
import signal
import threading
import time
from typing import Any

from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.v1.executor import uniproc_executor
from vllm.v1.executor.multiproc_executor import MultiprocExecutor
from vllm.v1.executor.uniproc_executor import UniProcExecutor

from dora_rl.config import PaceConfig
from dora_rl.pace import law
from dora_rl.pace.clock import Pacer
from dora_rl.runtime.staging import OWNER_VARIABLE, PACE_VARIABLE, PROBE, Slot, staged_tensors

PACE = PaceConfig.model_validate_json(os.environ[PACE_VARIABLE]) if os.environ.get(PACE_VARIABLE) else None
PACER = Pacer()
"""Of this engine's process: its steps and moves come one after the other."""


class OneProcess(UniProcExecutor):  # type: ignore[misc]  # vLLM's classes are untyped to us
    """The model runs in the engine's own process.

    On the CPU vLLM would start one more process and talk to it through a busy shared-memory queue, only to set
    OpenMP variables; those are set before the engine starts.
    """

    def _init_executor(self) -> None:
        # vLLM makes a lock for processes here, though this executor has only one. As by default it would have a name
        # in shared memory, which stays there when the engine is killed meanwhile; a lock for forks never has.
        uniproc_executor.Lock = multiprocessing.get_context("fork").Lock
        super()._init_executor()

    def execute_model(self, scheduler_output: Any, non_block: bool = False) -> Any:
        began = time.monotonic()
        output = super().execute_model(scheduler_output, non_block)
        scheduled = scheduler_output.num_scheduled_tokens
        tokens = [count for request, count in scheduled.items() if not request.startswith(PROBE)]
        if PACE is not None and tokens:
            prefill = sum(count for count in tokens if count > 1)
            PACER.stretch(law.step_s(PACE, answers=len(tokens), prefill_tokens=prefill), began=began)
        return output


class ManyProcesses(MultiprocExecutor):  # type: ignore[misc]
    """The model is split over several GPUs, each with a process."""


class WorkerExtension:
    """Added to vLLM's worker class; its methods are called by `collective_rpc`."""

    model_runner: Any

    def load_staged_weights(self, path: str, slots: list[Slot]) -> None:
        self.model_runner.reload_weights(weights_iterator=staged_tensors(path, slots))
        # An output layer that shares its weight with the embedding gets no tensor of its own, so vLLM 0.32 leaves
        # the copy that it has packed for oneDNN as it was: the engine would go on with the old output layer.
        for module in self.model_runner.get_model().modules():
            if isinstance(module, ParallelLMHead):
                module.quant_method.process_weights_after_loading(module)

    def keep_kv(self, name: str, paths: list[str]) -> None:
        get_kv_transfer_group().keep(name, paths)

    def kept_kv(self, name: str) -> list[Any] | None:
        """Tokens, bytes and checksum; None as long as the request has not ended."""
        kept = get_kv_transfer_group().kept(name)
        return None if kept is None else list(kept)

    def pace_report(self) -> list[int]:
        """Paced pieces of work so far, and how many of them took longer than the law says."""
        return [PACER.pieces, PACER.overruns]

    def forget_kv(self, name: str) -> None:
        get_kv_transfer_group().forget(name)


def end_with_owner() -> None:
    """Kill this process as soon as the instance that owns it is gone, even if that was killed itself.

    A signal at the parent's death (prctl) would not do: it fires when the *thread* that forked ends.
    """
    owner = int(os.environ.get(OWNER_VARIABLE, os.getpid()))
    if owner == os.getpid():
        return  # the instance itself
    try:
        descriptor = os.pidfd_open(owner)
    except ProcessLookupError:  # it was killed while this process was starting
        os.kill(os.getpid(), signal.SIGKILL)
        raise
    threading.Thread(target=_wait_then_die, args=(descriptor,), name="end-with-owner", daemon=True).start()


def _wait_then_die(descriptor: int) -> None:
    ended = select.poll()
    ended.register(descriptor, select.POLLIN)
    ended.poll()
    os.kill(os.getpid(), signal.SIGKILL)


# At import, when the first class of this module arrives in an engine's process: later, that would wait for its instance
# to say how it should start, for five minutes if it is gone.
end_with_owner()
