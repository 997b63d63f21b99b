"""Streams the full weights of a policy, one tensor at a time, under any sharding strategy.

Gathering is a collective: every rank must iterate to the end.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from lit_async_rl.models.architecture import stored_buffers
from lit_async_rl.models.policy import CausalPolicy
from lit_async_rl.models.received import LORA_A, LORA_B, UNCHANGED, LowRankSum

_WRAPPERS = ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "_orig_mod.", "_forward_module.")


def is_wrapped(module: nn.Module) -> bool:
    """Whether the module or a submodule is wrapped by FSDP1."""
    return any(isinstance(part, FullyShardedDataParallel) for part in module.modules())


def is_sharded(root: nn.Module) -> bool:
    """Whether parameters are sharded over ranks (FSDP1, FSDP2, tensor parallelism)."""
    return is_wrapped(root) or any(isinstance(parameter, DTensor) for parameter in root.parameters())


def without_reference(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """State dict of `PolicyModule` without the frozen reference, which is not saved."""
    return {name: tensor for name, tensor in state.items() if not name.startswith("reference.")}


@torch.no_grad()
def stream_weights(
    policy: CausalPolicy,
    root: nn.Module | None = None,
    adapters: bool = False,
    known: dict[str, int] | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """Yields (Hugging Face name, full tensor) of every parameter and stored buffer; tied ones once, LoRA merged.

    What is neither sharded nor merged is the live parameter itself; all else is valid until the next is asked for.

    Args:
        policy: policy whose weights are streamed.
        root: outermost module, where FSDP1 wraps it (`trainer.strategy.model`).
        adapters: LoRA is not merged; the factors of the change of `LAYER.weight` come before it as `LAYER.lora_A` and
            `LAYER.lora_B`, to be added as `lora_B @ lora_A`. Layers for which this cannot be said are merged.
        known: frozen weights that the receiver has, with torch's counts of their changes in place. While the count is
            the same they come as `UNCHANGED`, unless an adapter changes them or they are sharded; others are added.

    Raises:
        ValueError: the policy has adapters and is wrapped by FSDP1.
    """
    if root is not None and is_wrapped(root):
        if policy.has_adapters:
            raise ValueError(
                "model.lora is not supported with FSDP1; use DDP, or FSDP2 with model.sharding.meta_device=false"
            )
        yield from _stream_fsdp1(root)
        return
    causal_lm = policy.causal_lm
    adapted = adapted_layers(causal_lm)
    skips = known is not None and not is_sharded(causal_lm)  # all ranks must gather the same
    for given, parameter in causal_lm.named_parameters():
        name = plain_name(given, adapted)
        if name is None:
            continue
        owner, _, leaf = name.rpartition(".")
        layer = adapted.get(owner) if leaf == "weight" else None  # adapters change no bias
        if known is not None and skips and layer is None and not parameter.requires_grad:
            if known.get(name) == parameter._version:
                yield name, UNCHANGED
                continue
            known[name] = parameter._version
        full = _gather(parameter)
        if layer is not None:
            factors = low_rank_factors(layer)
            if adapters and factors is not None:
                yield f"{owner}{LORA_A}", factors[0]
                yield f"{owner}{LORA_B}", factors[1]
            elif factors is not None:
                full = LowRankSum(full.detach(), *factors).value()
            else:
                full = full + sum(_gather(layer.get_delta_weight(adapter)) for adapter in layer.active_adapters)
        yield name, full
    for given, buffer in stored_buffers(causal_lm):
        name = plain_name(given, adapted)
        if name is not None:
            yield name, buffer


def adapted_layers(causal_lm: nn.Module) -> dict[str, Any]:
    """Layers with adapters of PEFT, by their names in the model without wrappers."""
    layers = {_clean(name): module for name, module in causal_lm.named_modules()}
    return {name: layer for name, layer in layers.items() if hasattr(layer, "get_delta_weight")}


def plain_name(name: str, adapted: Mapping[str, Any]) -> str | None:
    """Name of a parameter or buffer in the model without adapters and wrappers; None for what adapters add.

    PEFT wraps a layer, so that its weight and bias become `LAYER.base_layer.weight` and `.bias`, beside its own
    `LAYER.lora_A...`. Engines, exports and copies for validation know weights by this name.

    Args:
        name: as in `named_parameters`.
        adapted: the model's `adapted_layers`.
    """
    whole = _clean(name)
    owner, inside, leaf = whole.partition(".base_layer.")
    if inside and owner in adapted:
        return f"{owner}.{leaf}"
    parts = whole.split(".")
    is_added = bool(adapted) and any(".".join(parts[:n]) in adapted for n in range(1, len(parts)))
    return None if is_added else whole


def low_rank_factors(layer: Any) -> tuple[Tensor, Tensor] | None:
    """A and B of a layer of PEFT whose weight changes by B @ A; None if it changes in another way."""
    if len(layer.active_adapters) != 1 or not isinstance(layer.get_base_layer(), nn.Linear):
        return None
    (name,) = layer.active_adapters
    if name not in layer.lora_A or getattr(layer, "use_dora", {}).get(name) or getattr(layer, "fan_in_fan_out", False):
        return None
    down, up = _gather(layer.lora_A[name].weight), _gather(layer.lora_B[name].weight)
    return down.detach(), up.detach() * layer.scaling[name]


def _gather(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _stream_fsdp1(root: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Gathers the parameters of one FSDP unit at a time; buffers are whole everywhere."""
    for unit_name, unit in root.named_modules():
        if not isinstance(unit, FullyShardedDataParallel):
            continue
        units = [name for name, module in unit.named_modules() if name and isinstance(module, FullyShardedDataParallel)]
        inner = [_clean(f"{name}.") for name in units]  # parameters below lose their wrappers' names, too
        with FullyShardedDataParallel.summon_full_params(unit, recurse=False, writeback=False):
            for name, parameter in unit.named_parameters():
                if not _clean(name).startswith(tuple(inner)):
                    yield from _own(f"{unit_name}.{name}" if unit_name else name, parameter)
    for name, buffer in stored_buffers(root):
        yield from _own(name, buffer)


def _own(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The tensor by its name in the policy's model; nothing if it is a frozen reference's."""
    before, found, own = _clean(name).rpartition("policy.lm.")
    if found and not before:
        yield own, tensor.detach()


def _clean(name: str) -> str:
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name
