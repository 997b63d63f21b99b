"""Whether the groups that are thrown away are the long, the slow or the hard ones."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities import rank_zero_warn

from lit_async_rl.callbacks.monitors.step_monitor import StepMonitor
from lit_async_rl.callbacks.parts import rollout_data
from lit_async_rl.rollouts.intake import TRAINED, FateTotals
from lit_async_rl.types import RolloutBatch
from lit_async_rl.utils.lightning_types import AnyModule, AnyTrainer


class LengthBiasMonitor(StepMonitor):
    """Compares what was trained on with what was dropped, over the last `window` steps; warns once when that is biased.

    For each fate (`trained`, `expired` at the bound, or `unbegun`: too old before it had a token; `no_signal`), where
    groups have met it:

    * `intake/<fate>_share`: of all groups that came to an end.
    * `intake/<fate>_length`: mean tokens of their rollouts; of groups that were cut off, as far as they had come, so
      that a bias is rather under- than overestimated.
    * `intake/<fate>_s`: mean seconds from admission to their last token.
    * `intake/<fate>_pass_rate`: mean measured pass rate of their prompts, where it was measured before.

    Args:
        window: optimizer steps.
        ratio: warns when dropped groups are so many times as long as those trained on.
        min_groups: dropped groups in the window that a warning needs.

    Raises:
        ValueError: a setting is out of range.
    """

    def __init__(self, window: int = 20, ratio: float = 1.25, min_groups: int = 32) -> None:
        super().__init__()
        if window < 1:
            raise ValueError(f"LengthBiasMonitor.window must be >= 1, got {window}")
        if not ratio > 1:
            raise ValueError(f"LengthBiasMonitor.ratio must be > 1, got {ratio}")
        if min_groups < 1:
            raise ValueError(f"LengthBiasMonitor.min_groups must be >= 1, got {min_groups}")
        self.window, self.ratio, self.min_groups = window, ratio, min_groups
        self._totals: deque[Mapping[str, FateTotals]] = deque(maxlen=window + 1)
        self._has_warned = False

    def on_train_start(self, trainer: AnyTrainer, pl_module: AnyModule) -> None:
        """The window begins here."""
        super().on_train_start(trainer, pl_module)
        self._totals.clear()
        self._totals.append({})

    def update(self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: RolloutBatch) -> None:
        """Nothing: groups are counted where they are dropped."""

    def compute(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> Mapping[str, Any]:
        """The window's values."""
        stats = rollout_data(trainer, "LengthBiasMonitor").stats()
        if stats is None:
            return {}
        self._totals.append(stats.fates)
        before = self._totals[0]
        changes = {fate: totals - before.get(fate, FateTotals()) for fate, totals in stats.fates.items()}
        self._warn(changes)
        return values(changes)

    def _warn(self, changes: Mapping[str, FateTotals]) -> None:
        trained = changes.get(TRAINED, FateTotals())
        for fate, dropped in changes.items():
            if self._has_warned or fate == TRAINED or not trained.length or dropped.num_groups < self.min_groups:
                continue
            times = (dropped.length / dropped.num_groups) / (trained.length / trained.num_groups)
            if times >= self.ratio:
                self._has_warned = True
                rank_zero_warn(
                    f"LengthBiasMonitor: groups dropped as `{fate}` are {times:.2f} times as long as those trained on: "
                    "what is learnt is biased towards short completions. With data.admission=null (wait) none is "
                    "lost at the bound; a larger data.max_staleness loses fewer."
                )


def values(changes: Mapping[str, FateTotals]) -> dict[str, float]:
    """Shares and means of each fate."""
    num_groups = sum(totals.num_groups for totals in changes.values())
    result = {}
    for fate, totals in changes.items():
        result[f"intake/{fate}_share"] = totals.num_groups / max(1, num_groups)
        if totals.num_groups:
            result[f"intake/{fate}_length"] = totals.length / totals.num_groups
            result[f"intake/{fate}_s"] = totals.seconds / totals.num_groups
        if totals.num_measured:
            result[f"intake/{fate}_pass_rate"] = totals.pass_rate / totals.num_measured
    return result
