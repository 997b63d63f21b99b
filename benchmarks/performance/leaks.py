"""Leak check: memory, threads and open files over thousands of steps of a configuration.

python benchmarks/performance/leaks.py [--steps 3000] [--minutes 30] [--config configs/quickstart.yaml] [further flags]

Ends at the first limit. Growth is that of resident memory from the second quarter of the run to the last.
"""

from __future__ import annotations

import argparse
import gc
import os
import tempfile
import threading
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl

from lit_async_rl.cli.app import AsyncRLCLI
from lit_async_rl.utils.lightning_types import AnyTrainer


@dataclass(frozen=True)
class Reading:
    """Resources of the process."""

    step: int
    resident_mb: float
    num_threads: int
    num_files: int


def read(step: int) -> Reading:
    """Current reading of this process."""
    gc.collect()
    with open("/proc/self/statm", encoding="ascii") as statm:
        resident = int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20
    return Reading(step, resident, threading.active_count(), num_files=len(os.listdir("/proc/self/fd")))


class Watch(pl.Callback):
    """Takes a reading every `every_n_steps` steps, before validation or checkpoints."""

    def __init__(self, every_n_steps: int) -> None:
        self.every_n_steps = every_n_steps
        self.readings: list[Reading] = []

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Prints, too: a run that is ended early still says something."""
        if trainer.global_step % self.every_n_steps == 0:
            self.readings.append(read(trainer.global_step))
            print(self.readings[-1], flush=True)


def report(readings: list[Reading]) -> str:
    """Growth of memory, and the range of the others after the first quarter."""
    quarter = max(1, len(readings) // 4)
    early = readings[quarter : 2 * quarter]
    late = readings[-quarter:]
    before, after = (sum(r.resident_mb for r in some) / len(some) for some in (early, late))
    settled = readings[quarter:]
    threads = {r.num_threads for r in settled}
    files = {r.num_files for r in settled}
    return (
        f"{readings[-1].step} steps: {before:.1f} MB to {after:.1f} MB ({after / before - 1:+.2%}), "
        f"{min(threads)} to {max(threads)} threads, {min(files)} to {max(files)} open files"
    )


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--minutes", type=int, default=30)
    parser.add_argument("--config", default="configs/quickstart.yaml")
    arguments, flags = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as folder:
        length = ["--trainer.max_steps", str(arguments.steps), "--trainer.max_time", f"00:00:{arguments.minutes:02}:00"]
        where = ["--trainer.logger.init_args.save_dir", folder, "--trainer.enable_progress_bar", "false"]
        cli = AsyncRLCLI(["--config", arguments.config, *length, *where, *flags])
        watch = Watch(max(1, arguments.steps // 120))
        trainer: AnyTrainer = cli.trainer
        trainer.callbacks.append(watch)
        trainer.fit(cli.model, cli.datamodule)
    print(report(watch.readings))


if __name__ == "__main__":
    main()
