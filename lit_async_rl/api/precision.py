"""Default precision of a run on a GPU: products in bfloat16, all sums in float32."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch
from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch.accelerators import CUDAAccelerator
from lightning.pytorch.plugins import Precision
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy

MIXED = "bf16-mixed"
CUDA_NAMES = ("auto", "gpu", "cuda")
log = logging.getLogger(__name__)


def gpu_precision(settings: Mapping[str, Any]) -> dict[str, str]:
    """Trainer settings for a GPU where the user names no precision; empty otherwise.

    `bf16-mixed`: weights, gradients, optimizer states and log-probabilities are float32, and matrix products bfloat16,
    with 15 times the throughput of float32 on an H100 by its data sheet. Other float32 products use TF32. Float32
    remains on cards without bfloat16, and with strategies that shard weights, whose dtype
    `model.sharding.compute_dtype` sets.

    Args:
        settings: of `Trainer`.
    """
    if settings.get("precision") is not None or not uses_cuda(settings) or _has_precision_plugin(settings):
        return {}
    is_tensor_float = torch.get_float32_matmul_precision() == "highest"  # torch's default; others are a user's choice
    if is_tensor_float:
        torch.set_float32_matmul_precision("high")
    if not _takes_mixed(settings.get("strategy")) or not torch.cuda.is_bf16_supported(including_emulation=False):
        _say("float32, products in TF32 where the card has it" if is_tensor_float else "float32")
        return {}
    _say("bf16-mixed: products in bfloat16; weights, gradients, optimizer and log-probabilities in float32")
    return {"precision": MIXED}


def uses_cuda(settings: Mapping[str, Any]) -> bool:
    """Whether a Trainer with these settings trains on CUDA."""
    accelerator = settings.get("accelerator")
    is_named = accelerator is None or accelerator in CUDA_NAMES or isinstance(accelerator, CUDAAccelerator)
    return is_named and torch.cuda.is_available()


def _takes_mixed(strategy: Any) -> bool:
    """Whether autocast is all that the strategy does for mixed precision."""
    if isinstance(strategy, str):
        return strategy == "auto" or strategy.startswith("ddp")
    return strategy is None or isinstance(strategy, DDPStrategy | SingleDeviceStrategy)


def _has_precision_plugin(settings: Mapping[str, Any]) -> bool:
    plugins = settings.get("plugins")
    plugins = plugins if isinstance(plugins, list | tuple) else [plugins]
    return any(isinstance(plugin, Precision) for plugin in plugins)


@rank_zero_only
def _say(what: str) -> None:
    log.warning("precision: %s (to compute everything in float32, set trainer.precision=32-true)", what)
