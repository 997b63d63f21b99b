"""Records all that is trained on."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl

from lit_async_rl.callbacks.parts import policy_module, rollout_data, run_folder
from lit_async_rl.replay.tape import TapeWriter
from lit_async_rl.utils.lightning_types import AnyModule, AnyTrainer


class RolloutTape(pl.Callback):
    """Writes every group, with the step that was trained on it, to a tape: see `lit_async_rl.replay.tape`.

    Args:
        folder: of the tape; None is `tape` in the log folder. A resumed run that goes on with its tape needs its name.
        every_n_steps: steps in one file. Checkpoints are never ahead of the tape: saving one writes what there is, and
            takes along what a full disk would not take.
        full_disk_timeout_s: how long the end of training waits for room on a full disk.

    Raises:
        ValueError: a number is not positive; when training starts, there is no folder to write to, or module or data
            module is another.
        OSError: the disk is full at the end, and stays so.
    """

    def __init__(self, folder: str | None = None, every_n_steps: int = 1, full_disk_timeout_s: float = 60.0) -> None:
        if every_n_steps < 1:
            raise ValueError(f"RolloutTape.every_n_steps must be >= 1, got {every_n_steps}")
        if full_disk_timeout_s < 0:
            raise ValueError(f"RolloutTape.full_disk_timeout_s must be >= 0, got {full_disk_timeout_s}")
        self.folder, self.every_n_steps, self.full_disk_timeout_s = folder, every_n_steps, full_disk_timeout_s
        self._writer: TapeWriter | None = None
        self._step = 0
        self._waiting: list[dict[str, Any]] = []  # by the run that this one resumes

    def on_train_start(self, trainer: AnyTrainer, pl_module: AnyModule) -> None:
        """Opens the tape, on rank 0."""
        policy_module(pl_module, "RolloutTape")
        rollout_data(trainer, "RolloutTape")
        self._step = trainer.global_step
        log_dir = run_folder(trainer)  # a collective: asked for on all ranks
        if not trainer.is_global_zero:
            return
        if self.folder is None and log_dir is None:
            raise ValueError("RolloutTape.folder is not set, and the run has no log folder")
        folder = self.folder or f"{log_dir}/tape"
        self._writer = TapeWriter(folder, trainer.global_step, self._waiting)
        self._waiting = []

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """After a step."""
        if self._writer is None or trainer.global_step == self._step:
            return
        module, data = policy_module(pl_module, "RolloutTape"), rollout_data(trainer, "RolloutTape")
        self._writer.append(self._step, module.stabilizer_signals["version"], data.last_step_groups)
        self._step = trainer.global_step
        if self._step % self.every_n_steps == 0:
            self._writer.flush()

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """What the checkpoint was trained on is on the disk before it, or in it."""
        self._flush()
        if self._writer is not None and self._writer.waiting:
            checkpoint["tape_rows"] = self._writer.waiting

    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Rows that are still to be written."""
        self._waiting = checkpoint.get("tape_rows", [])

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Writes the rest."""
        if self._writer is not None:
            self._writer.close(self.full_disk_timeout_s)

    def on_exception(self, trainer: AnyTrainer, pl_module: AnyModule, exception: BaseException) -> None:
        """Writes the rest."""
        self._flush()

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Lets others use the folder."""
        if self._writer is not None:
            self._writer.release()

    def _flush(self) -> None:
        if self._writer is not None:
            self._writer.flush()
