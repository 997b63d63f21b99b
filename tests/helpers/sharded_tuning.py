"""Run by one process or several: fine-tunes under a strategy; rank 0 writes losses, norms and the held-out loss.

python sharded_tuning.py STRATEGY OUTPUT.json
"""

from __future__ import annotations

import json
import os
import sys
from functools import partial
from pathlib import Path

import lightning.pytorch as pl
import torch
from sharded_training import make_strategy
from tuning import fit, make_data, make_module

from lit_async_rl.callbacks import GradientMonitor
from lit_async_rl.models.packing import PrefixTreePacking
from lit_async_rl.tasks import SortDigits


class Record(pl.Callback):
    """Loss, trained tokens and norm of the gradient of every step."""

    def __init__(self) -> None:
        self.steps: list[list[float]] = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        if (batch_idx + 1) % trainer.accumulate_grad_batches == 0:
            names = ("train/loss", "train/tokens", "grad/norm")
            self.steps.append([float(trainer.callback_metrics[name]) for name in names])


def main(strategy: str, output: str) -> None:
    """Eight steps of five rows, so that ranks and micro-batches have different numbers of tokens."""
    found = {}
    for name, packing in (("padded", None), ("packed", PrefixTreePacking())):
        pl.seed_everything(0, verbose=False)
        record = Record()
        data = make_data(
            samples_per_step=5,
            micro_batches_per_step=2,
            validation_records=SortDigits(8, size=7, split="held_out", min_digits=2),
        )
        trainer = fit(
            make_module(packing=packing, optimizer=partial(torch.optim.SGD, lr=1e-3)),  # Adam amplifies rounding
            data,
            8,
            callbacks=[record, GradientMonitor()],
            strategy=make_strategy(strategy),
            devices=int(os.environ.get("WORLD_SIZE", "1")),
            check_val_every_n_epoch=None,
            val_check_interval=8,
            num_sanity_val_steps=0,
        )
        held_out = [float(trainer.callback_metrics[key]) for key in ("val/loss", "val/token_accuracy")]
        found[name] = {"steps": record.steps, "held_out": held_out}
    if int(os.environ.get("RANK", "0")) == 0:
        Path(output).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
