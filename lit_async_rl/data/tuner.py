"""Lightning's `Tuner`, which is refused by name: what it tries is not what a run on rollouts needs."""

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
    for callback in list(trainer.callbacks):  # type: ignore[union-attr]
        if not isinstance(callback, LearningRateFinder | BatchSizeFinder):
            continue
        if getattr(callback, "_early_exit", False):  # the Tuner's own, which it would leave behind after an error
            trainer.callbacks.remove(callback)  # type: ignore[union-attr]
        raise ValueError(RATE if isinstance(callback, LearningRateFinder) else SIZE)
