"""Progress bar with the key metrics."""

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
    """Lightning's progress bar, reduced to reward, held-out accuracy, staleness and tokens per second."""

    def get_metrics(self, trainer: AnyTrainer, pl_module: AnyModule) -> dict[str, Any]:
        """Metrics of the progress bar, rounded."""
        shown = super().get_metrics(trainer, pl_module)
        return {
            short: f"{float(shown[name]):.{0 if short == 'tok/s' else 2}f}"  # type: ignore[arg-type]
            for name, short in NAMES.items()
            if name in shown
        }
