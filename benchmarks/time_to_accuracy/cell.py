"""One run: trained by the ordinary command line, with snapshots of the policy that are evaluated afterwards.

Evaluating while training stands still would give an asynchronous engine time to catch up, and evaluating beside the
training would slow it down; so the clock runs through the training alone, and held-out accuracy is measured later.
"""

from __future__ import annotations

import csv
import os
from collections.abc import Sequence
from pathlib import Path

import lightning.pytorch as pl
import pandas as pd

from benchmarks.common.process import csv_logger, recorded
from benchmarks.time_to_accuracy import trl_cell
from benchmarks.time_to_accuracy.latency import LATENCIES
from benchmarks.time_to_accuracy.snapshots import Recorder, Snapshot
from benchmarks.time_to_accuracy.suite import Cell, workloads
from lit_async_rl.cli.app import AsyncRLCLI

ACCURACY = "accuracy.csv"
OFF = ("checkpoint", "samples", "gradients", "verdict", "summary", "progress")  # default callbacks that cost time


def run_cell(cell: Cell, out: Path, settings: Sequence[str] = ()) -> None:
    """Trains one cell, with these further arguments of the command line, then evaluates its snapshots."""
    folder = out / cell.folder
    workload = workloads()[cell.workload]
    every_n_steps = max(1, round(workload.snapshot_steps * cell.num_steps / workload.num_steps))
    arguments = [*cell.arguments(), *settings]
    with recorded(folder, arguments) as result:
        quiet = [part for name in OFF for part in (f"--defaults.{name}", "null")]
        quiet += ["--trainer.enable_progress_bar", "false", "--trainer.enable_checkpointing", "false"]
        arguments += [*csv_logger(folder), *quiet]
        cli = AsyncRLCLI([*arguments, "--data.validation.prompts", "null"])
        recorder = Recorder(every_n_steps)
        try:
            if cell.settings.is_trl:
                recorder.snapshots, recorder.loads = trl_cell.run(cli, every_n_steps, cell.seed, folder=folder)
            else:
                callbacks: list[pl.Callback] = cli.trainer.callbacks  # type: ignore[attr-defined]
                callbacks.append(recorder)
                cli.trainer.fit(cli.model, cli.datamodule)
        finally:
            result["loads"] = recorder.loads
            result["cpus"] = os.cpu_count()
            if recorder.waits:
                pd.DataFrame(recorder.waits).to_csv(folder / LATENCIES, index=False)
            evaluate(AsyncRLCLI([*arguments, *workload.evaluation]), recorder.snapshots, folder)
        if workload.final:
            result["final"] = accuracy(AsyncRLCLI([*arguments, *workload.final]), recorder.snapshots[-1])


def evaluate(cli: AsyncRLCLI, snapshots: Sequence[Snapshot], folder: Path) -> None:
    """Held-out accuracy of every snapshot, in `accuracy.csv`."""
    with (folder / ACCURACY).open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["step", "wall_s", "tokens", "accuracy"])
        for one in snapshots:
            rows.writerow([one.step, one.wall_s, one.tokens, accuracy(cli, one)])
            file.flush()


def accuracy(cli: AsyncRLCLI, snapshot: Snapshot) -> float:
    """Held-out accuracy of one snapshot.

    Raises:
        RuntimeError: the snapshot is of another policy.
    """
    cli.trainer.loggers = []
    if unknown := cli.model.load_state_dict(snapshot.state, strict=False).unexpected_keys:
        raise RuntimeError(f"the policy to evaluate has no {unknown[:3]}")
    return float(cli.trainer.validate(cli.model, cli.datamodule, verbose=False)[0]["val/pass@1"])
