"""Logs sampled completions."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities import rank_zero_only

from lit_async_rl.callbacks.parts import rollout_data, run_folder
from lit_async_rl.training.trackers import log_table
from lit_async_rl.utils.checks import check_range
from lit_async_rl.utils.files import append, tolerate_full_disk
from lit_async_rl.utils.folder_lock import FolderLock
from lit_async_rl.utils.lightning_types import AnyModule, AnyTrainer

COLUMNS = ["step", "group", "prompt", "completion", "answer", "reward", "oldest_version", "newest_version"]


class SampleLogger(pl.Callback):
    """Every `every_n_steps` steps, some rollouts of that step: to `samples.jsonl` in the run's folder, and as a table
    to Weights & Biases, MLflow, Trackio and TensorBoard where they are used. Of several in one Trainer one writes.

    Args:
        every_n_steps: optimizer steps between samples.
        num_groups: prompts per sample, with all of their completions.

    Raises:
        ValueError: a number is not positive; when training starts, there is no `RolloutDataModule`.
        OSError: when training starts, another process writes to the run's folder.
    """  # noqa: D205

    def __init__(self, every_n_steps: int = 20, num_groups: int = 2) -> None:
        check_range("SampleLogger", ">= 1", every_n_steps=every_n_steps, num_groups=num_groups)
        self.every_n_steps, self.num_groups = every_n_steps, num_groups
        self._step = 0
        self._writes = False
        self._folder: Path | None = None
        self._lock: FolderLock | None = None

    def on_train_start(self, trainer: AnyTrainer, pl_module: AnyModule) -> None:
        rollout_data(trainer, "SampleLogger")
        self._step, self._folder = trainer.global_step, run_folder(trainer)  # a collective: asked for on all ranks
        self._writes = [c for c in trainer.callbacks if isinstance(c, SampleLogger)][-1] is self
        if self._writes and self._folder is not None and trainer.is_global_zero:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._lock = FolderLock(self._folder, "trainer.logger's folder")

    def on_train_end(self, trainer: AnyTrainer, pl_module: AnyModule) -> None:
        self._release()

    def on_exception(self, trainer: AnyTrainer, pl_module: AnyModule, exception: BaseException) -> None:
        self._release()

    def _release(self) -> None:
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    @rank_zero_only
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """After a step."""
        if not self._writes or trainer.global_step == self._step or (trainer.global_step - 1) % self.every_n_steps:
            return
        self._step = trainer.global_step
        data = rollout_data(trainer, "SampleLogger")
        rows = [
            [
                *(trainer.global_step, group.index, group.prompt.text, rollout.text, group.prompt.answer),
                *(rollout.reward, min(rollout.versions, default=None), max(rollout.versions, default=None)),
            ]
            for group in data.last_step_groups[: self.num_groups]
            for rollout in group.rollouts
        ]
        self._write(trainer, rows)

    def _write(self, trainer: pl.Trainer, rows: Sequence[Sequence[Any]]) -> None:
        if self._folder is not None:
            path = self._folder / "samples.jsonl"
            lines = [json.dumps(dict(zip(COLUMNS, row, strict=True))) + "\n" for row in rows]
            with tolerate_full_disk(str(path)):
                append(path, "".join(lines))
        for logger in trainer.loggers:
            log_table(logger, "samples", COLUMNS, rows, trainer.global_step)
