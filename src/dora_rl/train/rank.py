"""What one trainer process does: the trainer, the publication of its weights, and a clock of when it was busy.

`accumulate`, `step` and `export` come one after the other; `publish` may run beside `accumulate`, on a thread of its
own. The scheduler sends no step while a version is being published, so the weights stand still under it.
"""

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

from torch import Tensor

from dora_rl.config import Config
from dora_rl.core.types import Version
from dora_rl.pace.clock import Pacer
from dora_rl.pace.law import train_s
from dora_rl.train.checkpoint import Checkpoint, prune_checkpoints, save_checkpoint
from dora_rl.train.trainer import StepReport, Trainer
from dora_rl.wire.rollouts import Trajectory
from dora_rl.wire.weights import Manifest, Transport, prune, save_version, write_version


class BusyClock:
    """Seconds during which at least one activity ran; overlapping ones count once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._active = 0
        self._since = 0.0
        self._seconds = 0.0

    @contextmanager
    def running(self) -> Iterator[None]:
        self._change(+1)
        try:
            yield
        finally:
            self._change(-1)

    def take(self) -> float:
        """Seconds since the last call; an activity under way counts up to now, and from now on."""
        with self._lock:
            self._settle()
            seconds, self._seconds = self._seconds, 0.0
            return seconds

    def _change(self, by: int) -> None:
        with self._lock:
            self._settle()
            self._active += by

    def _settle(self) -> None:
        now = time.monotonic()
        if self._active:
            self._seconds += now - self._since
        self._since = now


class TrainerRank:
    def __init__(
        self,
        config: Config,
        model_dir: Path,
        weights_dir: Path,
        export_dir: Path,
        transport: Transport,
        checkpoints_dir: Path | None = None,
    ) -> None:
        self._trainer = Trainer(config, model_dir)
        self._keep = config.audit.keep_versions
        self._pace = config.pace
        self._pacer = Pacer()
        self._held: list[tuple[int, Sequence[Trajectory], int]] = []
        """Groups of the open batch, in a paced run whose trainer computes only full batches."""
        self._weights_dir = weights_dir
        self._export_dir = export_dir
        self._checkpoints_dir = checkpoints_dir
        self._checkpoint = config.checkpoint
        self._last_checkpoint = 0
        self._transport = transport
        self._clock = BusyClock()
        self._saver = ThreadPoolExecutor(max_workers=1, thread_name_prefix="save-weights")
        self._saving: tuple[Future[None], Callable[[], None]] | None = None
        """What is being written, and how to write it once more."""

    def accumulate(self, iteration: int, attempt: int, group: Sequence[Trajectory], trained_version: int) -> None:
        if self._pace is not None and not self._pace.early_training:
            self._held.append((attempt, group, trained_version))
            return
        with self._clock.running():
            self._compute(iteration, attempt, group, trained_version)

    def _compute(self, iteration: int, attempt: int, group: Sequence[Trajectory], trained_version: int) -> None:
        began = time.monotonic()
        self._trainer.accumulate(iteration + 1, attempt, group, trained_version)
        if self._pace is not None:
            tokens = sum(len(member.completion_token_ids) for member in group)
            self._pacer.stretch(train_s(self._pace, tokens), began=began)

    def step(self, iteration: int, attempt: int) -> StepReport:
        """`busy_s` of the report is everything since the last one: gradients, step and publication."""
        with self._clock.running():
            held, self._held = self._held, []
            for of_attempt, group, trained_version in held:
                if of_attempt == attempt:
                    self._compute(iteration, attempt, group, trained_version)
            began = time.monotonic()
            report = self._trainer.step(iteration + 1, attempt)
            if self._pace is not None:
                self._pacer.stretch(self._pace.step_s, began=began)
        return replace(report, busy_s=self._clock.take())

    def publish(self, version: Version, parent: Version | None) -> Manifest:
        """Put the current weights into the store; the copy on disk follows behind.

        If the previous version's copy failed, that is tried again first; its error is raised if it fails once more.
        """
        with self._clock.running():
            self._await_save()
            tensors = self._trainer.state_tensors()
            began = time.monotonic()
            manifest = write_version(self._transport, version, parent, tensors, self._trainer.canary())
            if self._pace is not None:
                time.sleep(max(0.0, self._pace.publish_s - (time.monotonic() - began)))
            checkpoint = self._due_checkpoint(version, tensors)
        save = partial(self._save, manifest, tensors, checkpoint)
        self._saving = self._saver.submit(save), save
        return manifest

    def _due_checkpoint(self, version: Version, weights: Mapping[str, Tensor]) -> Checkpoint | None:
        """A copy of everything, while it stands still; None when none is due."""
        iteration, every = self._trainer.finished_iterations, self._checkpoint.every_iterations
        if self._checkpoints_dir is None or not every or iteration - self._last_checkpoint < every:
            return None
        self._last_checkpoint = iteration
        return Checkpoint(iteration=iteration, version=version, model=weights, optimizer=self._trainer.moments())

    def pace_report(self) -> tuple[int, int]:
        """Paced groups and steps so far, and how many took longer than the law says."""
        return self._pacer.pieces, self._pacer.overruns

    def export(self) -> None:
        self._await_save()
        self._trainer.export(self._export_dir)

    def measure_rate(self, groups: Sequence[Sequence[Trajectory]]) -> float:
        return self._trainer.measure_rate(groups)

    def _save(self, manifest: Manifest, tensors: Mapping[str, Tensor], checkpoint: Checkpoint | None) -> None:
        save_version(self._weights_dir / str(manifest.version), manifest, tensors)
        prune(self._weights_dir, self._keep)
        if checkpoint is not None and self._checkpoints_dir is not None:
            save_checkpoint(self._checkpoints_dir / str(checkpoint.iteration), checkpoint)
            prune_checkpoints(self._checkpoints_dir, self._checkpoint.keep)

    def _await_save(self) -> None:
        if self._saving is None:
            return
        saving, again = self._saving
        if saving.exception() is not None:
            again()
        self._saving = None
