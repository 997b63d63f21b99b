"""Limits of an engine: its settings, its model's length, and the requests that it can serve."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

from transformers import PreTrainedModel

from lit_async_rl.engines.requests import GenerationRequest
from lit_async_rl.errors import InvariantError, SetupError
from lit_async_rl.models.architecture import context_length
from lit_async_rl.utils.checks import check_device, check_dtype, check_range

T = TypeVar("T")


def set_up(part: T | None) -> T:
    """The part that the setup makes.

    Raises:
        SetupError: there was none yet.
    """
    if part is None:
        raise SetupError("the engine was used before its setup")
    return part


def check_settings(
    num_slots: int,
    num_threads: int | None,
    max_model_len: int | None,
    update_timeout_s: float,
    device: str,
    dtype: str,
) -> None:
    """Refuses settings that are out of range.

    Raises:
        ValueError: names the setting and its value.
    """
    check_range("data.engine", "integer >= 1", num_slots=num_slots, num_threads=num_threads)
    check_range("data.engine", "integer >= 2", max_model_len=max_model_len)
    check_range("data.engine", "positive", update_timeout_s=update_timeout_s)
    check_device("data.engine.device", device)
    check_dtype("data.engine.dtype", dtype)


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
