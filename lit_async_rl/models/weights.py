"""Streams the full weights of a policy, one tensor at a time, under any sharding strategy."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from lit_async_rl.models.architecture import stored_buffers
from lit_async_rl.models.policy import CausalPolicy

# -- Weights on their way from a policy to another copy of its model --------------------------------------------------


UNCHANGED = torch.empty(0, device="meta")  # placeholder for a weight that the receiver has; compare by identity
LORA_A = ".lora_A"
LORA_B = ".lora_B"


@dataclass(frozen=True)
class LowRankSum:
    """`base + up @ down`, computed on demand.

    Args:
        base: live frozen weight, [out, in].
        down: LoRA's A, [rank, in].
        up: LoRA's B times its scale, [out, rank].
    """

    base: Tensor
    down: Tensor
    up: Tensor

    def value(self, scratch: Tensor | None = None) -> Tensor:
        """The sum, in the wider of both dtypes, in one pass over `base` (PEFT's merge takes four).

        Args:
            scratch: flat memory for the result, at least as large; None allocates.
        """
        dtype = torch.promote_types(self.base.dtype, self.down.dtype)
        out = None if scratch is None else scratch[: self.base.numel()].view(self.base.shape)
        return torch.addmm(self.base.to(dtype), self.up.to(dtype), self.down.to(dtype), out=out)


def lasts(item: tuple[str, Any]) -> bool:
    """Whether a streamed weight stays valid when the next is requested: it is live, or has its own memory."""
    name, tensor = item
    return tensor is UNCHANGED or isinstance(tensor, nn.Parameter) or name.endswith((LORA_A, LORA_B))


def tensors_of(received: Mapping[str, Tensor | LowRankSum]) -> Iterator[Tensor]:
    """All tensors in a result of `receive_weights`."""
    for weight in received.values():
        if isinstance(weight, LowRankSum):
            yield from (weight.base, weight.down, weight.up)
        else:
            yield weight


@torch.no_grad()
def receive_weights(lm: nn.Module, weights: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor | LowRankSum]:
    """Copies `weights` to the devices and dtypes of parameters and stored buffers of `lm`, without changing `lm`.

    Each tensor is copied before the next is requested, because gathered shards are freed; the iterable is always
    exhausted, because iterating is a collective. The low-rank factors of a weight precede it (see `stream_weights`). If
    it is frozen, only they are copied, and `apply_weights` adds their product to the live weight.

    The result lacks weights that come as `UNCHANGED`.

    Raises:
        ValueError: names or shapes differ from `lm`; only the second name of tied parameters may be missing.
    """
    trained = dict(lm.named_parameters())
    known = lm.state_dict().keys()
    first_names = {id(parameter): name for name, parameter in trained.items()}
    tied = {
        name: first_names[id(parameter)]
        for name, parameter in lm.named_parameters(remove_duplicate=False)
        if name not in trained
    }
    own = trained | dict(stored_buffers(lm))
    received: dict[str, Tensor | LowRankSum] = {}
    again: dict[str, Tensor | LowRankSum] = {}  # tied weights, under their second names
    factors: dict[str, Tensor] = {}
    unchanged: set[str] = set()
    problem = ""
    for name, tensor in weights:
        layer = name.removesuffix(LORA_A).removesuffix(LORA_B)
        if layer != name and f"{layer}.weight" in known:
            factors[name] = tensor.detach().clone()
        elif tensor is UNCHANGED and name in known:
            unchanged.add(name)
        elif name not in known:
            problem = problem or f"the engine's model has no weight {name!r}: policy and engine differ"
        elif name in own and tensor.shape != own[name].shape:
            problem = problem or (
                f"weight {name!r} has shape {tuple(tensor.shape)} in the policy and {tuple(own[name].shape)} in the "
                "engine"
            )
        elif name in own:
            layer = name.removesuffix(".weight")
            down = factors.pop(layer + LORA_A, None)
            up = factors.pop(layer + LORA_B, None)
            received[name] = _copy(tensor, own[name], down, up=up)
        elif name in tied:
            again[name] = _copy(tensor, trained[tied[name]], None, up=None)
    for name, second in again.items():
        first = received.get(tied[name])
        if isinstance(first, Tensor) and isinstance(second, Tensor) and not torch.equal(first, second):
            problem = problem or f"the engine's model ties {name!r} to {tied[name]!r}, and the policy does not"
    missing = trained.keys() - received.keys() - unchanged
    if problem or missing:
        raise ValueError(problem or f"the policy's weights lack what the engine's model has: {min(missing)!r}")
    return received


def _copy(tensor: Tensor, like: Tensor, down: Tensor | None, up: Tensor | None) -> Tensor | LowRankSum:
    if down is None or up is None:
        return tensor.detach().to(like.device, like.dtype, copy=True)
    whole = LowRankSum(tensor.detach(), down, up)
    if isinstance(tensor, nn.Parameter) and not tensor.requires_grad:
        return whole
    return whole.value().to(like.device, like.dtype)


@torch.no_grad()
def apply_weights(
    lm: nn.Module,
    received: Mapping[str, Tensor | LowRankSum],
    writers: Mapping[str, Callable[[Tensor], None]] | None = None,
) -> None:
    """Writes the result of `receive_weights` into parameters and buffers of `lm`.

    Sums are computed one by one in the same memory: fresh pages would cost more than the products.

    Args:
        lm: model to update.
        received: result of `receive_weights`.
        writers: functions that take a weight in place of the parameter of that name.
    """
    own = dict(lm.named_parameters()) | dict(stored_buffers(lm))
    scratch: dict[tuple[torch.dtype, torch.device], Tensor] = {}
    sizes = [weight.base.numel() for weight in received.values() if isinstance(weight, LowRankSum)]
    for name, weight in received.items():
        if isinstance(weight, LowRankSum):
            kind = torch.promote_types(weight.base.dtype, weight.down.dtype), weight.base.device
            if kind not in scratch:
                scratch[kind] = torch.empty(max(sizes), dtype=kind[0], device=kind[1])
            # cast first: copies that also transpose (the engine's layout) are slow between dtypes
            weight = weight.value(scratch[kind]).to(own[name].device, own[name].dtype)
        (writers or {}).get(name, own[name].copy_)(weight)


_WRAPPERS = ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "_orig_mod.", "_forward_module.")


def is_wrapped(module: nn.Module) -> bool:
    """Whether the module or a submodule is wrapped by FSDP1."""
    return any(isinstance(part, FullyShardedDataParallel) for part in module.modules())


def is_sharded(root: nn.Module) -> bool:
    """Whether parameters are sharded over ranks (FSDP1, FSDP2, tensor parallelism)."""
    return is_wrapped(root) or any(isinstance(parameter, DTensor) for parameter in root.parameters())


def without_reference(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """State dict of `PolicyModule` without the frozen reference policy."""
    return {name: tensor for name, tensor in state.items() if not name.startswith("reference.")}


@torch.no_grad()
def stream_weights(
    policy: CausalPolicy,
    root: nn.Module | None = None,
    adapters: bool = False,
    known: dict[str, int] | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """Yields (Hugging Face name, full tensor) of every parameter and stored buffer; tied ones once, LoRA merged.

    A tensor that is neither sharded nor merged is the live parameter itself; any other is valid until the next is
    requested. A collective if parameters are sharded: all ranks iterate to the end.

    Args:
        policy: policy to stream.
        root: outermost module if it is wrapped by FSDP1 (`trainer.strategy.model`).
        adapters: do not merge LoRA: its factors come before `LAYER.weight` as `LAYER.lora_A` and `LAYER.lora_B`, and
            the receiver adds `lora_B @ lora_A`. Other changes of layers are merged.
        known: frozen weights that the receiver has, with torch's counter of in-place changes. A weight with the same
            counter comes as `UNCHANGED`, unless it is sharded or has an adapter; other frozen weights are added here.

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
    # sharded weights are never skipped, because all ranks must gather the same ones
    skips = known is not None and not is_sharded(causal_lm)
    for full_name, parameter in causal_lm.named_parameters():
        name = plain_name(full_name, adapted)
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
    for full_name, buffer in stored_buffers(causal_lm):
        name = plain_name(full_name, adapted)
        if name is not None:
            yield name, buffer


def adapted_layers(causal_lm: nn.Module) -> dict[str, Any]:
    """Layers with adapters of PEFT, by their names in the model without wrappers."""
    layers = {_clean(name): module for name, module in causal_lm.named_modules()}
    return {name: layer for name, layer in layers.items() if hasattr(layer, "get_delta_weight")}


def plain_name(name: str, adapted: Mapping[str, Any]) -> str | None:
    """Name of a parameter or buffer without adapters and wrappers; None for parameters of adapters.

    PEFT wraps a layer: its weight and bias become `LAYER.base_layer.weight` and `.bias`, beside the adapter's
    `LAYER.lora_A...`. Engines, exports and copies for validation use the plain name.

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
    """Factors A and (scaled) B of a PEFT layer that adds B @ A to its weight; None for other changes."""
    if len(layer.active_adapters) != 1 or not isinstance(layer.get_base_layer(), nn.Linear):
        return None
    (name,) = layer.active_adapters
    if name not in layer.lora_A or getattr(layer, "use_dora", {}).get(name) or getattr(layer, "fan_in_fan_out", False):
        return None
    down = _gather(layer.lora_A[name].weight)
    up = _gather(layer.lora_B[name].weight)
    return down.detach(), up.detach() * layer.scaling[name]


def _gather(tensor: Tensor) -> Tensor:
    """The full tensor. A collective if it is sharded: all ranks call, in the same order."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _stream_fsdp1(root: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Gathers one FSDP unit at a time, to bound the memory; buffers are not sharded."""
    for unit_name, unit in root.named_modules():
        if not isinstance(unit, FullyShardedDataParallel):
            continue
        units = [name for name, module in unit.named_modules() if name and isinstance(module, FullyShardedDataParallel)]
        inner = [_clean(f"{name}.") for name in units]  # parameters below lose their wrappers' names, too
        with FullyShardedDataParallel.summon_full_params(unit, recurse=False, writeback=False):
            for name, parameter in unit.named_parameters():
                if not _clean(name).startswith(tuple(inner)):
                    yield from _in_policy(f"{unit_name}.{name}" if unit_name else name, parameter)
    for name, buffer in stored_buffers(root):
        yield from _in_policy(name, buffer)


def _in_policy(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The tensor with its name in the policy's model; nothing for tensors of the reference policy."""
    before, separator, model_name = _clean(name).rpartition("policy.lm.")
    if separator and not before:
        yield model_name, tensor.detach()


def _clean(name: str) -> str:
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


# -- Copies of trained weights in CPU memory, and their temporary use; each rank has its own shards -------------------


def trained_weights(module: nn.Module) -> dict[str, Tensor]:
    """This rank's shards of all trainable parameters."""
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()  # after a forward pass without gradients the root still holds gathered parameters
    return {name: own_piece(p) for name, p in module.named_parameters() if p.requires_grad}


def num_bytes(module: nn.Module) -> int:
    """Size of the trained weights on all ranks together, at least 1; the same on each rank."""
    return sum(p.numel() * p.element_size() for p in module.parameters() if p.requires_grad) or 1


def copy_weights(module: nn.Module) -> dict[str, Tensor]:
    """Copies of the trained weights."""
    return {name: piece.to("cpu", copy=True) for name, piece in trained_weights(module).items()}


@contextmanager
def with_weights(module: nn.Module, copies: Mapping[str, Tensor] | None) -> Iterator[None]:
    """Context in which `module` has the weights in `copies`; restores its own afterwards, bit for bit.

    Args:
        module: module that is not wrapped by FSDP1, which keeps gathered weights.
        copies: result of `copy_weights`; None changes nothing.
    """
    if copies is None:
        yield
        return
    own = copy_weights(module)
    try:
        _write_weights(module, copies)
        yield
    finally:
        _write_weights(module, own)


@torch.no_grad()
def _write_weights(module: nn.Module, copies: Mapping[str, Tensor]) -> None:
    for name, piece in trained_weights(module).items():
        piece.copy_(copies[name])


def own_piece(tensor: Tensor) -> Tensor:
    """This rank's shard of a tensor, detached."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()
