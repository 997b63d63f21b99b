"""Checks at the start of training that its end will work: space for checkpoints, and an export."""

from __future__ import annotations

import logging
import resource
import shutil
from pathlib import Path
from typing import Any

from lightning.pytorch.callbacks import ModelCheckpoint

from lit_async_rl.models.export import export_problems
from lit_async_rl.models.policy import CausalPolicy
from lit_async_rl.utils.lightning_types import AnyTrainer

log = logging.getLogger(__name__)


def check_end(trainer: AnyTrainer, policy: CausalPolicy, model: str) -> None:
    """Warns of each problem at the end of the run, on rank 0. Not an error: it may be solved until then.

    Args:
        trainer: trainer of the run.
        policy: policy in training.
        model: name of the policy's model.
    """
    if not trainer.is_global_zero:
        return
    tokenizer = getattr(getattr(trainer.datamodule, "codec", None), "tokenizer", None)
    if tokenizer is not None:
        for problem in export_problems(policy.causal_lm, tokenizer):
            log.warning("model.model=%r could not be exported after training: %s", model, problem)
    for callback in trainer.checkpoint_callbacks:
        if isinstance(callback, ModelCheckpoint) and callback.save_top_k and "://" not in str(callback.dirpath):
            _check_space(callback, trainer, checkpoint_bytes(policy, trainer.optimizers))


def _check_space(callback: ModelCheckpoint, trainer: AnyTrainer, size: int) -> None:
    interval = callback._every_n_train_steps or trainer.max_steps
    num_at_once = 1 if trainer.max_steps <= trainer.global_step + interval else 2
    free_bytes = free_bytes_per_file(Path(str(callback.dirpath)), num_at_once)
    if size > free_bytes:
        also = "" if num_at_once == 1 else " (two exist while one replaces the other)"
        log.warning(
            "ModelCheckpoint.dirpath=%s has only %.3g GB of free space for each checkpoint%s, but a checkpoint takes "
            "about %.3g GB: free some space, or no checkpoint of the last steps can be saved",
            callback.dirpath,
            free_bytes / 1e9,
            also,
            size / 1e9,
        )


def checkpoint_bytes(policy: CausalPolicy, optimizers: list[Any]) -> int:
    """Approximate size of a checkpoint in bytes: weights (of LoRA only adapters) and Adam's moments."""
    parameters = [p for p in policy.parameters() if p.requires_grad or not policy.has_adapters]
    moments = {
        id(p): 2 for o in optimizers if "betas" in o.defaults for group in o.param_groups for p in group["params"]
    }
    return sum(p.numel() * p.element_size() * (1 + moments.get(id(p), 0) * p.requires_grad) for p in parameters)


def free_bytes_per_file(folder: Path, number: int) -> int:
    """Largest size in bytes of each of `number` equal new files in a folder, which may not exist yet."""
    candidates = (folder.absolute(), *folder.absolute().parents)
    existing = next(path for path in candidates if path.exists())
    free_bytes = shutil.disk_usage(existing).free // number
    max_file_size, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    return free_bytes if max_file_size == resource.RLIM_INFINITY else min(free_bytes, max_file_size)
