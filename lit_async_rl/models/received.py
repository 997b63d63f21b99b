"""Weights on their way from a policy to another copy of its model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lit_async_rl.models.architecture import stored_buffers

UNCHANGED = torch.empty(0, device="meta")  # in place of a weight that the receiver has; compare by identity
LORA_A, LORA_B = ".lora_A", ".lora_B"


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
    trained, known = dict(lm.named_parameters()), lm.state_dict().keys()
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
            down, up = factors.pop(layer + LORA_A, None), factors.pop(layer + LORA_B, None)
            received[name] = _copy(tensor, own[name], down, up)
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
