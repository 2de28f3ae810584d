"""Reward functions in processes of their own, with a time limit for each group.

A reward function is the user's code: it may hang, crash or raise. Here it costs its own group its rewards (None,
with the reason), never the run its loop, and never turns into a 0. A pool that cannot start a worker is an error.

    score(group) -> an idle worker -> result             the worker is idle again
                                   -> raised             rewards None; the worker is idle again
                                   -> time limit passed  rewards None; worker killed and replaced
                                   -> worker died        once more on another worker, then rewards None; replaced
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError, WorkerCrashedError

from dora_rl.rl.errors import RewardError
from dora_rl.rl.rewards import Score, combine, load_reward
from dora_rl.rl.signatures import AnswerGroup, caller
from dora_rl.runtime.ports import RewardResult
from dora_rl.wire.errors import RemoteError
from dora_rl.wire.rollouts import Prompt

START_S = 60.0
"""Longest that a worker may take to start and import its functions."""


class RewardWorker:
    """The process in which reward functions run."""

    def __init__(self, specs: Sequence[str], weights: Sequence[float] = (), shaping: Sequence[str] = ()) -> None:
        names = named(specs)
        self.functions = {name: caller(load_reward(spec)) for name, spec in names.items()}
        self.weights = dict(zip(self.functions, weights, strict=False))
        self.shaping = [name for name, spec in names.items() if spec in shaping]

    def ready(self) -> bool:
        return True

    def score(
        self, prompt: Prompt, text: str, completions: Sequence[str], completion_ids: Sequence[Sequence[int]]
    ) -> list[Score]:
        """`text`: the prompt as the model sees it."""
        group = AnswerGroup(
            prompt=[dict(turn) for turn in prompt.messages] if prompt.is_chat else prompt.messages[-1]["content"],
            prompt_text=text,
            prompt_ids=prompt.token_ids,
            completions=completions,
            completion_ids=completion_ids,
            columns=prompt.columns,
        )
        return combine(self.functions, group, weights=self.weights, shaping=self.shaping)


class RewardPool:
    """Reward workers behind one handle (ports.Rewards). Made inside a running event loop; the workers start at once."""

    def __init__(
        self,
        functions: Sequence[str],
        *,
        workers: int,
        timeout_s: float,
        decode: Callable[[Sequence[int]], str],
        weights: Sequence[float] = (),
        shaping: Sequence[str] = (),
        stop_on_error: bool = False,
        start_s: float = START_S,
    ) -> None:
        """`decode`: token ids to text, special tokens included. Without `weights` all functions count once;
        `shaping`: those of `functions` that `rl.rewards.combine` treats so."""
        self._stop_on_error = stop_on_error
        self._specs = tuple(functions)
        self._weights = tuple(weights)
        self._shaping = tuple(shaping)
        self._decode = decode
        self._timeout_s = timeout_s
        self._start_s = start_s
        self._idle: asyncio.Queue[Any] = asyncio.Queue()
        self._alive: set[Any] = set()
        self._starting: set[asyncio.Task[None]] = set()
        self._broken: RemoteError | None = None
        # Reserves no core: those belong to the engines and the trainer. Never restarted by Ray: a worker that died
        # or was killed is replaced here, where the group it was scoring is known.
        self._actor = ray.remote(RewardWorker).options(num_cpus=0, max_restarts=0, max_task_retries=0)
        for _ in range(workers):
            self._start_worker()

    async def score(
        self, *, prompt: Prompt, completions: Sequence[str], completion_ids: Sequence[Sequence[int]]
    ) -> list[RewardResult]:
        """One result per completion of this prompt, in order.

        The time limit counts from the moment a worker is free. Raises RemoteError when no worker can be started, and
        with `stop_on_error` when a function fails.
        """
        if not completions:
            return []
        text = self._decode(prompt.token_ids)
        group = (prompt, text, list(completions), [list(ids) for ids in completion_ids])
        note = ""
        for _ in range(2):  # one death may be chance; two are the group's doing
            worker = await self._take()
            try:
                scores: list[Score] = await asyncio.wait_for(worker.score.remote(*group), self._timeout_s)
            except (RayActorError, WorkerCrashedError) as error:
                self._replace(worker)
                note = f"two reward workers died scoring it: {_first_line(error)}"
                continue
            except TimeoutError:
                self._replace(worker)
                note = (
                    f"scoring took longer than reward.timeout_s = {self._timeout_s:g} s; raise it or mend the function"
                )
                break
            except RayTaskError as error:
                self._idle.put_nowait(worker)
                note = _first_line(error.cause or error)
                break
            except BaseException:
                # Cancelled while the function runs: the worker is busy with work that nobody waits for.
                self._replace(worker)
                raise
            self._idle.put_nowait(worker)
            return [RewardResult(value=score.value, values=score.values) for score in scores]
        note = f"prompt {prompt.prompt_id}: {note}"
        if self._stop_on_error:
            raise RemoteError(note)
        return [RewardResult(value=None, values={}, note=note) for _ in completions]

    async def shutdown(self) -> None:
        """End every worker; a call that still waits for one gets RemoteError."""
        self._break(RemoteError("the reward pool was shut down; score nothing after shutdown()"))
        for starting in tuple(self._starting):
            starting.cancel()
        for worker in tuple(self._alive):
            self._kill(worker)

    async def _take(self) -> Any:
        worker = None if self._broken else await self._idle.get()
        if worker is None:
            self._idle.put_nowait(None)  # the mark of a broken pool stays for the next caller
            raise self._broken or RemoteError("the reward pool has no worker")
        return worker

    def _replace(self, worker: Any) -> None:
        """Kill it now; the new one comes in the background."""
        self._kill(worker)
        if self._broken is None:
            self._start_worker()

    def _start_worker(self) -> None:
        worker = self._actor.remote(self._specs, self._weights, self._shaping)
        self._alive.add(worker)
        starting = asyncio.create_task(self._until_ready(worker))
        self._starting.add(starting)
        starting.add_done_callback(self._starting.discard)

    async def _until_ready(self, worker: Any) -> None:
        try:
            await asyncio.wait_for(worker.ready.remote(), self._start_s)
        except TimeoutError:
            self._break(RemoteError(f"a reward worker is not ready after {self._start_s:g} s; free memory or cores"))
        except RayError as error:
            self._break(RemoteError(f"cannot start a reward worker: {_cause(error)}"))
        else:
            self._idle.put_nowait(worker)

    def _break(self, error: RemoteError) -> None:
        """Every caller, now and later, gets the first cause."""
        self._broken = self._broken or error
        self._idle.put_nowait(None)

    def _kill(self, worker: Any) -> None:
        self._alive.discard(worker)
        ray.kill(worker, no_restart=True)


def named(specs: Sequence[str]) -> dict[str, str]:
    """A short name for each `module:function`: the function's, or the whole where two functions share one."""
    short = [spec.rpartition(":")[2] for spec in specs]
    return {name if short.count(name) == 1 else spec: spec for name, spec in zip(short, specs, strict=True)}


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).split("\n") if line.strip()), type(error).__name__)


def _cause(error: BaseException) -> str:
    """The text of our own error out of the traceback that Ray wraps around a constructor's."""
    lines = [line.strip() for line in str(error).split("\n")]
    marks = [line for line in lines if RewardError.__name__ + ":" in line]
    return marks[-1].partition(RewardError.__name__ + ":")[2].strip() if marks else _first_line(error)
