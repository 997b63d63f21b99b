"""The two parts of a rollout's age."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from lit_async_rl.callbacks import StalenessMonitor
from lit_async_rl.types import RolloutBatch


@pytest.mark.parametrize("begun", [0, -9])  # a tape that begins later than the run
def test_the_age_of_a_rollout_is_split_into_lag_before_and_within_it(begun) -> None:
    versions = torch.tensor([[0, 3, 5, 5], [0, 6, 6, 0], [0, 0, 0, 0]])
    mask = torch.tensor([[False, True, True, True], [False, True, True, False], [False] * 4])  # the last is padding
    versions = torch.where(mask, versions + begun, 0)
    zeros = torch.zeros(3, 4)
    batch = RolloutBatch(
        input_ids=versions.abs(),
        attention_mask=mask,
        loss_mask=mask,
        behavior_logprobs=zeros,
        versions=versions,
        advantages=zeros,
        token_weights=zeros,
        rewards=torch.zeros(3),
        group_index=torch.tensor([0, 0, -1]),
    )
    monitor, trainer = StalenessMonitor(), pl.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    module: Any = pl.LightningModule()
    module.stabilizer_signals = {"staleness": torch.where(mask, 7 + begun - versions, 0), "version": 7 + begun}
    monitor.update(trainer, module, batch)
    found = {name: float(value) for name, value in monitor.compute(trainer, module).items()}
    assert found["sample/inter_rollout_lag"] == ((7 - 5) + (7 - 6)) / 2
    assert found["sample/intra_rollout_lag"] == ((5 - 3) + 0) / 2
    assert found["sample/mixed_version_share"] == 0.5
    assert found["sample/staleness_max"] == 4


@pytest.mark.slow
def test_a_step_may_have_more_tokens_than_torch_takes_quantiles_of() -> None:
    monitor, trainer = StalenessMonitor(), pl.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    num = 2**24 + 1
    monitor.tokens.update(torch.arange(num) // (num // 10 + 1))  # 0 to 9, as many of each
    for part in (monitor.mixed, monitor.inter, monitor.intra):
        part.update(torch.zeros(1))
    assert monitor.compute(trainer, pl.LightningModule())["sample/staleness_p95"] == 9
    monitor.tokens.update(torch.tensor([0.0, 1.0, 2.0]))
    assert monitor.compute(trainer, pl.LightningModule())["sample/staleness_p95"] == 2
