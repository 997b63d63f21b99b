"""Sharding of the policy: FSDP2 and tensor parallelism by a device mesh, FSDP1 by wrapping.

`PolicyModule.configure_model` calls `Sharding.divide`. `ModelParallelStrategy` provides a mesh, Lightning's `fsdp` the
wrapper class for `torch.distributed.fsdp.wrap.wrap`; other strategies do not shard.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import lightning.pytorch.strategies as strategies
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.fsdp.wrap import enable_wrap, wrap
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from lit_async_rl.models.architecture import is_transformer_block
from lit_async_rl.models.compilation import is_compiled
from lit_async_rl.models.loading import WeightFiles, is_on_meta
from lit_async_rl.models.policy import CausalPolicy
from lit_async_rl.models.sharded_checkpoint import WholeFolders
from lit_async_rl.models.weights import is_sharded, is_wrapped

_STYLES = {"colwise": ColwiseParallel, "rowwise": RowwiseParallel}


@dataclass(frozen=True, kw_only=True)
class Sharding:
    """Sharding under `ModelParallelStrategy`: one FSDP2 unit per transformer block, one for the rest.

    With a tensor-parallel mesh, the linear layers of the blocks are parallelised by the plan of the model
    (`base_model_tp_plan` of transformers); embeddings and head are sharded by FSDP2 only.

    Args:
        compute_dtype: dtype of forward and backward (`bfloat16`); weights, gradient reduction and optimizer keep
            `model.dtype`. None computes in `model.dtype`. Log-probabilities are always float32.
        reshard_after_forward: frees a block's full weights between forward and backward pass: less memory, more
            communication.
        meta_device: shard first, then let each process read its own weights from safetensors files. False: each process
            reads all weights first. Not with `random_init` or `lora`.
    """

    compute_dtype: str | None = None
    reshard_after_forward: bool = True
    meta_device: bool = False

    def divide(self, policy: CausalPolicy, mesh: DeviceMesh | None, model: str) -> CausalPolicy:
        """Shards the policy and reads missing weights; idempotent.

        Args:
            policy: unsharded policy; its parameters may be on the meta device.
            mesh: device mesh of FSDP2; None for other strategies, which wrap (FSDP1) or do not shard.
            model: source of the weights of a policy on the meta device.
        """
        if mesh is not None:
            self.apply(policy, mesh)
            if is_on_meta(policy):
                WeightFiles(model).read(policy.causal_lm, policy.causal_lm, torch.device(mesh.device_type))
            return policy
        if is_wrapped(policy):
            return policy
        files = WeightFiles(model) if is_on_meta(policy) else None
        lm = policy.causal_lm
        names = [name for name, module in lm.named_modules() if is_transformer_block(module)]
        for name in names:
            if files is not None:
                files.read(lm, lm.get_submodule(name), torch.device("cpu"))
            lm.set_submodule(name, wrap(lm.get_submodule(name)))
        if files is not None:
            files.read(lm, lm, torch.device("cpu"))
        wrapped: Any = wrap(policy, auto_wrap_policy=None)
        return wrapped

    def apply(self, policy: CausalPolicy, mesh: DeviceMesh) -> None:
        """Shards `policy` in place; idempotent.

        Args:
            policy: policy on any device.
            mesh: device mesh with dimensions `data_parallel` and `tensor_parallel`.

        Raises:
            ValueError: the model has no tensor-parallel plan, one with an unsupported style, or adapters.
        """
        if is_sharded(policy):
            return
        if mesh["tensor_parallel"].size() > 1:
            _divide_layers(policy, mesh["tensor_parallel"])
        self.shard(policy, mesh["data_parallel"])

    def shard(self, policy: CausalPolicy, mesh: DeviceMesh) -> None:
        """Makes the units of FSDP2; arguments as of `apply`, but for a mesh of the data-parallel ranks."""
        dtype = None if self.compute_dtype is None else getattr(torch, self.compute_dtype)
        # gradients are reduced in float32: sums over many ranks lose small gradients in bfloat16
        precision = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32 if dtype else None)
        options: dict[str, Any] = dict(mesh=mesh, mp_policy=precision)
        for module in policy.modules():  # blocks first, because the root unit takes the parameters that are left
            if is_transformer_block(module):
                fully_shard(module, reshard_after_forward=self.reshard_after_forward, **options)
        fully_shard(policy, **options)


def shard_frozen(policy: CausalPolicy, mesh: DeviceMesh) -> None:
    """Shards the blocks of a policy that does not train by FSDP2, in place.

    `features` is a collective; the head is not, because ranks have different numbers of chunks of tokens. Without a
    backward pass, embeddings and head stay whole on each rank after the first forward pass.

    Args:
        policy: on any device; its parameters move to that of the mesh, block by block.
        mesh: data-parallel ranks.
    """
    Sharding().shard(policy, mesh)
    register_fsdp_forward_method(policy, "features")


class ModelParallelStrategy(WholeFolders, strategies.ModelParallelStrategy):
    """Lightning's `ModelParallelStrategy` (FSDP2, tensor parallelism) with atomic, verified checkpoints.

    Args:
        *args: of Lightning's strategy.
        context_parallel_size: 1; others are refused, because neither this package nor Lightning splits sequences.
        **settings: of Lightning's strategy.

    Raises:
        ValueError: `context_parallel_size` is not 1.
    """

    def __init__(self, *args: Any, context_parallel_size: int = 1, **settings: Any) -> None:
        if context_parallel_size != 1:
            raise ValueError(
                f"trainer.strategy.init_args.context_parallel_size={context_parallel_size} is not supported: "
                "sequences are not split over GPUs, so one GPU must hold the activations of the longest sequence. To "
                "save memory, use model.gradient_checkpointing, a smaller model.logprob_chunk_tokens, more "
                "data.micro_batches_per_step or a larger tensor_parallel_size (docs/hardware.md)"
            )
        super().__init__(*args, **settings)

    def check_sizes(self) -> None:
        """Compares the sizes of the mesh with the number of processes, before any waits for the others.

        Raises:
            ValueError: they do not multiply to it.
        """
        data = self._data_parallel_size
        tensor = self._tensor_parallel_size
        data = self.num_nodes if data == "auto" else data
        tensor = self.num_processes if tensor == "auto" else tensor
        if data * tensor != self.num_nodes * self.num_processes:
            raise ValueError(
                f"trainer.strategy.init_args.data_parallel_size={data} times tensor_parallel_size={tensor} must be the "
                f"number of processes, which is {self.num_nodes * self.num_processes} (trainer.num_nodes times devices)"
            )

    def setup_environment(self) -> None:
        self.check_sizes()
        super().setup_environment()

    @property
    def writes_folders(self) -> bool:
        """Whether checkpoints are sharded."""
        return self._save_distributed_checkpoint


class FSDPStrategy(WholeFolders, strategies.FSDPStrategy):
    """Lightning's `fsdp` (FSDP1) with atomic, verified checkpoints; also runs on the CPU."""

    @property
    def writes_folders(self) -> bool:
        """Whether checkpoints are sharded."""
        return self._state_dict_type == "sharded"

    @property
    def mixed_precision_config(self) -> MixedPrecision | None:
        """The precision's configuration without casts of buffers, which would shift rotary positions."""
        config = super().mixed_precision_config
        return config if config is None or self.mixed_precision else replace(config, buffer_dtype=None)

    @contextmanager
    def model_sharded_context(self) -> Iterator[None]:
        """Context in which `torch.distributed.fsdp.wrap.wrap` wraps with FSDP.

        Raises:
            ValueError: unsharded checkpoints on the CPU, which crash torch.
        """
        if self.root_device.type != "cpu":
            with super().model_sharded_context():
                yield
            return
        if self._state_dict_type == "full":
            raise ValueError("trainer.strategy.state_dict_type=full crashes in torch on the CPU; use sharded")
        with enable_wrap(
            wrapper_cls=FullyShardedDataParallel,
            cpu_offload=self.cpu_offload,
            mixed_precision=self.mixed_precision_config,
            sharding_strategy=self.sharding_strategy,
            device_id=self.root_device,
            **self.kwargs,
        ):
            yield

    def _setup_model(self, model: nn.Module) -> nn.Module:
        if self.root_device.type != "cpu" or is_wrapped(model):
            return super()._setup_model(model)
        return FullyShardedDataParallel(module=model, device_id=self.root_device, **self.kwargs)


def _divide_layers(policy: CausalPolicy, mesh: DeviceMesh) -> None:
    if policy.has_adapters:
        raise ValueError(
            f"trainer.strategy.tensor_parallel_size={mesh.size()} cannot be combined with model.lora, whose layers "
            "have no tensor-parallel plan; set tensor_parallel_size to 1"
        )
    if is_compiled(policy.causal_lm):
        raise ValueError(
            f"trainer.strategy.tensor_parallel_size={mesh.size()} cannot be combined with model.torch_compile=true; "
            "set one of them to its default"
        )
    body = policy.causal_lm.base_model
    styles: dict[str, str] = policy.causal_lm.config.get_text_config().base_model_tp_plan or {}
    if not styles:
        raise ValueError(
            f"trainer.strategy.tensor_parallel_size={mesh.size()}: transformers has no tensor-parallel plan for "
            f"{type(body).__name__}; set tensor_parallel_size to 1"
        )
    heads = policy.causal_lm.config.get_text_config().num_key_value_heads
    if heads % mesh.size():
        raise ValueError(
            f"trainer.strategy.tensor_parallel_size={mesh.size()} must divide the model's number of key-value heads, "
            f"which is {heads}"
        )
    styles = {pattern: style for pattern, style in styles.items() if not style.startswith("embedding")}
    for pattern, style in styles.items():
        if style not in _STYLES:
            raise ValueError(
                f"trainer.strategy.tensor_parallel_size={mesh.size()}: {pattern} needs the tensor-parallel style "
                f"{style!r}, which is not one of {sorted(_STYLES)}; set tensor_parallel_size to 1"
            )
    parallelize_module(body, mesh, {pattern: _STYLES[style]() for pattern, style in styles.items()})
