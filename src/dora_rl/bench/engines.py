"""Real engines side by side, for benchmarks of moves: start them, and let answers go from one to another."""

import asyncio
import json
import tempfile
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

from dora_rl.config import Config, RolloutConfig
from dora_rl.core.types import FinishReason, InstanceId, RolloutId, Version
from dora_rl.models.source import prepare_model
from dora_rl.runtime.instance import Instance
from dora_rl.runtime.ports import GenerateRequest, GenerateResult, Partial
from dora_rl.train.trainer import Trainer
from dora_rl.wire.errors import RemoteError
from dora_rl.wire.weights import Manifest, MemoryTransport, write_version

VERSION = Version(0)
_rollouts = count()
_names = count()


class Engine(Instance):
    """An instance with many readers: its reports are filed by answer, whoever asks for them."""

    def __init__(self, transport: MemoryTransport) -> None:
        super().__init__(transport)
        self.reported: dict[RolloutId, list[Partial]] = defaultdict(list)
        self.kv_capacity = 0
        """Tokens."""

    async def sampled(self, answer: "MovingAnswer", tokens: int) -> bool:
        """Whether the answer's segment that runs here has reported so many tokens by now."""
        for partial in await self.partials():
            self.reported[partial.rollout].append(partial)
        news = [one for one in self.reported[answer.rollout] if one.attempt == answer.attempt]
        return sum(len(one.token_ids) for one in news) >= tokens


class EnginePool:
    """Starts engines that serve the same weights."""

    def __init__(self, config: Config, model_dir: Path) -> None:
        self._config = config
        self.model_dir = model_dir
        self._transport = MemoryTransport()
        trainer = Trainer(config, model_dir)
        self._manifest: Manifest = write_version(
            self._transport, VERSION, None, trainer.state_tensors(), trainer.canary()
        )
        self.running: list[Engine] = []
        self.vocabulary = int(json.loads((model_dir / "config.json").read_text(encoding="utf-8"))["vocab_size"])

    async def start(self, rollout: RolloutConfig) -> Engine:
        engine = Engine(self._transport)
        self.running.append(engine)
        name, config = InstanceId(f"engine-{next(_names)}"), self._config
        described = await engine.start(name, str(self.model_dir), rollout, config.model.dtype, config.run.seed)
        engine.kv_capacity = described.kv_capacity_tokens
        await engine.load(self._manifest)
        return engine


@asynccontextmanager
async def engine_pool(config: Config) -> AsyncIterator[EnginePool]:
    """All engines that were started in the block have ended when it is left."""
    with tempfile.TemporaryDirectory(prefix="dora-rl-bench-") as folder:
        model_dir = Path(folder) / "model"
        prepare_model(config.model.path, model_dir)
        engines = EnginePool(config, model_dir)
        try:
            yield engines
        finally:
            for engine in engines.running:
                await engine.shutdown()


@dataclass(slots=True)
class MovingAnswer:
    """One answer that goes from engine to engine."""

    prompt: tuple[int, ...]
    max_tokens: int
    greedy: bool = False
    stop_token_ids: tuple[int, ...] = ()
    rollout: RolloutId = field(default_factory=lambda: RolloutId(next(_rollouts)))
    attempt: int = 0
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    moves: int = 0
    loaded_tokens: int = 0
    recomputed_tokens: int = 0
    fallbacks: list[str] = field(default_factory=list)
    """Why KV was not used, one a move that fell back."""
    versions: set[Version] = field(default_factory=set)
    reason: FinishReason = "detached"
    last: GenerateResult | None = None

    @property
    def done(self) -> bool:
        return self.reason in ("stop", "length") or len(self.token_ids) >= self.max_tokens

    def request(self) -> GenerateRequest:
        return GenerateRequest(
            rollout=self.rollout,
            attempt=self.attempt,
            version=VERSION,
            prompt_token_ids=self.prompt,
            completion_token_ids=tuple(self.token_ids),
            max_tokens=self.max_tokens - len(self.token_ids),
            temperature=1.0,
            greedy=self.greedy,
            stop_token_ids=self.stop_token_ids,
        )

    async def run(self, engine: Engine, *, until: int | None = None) -> None:
        """A segment: until the answer has so many tokens and is detached, or to its end."""
        segment = asyncio.ensure_future(engine.generate(self.request()))
        if until is not None:
            wanted = until - len(self.token_ids)
            while not segment.done() and not await engine.sampled(self, wanted):
                await asyncio.sleep(0.002)
            await engine.detach(self.rollout, self.attempt, keep=True)
        self.take(await segment)

    def take(self, result: GenerateResult) -> None:
        self.token_ids += result.token_ids
        self.logprobs += result.logprobs
        self.loaded_tokens += result.loaded_tokens
        self.recomputed_tokens += result.recomputed_tokens
        self.versions.add(result.version)
        self.reason, self.last = result.finish_reason, result
        self.attempt += 1

    async def move(self, source: Engine, target: Engine, *, damage: int | None = None) -> None:
        """Hand its KV over; with `damage` the byte at that place has been flipped on the way."""
        self.moves += 1
        kept = self.last.kept if self.last else None
        if kept is None:
            self.fallbacks.append("no KV was kept")
            return
        if damage is not None:
            with Path(kept.shards[0].path).open("r+b") as file:
                file.seek(damage % kept.shards[0].nbytes)
                byte = file.read(1)
                file.seek(-1, 1)
                file.write(bytes([byte[0] ^ 1]))
        try:
            why = await target.receive_kv(self.rollout, kept, None)
        except RemoteError as error:
            why = str(error)
        if why:
            self.fallbacks.append(why)
        await source.drop_kv(self.rollout)

    async def travel(self, engines: Sequence[Engine], cuts: Sequence[int]) -> None:
        """Through the engines in turn, changing at every cut (in tokens of the answer), to its end."""
        here = 0
        for cut in sorted(cuts):
            await self.run(engines[here % len(engines)], until=cut)
            if self.done:
                return
            await self.move(engines[here % len(engines)], engines[(here + 1) % len(engines)])
            here += 1
        await self.run(engines[here % len(engines)])
