"""The two parts of a rollout's age."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from lit_async_rl.callbacks import StalenessMonitor
from lit_async_rl.types import RolloutBatch


def test_the_age_of_a_rollout_is_split_into_lag_before_and_within_it() -> None:
    versions = torch.tensor([[0, 3, 5, 5], [0, 6, 6, 0], [0, 0, 0, 0]])
    mask = torch.tensor([[False, True, True, True], [False, True, True, False], [False] * 4])  # the last is padding
    zeros = torch.zeros(3, 4)
    batch = RolloutBatch(
        input_ids=versions,
        attention_mask=mask,
        loss_mask=mask,
        behavior_logprobs=zeros,
        versions=versions,
        advantages=zeros,
        token_weights=zeros,
        rewards=torch.zeros(3),
        group_index=torch.tensor([0, 0, -1]),
    )
    monitor, nothing = StalenessMonitor(), SimpleNamespace()
    signals = {"staleness": torch.where(mask, 7 - versions, 0), "version": 7}
    module: Any = SimpleNamespace(stabilizer_signals=signals)
    monitor.update(nothing, module, batch)  # type: ignore[arg-type]
    found = {name: float(value) for name, value in monitor.compute(nothing, module).items()}  # type: ignore[arg-type]
    assert found["sample/inter_rollout_lag"] == ((7 - 5) + (7 - 6)) / 2
    assert found["sample/intra_rollout_lag"] == ((5 - 3) + 0) / 2
    assert found["sample/mixed_version_share"] == 0.5
    assert found["sample/staleness_max"] == 4
