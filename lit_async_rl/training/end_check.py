"""Checks when training begins whether its end will work: checkpoints that fit on the disk, and an export."""

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
    """Says in one line each what the end of the run would lack, on rank 0; nothing is refused, as it may be mended.

    Args:
        trainer: that begins to train.
        policy: that it trains.
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
    room = room_for_file(Path(str(callback.dirpath)), num_at_once)
    if size > room:
        also = "" if num_at_once == 1 else " (of the two that are there while one takes the place of another)"
        log.warning(
            "ModelCheckpoint.dirpath=%s has room for checkpoints of %.3g GB%s, and one takes about %.3g GB: free some "
            "space, or the run loses its last steps",
            callback.dirpath,
            room / 1e9,
            also,
            size / 1e9,
        )


def checkpoint_bytes(policy: CausalPolicy, optimizers: list[Any]) -> int:
    """Bytes of a checkpoint, about: weights (with adapters, these alone), and the moments of Adam and its kin."""
    parameters = [p for p in policy.parameters() if p.requires_grad or not policy.has_adapters]
    moments = {
        id(p): 2 for o in optimizers if "betas" in o.defaults for group in o.param_groups for p in group["params"]
    }
    return sum(p.numel() * p.element_size() * (1 + moments.get(id(p), 0) * p.requires_grad) for p in parameters)


def room_for_file(folder: Path, number: int) -> int:
    """Bytes that each of `number` new files in a folder, which may not exist yet, can have."""
    there = next(one for one in (folder.absolute(), *folder.absolute().parents) if one.exists())
    room = shutil.disk_usage(there).free // number
    most, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    return room if most == resource.RLIM_INFINITY else min(room, most)
