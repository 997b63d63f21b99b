"""Memory of training and sampling, counted before a device is rented.

`training_memory` runs a training step of the real model with tensors that have a shape and no values, and counts the
bytes alive at a time: exactly what the step allocates, without the device or the weights. It knows every architecture
whose shapes do not depend on values, as those of routed experts do. Not counted: memory lost between tensors, CUDA's
own (about half a gigabyte), what kernels need, and a teacher's activations.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim import AdamW
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM, PreTrainedConfig

from lit_async_rl.errors import UnsupportedModelError
from lit_async_rl.models.loading import parameters_on_meta
from lit_async_rl.models.lora import LoRA, add_lora
from lit_async_rl.models.policy import CausalPolicy
from lit_async_rl.training.module import CHECKPOINTING

aten = torch.ops.aten


@dataclass(frozen=True, kw_only=True)
class StepShape:
    """Size of a training step, and how it is computed.

    Attributes:
        rows: rows of a micro-batch.
        prompt_tokens: of each row.
        completion_tokens: of each row.
        micro_batches: of an optimizer step.
        logprob_chunk_tokens: see `PolicyModule`.
        gradient_checkpointing: see `PolicyModule`.
        dtype: of the weights.
        compute_dtype: of matrix products.
        lora: see `PolicyModule`.
    """

    rows: int
    prompt_tokens: int
    completion_tokens: int
    micro_batches: int = 1
    logprob_chunk_tokens: int = 4096
    gradient_checkpointing: bool = False
    dtype: torch.dtype = torch.float32
    compute_dtype: torch.dtype = torch.bfloat16
    lora: LoRA | None = None


@dataclass(frozen=True, kw_only=True)
class TrainingMemory:
    """Bytes of a training step.

    Attributes:
        weights: parameters and buffers.
        gradients: of all trained parameters.
        moments: states of AdamW.
        peak: largest sum of these and everything else.
    """

    weights: int
    gradients: int
    moments: int
    peak: int

    @property
    def states(self) -> int:
        """Bytes that stay between micro-batches; sharding divides them."""
        return self.weights + self.gradients + self.moments

    @property
    def working(self) -> int:
        """Bytes beside these: activations, logits, and temporaries of the backward pass."""
        return self.peak - self.states


class _Live(TorchDispatchMode):
    """Counts the bytes of live storages, and answers what depends on missing values.

    These are a mask's: `num_tokens` of its entries are True.
    """

    def __init__(self, num_tokens: int) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._num_tokens = num_tokens
        self._known: Any = weakref.WeakKeyDictionary()

    def count(self, tensors: Iterable[Any]) -> None:
        """Counts tensors that exist already."""
        for tensor in tensors:
            if not isinstance(tensor, Tensor) or (storage := tensor.untyped_storage()) in self._known:
                continue
            size = self._known[storage] = storage.nbytes()
            self.now += size
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._free, size)

    def _free(self, size: int) -> None:
        self.now -= size

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        packet = func.overloadpacket
        if packet is aten._local_scalar_dense:
            return True
        if packet is aten.index and any(index.dtype == torch.bool for index in args[1] if index is not None):
            values, (mask,) = args
            result = values.new_empty(self._num_tokens, *values.shape[mask.dim() :])
        elif packet in (aten.index_put, aten._unsafe_index_put):
            result = torch.empty_like(args[0])
        else:
            result = func(*args, **(kwargs or {}))
        self.count(tree_leaves(result))
        return result


def training_memory(config: PreTrainedConfig, shape: StepShape) -> TrainingMemory:
    """Bytes of an optimizer step of a model with this configuration on one device.

    Args:
        config: of the model.
        shape: of the step.

    Raises:
        UnsupportedModelError: the model cannot be run without values.
    """
    with parameters_on_meta():
        lm: Any = AutoModelForCausalLM.from_config(config, dtype=shape.dtype).train()
        if shape.gradient_checkpointing:
            lm.gradient_checkpointing_enable(gradient_checkpointing_kwargs=CHECKPOINTING)
        policy = CausalPolicy(lm if shape.lora is None else add_lora(lm, shape.lora), shape.logprob_chunk_tokens)
    with FakeTensorMode():
        _without_values(policy)
        trained = [parameter for parameter in policy.parameters() if parameter.requires_grad]
        optimizer = AdamW(trained, fused=True)
        for parameter in trained:  # a step, after which the optimizer has its states
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        optimizer.zero_grad()
        states = [value for state in optimizer.state.values() for value in state.values()]
        ids = torch.zeros(shape.rows, shape.prompt_tokens + shape.completion_tokens, dtype=torch.long)
        mask = ids > 0
        live = _Live(shape.rows * shape.completion_tokens)
        live.count([*policy.parameters(), *policy.buffers()])
        weights = live.now
        live.count(states)
        moments = live.now - weights
        live.count([ids, mask])
        try:
            with live:
                for _ in range(min(shape.micro_batches, 2)):  # in the second, all gradients exist from the start
                    with torch.autocast("cpu", dtype=shape.compute_dtype, enabled=shape.compute_dtype != shape.dtype):
                        loss = policy(ids, mask, needs_entropy=True).logprobs.sum()
                    loss.backward()
                    del loss
                optimizer.step()
        except Exception as error:  # of any kind: it is the model's own code that runs
            raise UnsupportedModelError(
                f"activations of the model type {config.model_type!r} cannot be counted, because its code does not run "
                "on fake tensors"
            ) from error
    gradients = sum(parameter.numel() * parameter.element_size() for parameter in trained)
    return TrainingMemory(weights=weights, gradients=gradients, moments=moments, peak=live.peak)


def _without_values(module: nn.Module) -> None:
    """Replaces all tensors of a module by some with shape and device, but no values."""
    tied: dict[int, nn.Parameter] = {}
    for part in module.modules():
        for name, parameter in part.named_parameters(recurse=False):
            if id(parameter) not in tied:
                empty = torch.empty(parameter.shape, dtype=parameter.dtype)
                tied[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
            part._parameters[name] = tied[id(parameter)]
        for name, buffer in part.named_buffers(recurse=False):
            part._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype)


# -- What a plan says of it -------------------------------------------------------------------------------------------


USABLE = 0.94  # of a device's memory: CUDA takes half a gigabyte, and an allocator loses some between tensors
CHUNK_TOKENS = 1024  # of logits, if memory is short


@dataclass(frozen=True, kw_only=True)
class Fit:
    """Bytes on each training device with some settings.

    Attributes:
        settings: changed ones, as for the command line; none if as configured.
        num_bytes: at most at any time.
    """

    settings: tuple[str, ...]
    num_bytes: int


def ways_to_fit(
    config: PreTrainedConfig, shape: StepShape, capacity: int, trainer_devices: int, is_sharded: bool
) -> list[Fit]:
    """Memory of training, then with one more setting at a time until it fits.

    Args:
        config: of the model.
        shape: of a step on each device.
        capacity: bytes of a device.
        trainer_devices: devices that train.
        is_sharded: whether weights, gradients and moments are divided among them.
    """
    sharded = trainer_devices if is_sharded else 1
    fits = [Fit(settings=(), num_bytes=_on_device(config, shape, sharded))]
    changes: list[tuple[str, dict[str, Any], int]] = []
    if not shape.gradient_checkpointing:
        changes.append(("--model.gradient_checkpointing true", {"gradient_checkpointing": True}, sharded))
    if shape.logprob_chunk_tokens > CHUNK_TOKENS:
        chunk = {"logprob_chunk_tokens": CHUNK_TOKENS}
        changes.append((f"--model.logprob_chunk_tokens {CHUNK_TOKENS}", chunk, sharded))
    if shape.rows > 1:
        micro_batches = shape.micro_batches * shape.rows
        fewest = {"rows": 1, "micro_batches": micro_batches}
        changes.append((f"--data.micro_batches_per_step {micro_batches}", fewest, sharded))
    if trainer_devices > sharded:
        changes.append(("--config configs/strategies/fsdp2.yaml", {}, trainer_devices))
    if shape.lora is None:
        needed = " --model.sharding.meta_device false" if trainer_devices > 1 else ""  # FSDP2 refuses adapters with it
        changes.append((f"--model.lora.rank 32{needed}", {"lora": LoRA(rank=32)}, trainer_devices))
    while fits[-1].num_bytes > USABLE * capacity and changes:
        setting, change, sharded = changes.pop(0)
        shape = replace(shape, **change)
        fits.append(Fit(settings=(*fits[-1].settings, setting), num_bytes=_on_device(config, shape, sharded)))
    return fits


def _on_device(config: PreTrainedConfig, shape: StepShape, sharded: int) -> int:
    """Bytes on each of `sharded` devices that divide weights, gradients and moments."""
    whole = training_memory(config, shape)
    if sharded == 1:
        return whole.peak
    # each block is gathered in the precision of the products, so that it is computed without a cast
    gathered = training_memory(config, replace(shape, dtype=shape.compute_dtype))
    blocks = gathered.weights * 2 // config.get_text_config().num_hidden_layers
    embeddings = config.get_text_config().vocab_size * config.get_text_config().hidden_size
    return whole.states // sharded + gathered.working + blocks + embeddings * shape.compute_dtype.itemsize
