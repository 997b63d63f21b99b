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
    """Lightning's own bar in optimizer steps; shows reward, held-out accuracy, staleness and tokens per second only."""

    @property
    def total_train_batches(self) -> int | float:
        """Optimizer steps of the run, those before a resume included."""
        steps = self.trainer.max_steps
        return steps if steps > 0 else float("inf")

    def on_train_batch_end(
        self, trainer: AnyTrainer, pl_module: AnyModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Counts optimizer steps, of which a micro-batch is a part only."""
        step, bar = trainer.global_step, self.train_progress_bar
        if step > bar.n and self._should_update(step, bar.total):
            bar.n = step
            bar.set_postfix(self.get_metrics(trainer, pl_module))

    def get_metrics(self, trainer: AnyTrainer, pl_module: AnyModule) -> dict[str, Any]:
        """Metrics of the progress bar, rounded."""
        shown = super().get_metrics(trainer, pl_module)
        return {
            short: f"{float(shown[name]):.{0 if short == 'tok/s' else 2}f}"  # type: ignore[arg-type]
            for name, short in NAMES.items()
            if name in shown
        }
