"""What this machine could have done: the floor under a run's time, from rates measured by the run's own processes.

On a CPU engines and trainer share the cores, so their work adds up: floor = tokens decoded / decode rate + tokens
trained / training rate, each rate measured while nothing else runs and with all threads. With GPUs of their own they
overlap, and the floor is the longer of the two.
"""

import asyncio
import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from dora_rl.config import Config
from dora_rl.core.messages import Close, Generated
from dora_rl.obs.folder import RunFolder
from dora_rl.obs.journal import read_journal
from dora_rl.run.recorder import Print
from dora_rl.runtime.ports import Engine, Trainer
from dora_rl.wire.iteration_files import RolloutRow, read_iteration
from dora_rl.wire.rollouts import Trajectory

MEASURED_TOKENS = 32
"""Tokens that each answer of the decode measurement has: a few seconds."""

MEASURED_GROUPS = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class Floor:
    """Times in seconds, rates in tokens per second, over all iterations."""

    decoded_tokens: int
    decode_rate: float
    decode_batch: int
    """Answers that ran at once on one instance while the rate was measured: as many as in the run, on average."""
    trained_tokens: int
    train_rate: float
    shared: bool
    """Whether engines and trainer compute on the same cores."""
    actual_s: float

    @property
    def floor_s(self) -> float:
        decode, train = self.decoded_tokens / self.decode_rate, self.trained_tokens / self.train_rate
        return decode + train if self.shared else max(decode, train)

    @property
    def share(self) -> float:
        """Of the floor's throughput that the run reached."""
        return self.floor_s / self.actual_s

    def to_text(self) -> str:
        how = "+" if self.shared else "or, if longer,"
        return (
            f"the least time this machine needs: {self.decoded_tokens} tokens decoded / {self.decode_rate:.0f} per s "
            f"(all instances, {self.decode_batch} answers each) {how} {self.trained_tokens} tokens trained / "
            f"{self.train_rate:.0f} per s = {self.floor_s:.0f} s; the iterations took {self.actual_s:.0f} s, "
            f"so they ran at {self.share:.0%} of it"
        )


async def measure_floor(
    folder: RunFolder, config: Config, engines: Collection[Engine], trainer: Trainer, out: Print
) -> Floor:
    """Measure both rates, one after the other, and write `floor.json` beside the metrics.

    Raises ValueError when the run made no iteration or trained nothing, RemoteError when a process cannot measure.
    """
    metrics = folder.read_metrics()
    if not metrics:
        raise ValueError("the run made no iteration")
    rows = [row for line in metrics for row in read_iteration(folder.iteration_file(int(line["iteration"])))]
    batch = _mean_batch(metrics, config)
    prompt = rows[-1].trajectory.prompt_token_ids
    tokens = min(MEASURED_TOKENS, config.rollout.max_completion_tokens)
    if tokens < 8:
        raise ValueError(f"answers of at most {tokens} tokens are too short to time")
    rates = await asyncio.gather(
        *(engine.measure_decode(batch=batch, tokens=tokens, prompt=prompt) for engine in engines)
    )
    groups = _groups(row for row in rows if row.status == "trained")[-MEASURED_GROUPS:]
    floor = Floor(
        decoded_tokens=decoded_tokens(folder.journal),
        decode_rate=sum(rates),
        decode_batch=batch,
        trained_tokens=sum(int(line["train/tokens"]) for line in metrics if line["train/tokens"] is not None),
        train_rate=await trainer.measure_rate(groups),
        shared=config.rollout.gpus_per_instance == 0,
        actual_s=sum(float(line["time/iteration_s"]) for line in metrics),
    )
    text = json.dumps(asdict(floor) | {"floor_s": floor.floor_s, "share": floor.share}, indent=2)
    (folder.path / "floor.json").write_text(text + "\n", encoding="utf-8")
    out("\n" + floor.to_text())
    return floor


def decoded_tokens(journal: Path) -> int:
    """Tokens that engines sampled until the last iteration closed, evaluations' answers included."""
    _, entries = read_journal(journal)
    total = closed = 0
    for event, commands in entries:
        if isinstance(event, Generated):
            total += event.num_tokens
        if any(isinstance(command, Close) for command in commands):
            closed = total
    return closed


def _mean_batch(metrics: Sequence[Mapping[str, float]], config: Config) -> int:
    """Answers per instance, averaged over the time in which it had any."""
    used = [1.0 - line["idle/slots_share"] for line in metrics]
    busy = [max(1e-6, 1.0 - line["idle/rollout_share"]) for line in metrics]
    mean = sum(u / b for u, b in zip(used, busy, strict=True)) / len(used)
    return min(config.rollout.slots, max(1, round(mean * config.rollout.slots)))


def _groups(rows: Iterable[RolloutRow]) -> list[list[Trajectory]]:
    groups: dict[int, list[Trajectory]] = {}
    for row in rows:
        groups.setdefault(row.trajectory.group_id, []).append(row.trajectory)
    return list(groups.values())
