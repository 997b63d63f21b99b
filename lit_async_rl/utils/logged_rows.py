"""Rows of loggers have the values of their step, and no others.

Lightning keeps each metric's last value, and writes it again in rows of later steps that do not log it, such as the
gradient's norm where a gradient was not finite. After a resume from a checkpoint saved behind a validation, it counts
one step too many in all further rows. This module stands alone because it uses Lightning's private parts.
"""

from __future__ import annotations

from lit_async_rl.utils.lightning_types import AnyTrainer


class LoggedRows:
    """Forgets written values, and numbers the rows. One per fit; call `begin` before each micro-batch."""

    def __init__(self) -> None:
        self._num_steps = -1  # optimizer steps, when it last looked

    def begin(self, trainer: AnyTrainer) -> None:
        """Forgets the values of single steps, in the first micro-batch after a row was written."""
        loop = trainer.fit_loop.epoch_loop
        if self._num_steps == -1:
            loop._batches_that_stepped = loop.batch_progress.total.ready // trainer.accumulate_grad_batches
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
