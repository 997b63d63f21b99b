"""Whether a long run leaks: memory, threads and file descriptors over the steps of a tiny run with a tape.

python benchmarks/leaks.py [--steps 3000]
"""

from __future__ import annotations

import argparse
import gc
import os
import tempfile
import threading
from typing import Any

import lightning.pytorch as pl
import torch

from lit_async_rl.assets import asset
from lit_async_rl.callbacks import RolloutTape, WeightSync
from lit_async_rl.data import RolloutDataModule
from lit_async_rl.engine import SamplingParams
from lit_async_rl.module import PolicyModule
from lit_async_rl.rewards import share_correct
from lit_async_rl.tasks import SortDigits


class Watch(pl.Callback):
    """Prints resident memory in MB, threads and open files."""

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Every 250 steps."""
        if trainer.global_step % 250:
            return
        gc.collect()
        with open("/proc/self/statm", encoding="ascii") as statm:
            resident = int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20
        files = len(os.listdir("/proc/self/fd"))
        print(
            f"{trainer.global_step:6} {resident:9.1f} MB {threading.active_count():4} threads {files:4} files",
            flush=True,
        )


def main() -> None:
    """Reads the command line and trains."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=3000)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    model = asset("sort_policy")
    settings: dict[str, Any] = dict(max_staleness=2, groups_per_step=2, group_size=4)
    sampling = SamplingParams(max_tokens=10)
    data = RolloutDataModule(model, SortDigits(8, size=100000), share_correct, sampling=sampling, **settings)
    with tempfile.TemporaryDirectory() as folder:
        trainer = pl.Trainer(
            accelerator="cpu",
            devices=1,
            max_steps=arguments.steps,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=[WeightSync(), RolloutTape(folder), Watch()],
        )
        trainer.fit(PolicyModule(model, learning_rate=1e-4), datamodule=data)


if __name__ == "__main__":
    main()
