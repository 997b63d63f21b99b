"""The policy that trains, and the frozen one of the KL penalty."""

from __future__ import annotations

import copy
import logging
from typing import Any

from lit_async_rl.models.loading import adapter_folder, has_adapter, load_policy
from lit_async_rl.models.lora import LoRA, add_lora
from lit_async_rl.models.packing import SharedPromptPacking
from lit_async_rl.models.policy import CausalPolicy
from lit_async_rl.models.routers import checkpoint_contexts

log = logging.getLogger(__name__)
CHECKPOINTING = {"use_reentrant": False, "context_fn": checkpoint_contexts}


def load_policies(
    model: str,
    logprob_chunk_tokens: int,
    packing: SharedPromptPacking | None,
    lora: LoRA | None,
    on_meta_device: bool,
    needs_reference: bool,
    gradient_checkpointing: bool,
    **load: Any,
) -> tuple[CausalPolicy, CausalPolicy | None]:
    """Policy and reference; the latter is a frozen copy, or None if none is needed or only adapters train.

    Args:
        model: Hugging Face name or folder.
        logprob_chunk_tokens: logits of at most this many tokens exist at a time.
        packing: of the prompts of a group; None is none.
        lora: adapters to train; None trains all weights.
        on_meta_device: whether weights are loaded later, when they are sharded.
        needs_reference: whether there is a KL penalty.
        gradient_checkpointing: whether activations are computed again in the backward pass.
        load: further arguments of `load_policy`.

    Raises:
        ValueError: weights that are made here, not loaded, would have to be on the meta device.
    """
    if on_meta_device and (load.get("random_init") or lora):
        raise ValueError(
            "model.sharding.meta_device=true goes with neither model.random_init nor model.lora: set it to false"
        )
    if on_meta_device and has_adapter(model):
        raise ValueError(
            f"model.sharding.meta_device=true reads files, and model.model={model!r} holds an adapter beside them: "
            "merge it first, or set meta_device to false"
        )
    continued = lora is not None and lora.continue_adapter
    adapter: Any = "leave_out" if continued else "merge"
    lm = load_policy(model, **load, device="meta" if on_meta_device else "cpu", adapter=adapter)
    if has_adapter(model) and not load.get("random_init"):
        done = "trained further" if continued else "merged into the weights"
        log.warning("model.model=%r holds an adapter, which is %s (model.lora.continue_adapter)", model, done)
    reference = None
    if needs_reference and (lora is None or lora.modules_to_save or continued):
        # a continued adapter cannot be switched off to get the policy that training began with
        start = load_policy(model, **load) if continued else copy.deepcopy(lm)
        reference = CausalPolicy(start, logprob_chunk_tokens, packing).requires_grad_(False)
    if gradient_checkpointing:
        lm.gradient_checkpointing_enable(gradient_checkpointing_kwargs=CHECKPOINTING)
        lm.train()  # transformers checkpoints in this mode only; without dropout the two are the same
    adapted = lm if lora is None else add_lora(lm, lora, adapter_folder(model))
    return CausalPolicy(adapted, logprob_chunk_tokens, packing), reference
