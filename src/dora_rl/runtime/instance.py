"""One rollout instance: vLLM's asynchronous engine with exactly one version of the weights.

A plain class; cluster.py makes a Ray actor of it. Token ids in, token ids and their processed log-probabilities
out. It refuses what is out of order (ProtocolError), and says so when its engine fails (RemoteError) or is gone
(ProcessLost). Knows nothing of schedules, rewards or text.
"""

import asyncio
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import xxhash

from dora_rl.config import PaceConfig, RolloutConfig
from dora_rl.core.messages import ProtocolError
from dora_rl.core.types import InstanceDescriptor, InstanceId, RolloutId, Version
from dora_rl.runtime.engine import describe, engine_processes, start_engine, stop_engine
from dora_rl.runtime.instance_kv import InstanceKv, Received
from dora_rl.runtime.ports import GenerateRequest, GenerateResult, LoadReport, Partial, ProcessLost
from dora_rl.runtime.staging import PROBE, staged
from dora_rl.wire.errors import RemoteError
from dora_rl.wire.kv import Bytes, KeptKv, KvHandle
from dora_rl.wire.weights import Manifest, Transport

if TYPE_CHECKING:
    from vllm.outputs import RequestOutput
    from vllm.sampling_params import SamplingParams
    from vllm.v1.engine.async_llm import AsyncLLM

CANARY_TOLERANCE = {"float32": 1e-3, "bfloat16": 0.5}
"""Largest difference per token, in nats, at which engine and trainer still hold the same weights. Right loads
differ by rounding: in float32 by at most 6e-5 on SmolLM2-135M, in bfloat16 by up to 0.43."""

_FINISH_REASONS = {"stop": "stop", "length": "length", "abort": "detached"}


@dataclass(slots=True)
class _Answer:
    """One running request."""

    request: GenerateRequest
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    reported: int = 0
    """How many of the tokens `partials` has given out."""
    finish_reason: str | None = None
    began: float = field(default_factory=time.monotonic)
    first_token_s: float = 0.0
    cached_tokens: int = 0
    """Prefix tokens that were there already when it was scheduled: in the prefix cache, or loaded."""
    told_at: float = 0.0
    """When it was asked to end; 0: it was not."""
    keep: KeptKv | None = None
    received: Received | None = None
    """KV of its prefix, held until the engine has loaded it."""

    @property
    def engine_id(self) -> str:
        return f"{self.request.rollout}-{self.request.attempt}"

    def take(self, output: "RequestOutput") -> None:
        if not self.token_ids:
            self.first_token_s = time.monotonic() - self.began
            self.cached_tokens = output.num_cached_tokens or 0
        (new,) = output.outputs
        if new.token_ids and self.received is not None:
            self.received.memory.close()  # loaded by now, if it ever is
        for token, at_position in zip(new.token_ids, new.logprobs or (), strict=True):
            self.token_ids.append(token)
            self.logprobs.append(at_position[token].logprob)
        self.finish_reason = new.finish_reason


class Instance:
    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._engine: AsyncLLM | None = None
        self._name = InstanceId("instance")
        self._version: Version | None = None
        """The one that may be asked for; None before the first load, while one runs, and after one that failed."""
        self._loading = False
        self._answers: dict[RolloutId, _Answer] = {}
        self._kv: InstanceKv | None = None
        self.prefix_tokens_shared = 0
        """Prompt tokens that were found in the prefix cache instead of being computed, since the start."""

    async def start(
        self,
        instance: InstanceId,
        model_dir: str,
        rollout: RolloutConfig,
        dtype: str,
        seed: int,
        pace: PaceConfig | None = None,
    ) -> InstanceDescriptor:
        """Start the engine (seconds; the loop is blocked, as nothing can be asked yet) and let it compute once.

        Its sampling is seeded from the run's `seed` and its name. Raises RemoteError when the engine does not come up.
        """
        if self._engine is not None:
            raise ProtocolError(f"{instance}: started twice; start another instance instead")
        self._name, self._rollout, self._tolerance = instance, rollout, CANARY_TOLERANCE[dtype]
        self._pace = pace
        self._limit = rollout.max_prompt_tokens + rollout.max_completion_tokens
        try:
            # Two engines with one seed would draw the same random numbers for different answers.
            own_seed = xxhash.xxh32_intdigest(f"{seed}/{instance}".encode())
            self._engine = start_engine(model_dir, rollout, dtype, own_seed, pace)
            await _warm_up(self._engine, length=min(8, self._limit - 3))
        except Exception as error:
            raise RemoteError(
                f"{instance}: the engine did not start on {model_dir}: {_one_line(error)}; its own output is in Ray's "
                "session folder, session_latest/logs/worker-*.err"
            ) from error
        if pace is not None:
            # The engine's steps have a time to keep to; handing answers in and out has not. (Of this thread alone.)
            os.setpriority(os.PRIO_PROCESS, 0, 19)
        descriptor = describe(self._engine, rollout, dtype)
        self._kv = InstanceKv(self._ask, descriptor, rollout)
        return descriptor

    async def load(self, manifest: Manifest) -> LoadReport:
        """Change to another version and prove, by its canary, that the engine has it.

        Raises ProtocolError while answers run, RemoteError when the weights are late, damaged or not the
        manifest's; the instance then serves nothing until a later load succeeds.
        """
        engine = self._running_engine()
        if self._answers or self._loading:
            busy = "another load runs" if self._loading else f"answers {sorted(self._answers)} run"
            raise ProtocolError(
                f"{self._name}: version {manifest.version} cannot be loaded while {busy}; wait for them"
            )
        began = time.monotonic()
        self._version, self._loading = None, True
        try:
            async with asyncio.timeout(self._rollout.no_progress_s):
                await self._hand_over(engine, manifest)
                difference = await self._canary_difference(engine, manifest)
        except TimeoutError as error:
            limit = self._rollout.no_progress_s
            raise RemoteError(
                f"{self._name}: loading version {manifest.version} took longer than rollout.no_progress_s = {limit:g} s"
            ) from error
        finally:
            self._loading = False
        # Written so that a NaN fails too.
        if not difference <= self._tolerance:
            raise RemoteError(
                f"{self._name}: after loading version {manifest.version} the engine's log-probabilities differ from "
                f"the trainer's by up to {difference:.3g}, at most {self._tolerance:g} expected; it serves other "
                "weights than were published"
            )
        if self._pace is not None:
            await asyncio.sleep(max(0.0, self._pace.load_s - (time.monotonic() - began)))
        self._version = manifest.version
        return LoadReport(seconds=time.monotonic() - began, canary_max_abs_diff=difference)

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """Sample one segment; the token that stops it is part of it.

        A sampled token's log-probability is that of log softmax(logits / temperature). With `greedy` the engine
        takes the likeliest token and reports log softmax(logits), temperature 1.
        """
        engine, kv = self._running_engine(), self._moving()
        self._check(request)
        answer = self._answers[request.rollout] = _Answer(request, received=kv.take(request.rollout))
        kept: KvHandle | None = None
        try:
            await self._follow(engine, answer)
            if answer.keep is not None:
                aborted = answer.finish_reason == "abort"
                kept = await kv.collect(answer.engine_id, answer.keep, request, answer.token_ids, aborted=aborted)
        finally:
            del self._answers[request.rollout]
            if answer.keep is not None and kept is None:
                answer.keep.close()
            if answer.received is not None:
                kv.release(answer.received, loaded=bool(answer.token_ids))
            if late := kv.take(request.rollout):
                late.memory.close()  # it came when this answer was no longer waited for, and its prefix was computed
        return _result(answer, kept)

    async def partials(self) -> list[Partial]:
        """What the unfinished answers have sampled since the last call; answers without news are left out.

        Raises ProcessLost when the engine is gone, which a load or an idle engine would not notice by itself.
        """
        self._check_alive(self._running_engine())
        news = []
        for answer in self._answers.values():
            start, answer.reported = answer.reported, len(answer.token_ids)
            # A complete answer is about to be handed out as a whole; as a part, somebody might go on with it.
            if answer.reported > start and answer.finish_reason is None:
                news.append(
                    Partial(
                        rollout=answer.request.rollout,
                        attempt=answer.request.attempt,
                        token_ids=tuple(answer.token_ids[start:]),
                        logprobs=tuple(answer.logprobs[start:]),
                    )
                )
        return news

    async def kv_tokens(self) -> int:
        block = self._rollout.block_tokens
        prompts = {answer.request.prompt_token_ids for answer in self._answers.values()}
        own = [
            len(answer.request.completion_token_ids)
            + len(answer.token_ids)
            + len(answer.request.prompt_token_ids) % block
            for answer in self._answers.values()
        ]
        return sum(len(prompt) // block * block for prompt in prompts) + sum(-(-one // block) * block for one in own)

    async def detach(self, rollout: RolloutId, attempt: int, *, keep: bool) -> None:
        """Ask a running segment to end now, with reason "detached"; one that has just ended is left alone."""
        answer = self._answers.get(rollout)
        if answer is None or answer.request.attempt != attempt or answer.told_at:
            return
        engine, answer.told_at = self._running_engine(), time.monotonic()
        if keep:
            answer.keep = KeptKv.empty(answer.engine_id, self._rollout.tensor_parallel)
            # Known to the engine before the abort: both come to it in order.
            await self._moving().order(answer.engine_id, answer.keep)
        # It is known to the engine by now: between its entry in the table and in the engine nothing awaits.
        await engine.abort(answer.engine_id)

    async def receive_kv(self, rollout: RolloutId, handle: KvHandle, data: Sequence[Bytes] | None) -> str:
        return await self._moving().receive(rollout, handle, data, self._version)

    async def read_kv(self, rollout: RolloutId) -> Sequence[Bytes]:
        return self._moving().read(rollout)

    async def drop_kv(self, rollout: RolloutId) -> None:
        self._moving().drop(rollout)

    async def measure_decode(self, *, batch: int, tokens: int, prompt: Sequence[int]) -> float:
        """Decoded tokens per second of `batch` answers at once, from everyone's first token to the last one's end."""
        if self._version is None or self._answers:
            raise ProtocolError(f"{self._name}: measuring needs a loaded version and no running answer")
        requests = [
            GenerateRequest(
                rollout=RolloutId(-1 - i),  # real ones are never negative
                attempt=0,
                version=self._version,
                prompt_token_ids=tuple(prompt),
                completion_token_ids=(),
                max_tokens=tokens,
                temperature=self._rollout.temperature,
                greedy=False,
                stop_token_ids=(),
            )
            for i in range(batch)
        ]
        running = [asyncio.ensure_future(self.generate(request)) for request in requests]
        await asyncio.sleep(0)
        while not all(answer.token_ids for answer in self._answers.values()):
            await asyncio.sleep(0.001)
        began, before = time.monotonic(), sum(len(answer.token_ids) for answer in self._answers.values())
        results = await asyncio.gather(*running)
        return (sum(len(result.token_ids) for result in results) - before) / (time.monotonic() - began)

    def processes(self) -> tuple[int, ...]:
        """Process ids of the engine."""
        return tuple(engine_processes(self._running_engine()))

    async def pace_report(self) -> tuple[int, int]:
        """Paced pieces of work so far, and how many took longer than the law says."""
        pieces, overruns = (await self._ask("pace_report"))[0]
        return pieces, overruns

    async def shutdown(self) -> None:
        """End the engine and wait until its processes are gone."""
        engine, self._engine, self._version = self._engine, None, None
        if engine is not None:
            stop_engine(engine)

    def _check_alive(self, engine: "AsyncLLM") -> None:
        codes = [code for code in engine_processes(engine).values() if code is not None]
        if codes:
            raise ProcessLost(f"{self._name}: the engine's process is gone (exit codes {codes})")

    def _running_engine(self) -> "AsyncLLM":
        if self._engine is None:
            raise ProtocolError(f"{self._name}: not started, or shut down; start it first")
        return self._engine

    def _moving(self) -> InstanceKv:
        if self._kv is None:
            raise ProtocolError(f"{self._name}: not started; start it first")
        return self._kv

    async def _ask(self, what: str, *arguments: Any) -> list[Any]:
        """Call a method of the engine's workers, which answer between two of its steps; one answer a rank.

        Raises ProcessLost when the engine is gone: vLLM answers nobody who asked just before its end.
        """
        engine, limit = self._running_engine(), self._rollout.move_timeout_s
        try:
            async with asyncio.timeout(limit):
                answers: list[Any] = await engine.collective_rpc(what, args=arguments)
                return answers
        except TimeoutError as error:
            self._check_alive(engine)
            raise RemoteError(
                f"{self._name}: the engine did not answer {what} within rollout.move_timeout_s = {limit:g} s"
            ) from error

    def _check(self, request: GenerateRequest) -> None:
        if request.version != self._version:
            raise ProtocolError(
                f"{self._name}: rollout {request.rollout} wants version {request.version}, served is {self._version}; "
                "load it first"
            )
        if request.rollout in self._answers:
            raise ProtocolError(f"{self._name}: rollout {request.rollout} runs already; wait for its answer")
        limit = self._limit
        given = len(request.prompt_token_ids) + len(request.completion_token_ids)
        if not 1 <= request.max_tokens <= limit - given:
            raise ProtocolError(
                f"{self._name}: rollout {request.rollout} asks for {request.max_tokens} more tokens after {given}; "
                f"1 to {limit - given} are left of rollout.max_prompt_tokens + rollout.max_completion_tokens = {limit}"
            )

    async def _follow(self, engine: "AsyncLLM", answer: _Answer) -> None:
        """Take in an answer's tokens until it ends. Raises RemoteError when it stands still or the engine fails."""
        from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

        request, patience = answer.request, self._rollout.no_progress_s
        # Blocks of one version must never serve another one's request, whatever else goes wrong.
        prompt = _tokens([*request.prompt_token_ids, *request.completion_token_ids], salt=str(request.version))
        clock = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(patience) as deadline:
                async for output in engine.generate(prompt, _sampling(answer), answer.engine_id):
                    if not answer.token_ids:
                        self.prefix_tokens_shared += output.num_cached_tokens or 0
                    answer.take(output)
                    deadline.reschedule(clock.time() + patience)
        except TimeoutError as error:
            raise RemoteError(
                f"{self._name}: rollout {request.rollout} got no token for rollout.no_progress_s = {patience:g} s "
                f"after {len(answer.token_ids)}"
            ) from error
        except EngineDeadError as error:
            codes = list(engine_processes(engine).values())
            raise ProcessLost(f"{self._name}: the engine's process is gone (exit codes {codes})") from error
        except EngineGenerateError as error:
            raise RemoteError(
                f"{self._name}: rollout {request.rollout}: {_one_line(error.__cause__ or error)}"
            ) from error

    async def _hand_over(self, engine: "AsyncLLM", manifest: Manifest) -> None:
        staging = staged(self._transport, manifest, self._rollout.no_progress_s)
        # In a thread, because the transport may block and partials must still be answered.
        stage = await asyncio.to_thread(staging.__enter__)
        try:
            await engine.collective_rpc("load_staged_weights", args=(stage.path, stage.slots))
        finally:
            staging.__exit__(None, None, None)
        # The cache is salted with the version, so stale blocks could never be hit; they are only in the way.
        if not await engine.reset_prefix_cache():
            raise RemoteError(f"{self._name}: the engine kept its prefix cache, so some request still holds blocks")

    async def _canary_difference(self, engine: "AsyncLLM", manifest: Manifest) -> float:
        canary = manifest.canary
        ours = await _probe(engine, canary.token_ids, f"{PROBE}canary-{manifest.version}")
        return max(abs(a - b) for a, b in zip(ours, canary.logprobs, strict=True))


def _result(answer: _Answer, kept: KvHandle | None) -> GenerateResult:
    request, received = answer.request, answer.received
    prefix = len(request.prompt_token_ids) + len(request.completion_token_ids)
    continued = bool(request.completion_token_ids and answer.token_ids)
    return GenerateResult(
        rollout=request.rollout,
        attempt=request.attempt,
        version=request.version,
        token_ids=tuple(answer.token_ids),
        logprobs=tuple(answer.logprobs),
        finish_reason=_FINISH_REASONS[answer.finish_reason or ""],  # type: ignore[arg-type]
        loaded_tokens=min(received.tokens_of(request), prefix - 1) if continued and received else 0,
        recomputed_tokens=prefix - answer.cached_tokens - 1 if continued else 0,
        resume_s=answer.first_token_s + (received.seconds if received else 0.0) if continued else 0.0,
        kept=kept,
        keep_s=time.monotonic() - answer.told_at if kept else 0.0,
    )


def _sampling(answer: _Answer) -> "SamplingParams":
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    request = answer.request
    transfer: dict[str, Any] = {"name": answer.engine_id}
    if answer.received is not None and (tokens := answer.received.tokens_of(request)):
        transfer["load"] = {"paths": answer.received.memory.paths, "tokens": tokens}
    return SamplingParams(
        temperature=0.0 if request.greedy else request.temperature,
        max_tokens=request.max_tokens,
        stop_token_ids=list(request.stop_token_ids),
        ignore_eos=True,  # only the request's own stop ids end an answer, not what the model's files say
        logprobs=0,  # of the sampled token alone
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
        # vLLM gives requests ids of its own; the connector knows them by this name.
        extra_args={"kv_transfer_params": transfer},
    )


async def _warm_up(engine: "AsyncLLM", length: int) -> None:
    """Let the engine do what it will do later: score a prompt, and sample for one answer and for several at once.

    The first use of each compiles kernels, for up to a minute on a new machine: that belongs to the start, not to the
    first load or somebody's answer.
    """
    from vllm.sampling_params import SamplingParams

    await _probe(engine, (0,) * length, f"{PROBE}warm-up")
    sampling = SamplingParams(max_tokens=2, logprobs=0, ignore_eos=True, detokenize=False)

    async def sample(name: str) -> None:
        async for _ in engine.generate(_tokens((0,) * length, salt=name), sampling, name):
            pass

    for answers in (1, 4):
        await asyncio.gather(*(sample(f"{PROBE}warm-up-{answers}-{one}") for one in range(answers)))


async def _probe(engine: "AsyncLLM", token_ids: Sequence[int], name: str) -> list[float]:
    """The engine's own log-probabilities of these tokens, the first excepted, by the code path that serves prompts."""
    from vllm.sampling_params import SamplingParams

    sampling = SamplingParams(temperature=1.0, max_tokens=1, prompt_logprobs=0, logprobs=0, detokenize=False)
    found: Any = None
    async for output in engine.generate(_tokens(token_ids, salt=name), sampling, name):
        found = output.prompt_logprobs or found
    return [at[token].logprob for token, at in zip(token_ids[1:], found[1:], strict=True)]


def _tokens(token_ids: Sequence[int], *, salt: str) -> Any:
    from vllm.inputs.engine import tokens_input

    return tokens_input(list(token_ids), cache_salt=salt)


def _one_line(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0] if text else 'no message'}"
