"""Self-check of the embedded engine: incremental log-probabilities against full forward passes."""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakSet

import torch
from transformers import PreTrainedModel

from lit_async_rl.engines.base import Completion, GenerationRequest, SamplingParams, default_bound
from lit_async_rl.engines.embedded.kv_cache import INEXACT_MODEL_TYPES, cache_argument
from lit_async_rl.engines.embedded.packed_linear import in_modules
from lit_async_rl.engines.embedded.queue import Pending
from lit_async_rl.engines.embedded.slots import Slots
from lit_async_rl.models.architecture import other_layers
from lit_async_rl.models.loading import evaluation_mode
from lit_async_rl.models.self_check import (
    MAX_COMPLETION_LENGTH,
    PROMPT_LENGTHS,
    compare,
    compute_dtype,
    plain_pass,
    random_tokens,
    refusal,
    unsupported_model_errors,
)

_RIGHT: WeakSet[PreTrainedModel] = WeakSet()  # validation borrows the same one again and again


def check_decoding(slots: Slots, side: str = "engine") -> None:
    """Decodes completions of a short prompt and of a prompt of one token, and compares them with full forward passes.

    Leaves random numbers and counters as they were; checks a model once.

    Args:
        slots: without requests.
        side: `engine`, or `validation` where that decodes a model of another engine; for the message.

    Raises:
        UnsupportedModelError: log-probabilities differ, or cannot be computed.
    """
    lm = slots.lm
    if lm in _RIGHT:
        return
    what = "the embedded engine's log-probabilities"
    if (layers := other_layers(lm)) and cache_argument(lm) is None:
        is_inexact = lm.config.get_text_config().model_type in INEXACT_MODEL_TYPES
        why = "which transformers decodes inexactly" if is_inexact else "whose state the embedded engine does not keep"
        raise refusal(lm, f"it has {layers} layers, {why}", side)
    params = SamplingParams(max_tokens=MAX_COMPLETION_LENGTH)
    prompts = [tuple(random_tokens(lm, length, seed)) for seed, length in enumerate(PROMPT_LENGTHS)]
    requests = [
        GenerationRequest(id=n, prompt_ids=prompt, num_samples=1, sampling=params) for n, prompt in enumerate(prompts)
    ]
    with evaluation_mode(lm), unsupported_model_errors(lm, what, side):
        completions = _decode(slots, requests)
        with in_modules(slots.packed.values()):
            plain = plain_pass(lm, [prompts[c.request_id] + c.token_ids for c in completions])
    found = [torch.tensor(completion.logprobs) for completion in completions]
    compare(lm, what, found, plain=plain, bound=default_bound(compute_dtype(lm)), side=side)
    _RIGHT.add(lm)


def _decode(slots: Slots, requests: Sequence[GenerationRequest]) -> list[Completion]:
    """One completion of each request, decoded together as far as slots allow; leaves the slots empty."""
    state = slots.generator.get_state()
    num_tokens = slots.num_tokens
    found: list[Completion] = []
    for begin in range(0, len(requests), slots.num_slots):
        found += slots.admit(
            [Pending(request, 0, 1) for request in requests[begin : begin + slots.num_slots]], version=0
        )
        while slots.num_active:
            found += slots.decode(version=0)
    slots.begin_batch(seed=0)
    slots.generator.set_state(state)
    slots.num_tokens = num_tokens
    return found
