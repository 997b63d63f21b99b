"""Sharding of the policy by FSDP2, with tensor parallelism if the strategy's mesh has it, and the wrap rule for FSDP1.

`lightning.pytorch.strategies.ModelParallelStrategy` gives the mesh; the module calls `Sharding.apply` in
`configure_model`. DDP and FSDP1 need nothing of this: Lightning wraps the module itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers.modeling_layers import GradientCheckpointingLayer

from lit_async_rl.network import CausalPolicy

_STYLES = {"colwise": ColwiseParallel, "rowwise": RowwiseParallel}


@dataclass(frozen=True, kw_only=True)
class Sharding:
    """How `ModelParallelStrategy` divides the policy: one FSDP2 unit for each transformer block, one for the rest.

    With a tensor-parallel mesh the linear layers of the blocks are divided as the model's own plan says
    (`base_model_tp_plan` of transformers); embeddings and head are only sharded.

    Args:
        compute_dtype: dtype of forward and backward (`bfloat16`), while weights, their gradients' sums and the
            optimizer keep `model.dtype`; None computes in that, too. Log-probabilities are always float32.
        reshard_after_forward: frees a block's full weights after its forward pass and gathers them again for the
            backward pass: less memory, more communication.
    """

    compute_dtype: str | None = None
    reshard_after_forward: bool = True

    def apply(self, policy: CausalPolicy, mesh: DeviceMesh) -> None:
        """Divides `policy` in place; a second call changes nothing.

        Args:
            policy: on any device.
            mesh: with dimensions `data_parallel` and `tensor_parallel`.

        Raises:
            ValueError: the model has no plan for tensor parallelism, or one with an unknown style.
        """
        if any(isinstance(p, DTensor) for p in policy.parameters()):
            return
        if mesh["tensor_parallel"].size() > 1:
            _divide_layers(policy, mesh["tensor_parallel"])
        dtype = None if self.compute_dtype is None else getattr(torch, self.compute_dtype)
        precision = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32 if dtype else None)
        options: dict[str, Any] = dict(mesh=mesh["data_parallel"], mp_policy=precision)
        for module in policy.modules():
            if is_transformer_block(module):
                fully_shard(module, reshard_after_forward=self.reshard_after_forward, **options)
        fully_shard(policy, **options)


def is_transformer_block(module: nn.Module) -> bool:
    """Whether it is one of the repeated blocks of a transformers model."""
    return isinstance(module, GradientCheckpointingLayer)


def wrap_transformer_blocks(module: nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:
    """`auto_wrap_policy` of Lightning's FSDPStrategy: one FSDP1 unit for each transformer block."""
    return recurse or is_transformer_block(module)


def _divide_layers(policy: CausalPolicy, mesh: DeviceMesh) -> None:
    body = policy.causal_lm.base_model
    styles: dict[str, str] = policy.causal_lm.config.get_text_config().base_model_tp_plan or {}
    if not styles:
        raise ValueError(
            f"trainer.strategy.tensor_parallel_size={mesh.size()}: transformers has no plan for {type(body).__name__}; "
            "use 1"
        )
    heads = policy.causal_lm.config.get_text_config().num_key_value_heads
    if heads % mesh.size():
        raise ValueError(f"trainer.strategy.tensor_parallel_size={mesh.size()} does not divide {heads} key-value heads")
    styles = {pattern: style for pattern, style in styles.items() if not style.startswith("embedding")}
    for pattern, style in styles.items():
        if style not in _STYLES:
            raise ValueError(
                f"trainer.strategy.tensor_parallel_size={mesh.size()}: {pattern} wants style {style!r}, which is not "
                f"among {sorted(_STYLES)}; use 1"
            )
    parallelize_module(body, mesh, {pattern: _STYLES[style]() for pattern, style in styles.items()})
