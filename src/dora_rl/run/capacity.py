"""Whether this machine can hold what a configuration asks for: the rule, and the check before anything starts.

    cores          every process's threads, and an eighth of all instances' threads together
    memory         instances * (weights + KV cache + 0.8 GiB)
                   + trainer: 4 * weights (float32 weights, gradient, two moments of AdamW) + logits + 1 GiB
                   + kept KV + 0.3 GiB a reward worker + 0.5 GiB for Ray
    /dev/shm       weights of K + 3 versions, at least 256 MiB
    GPUs           instances * gpus_per_instance
    KV cache       one answer with its prompt, in whole blocks (on the CPU; a GPU's is what is left of its memory)

On a cluster (RAY_ADDRESS) nobody knows yet which machine a process will run on, so nothing is checked there.
"""

import math
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dora_rl.config import Config, ConfigError, RolloutConfig
from dora_rl.runtime.cluster import shared_bytes

GIB = 2**30
CROWDED = 8
"""Threads of engines on one core, at most: they take turns."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """What there is."""

    cores: int
    memory_bytes: int
    """That can still be had."""
    shared_bytes: int
    gpus: int = 0

    @classmethod
    def here(cls) -> "Machine":
        return cls(
            cores=len(os.sched_getaffinity(0)),
            memory_bytes=_available(),
            shared_bytes=shutil.disk_usage("/dev/shm").free if Path("/dev/shm").is_dir() else 0,
            gpus=torch.cuda.device_count(),
        )


def check_capacity(config: Config, *, weight_bytes: int, vocabulary: int, machine: Machine | None = None) -> None:
    """Raises ConfigError, one line, about the first thing of which there is too little.

    `weight_bytes`: of the model in float32; `vocabulary`: its tokens.
    """
    there = machine or Machine.here()
    rollout, train = config.rollout, config.train
    each = {"rollout.cpus_per_instance": rollout.cpus_per_instance, "train.threads": train.threads}
    for setting, asked in each.items():
        if asked > there.cores:
            raise ConfigError(f"{setting} = {asked}, but this machine has {there.cores} cores; lower it")
    threads = rollout.instances * rollout.cpus_per_instance
    if threads > CROWDED * there.cores:
        raise ConfigError(
            f"rollout.instances * rollout.cpus_per_instance = {threads} threads, but this machine has "
            f"{there.cores} cores and {CROWDED} may share one; lower one of them"
        )
    gpus = rollout.instances * rollout.gpus_per_instance
    if gpus > there.gpus:
        raise ConfigError(
            f"rollout.instances * rollout.gpus_per_instance = {gpus} GPUs, but this machine has "
            f"{there.gpus}; lower one of them (0 GPUs run on the CPU) or join a larger cluster with RAY_ADDRESS"
        )
    parts = memory_parts(config, weight_bytes=weight_bytes, vocabulary=vocabulary)
    if (needed := sum(parts.values())) > there.memory_bytes:
        largest = max(parts, key=lambda part: parts[part])
        raise ConfigError(
            f"about {needed / GIB:.1f} GiB of memory are needed, {there.memory_bytes / GIB:.1f} GiB are free; most "
            f"goes to {largest} ({parts[largest] / GIB:.1f} GiB): lower rollout.instances, rollout.kv_cache_gib or "
            "train.micro_batch_tokens, or take a smaller model"
        )
    shared = shared_bytes(config, weight_bytes=weight_bytes)
    if shared > there.shared_bytes:
        raise ConfigError(
            f"{shared / GIB:.1f} GiB of shared memory are needed for the weights of "
            f"{config.schedule.max_staleness_versions + 3} versions, /dev/shm has {there.shared_bytes / GIB:.1f} GiB "
            "free; enlarge it (docker run --shm-size) or lower schedule.max_staleness_versions"
        )


def check_kv_cache(config: Config, facts: Mapping[str, Any]) -> None:
    """Raises ConfigError when an instance's KV cache cannot hold one whole answer. `facts`: the model's config.json."""
    rollout = config.rollout
    if rollout.gpus_per_instance or not (per_token := kv_token_bytes(facts, config.model.dtype)):
        return
    if (holds := kv_capacity_tokens(rollout, per_token)) < config.max_model_tokens:
        needed = (config.max_model_tokens // rollout.block_tokens + 1) * rollout.block_tokens * per_token
        raise ConfigError(
            f"rollout.kv_cache_gib = {rollout.kv_cache_gib:g} holds {holds} tokens of this model, but an answer with "
            f"its prompt may have {config.max_model_tokens}; raise it to {math.ceil(needed / GIB * 1e4) / 1e4:g} or "
            "more, or lower rollout.max_completion_tokens"
        )


def kv_token_bytes(facts: Mapping[str, Any], dtype: str) -> int:
    """Bytes of one token in the KV cache: keys and values of all layers. 0 when config.json does not tell."""
    heads, layers = facts.get("num_attention_heads"), facts.get("num_hidden_layers")
    size = facts.get("head_dim") or (heads and facts.get("hidden_size", 0) // heads)
    if not (heads and layers and size):
        return 0
    return int(2 * layers * (facts.get("num_key_value_heads") or heads) * size * (2 if dtype == "bfloat16" else 4))


def kv_capacity_tokens(rollout: RolloutConfig, token_bytes: int) -> int:
    """Whole blocks that fit into rollout.kv_cache_gib, in tokens."""
    return int(rollout.kv_cache_gib * GIB) // (rollout.block_tokens * token_bytes) * rollout.block_tokens


def memory_parts(config: Config, *, weight_bytes: int, vocabulary: int) -> Mapping[str, float]:
    """Bytes by what they are for."""
    rollout = config.rollout
    on_cpu = rollout.gpus_per_instance == 0
    one = (weight_bytes + rollout.kv_cache_gib * GIB if on_cpu else 0.0) + 0.8 * GIB
    # Logits and their gradient, in float32.
    logits = 2 * 4 * vocabulary * min(config.train.micro_batch_tokens, 4096)
    return {
        "the instances": rollout.instances * one,
        "the trainer": 4 * weight_bytes + logits + 1.0 * GIB,
        "kept KV": rollout.kept_kv_gib * GIB,
        "rewards and Ray": 0.3 * GIB * config.reward.workers + 0.5 * GIB,
        "published weights": shared_bytes(config, weight_bytes=weight_bytes),
    }


def _available() -> int:
    """Memory that can be had without swapping: of the machine, or of the container if that is less."""
    lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    kib = next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable"))
    return min(kib * 1024, *_container())


def _container() -> list[int]:
    """What the limits of a control group leave."""
    found = []
    for limit, used in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        try:
            most = Path(limit).read_text(encoding="ascii").strip()
            if most != "max":
                found.append(max(0, int(most) - int(Path(used).read_text(encoding="ascii"))))
        except (OSError, ValueError):
            continue
    return found or [2**63]
