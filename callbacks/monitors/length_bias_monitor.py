"""Length, duration and difficulty of dropped groups compared with trained ones."""

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
from lit_async_rl.utils.checks import check_range
from lit_async_rl.utils.lightning_types import AnyModule, AnyTrainer


class LengthBiasMonitor(StepMonitor):
    """Compares dropped groups with trained ones over the last `window` steps; warns once about a length bias.

    For each fate of groups (`trained`; `expired` at the staleness bound; `unbegun`: expired before its first token;
    `no_signal`) it logs:

    * `intake/<fate>_share`: share of all completed groups.
    * `intake/<fate>_length`: mean tokens per rollout; aborted groups count the tokens sampled so far, so a bias is
      underestimated.
    * `intake/<fate>_s`: mean seconds from admission to their last token.
    * `intake/<fate>_pass_rate`: mean measured pass rate of their prompts, if known.

    Args:
        window: optimizer steps per window.
        ratio: ratio of mean lengths, dropped to trained, from which it warns.
        min_groups: smallest number of dropped groups in the window for a warning.

    Raises:
        ValueError: a setting is out of range.
    """

    def __init__(self, window: int = 20, ratio: float = 1.25, min_groups: int = 32) -> None:
        super().__init__()
        check_range("LengthBiasMonitor", "integer >= 1", window=window, min_groups=min_groups)
        check_range("LengthBiasMonitor", "> 1", ratio=ratio)
        self.window, self.ratio, self.min_groups = window, ratio, min_groups
        self._totals: deque[Mapping[str, FateTotals]] = deque(maxlen=window + 1)
        self._has_warned = False

    def on_train_start(self, trainer: AnyTrainer, pl_module: AnyModule) -> None:
        super().on_train_start(trainer, pl_module)
        self._totals.clear()
        self._totals.append({})

    def update(self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: RolloutBatch) -> None:
        """Does nothing: groups are counted where they are dropped."""

    def compute(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> Mapping[str, Any]:
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
                    "training is biased towards short completions. With data.admission=null (wait) no group "
                    "expires; a larger data.max_staleness drops fewer."
                )


def values(changes: Mapping[str, FateTotals]) -> dict[str, float]:
    """Metrics of each fate: share of groups, mean length, seconds and pass rate."""
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
