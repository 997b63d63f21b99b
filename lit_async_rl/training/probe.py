"""Log-probabilities of the policy for comparison with an engine's."""

from __future__ import annotations

import torch

from lit_async_rl.engines.base import Probe, probe_tokens
from lit_async_rl.models.architecture import context_length
from lit_async_rl.models.weights import is_wrapped
from lit_async_rl.training.module import PolicyModule


def compute_dtype(module: PolicyModule) -> str:
    """Name of the dtype of forward passes; `tf32` is float32 on an accelerator."""
    if module.sharding.compute_dtype is not None:
        return module.sharding.compute_dtype
    half = {"bf16": "bfloat16", "16": "float16"}.get(str(module.trainer.precision).partition("-")[0])
    name = half or str(next(module.policy.parameters()).dtype).removeprefix("torch.")
    return "tf32" if name == "float32" and module.device.type != "cpu" else name


def can_be_called(module: PolicyModule) -> bool:
    """Whether the policy can be called outside of `training_step`: not if FSDP1 wraps the whole module."""
    root = module.trainer.strategy.model
    return root is None or not is_wrapped(root) or is_wrapped(module.policy)


@torch.no_grad()
def make_probe(module: PolicyModule) -> Probe | None:
    """Log-probabilities of a fixed token sequence under the present weights; None if they cannot be computed.

    A collective: all ranks call.
    """
    if not can_be_called(module):
        return None
    lm = module.policy.causal_lm
    tokens = probe_tokens(lm.config.get_text_config().vocab_size, context_length(lm) - 1)
    ids = torch.tensor([tokens], device=module.device)
    mask = torch.arange(len(tokens), device=module.device)[None] > 0
    with module.trainer.precision_plugin.train_step_context():
        logprobs = module.policy(ids, mask).logprobs
    return Probe(module.version, tokens, tuple(logprobs[0, 1:].tolist()), dtype=compute_dtype(module))
