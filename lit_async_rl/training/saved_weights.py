"""The weights in a checkpoint: what training changes, and the digest of the frozen base that adapters belong to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import xxhash
from torch import Tensor
from torch.distributed.tensor import DTensor

from lit_async_rl.models.loading import check_finite
from lit_async_rl.models.lora import alpha_of
from lit_async_rl.models.policy import CausalPolicy
from lit_async_rl.models.weights import is_sharded, is_wrapped, without_reference
from lit_async_rl.training.checkpoint_io import check_same_model


class SavedWeights:
    """Leaves out of a module's checkpoints what is frozen: the reference, and the base below LoRA adapters.

    Sharded ones are kept: such checkpoints are loaded completely or not at all.

    Args:
        module: has the parts `policy` and `reference`.
        model: name of the base.
    """

    def __init__(self, module: torch.nn.Module, model: str) -> None:
        self._module, self._model, self._digest = module, model, ""

    def reduce(self, checkpoint: dict[str, Any], policy: CausalPolicy) -> None:
        """Drops what is frozen; names the base of adapters."""
        if is_sharded(self._module):
            return
        checkpoint["state_dict"] = without_reference(checkpoint["state_dict"])
        if policy.has_adapters:
            checkpoint["state_dict"] = without_frozen(self._module, checkpoint["state_dict"])
            checkpoint["base"] = {"model": self._model, "digest": self.digest(policy), "alpha": alpha_of(policy)}

    def check(self, checkpoint: dict[str, Any], policy: CausalPolicy) -> None:
        """Refuses weights of another model, adapters of another base or scale, and values that are not finite.

        Drops a reference, which sharded policies save, where this run has none.

        Raises:
            ValueError: says which.
        """
        if "state_dict" not in checkpoint or is_wrapped(self._module):  # no rank has the shapes of FSDP1's weights
            return
        saved = without_reference(checkpoint["state_dict"])
        own = without_reference(self._module.state_dict())
        if "base" in checkpoint and policy.has_adapters:  # earlier checkpoints hold the base
            own = without_frozen(self._module, own)
            _check_base(checkpoint["base"], self._model, self.digest(policy), alpha_of(policy))
        check_same_model(saved, own)
        check_finite(saved.items(), "the checkpoint")
        if getattr(self._module, "reference", None) is None:
            checkpoint["state_dict"] = saved

    def digest(self, policy: CausalPolicy) -> str:
        """XXH3 of names, dtypes, shapes and values of the frozen parameters; computed once. A collective if sharded."""
        if not self._digest:
            self._digest = _frozen_digest(policy)
        return self._digest


def without_frozen(module: torch.nn.Module, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The part of a state dict that training changes."""
    frozen = {name for name, p in module.named_parameters(remove_duplicate=False) if not p.requires_grad}
    return {name: tensor for name, tensor in state.items() if name not in frozen}


@torch.no_grad()
def _frozen_digest(policy: CausalPolicy) -> str:
    digest = xxhash.xxh3_128()
    for name, parameter in sorted(policy.named_parameters()):
        if not parameter.requires_grad:
            digest.update(f"{name} {parameter.dtype} {tuple(parameter.shape)}".encode())
            whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
            digest.update(whole.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _check_base(saved: Mapping[str, Any], model: str, digest: str, alpha: float) -> None:
    if saved["digest"] != digest:
        raise ValueError(
            f"the checkpoint holds adapters of another model: of model.model={saved['model']!r} with the digest "
            f"{saved['digest'][:12]}, and model.model={model!r} has {digest[:12]} "
            "(model.dtype and model.lora.modules_to_save count, too)"
        )
    if saved.get("alpha", alpha) != alpha:  # earlier checkpoints do not say
        raise ValueError(
            f"model.lora.alpha is {alpha:g}, and was {saved['alpha']:g} when the checkpoint was saved: its adapters "
            "would have another effect than they were trained to have"
        )
