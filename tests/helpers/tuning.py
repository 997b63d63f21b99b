"""Shared by the tests of supervised fine-tuning: records, and runs on the CPU."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from flow import MODEL
from torch import Tensor

from lit_async_rl.models.policy import CausalPolicy
from lit_async_rl.supervised.data import SFTDataModule
from lit_async_rl.supervised.module import SFTModule
from lit_async_rl.supervised.rows import Row
from lit_async_rl.tasks import SortDigits

RECORDS = [
    {"prompt": f"{'123456789'[:n]}=", "completion": "987654321"[:m]}
    for n, m in [(3, 1), (9, 9), (2, 4), (5, 2), (7, 6)]
]


def make_data(**changes: Any) -> SFTDataModule:
    """Four rows a step, of a source with more than one step."""
    return SFTDataModule(
        **(dict(model=MODEL, records=SortDigits(8, size=10, min_digits=3), samples_per_step=4) | changes)
    )


def make_module(**changes: Any) -> SFTModule:
    """A rate at which steps visibly change the policy."""
    rate: dict[str, Any] = {} if "optimizer" in changes else {"learning_rate": 1e-3}
    return SFTModule(**(dict(model=MODEL, self_check=False, **rate) | changes))


def fit(
    module: SFTModule, data: SFTDataModule, max_steps: int, ckpt_path: str | None = None, **trainer: Any
) -> pl.Trainer:
    """Trains on the CPU with Lightning's own Trainer, without logs or files."""
    settings: dict[str, Any] = dict(
        accelerator="cpu",
        devices=1,
        max_steps=max_steps,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    runner = pl.Trainer(**(settings | trainer))
    runner.fit(module, datamodule=data, ckpt_path=ckpt_path)
    return runner


def slow_loss(policy: CausalPolicy, rows: list[Row]) -> Tensor:
    """-log pi of each trained token by itself, one row after the other, over the number of all."""
    total = torch.zeros(())
    number = 0
    for row in rows:
        ids = torch.from_numpy(row.ids).long()
        log_p = policy.causal_lm(input_ids=ids[None]).logits[0].log_softmax(-1)
        for place in row.trains.nonzero()[0].tolist():
            total = total - log_p[place - 1, ids[place]]
            number += 1
    return total / number
