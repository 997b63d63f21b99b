"""One run of supervised fine-tuning, timed; started by `benchmarks/performance/trl_sft.py`."""

from __future__ import annotations

import argparse
import json
import resource
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl

import lit_async_rl as rl


class Clock(pl.Callback):
    """Loss and processor seconds of each step."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.seconds: list[float] = []
        self._last = 0.0

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._last = time.process_time()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step > len(self.seconds):
            now = time.process_time()
            self.seconds.append(now - self._last)
            self.losses.append(float(trainer.callback_metrics["train/loss"]))
            self._last = now


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--settings", type=json.loads, required=True)
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    s = args.settings
    clock = Clock()
    rl.sft(
        s["model"],
        s["records"],
        max_steps=s["steps"],
        samples_per_step=8,
        micro_batches_per_step=2,
        learning_rate=1e-5,
        packing=rl.PrefixTreePacking() if s["packed"] else None,
        self_check=False,
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        callbacks=[clock],
    )
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    args.output.write_text(json.dumps(dict(losses=clock.losses, processor_s=clock.seconds, memory_gb=peak)))


if __name__ == "__main__":
    main()
