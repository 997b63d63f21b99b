"""Limits of an engine's model: its length, and the requests that it can serve."""

from __future__ import annotations

from collections.abc import Iterable

from transformers import PreTrainedModel

from lit_async_rl.engines.requests import GenerationRequest
from lit_async_rl.errors import InvariantError
from lit_async_rl.models.architecture import context_length


def model_length(lm: PreTrainedModel, max_model_len: int | None) -> int:
    """Tokens of prompt and completion together: what was set, or all that the model can.

    Raises:
        ValueError: the model cannot have that many.
    """
    limit = context_length(lm)
    if max_model_len is not None and max_model_len > limit:
        raise ValueError(f"data.engine.max_model_len={max_model_len} exceeds the model's context of {limit}")
    return max_model_len or limit


def check_requests(requests: Iterable[GenerationRequest], max_model_len: int, vocab_size: int) -> None:
    """Refuses requests that can never be served, see `check_request`."""
    for request in requests:
        check_request(request, max_model_len, vocab_size)


def check_request(request: GenerationRequest, max_model_len: int, vocab_size: int) -> None:
    """Refuses a request that can never be served.

    Raises:
        ValueError: prompt and completion do not fit, or a token of the prompt is not in the vocabulary.
    """
    if request.num_samples < 1:
        raise InvariantError(f"a request for no samples: {request}")
    ids, max_tokens = request.prompt_ids, request.sampling.max_tokens
    if not ids or len(ids) + max_tokens > max_model_len:
        raise ValueError(
            f"a prompt of {len(ids)} tokens and sampling.max_tokens={max_tokens} need {len(ids) + max_tokens} "
            f"positions, at least one of them for the prompt; the engine has max_model_len={max_model_len}"
        )
    if not 0 <= min(ids) <= max(ids) < vocab_size:
        raise ValueError(
            f"a prompt holds the tokens {min(ids)} to {max(ids)}, the model's vocabulary has only {vocab_size}: "
            "tokenizer and model do not belong together"
        )
