"""Records all rollouts used for training."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import lightning.pytorch as pl

from lit_async_rl.callbacks.parts import policy_module, rollout_data, run_folder
from lit_async_rl.replay.tape import TapeWriter
from lit_async_rl.runtime.files import absolute
from lit_async_rl.utils.checks import check_range
from lit_async_rl.utils.lightning_types import AnyModule, AnyTrainer


class RolloutTape(pl.Callback):
    """Writes every trained group, with its optimizer step, to a tape (see `lit_async_rl.replay.tape`).

    Args:
        folder: folder of the tape; None is `tape` in the log folder. Needed to continue the tape after a resume.
        every_n_steps: steps per file. Checkpoints are never ahead of the tape: saving one flushes it, and includes rows
            that a full disk did not take.
        full_disk_timeout_s: seconds to wait for space on a full disk at the end of training.

    Raises:
        ValueError: a setting is out of range; when training starts, there is no folder to write to, the folder holds
            the tape being replayed, or `PolicyModule` or `RolloutDataModule` is missing.
        OSError: the disk is still full at the end of training.
    """

    def __init__(self, folder: str | None = None, every_n_steps: int = 1, full_disk_timeout_s: float = 60.0) -> None:
        check_range("RolloutTape", "integer >= 1", every_n_steps=every_n_steps)
        check_range("RolloutTape", ">= 0", full_disk_timeout_s=full_disk_timeout_s)
        self.folder = None if folder is None else os.path.expanduser(folder)
        self.every_n_steps = every_n_steps
        self.full_disk_timeout_s = full_disk_timeout_s
        self._writer: TapeWriter | None = None
        self._step = 0
        self._unwritten_rows: list[dict[str, Any]] = []  # unwritten rows of the resumed run

    def on_train_start(self, trainer: AnyTrainer, pl_module: AnyModule) -> None:
        """Opens the tape on rank 0."""
        policy_module(pl_module, "RolloutTape")
        source = rollout_data(trainer, "RolloutTape").tape
        self._step = trainer.global_step
        log_dir = run_folder(trainer)  # a collective: all ranks call, though only one writes
        folder = self.folder or f"{log_dir}/tape"
        if source is not None and Path(folder).resolve() == source.folder.resolve():
            raise ValueError(
                f"RolloutTape.folder={folder!r} is the tape that data.admission=FromTape trains from, and recording "
                "would rename its files: leave RolloutTape out, or give it another folder"
            )
        if not trainer.is_global_zero:
            return
        if self.folder is None and log_dir is None:
            raise ValueError("RolloutTape.folder must be set, because the run has no log folder")
        self._writer = TapeWriter(absolute(folder), trainer.global_step, self._unwritten_rows)
        self._unwritten_rows = []

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Appends the groups of a completed step."""
        if self._writer is None or trainer.global_step == self._step:
            return
        module = policy_module(pl_module, "RolloutTape")
        data = rollout_data(trainer, "RolloutTape")
        self._writer.append(
            self._step,
            module.stabilizer_signals["version"],
            data.last_step_groups,
            sampling=data.sampling.distribution,
            arrived=data.arrived_rewards,
        )
        self._step = trainer.global_step
        if self._step % self.every_n_steps == 0:
            self._writer.flush()

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Flushes the tape; the checkpoint gets unwritten rows."""
        self._flush()
        if self._writer is not None and self._writer.unwritten_rows:
            checkpoint["tape_rows"] = self._writer.unwritten_rows

    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        self._unwritten_rows = checkpoint.get("tape_rows", [])

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._writer is not None:
            self._writer.close(self.full_disk_timeout_s)

    def on_exception(self, trainer: AnyTrainer, pl_module: AnyModule, exception: BaseException) -> None:
        """Flushes the tape and releases its folder; Lightning does not call `teardown` after an exception."""
        self._flush()
        self._release()

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Releases the lock of the folder."""
        self._release()

    def _release(self) -> None:
        if self._writer is not None:
            self._writer.release()

    def _flush(self) -> None:
        if self._writer is not None:
            self._writer.flush()
