"""Refuses resumes that the checkpoint does not allow, before anything is sampled or written.

Lightning restores optimizers and rollouts only after the validation ahead of training, when tables in the run's folder
have been cut at the checkpoint's step.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer

from lit_async_rl.rollouts.resume import START_ANEW
from lit_async_rl.runtime.checkpoint_files import read_safely
from lit_async_rl.training.module import PolicyModule

OPTIMIZERS = "optimizer_states"


def check_resume(trainer: Trainer, module: PolicyModule, data: Any, *, ckpt_path: str | None) -> None:
    """Refuses a checkpoint that this run cannot go on from; reads no values of weights.

    Args:
        trainer: that has not run yet.
        module: to be trained.
        data: of the run: a `RolloutDataModule`, or that of another stage.
        ckpt_path: has passed `check_checkpoint`; one at an address such as `s3://` is checked on loading.

    Raises:
        ValueError: it lacks the optimizer's state, or is of another optimizer, model, length of the schedule, prompts
            or tokenizer.
    """
    if ckpt_path is None or "://" in ckpt_path:
        return
    path = Path(ckpt_path)
    if path.is_dir():
        checkpoint = read_safely(path / "meta.pt", f"ckpt_path={ckpt_path!r}", with_values=True)  # without weights
    else:
        checkpoint = read_safely(path, f"ckpt_path={ckpt_path!r}", with_values=True)
        if OPTIMIZERS not in checkpoint:
            raise ValueError(
                f"ckpt_path={ckpt_path!r} holds weights but no optimizer state (save_weights_only), so no run can be "
                f"resumed from it. {START_ANEW}"
            )
        module.saved_weights.check_names(checkpoint, module.policy)
    module.trainer = trainer
    module.check_resumable(checkpoint)
    if (state := data.saved_state(checkpoint)) is not None:
        data.use_model(module.model)  # whose tokenizer it is, unless the data has one of its own
        data.check_resumable(state)
