"""Keeps values of earlier steps out of the rows of loggers.

Lightning keeps the last value of each metric, and writes it again in the rows of all later steps that do not log it:
the gradient's norm of the step before where a gradient was not finite, say. It stands alone because it knows
Lightning's private parts.
"""

from __future__ import annotations

from lit_async_rl.utils.lightning_types import AnyTrainer


class LoggedRows:
    """Forgets written values. Call `begin` before each micro-batch."""

    def __init__(self) -> None:
        self._num_steps = -1  # optimizer steps, when it last looked

    def begin(self, trainer: AnyTrainer) -> None:
        """Forgets the values of single steps, in the first micro-batch after a row was written."""
        loop = trainer.fit_loop.epoch_loop
        num_steps = loop._batches_that_stepped
        is_new = num_steps != self._num_steps
        self._num_steps = num_steps
        every = trainer.log_every_n_steps  # type: ignore[attr-defined]
        if not is_new or not every or num_steps % every:
            return
        _ = trainer.callback_metrics  # takes the values over, for callbacks that read them later
        for metric in loop._results.values():
            if metric.is_tensor and metric.meta.on_step and not metric.meta.on_epoch:
                metric.has_reset = True  # until it is logged again
