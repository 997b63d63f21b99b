"""Completions are checked once, where they enter: by the producer, by an evaluation, by validation, by episodes.

An engine that returns something impossible is broken. Nothing else that comes from it could be trusted, so the error
counts as an engine failure; what was checked before is kept.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

from lit_async_rl.engines.base import Completion, GenerationRequest, RolloutEngine
from lit_async_rl.errors import CompletionError
from lit_async_rl.types import Turn

MAX_LOGPROB = 1e-4  # log(softmax(x)) of a nearly certain token, rounded in float32, may be a little more than 0
MIN_LOGPROB = -750.0  # e^-745 is the smallest double: no sampler draws what is less likely
NUM_REMEMBERED = 16384  # requests that have ended: what comes of them is late, or a duplicate
FINISHED, PARTIAL = ("stop", "length"), ("stop", "length", "abort")


@dataclass
class _Asked:
    request: GenerationRequest
    oldest: int | None  # version that a token may have
    missing: set[int]  # samples that have not come


class RequestLedger:
    """What an engine was asked for, and what of it has come. Not thread-safe.

    Args:
        engine: named in errors; says whether completions bring rewards, and how long an episode may be.
        vocab_size: token ids are smaller; None checks only that they are not negative.
        version: of the weights that the engine has; None checks no versions.

    Attributes:
        loaded: newest version whose `load_weights` has returned: requests from now on get no older token.
        newest: newest version that the engine was given, whether or not `load_weights` has returned.
    """

    def __init__(self, engine: RolloutEngine, vocab_size: int | None = None, version: int | None = None) -> None:
        self.name, self.scores, self.max_model_len = type(engine).__name__, engine.scores, engine.max_model_len
        self.vocab_size = vocab_size
        self.loaded = self.newest = version
        self._running: dict[int, _Asked] = {}
        self._ended: OrderedDict[int, _Asked] = OrderedDict()

    def open(self, requests: Iterable[GenerationRequest]) -> None:
        """These are asked for now."""
        for request in requests:
            self._ended.pop(request.id, None)
            self._running[request.id] = _Asked(request, self.loaded, set(range(request.num_samples)))

    def abort(self, request_ids: Iterable[int]) -> None:
        """These are not wanted any more; what is under way of them may still come, and is dropped."""
        for request_id in request_ids:
            self._end(request_id)

    def _end(self, request_id: int) -> None:
        if (asked := self._running.pop(request_id, None)) is not None:
            self._ended[request_id] = asked
            while len(self._ended) > NUM_REMEMBERED:
                self._ended.popitem(last=False)

    def receive(self, completion: Any) -> bool:
        """Whether a finished completion is wanted; False for a late one of a request that was aborted.

        Raises:
            CompletionError: it cannot be right: unknown, there already, or a field is wrong.
        """
        asked = self._find(completion)
        if completion.sample_index not in asked.missing:
            raise self._error(completion, "has come already: sample_index is a duplicate")
        self._check_fields(completion, asked, FINISHED)
        asked.missing.remove(completion.sample_index)
        if completion.request_id not in self._running:
            return False
        if not asked.missing:
            self._end(completion.request_id)
        return True

    def receive_partials(self, completions: Any) -> list[Completion]:
        """The wanted ones among what running requests have so far.

        Raises:
            CompletionError: one of them cannot be right.
        """
        wanted = []
        for completion in self.listed(completions, "partial_completions"):
            asked = self._find(completion)
            self._check_fields(completion, asked, PARTIAL)
            if completion.request_id in self._running and completion.sample_index in asked.missing:
                wanted.append(completion)
        return wanted

    def listed(self, completions: Any, call: str) -> Sequence[Any]:
        """What a call of the engine returned.

        Raises:
            CompletionError: it is no list.
        """
        if not isinstance(completions, list | tuple):
            raise CompletionError(f"{self.name}.{call} returned {_show(completions)} instead of a list of completions")
        return completions

    def _find(self, completion: Any) -> _Asked:
        if not isinstance(completion, Completion):
            raise CompletionError(f"{self.name} returned {_show(completion)} instead of a Completion")
        number, sample = completion.request_id, completion.sample_index
        if type(number) is not int:
            raise self._error(completion, f"has request_id={_show(number)}, which is no int")
        asked = self._running.get(number) or self._ended.get(number)
        if asked is None:
            raise self._error(completion, f"has request_id={number}, which was never asked for")
        if type(sample) is not int or not 0 <= sample < asked.request.num_samples:
            rule = f"must be an int from 0 to {asked.request.num_samples - 1}"
            raise self._error(completion, f"has sample_index={_show(sample)}, {rule}")
        return asked

    def _check_fields(self, completion: Completion, asked: _Asked, reasons: tuple[str, ...]) -> None:
        is_partial = reasons is PARTIAL
        problem = (
            _bad_sequences(completion)
            or _bad_reason(completion, reasons)
            or _bad_tokens(completion, self.vocab_size)
            or _bad_length(completion, asked.request, self.max_model_len, is_partial)
            or _bad_logprobs(completion)
            or _bad_versions(completion, asked.oldest, self.newest)
            or ("" if is_partial else _bad_reward(completion, self.scores))
        )
        if problem:
            raise self._error(completion, problem)

    def _error(self, completion: Completion, problem: str) -> CompletionError:
        which = f"request {_show(completion.request_id)}, sample {_show(completion.sample_index)}"
        return CompletionError(f"{self.name} returned a wrong completion: {which} {problem}")


def _show(value: Any) -> str:
    """A value on one line that is not too long."""
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
    return f"has finish_reason={_show(reason)}, must be {' or '.join(map(repr, allowed))}"


def _bad_tokens(completion: Completion, vocab_size: int | None) -> str:
    ids = completion.token_ids
    limit = math.inf if vocab_size is None else vocab_size
    if not ids or (min(ids) >= 0 and max(ids) < limit):
        return ""
    position, token = next((n, token) for n, token in enumerate(ids) if not 0 <= token < limit)
    return f"has token_ids[{position}]={token}, which is not in the vocabulary of {limit} tokens"


def _bad_length(completion: Completion, request: GenerationRequest, max_model_len: int, is_partial: bool) -> str:
    """`max_tokens` bounds what the policy wrote in one turn; the model's context bounds all turns together."""
    num_tokens, limit = len(completion.token_ids), request.sampling.max_tokens
    mask = completion.loss_mask
    if not is_partial and not (num_tokens if mask is None else sum(mask)):
        return "has no token_ids" if mask is None or not num_tokens else "has a loss_mask without a token of the policy"
    if mask is None and completion.turns is None:
        return f"has {num_tokens} token_ids, more than max_tokens={limit}" if num_tokens > limit else ""
    if len(request.prompt_ids) + num_tokens > max_model_len:
        return f"has {num_tokens} token_ids and {len(request.prompt_ids)} of the prompt, more than {max_model_len=}"
    if problem := _bad_turns(completion.turns, num_tokens):
        return problem
    mask = mask or (True,) * num_tokens
    longest = max(_written_in_turns(mask, completion.turns), default=0)
    return f"has {longest} token_ids in one turn, more than max_tokens={limit}" if longest > limit else ""


def _bad_turns(turns: Any, num_tokens: int) -> str:
    if turns is None:
        return ""
    if type(turns) is not tuple or not all(isinstance(turn, Turn) for turn in turns):
        return f"has turns={_show(turns)}, must be a tuple of Turn"
    begin = 0
    for n, turn in enumerate(turns):
        if type(turn.end) is not int or not begin < turn.end <= num_tokens:
            return f"has turns[{n}].end={_show(turn.end)}, must be from {begin + 1} to {num_tokens}"
        if not _is_finite(turn.reward):
            return f"has turns[{n}].reward={_show(turn.reward)}, must be a finite number"
        begin = turn.end
    return ""


def _written_in_turns(mask: tuple[bool, ...], turns: tuple[Turn, ...] | None) -> list[int]:
    """Tokens that the policy wrote in each turn; without turns, in each stretch without an answer."""
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
            return f"has logprobs[{n}]={value}, which is no log-probability of a token that was sampled"
    return ""


def _bad_versions(completion: Completion, oldest: int | None, newest: int | None) -> str:
    """Tokens are sampled one after the other by weights that only get newer."""
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
        return "" if reward is None else f"has reward={_show(reward)}, but the engine does not score"
    return "" if _is_finite(reward) else f"has reward={_show(reward)}, must be a finite number"


def _is_finite(value: Any) -> bool:
    return isinstance(value, Real) and math.isfinite(value)
