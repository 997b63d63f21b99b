"""One run: trained by the ordinary command line, with snapshots of the policy that are evaluated afterwards.

Evaluating while training stands still would give an asynchronous engine time to catch up, and evaluating beside the
training would slow it down; so the clock runs through the training alone, and held-out accuracy is measured later.
"""

from __future__ import annotations

import csv
import os
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch

from benchmarks.common.process import csv_logger, recorded
from benchmarks.time_to_accuracy.suite import Cell, workloads
from lit_async_rl.cli.app import AsyncRLCLI
from lit_async_rl.utils.lightning_types import AnyModule, AnyTrainer

ACCURACY = "accuracy.csv"
OFF = ("checkpoint", "samples", "gradients", "verdict", "summary", "progress")  # default callbacks that cost time


class Recorder(pl.Callback):
    """Logs `bench/wall_s`, `bench/cpu_s` and `bench/tokens` since training began, and keeps copies of the policy.

    Args:
        every_n_steps: optimizer steps between two copies; the first and the last policy are kept, too.
    """

    def __init__(self, every_n_steps: int) -> None:
        self.every_n_steps = every_n_steps
        self.snapshots: list[tuple[int, float, int, dict[str, torch.Tensor]]] = []
        self.loads: list[float] = []
        self._began = self._cpu = 0.0
        self._tokens = 0

    def on_train_start(self, trainer: AnyTrainer, pl_module: AnyModule) -> None:
        self._began, self._cpu = time.monotonic(), time.process_time()
        self._keep(trainer, pl_module, 0.0)

    def on_train_batch_end(
        self, trainer: AnyTrainer, pl_module: AnyModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._tokens += int(batch.loss_mask.sum())
        wall_s = time.monotonic() - self._began
        values = {"bench/wall_s": wall_s, "bench/cpu_s": time.process_time() - self._cpu}
        pl_module.log_dict(values | {"bench/tokens": float(self._tokens)})
        step = trainer.global_step
        if step != self.snapshots[-1][0] and (step % self.every_n_steps == 0 or step == trainer.max_steps):
            self._keep(trainer, pl_module, wall_s)

    def _keep(self, trainer: AnyTrainer, pl_module: AnyModule, wall_s: float) -> None:
        state = {name: tensor.detach().clone() for name, tensor in pl_module.state_dict().items()}
        self.snapshots.append((trainer.global_step, wall_s, self._tokens, state))
        self.loads.append(os.getloadavg()[0])


def run_cell(cell: Cell, out: Path) -> None:
    """Trains one cell, then evaluates its snapshots."""
    folder, workload = out / cell.folder, workloads()[cell.workload]
    with recorded(folder, cell.arguments()) as result:
        quiet = [part for name in OFF for part in (f"--defaults.{name}", "null")]
        quiet += ["--trainer.enable_progress_bar", "false", "--trainer.enable_checkpointing", "false"]
        arguments = [*cell.arguments(), *csv_logger(folder), *quiet]
        cli = AsyncRLCLI([*arguments, "--data.validation.prompts", "null"])
        recorder = Recorder(max(1, round(workload.snapshot_steps * cell.num_steps / workload.num_steps)))
        callbacks: list[pl.Callback] = cli.trainer.callbacks  # type: ignore[attr-defined]
        callbacks.append(recorder)
        try:
            cli.trainer.fit(cli.model, cli.datamodule)
        finally:
            result["loads"] = recorder.loads
            result["cpus"] = os.cpu_count()
            evaluate(AsyncRLCLI([*arguments, *workload.evaluation]), recorder, folder)


def evaluate(cli: AsyncRLCLI, recorder: Recorder, folder: Path) -> None:
    """Held-out accuracy of every snapshot, in `accuracy.csv`."""
    cli.trainer.loggers = []
    with (folder / ACCURACY).open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["step", "wall_s", "tokens", "accuracy"])
        for step, wall_s, tokens, state in recorder.snapshots:
            cli.model.load_state_dict(state)
            found = cli.trainer.validate(cli.model, cli.datamodule, verbose=False)[0]
            rows.writerow([step, wall_s, tokens, found["val/pass@1"]])
            file.flush()
