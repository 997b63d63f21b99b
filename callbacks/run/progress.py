"""A progress bar that says what matters, in short words."""

from __future__ import annotations

from typing import Any

from lightning.pytorch.callbacks import TQDMProgressBar

from lit_async_rl.utils.lightning_types import AnyModule, AnyTrainer

NAMES = {
    "reward/mean": "reward",
    "val/pass@1": "held-out",
    "sample/staleness_mean": "staleness",
    "perf/tokens_per_s": "tok/s",
}


class Progress(TQDMProgressBar):
    """Lightning's own bar; shows reward, held-out accuracy, staleness and tokens per second only."""

    def get_metrics(self, trainer: AnyTrainer, pl_module: AnyModule) -> dict[str, Any]:
        """The four values, rounded."""
        shown = super().get_metrics(trainer, pl_module)
        return {
            short: f"{float(shown[name]):.{0 if short == 'tok/s' else 2}f}"  # type: ignore[arg-type]
            for name, short in NAMES.items()
            if name in shown
        }
