"""Validation of completions: each function returns a one-line description of the fault, or an empty string."""

from __future__ import annotations

import math
from numbers import Real
from typing import Any

from lit_async_rl.engines.base import Completion, GenerationRequest
from lit_async_rl.expert_choices import OWN_CHOICE, ExpertChoices
from lit_async_rl.sampler_head import SamplerHead
from lit_async_rl.types import Turn
from lit_async_rl.utils.checks import MAX_REWARD

MAX_LOGPROB = 1e-4  # log(softmax(x)) of a nearly certain token, rounded in float32, may be a little more than 0
MIN_LOGPROB = -750.0  # e^-745 is the smallest double: no sampler draws what is less likely


def find_fault(
    completion: Completion,
    request: GenerationRequest,
    *,
    versions: tuple[int | None, int | None],
    vocab_size: int | None,
    max_model_len: int,
    scores: bool,
    is_partial: bool,
) -> str:
    """Describes the first fault of a completion; empty if it is valid.

    Args:
        completion: of `request`, which its `request_id` and `sample_index` fit.
        request: what was asked for.
        versions: the oldest and the newest that a token may have; None is not checked.
        vocab_size: token ids are smaller; None checks only that they are not negative.
        max_model_len: tokens of prompt and completion, where there are several turns.
        scores: whether the engine gives rewards.
        is_partial: it is not finished, has no reward yet, and may be empty.
    """
    return (
        _bad_sequences(completion)
        or _bad_reason(completion, ("stop", "length", "abort") if is_partial else ("stop", "length"))
        or _bad_tokens(completion, vocab_size)
        or _bad_length(completion, request, max_model_len, is_partial)
        or _bad_logprobs(completion)
        or _bad_head(completion, request.sampling.head, vocab_size)
        or _bad_experts(completion, request)
        or _bad_versions(completion, *versions)
        or ("" if is_partial else _bad_reward(completion, scores))
    )


def show(value: Any) -> str:
    """Short representation of a value on one line."""
    text = f"{type(value).__name__}" if hasattr(value, "shape") else repr(value)
    return " ".join(text.split())[:80]


def _bad_sequences(completion: Completion) -> str:
    """Python's own types: numbers of other libraries would end in a checkpoint, or break far from here."""
    allowed: dict[str, set[type]] = {
        "token_ids": {int},
        "logprobs": {float, int},
        "versions": {int},
        "loss_mask": {bool},
    }
    for name, types in allowed.items():
        values: Any = getattr(completion, name)
        if values is None and name == "loss_mask":
            continue
        if type(values) is not tuple:
            return f"has {name} of type {type(values).__name__}, must be a tuple"
        if others := set(map(type, values)) - types:
            rule = " or ".join(sorted(kind.__name__ for kind in types))
            return f"has {name} with elements of type {min(kind.__name__ for kind in others)}, must be {rule}"
        if len(values) != len(completion.token_ids):
            return f"has {len(values)} {name} for {len(completion.token_ids)} token_ids"
    return ""


def _bad_reason(completion: Completion, allowed: tuple[str, ...]) -> str:
    reason: Any = completion.finish_reason
    if isinstance(reason, str) and reason in allowed:
        return ""
    return f"has finish_reason={show(reason)}, must be {' or '.join(map(repr, allowed))}"


def _bad_tokens(completion: Completion, vocab_size: int | None) -> str:
    ids = completion.token_ids
    limit = math.inf if vocab_size is None else vocab_size
    if not ids or (min(ids) >= 0 and max(ids) < limit):
        return ""
    position, token = next((n, token) for n, token in enumerate(ids) if not 0 <= token < limit)
    return f"has token_ids[{position}]={token}, which is not in the vocabulary of {limit} tokens"


def _bad_length(completion: Completion, request: GenerationRequest, max_model_len: int, is_partial: bool) -> str:
    """`max_tokens` bounds one turn of the policy; the model's context bounds all turns together."""
    num_tokens, limit = len(completion.token_ids), request.sampling.max_tokens
    mask = completion.loss_mask
    if not is_partial and not (num_tokens if mask is None else sum(mask)):
        return "has no token_ids" if mask is None or not num_tokens else "has a loss_mask without a token of the policy"
    if mask is None and completion.turns is None:
        return f"has {num_tokens} token_ids, more than max_tokens={limit}" if num_tokens > limit else ""
    if len(request.prompt_ids) + num_tokens > max_model_len:
        return f"has {num_tokens} token_ids and {len(request.prompt_ids)} of the prompt, more than {max_model_len=}"
    if problem := _bad_turns(completion.turns, num_tokens, is_partial):
        return problem
    mask = mask or (True,) * num_tokens
    longest = max(_written_in_turns(mask, completion.turns), default=0)
    return f"has {longest} token_ids in one turn, more than max_tokens={limit}" if longest > limit else ""


def _bad_turns(turns: Any, num_tokens: int, is_partial: bool) -> str:
    """Turns follow each other; the last one ends with the completion, unless that is not finished."""
    if turns is None:
        return ""
    if type(turns) is not tuple or not all(isinstance(turn, Turn) for turn in turns):
        return f"has turns={show(turns)}, must be a tuple of Turn"
    begin = 0
    for n, turn in enumerate(turns):
        if type(turn.end) is not int or not begin < turn.end <= num_tokens:
            return f"has turns[{n}].end={show(turn.end)}, must be from {begin + 1} to {num_tokens}"
        if not _is_finite(turn.reward):
            return f"has turns[{n}].reward={show(turn.reward)}, must be a finite number in float32"
        begin = turn.end
    if turns and not is_partial and begin != num_tokens:
        return f"has turns[{len(turns) - 1}].end={begin}, must be {num_tokens}: the last turn ends with the last token"
    return ""


def _written_in_turns(mask: tuple[bool, ...], turns: tuple[Turn, ...] | None) -> list[int]:
    """Number of tokens the policy wrote in each turn; without turns, in each contiguous stretch of the mask."""
    if turns is not None:
        ends = [turn.end for turn in turns] + [len(mask)]
        return [sum(mask[begin:end]) for begin, end in zip([0, *ends], ends, strict=False)]
    return [len(stretch) for stretch in "".join("1" if one else " " for one in mask).split()]


def _bad_logprobs(completion: Completion) -> str:
    values = completion.logprobs
    if not values or (math.isfinite(sum(values)) and max(values) <= MAX_LOGPROB and min(values) >= MIN_LOGPROB):
        return ""
    for n, value in enumerate(values):
        if not MIN_LOGPROB <= value <= MAX_LOGPROB:  # NaN is neither
            return f"has logprobs[{n}]={value}, which is not the log-probability of a sampled token"
    return ""


def _bad_head(completion: Completion, width: int | None, vocab_size: int | None) -> str:
    head: Any = completion.head
    if head is None or width is None:
        return "" if head is None and width is None else f"has head={show(head)}, but sampling.head={width}"
    if not isinstance(head, SamplerHead):
        return f"has head={show(head)}, must be a SamplerHead"
    if (len(head), head.width) != (len(completion.token_ids), width):
        return f"has a head of {len(head)} x {head.width} for {len(completion.token_ids)} token_ids and {width=}"
    if head.logprobs.isnan().any() or (head.logprobs > MAX_LOGPROB).any():
        return "has a head with values that are no log-probabilities"
    limit = math.inf if vocab_size is None else vocab_size
    if head.ids.numel() and not 0 <= int(head.ids.min()) <= int(head.ids.max()) < limit:
        return f"has a head with token ids outside of the vocabulary of {limit} tokens"
    return ""


def _bad_experts(completion: Completion, request: GenerationRequest) -> str:
    choices: Any = completion.experts
    if choices is None or not request.sampling.experts:
        fits = (choices is None) is not request.sampling.experts
        return "" if fits else f"has experts={show(choices)}, but sampling.experts={request.sampling.experts}"
    if not isinstance(choices, ExpertChoices):
        return f"has experts={show(choices)}, must be ExpertChoices"
    num_read = len(request.prompt_ids) + len(completion.token_ids) - 1
    if len(choices) != num_read:
        return f"has experts of {len(choices)} tokens, must be of {num_read}: prompt and completion but its last"
    if choices.experts.is_floating_point() or (len(choices) and int(choices.experts.min()) < OWN_CHOICE):
        return "has experts that are not the numbers of experts"
    return ""


def _bad_versions(completion: Completion, oldest: int | None, newest: int | None) -> str:
    """Versions must not decrease along a completion."""
    values = completion.versions
    if not values:
        return ""
    if any(map(int.__gt__, values, values[1:])):
        n = next(n for n in range(1, len(values)) if values[n] < values[n - 1])
        return f"has versions[{n}]={values[n]} behind versions[{n - 1}]={values[n - 1]}: they cannot decrease"
    if oldest is not None and values[0] < oldest:
        return f"has versions[0]={values[0]}, older than version {oldest}, which was loaded when it was asked for"
    if newest is not None and values[-1] > newest:
        return f"has versions[{len(values) - 1}]={values[-1]}, newer than the policy's newest version {newest}"
    return ""


def _bad_reward(completion: Completion, scores: bool) -> str:
    reward = completion.reward
    if not scores:
        return "" if reward is None else f"has reward={show(reward)}, but the engine does not score"
    return "" if _is_finite(reward) else f"has reward={show(reward)}, must be a finite number in float32"


def _is_finite(value: Any) -> bool:
    """True for a number that is finite in float32, in which rewards are trained on."""
    if not isinstance(value, Real):
        return False
    try:
        return abs(float(value)) <= MAX_REWARD  # false for NaN
    except OverflowError:  # an integer of more than 308 digits
        return False
