"""Refuses Lightning's `Tuner` by name: its trials do not fit a run on rollouts."""

from __future__ import annotations

from lightning.pytorch.callbacks import BatchSizeFinder, LearningRateFinder

from lit_async_rl.utils.lightning_types import AnyTrainer

RATE = (
    "Tuner.lr_find is not for this module: the loss of a policy gradient does not fall where the rate is good, and "
    "each trial step would train on rollouts of other weights. Set model.learning_rate, and compare the rewards of runs"
)
SIZE = (
    "Tuner.scale_batch_size is not for this module: a step has data.groups_per_step * data.group_size completions "
    "whatever fits. Where memory ends, raise data.micro_batches_per_step, which changes no result"
)


def refuse_tuner(trainer: AnyTrainer) -> None:
    """Refuses a run of `Tuner.lr_find` or `Tuner.scale_batch_size`, or the callback that does the same.

    Raises:
        ValueError: says why, and what to set.
    """
    for callback in trainer.callbacks:  # type: ignore[union-attr]  # the Tuner's own stands first
        if isinstance(callback, LearningRateFinder):
            raise ValueError(RATE)
        if isinstance(callback, BatchSizeFinder):
            raise ValueError(SIZE)
