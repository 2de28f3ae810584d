"""Starting and ending vLLM's asynchronous engine for one instance. Knows its settings; knows nothing of requests."""

import os
import platform
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from dora_rl.config import PaceConfig, RolloutConfig
from dora_rl.core.types import InstanceDescriptor
from dora_rl.runtime.staging import OWNER_VARIABLE, PACE_VARIABLE

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM


def start_engine(
    model_dir: str, rollout: RolloutConfig, dtype: str, seed: int, pace: PaceConfig | None = None
) -> "AsyncLLM":
    """A running engine with weights of no meaning: real ones only ever come from the weight store.

    Blocks until it is ready (seconds). Whatever vLLM changes in this process's environment is undone.
    """
    with _environment(_variables(rollout, pace)), warnings.catch_warnings():
        # vLLM reads its environment when it is imported, and takes seconds to import. What it and torch warn each
        # other of is for their authors; errors still come through.
        warnings.simplefilter("ignore")
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        return AsyncLLM.from_engine_args(AsyncEngineArgs(**_arguments(model_dir, rollout, dtype, seed)))


def describe(engine: "AsyncLLM", rollout: RolloutConfig, dtype: str) -> InstanceDescriptor:
    config = engine.vllm_config
    model, parallel, block = config.model_config, config.parallel_config, config.cache_config.block_size
    kv_heads = model.get_num_kv_heads(parallel)
    shape = f"{model.get_num_layers(parallel)}x{kv_heads}x{model.get_head_size()}"
    kv_tokens = config.cache_config.num_gpu_blocks * block
    on_gpu = rollout.gpus_per_instance > 0
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(str(i) for i in range(rollout.gpus_per_instance))
    return InstanceDescriptor(
        node=platform.node(),
        devices=tuple(f"cuda:{device}" for device in visible.split(",")) if on_gpu else ("cpu",),
        # Layers x KV heads x head size of one rank, then element type, block and ranks: whatever decides how a
        # block's bytes lie in memory.
        layout=f"{shape}-{dtype}-block{block}-tp{rollout.tensor_parallel}-{'gpu' if on_gpu else 'cpu'}",
        slots=min(rollout.slots, int(kv_tokens * rollout.kv_overcommit) // model.max_model_len),
        kv_capacity_tokens=kv_tokens,
    )


def engine_processes(engine: "AsyncLLM") -> Mapping[int, int | None]:
    """Process id to exit code (None: alive) of the engine's own processes."""
    manager = engine.engine_core.resources.engine_manager
    return {process.pid: process.exitcode for process in manager.processes} if manager else {}


def stop_engine(engine: "AsyncLLM") -> None:
    """End the engine and wait until its processes are gone; may be called twice."""
    # Otherwise vLLM's own reader takes the end of its engine for an accident and prints a stack trace.
    if engine.output_handler is not None:
        engine.output_handler.cancel()
    # Killed at once: an engine's process holds nothing that is worth a farewell, and a polite one takes seconds.
    engine.shutdown(timeout=0)


def _arguments(model_dir: str, rollout: RolloutConfig, dtype: str, seed: int) -> dict[str, Any]:
    from dora_rl.runtime.engine_worker import ManyProcesses, OneProcess, WorkerExtension

    on_gpu = rollout.gpus_per_instance > 0
    return {
        "model": model_dir,
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "generation_config": "vllm",  # not the model's: sampling parameters and stop ids come with each request
        "dtype": dtype,
        "seed": seed,
        "max_model_len": rollout.max_prompt_tokens + rollout.max_completion_tokens,
        "max_num_seqs": rollout.slots,
        "block_size": rollout.block_tokens,
        "enable_prefix_caching": True,
        # After temperature, as the trainer computes them.
        "logprobs_mode": "processed_logprobs",
        # On the CPU compiling costs a minute and a half and gains a tenth.
        "enforce_eager": not on_gpu,
        "tensor_parallel_size": rollout.tensor_parallel,
        "kv_cache_memory_bytes": None if on_gpu else int(rollout.kv_cache_gib * 2**30),
        "distributed_executor_backend": OneProcess if rollout.tensor_parallel == 1 else ManyProcesses,
        "worker_extension_cls": f"{WorkerExtension.__module__}.{WorkerExtension.__qualname__}",
        "kv_transfer_config": {
            "kv_connector": "KvConnector",
            "kv_connector_module_path": "dora_rl.runtime.kv_connector",
            "kv_role": "kv_both",
        },
        "disable_log_stats": True,
    }


def _variables(rollout: RolloutConfig, pace: PaceConfig | None) -> dict[str, str]:
    from_outside = {
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "PYTHONWARNINGS": "ignore",
        "TORCH_LOGS": "-all",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        OWNER_VARIABLE: str(os.getpid()),
        PACE_VARIABLE: pace.model_dump_json() if pace is not None else "",
    }
    if rollout.gpus_per_instance > 0:
        return from_outside
    return from_outside | {
        "OMP_NUM_THREADS": str(rollout.cpus_per_instance),
        # Trainer and instances share the cores in a pattern that changes by the second: leave placing threads to
        # the kernel, and let idle ones sleep instead of spinning on a core that another process needs.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_WAIT_POLICY": "PASSIVE",
    }


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
