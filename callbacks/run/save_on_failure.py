"""A last checkpoint of a run that cannot go on."""

from __future__ import annotations

import logging
from pathlib import Path

from lightning.pytorch.callbacks import Checkpoint

from lit_async_rl.callbacks.run.save_on_sigterm import checkpoint_folder
from lit_async_rl.errors import EngineError, NonFiniteError, ProducerError, StalledError
from lit_async_rl.utils.lightning_types import AnyModule, AnyTrainer

BETWEEN_STEPS = (EngineError, NonFiniteError, ProducerError, StalledError)
log = logging.getLogger(__name__)


class SaveOnFailure(Checkpoint):
    """When engine, reward or environment end the run, or too many gradients were NaN, saves `failed.ckpt`.

    These errors are raised between two steps, so weights, moments and all finished rollouts are whole: the run resumes
    from there once the cause is gone. It lies where the run's `ModelCheckpoint` writes. On several ranks nothing is
    saved, because those that have not failed do not come to save together.

    Attributes:
        path: of the checkpoint; None before.
    """

    def __init__(self) -> None:
        self.path: str | None = None

    def on_exception(self, trainer: AnyTrainer, pl_module: AnyModule, exception: BaseException) -> None:
        """Saves; called before the engine is closed."""
        if not isinstance(exception, BETWEEN_STEPS) or trainer.world_size > 1 or not trainer.training:
            return
        self.path = str(Path(checkpoint_folder(trainer)) / "failed.ckpt")
        trainer.save_checkpoint(self.path)
        log.warning("saved %s after step %d, with all finished rollouts", self.path, trainer.global_step)
