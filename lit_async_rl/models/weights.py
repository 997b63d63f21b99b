"""Streams the full weights of a policy, one tensor at a time, under any sharding strategy.

Gathering is a collective: every rank must iterate to the end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from lit_async_rl.models.loading import stored_buffers
from lit_async_rl.models.policy import CausalPolicy

# -- Weights on their way from a policy to another copy of its model --------------------------------------------------


UNCHANGED = torch.empty(0, device="meta")  # in place of a weight that the receiver has; compare by identity
LORA_A = ".lora_A"
LORA_B = ".lora_B"


@dataclass(frozen=True)
class LowRankSum:
    """`base + up @ down`, computed where it is needed; `base` is a live weight that does not train.

    Args:
        base: [out, in].
        down: [rank, in], as LoRA's A.
        up: [out, rank], as LoRA's B with its scale.
    """

    base: Tensor
    down: Tensor
    up: Tensor

    def value(self, scratch: Tensor | None = None) -> Tensor:
        """The sum, in the wider of both dtypes; one pass over `base`, where PEFT's difference takes four.

        Args:
            scratch: memory for it, flat and at least as large.
        """
        dtype = torch.promote_types(self.base.dtype, self.down.dtype)
        out = None if scratch is None else scratch[: self.base.numel()].view(self.base.shape)
        return torch.addmm(self.base.to(dtype), self.up.to(dtype), self.down.to(dtype), out=out)


def lasts(item: tuple[str, Any]) -> bool:
    """Whether a streamed weight stays valid when the next is asked for: it is a live one, or has memory of its own."""
    name, tensor = item
    return tensor is UNCHANGED or isinstance(tensor, nn.Parameter) or name.endswith((LORA_A, LORA_B))


@torch.no_grad()
def receive_weights(lm: nn.Module, weights: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor | LowRankSum]:
    """Copies `weights` to the devices and dtypes of parameters and stored buffers of `lm`, without changing `lm`.

    Each tensor is copied before the next is requested, because gathered shards are freed; the iterable is always
    exhausted, because other ranks take part in it. Of a weight with adapters (whose factors come before it, see
    `stream_weights`) only those are copied if it does not train: `apply_weights` reads it and adds their product.

    `UNCHANGED` in place of a tensor leaves the weight out of the result.

    Raises:
        ValueError: names or shapes differ from `lm`; only the second name of tied parameters may be missing.
    """
    trained = dict(lm.named_parameters())
    known = lm.state_dict().keys()
    own = trained | dict(stored_buffers(lm))
    received: dict[str, Tensor | LowRankSum] = {}
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
    """Writes what `receive_weights` has found into parameters and buffers of `lm`, or hands it to `writers` by name.

    Sums are computed one by one in the same memory, which stays in the cache; fresh pages cost more than the products.
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
    down = _gather(layer.lora_A[name].weight)
    up = _gather(layer.lora_B[name].weight)
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


# -- Copies of trained weights in CPU memory, put back for a while; each rank has its own shards ----------------------


def trained_weights(module: nn.Module) -> dict[str, Tensor]:
    """The parts on this rank of all parameters that train."""
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()  # the root keeps what it gathered for a forward pass without gradients
    return {name: own_piece(p) for name, p in module.named_parameters() if p.requires_grad}


def num_bytes(module: nn.Module) -> int:
    """Size of the trained weights on all ranks together, at least 1; the same on each rank."""
    return sum(p.numel() * p.element_size() for p in module.parameters() if p.requires_grad) or 1


def copy_weights(module: nn.Module) -> dict[str, Tensor]:
    """Copies of the trained weights."""
    return {name: piece.to("cpu", copy=True) for name, piece in trained_weights(module).items()}


@contextmanager
def with_weights(module: nn.Module, copies: Mapping[str, Tensor] | None) -> Iterator[None]:
    """Context in which `module` has the weights in `copies`; afterwards it has its own again, bit for bit.

    Args:
        module: not wrapped by FSDP1, which keeps gathered weights.
        copies: of `copy_weights`; None changes nothing.
    """
    if copies is None:
        yield
        return
    own = copy_weights(module)
    try:
        _put(module, copies)
        yield
    finally:
        _put(module, own)


@torch.no_grad()
def _put(module: nn.Module, copies: Mapping[str, Tensor]) -> None:
    for name, piece in trained_weights(module).items():
        piece.copy_(copies[name])


def own_piece(tensor: Tensor) -> Tensor:
    """The part of a tensor on this rank."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()
