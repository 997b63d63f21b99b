"""Validation of completions: functions return a one-line description of the fault, or an empty string."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from numbers import Real
from typing import Any

from lit_async_rl.engines.base import RolloutEngine
from lit_async_rl.errors import CompletionError
from lit_async_rl.runtime.waiting import Wait
from lit_async_rl.sampler_records import OWN_CHOICE, ExpertChoices, SamplerHead
from lit_async_rl.types import Branch, Completion, GenerationRequest, Turn
from lit_async_rl.utils.checks import MAX_REWARD

MAX_LOGPROB = 1e-4  # rounding in float32 may give a nearly certain token a log-probability slightly above 0
MIN_LOGPROB = -750.0  # e^-745 is the smallest double: no sampler draws less likely tokens
ROW_FIELDS = [one.name for one in fields(Branch)]


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
        completion: with valid `request_id` and `sample_index`.
        request: its request.
        versions: oldest and newest valid version of a token; None is not checked.
        vocab_size: number of valid token ids; None checks only that they are not negative.
        max_model_len: maximum number of tokens of prompt and completion, for completions of several turns.
        scores: whether the engine computes rewards.
        is_partial: whether it is unfinished; it then has no reward yet, and may be empty.
    """
    fault = (
        _bad_sequences(completion)
        or _bad_reason(completion, ("stop", "length", "abort") if is_partial else ("stop", "length"))
        or _bad_tokens(completion, vocab_size)
        or _bad_length(completion, request, max_model_len, is_partial=is_partial)
        or _bad_logprobs(completion)
        or _bad_head(completion, request.sampling.head, vocab_size)
        or _bad_experts(completion, request)
        or _bad_versions(completion, *versions)
        or ("" if is_partial else _bad_reward(completion, scores))
        or _bad_rows(completion)
    )
    if fault or not completion.branches:
        return fault
    # replies of a text may follow each other without a token between them: no limit of a turn applies to a branch
    unlimited = replace(request, sampling=replace(request.sampling, max_tokens=max_model_len))
    for number, branch in enumerate(completion.branches):  # they are completions but for their rewards
        row = Completion(
            request_id=completion.request_id,
            sample_index=completion.sample_index,
            finish_reason="stop",
            **{name: getattr(branch, name) for name in ROW_FIELDS},
        )
        problem = find_fault(
            row,
            unlimited,
            versions=versions,
            vocab_size=vocab_size,
            max_model_len=max_model_len,
            scores=False,
            is_partial=False,
        )
        if problem:
            return f"branches[{number}] {problem}"
    return ""


def _bad_rows(completion: Completion) -> str:
    if not _is_finite(completion.credit):
        return f"has credit={show(completion.credit)}, must be a finite number in float32"
    own: Any = completion.prompt_ids
    if own is not None and (type(own) is not tuple or not own or set(map(type, own)) != {int}):
        return f"has prompt_ids={show(own)}, must be a tuple of int that is not empty"
    if type(completion.branches) is not tuple:
        return f"has branches={show(completion.branches)}, must be a tuple of Branch"
    for number, branch in enumerate(completion.branches):
        if not isinstance(branch, Branch):
            return f"has branches[{number}]={show(branch)}, must be a Branch"
    return ""


def show(value: Any) -> str:
    """Short representation of a value on one line."""
    text = f"{type(value).__name__}" if hasattr(value, "shape") else repr(value)
    return " ".join(text.split())[:80]


def _bad_sequences(completion: Completion) -> str:
    """Requires Python's own types: others would get into checkpoints, or cause errors far from here."""
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
    """`max_tokens` limits one turn of the policy; the model's context limits all turns together."""
    num_tokens = len(completion.token_ids)
    limit = request.sampling.max_tokens
    mask = completion.loss_mask
    if not is_partial and not (num_tokens if mask is None else sum(mask)):
        return "has no token_ids" if mask is None or not num_tokens else "has a loss_mask without a token of the policy"
    if mask is None and completion.turns is None:
        return f"has {num_tokens} token_ids, more than max_tokens={limit}" if num_tokens > limit else ""
    if (num_given := _num_given(completion, request)) + num_tokens > max_model_len:
        return f"has {num_tokens} token_ids and {num_given} of the prompt, more than {max_model_len=}"
    if problem := _bad_turns(completion.turns, num_tokens, is_partial):
        return problem
    mask = mask or (True,) * num_tokens
    longest = max(_num_policy_tokens(mask, completion.turns), default=0)
    return f"has {longest} token_ids in one turn, more than max_tokens={limit}" if longest > limit else ""


def _num_given(completion: Completion, request: GenerationRequest) -> int:
    """Number of tokens that the completion follows."""
    return len(request.prompt_ids if completion.prompt_ids is None else completion.prompt_ids)


def _bad_turns(turns: Any, num_tokens: int, is_partial: bool) -> str:
    """Turns must be contiguous, and the last must end with the completion unless that is partial."""
    if turns is None:
        return ""
    if type(turns) is not tuple or not all(isinstance(turn, Turn) for turn in turns):
        return f"has turns={show(turns)}, must be a tuple of Turn"
    begin = 0
    for n, turn in enumerate(turns):
        if type(turn.end) is not int or not begin < turn.end <= num_tokens:
            return f"has turns[{n}].end={show(turn.end)}, must be from {begin + 1} to {num_tokens}"
        if turn.call is not None and (type(turn.call) is not int or turn.call < 0):
            return f"has turns[{n}].call={show(turn.call)}, must be an integer >= 0"
        if not _is_finite(turn.reward):
            return f"has turns[{n}].reward={show(turn.reward)}, must be a finite number in float32"
        begin = turn.end
    if turns and not is_partial and begin != num_tokens:
        return f"has turns[{len(turns) - 1}].end={begin}, must be {num_tokens}: the last turn ends with the last token"
    return ""


def _num_policy_tokens(mask: tuple[bool, ...], turns: tuple[Turn, ...] | None) -> list[int]:
    """Number of the policy's tokens in each turn; without turns, in each contiguous stretch of the mask."""
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
        return "has a head with values that are not log-probabilities"
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
    num_read = _num_given(completion, request) + len(completion.token_ids) - 1
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
    """True for a number that is finite in float32, the precision of rewards in training."""
    if not isinstance(value, Real):
        return False
    try:
        return abs(float(value)) <= MAX_REWARD  # false for NaN
    except OverflowError:  # an integer of more than 308 digits
        return False


# -- Validation of completions where they enter: in the producer, in evaluation, in validation and in episodes --------
# An engine that returns an impossible completion is considered broken: the error counts as an engine failure, and
# completions validated earlier are kept.


MAX_ENDED_REQUESTS = 16384  # remembered, to recognize late completions and duplicates


@dataclass
class _Asked:
    """A request, and the samples received for it."""

    id: int
    num_samples: int
    request: GenerationRequest | None  # None once it has ended: its prompt may have thousands of tokens
    oldest: int | None  # oldest valid version of a token
    received: Any = field(default_factory=set)  # set of sample indices, and once all have come, their range


class RequestLedger:
    """Requests to an engine and the samples received for them. Not thread-safe.

    Args:
        engine: gives the name in errors, `scores` and `max_model_len`.
        vocab_size: see `find_fault`.
        version: that of the engine's weights; None checks no versions.

    Attributes:
        loaded: version of the last `load_weights` that returned: the oldest valid version for new requests.
        newest: version of the last `load_weights`, even if it has not returned yet: the newest valid version.
    """

    def __init__(self, engine: RolloutEngine, vocab_size: int | None = None, version: int | None = None) -> None:
        self.name = type(engine).__name__
        self.scores = engine.scores
        self.max_model_len = engine.max_model_len
        self.vocab_size = vocab_size
        self.loaded = self.newest = version
        self._running: dict[int, _Asked] = {}
        self._ended: OrderedDict[int, _Asked] = OrderedDict()

    def open(self, requests: Iterable[GenerationRequest]) -> None:
        """Registers submitted requests."""
        for request in requests:
            self._ended.pop(request.id, None)
            self._running[request.id] = _Asked(request.id, request.num_samples, request, oldest=self.loaded)

    def abort(self, request_ids: Iterable[int]) -> None:
        """Unregisters requests; samples of them that arrive later are dropped."""
        for request_id in request_ids:
            self._end(request_id)

    def _end(self, request_id: int) -> None:
        if (asked := self._running.pop(request_id, None)) is not None:
            asked.request = None
            self._ended[request_id] = asked
            while len(self._ended) > MAX_ENDED_REQUESTS:
                self._ended.popitem(last=False)

    def _count(self, asked: _Asked, sample: int) -> None:
        asked.received.add(sample)
        if len(asked.received) == asked.num_samples:
            asked.received = range(asked.num_samples)
            self._end(asked.id)

    def receive(self, completion: Any) -> bool:
        """Validates a finished completion; False for a late one of an aborted request.

        Raises:
            CompletionError: the completion is unknown, a duplicate, or has an invalid field.
        """
        asked = self._find(completion)
        sample = completion.sample_index
        if sample in asked.received:
            raise self._error(completion, "has come already: sample_index is a duplicate")
        if asked.request is None:
            self._count(asked, sample)
            return False
        self._check_fields(completion, asked.request, asked.oldest, is_partial=False)
        self._count(asked, sample)
        return True

    def lose(self, request_id: int, sample: int) -> bool:
        """Registers that a sample will not come; False if it has come, or its request is no longer registered."""
        asked = self._running.get(request_id)
        if asked is None or sample in asked.received:
            return False
        self._count(asked, sample)
        return True

    def num_missing(self, request_id: int) -> int:
        """Number of samples of a registered request that have not arrived; 0 for any other request."""
        asked = self._running.get(request_id)
        return 0 if asked is None else asked.num_samples - len(asked.received)

    def receive_partials(self, completions: Any) -> list[Completion]:
        """Validates partial completions and returns those of registered requests.

        Raises:
            CompletionError: a completion is invalid.
        """
        wanted = []
        for completion in self.listed(completions, "partial_completions"):
            asked = self._find(completion)
            if asked.request is None:
                continue
            self._check_fields(completion, asked.request, asked.oldest, is_partial=True)
            if completion.sample_index not in asked.received:
                wanted.append(completion)
        return wanted

    def listed(self, completions: Any, call: str) -> Sequence[Any]:
        """Checks that a call of the engine returned a list.

        Raises:
            CompletionError: it returned something else.
        """
        if not isinstance(completions, list | tuple):
            raise CompletionError(f"{self.name}.{call} returned {show(completions)} instead of a list of completions")
        return completions

    def _find(self, completion: Any) -> _Asked:
        if not isinstance(completion, Completion):
            raise CompletionError(f"{self.name} returned {show(completion)} instead of a Completion")
        number = completion.request_id
        sample = completion.sample_index
        if type(number) is not int:
            raise self._error(completion, f"has request_id={show(number)}, which is not an int")
        asked = self._running.get(number) or self._ended.get(number)
        if asked is None:
            raise self._error(completion, f"has request_id={number}, which was never asked for")
        if type(sample) is not int or not 0 <= sample < asked.num_samples:
            rule = f"must be an int from 0 to {asked.num_samples - 1}"
            raise self._error(completion, f"has sample_index={show(sample)}, {rule}")
        return asked

    def _check_fields(
        self, completion: Completion, request: GenerationRequest, oldest: int | None, is_partial: bool
    ) -> None:
        problem = find_fault(
            completion,
            request,
            versions=(oldest, self.newest),
            vocab_size=self.vocab_size,
            max_model_len=self.max_model_len,
            scores=self.scores,
            is_partial=is_partial,
        )
        if problem:
            raise self._error(completion, problem)

    def _error(self, completion: Completion, problem: str) -> CompletionError:
        which = f"request {show(completion.request_id)}, sample {show(completion.sample_index)}"
        return CompletionError(f"{self.name} returned a wrong completion: {which} {problem}")


# -- Blocking generation without a producer: validation, benchmarks, tests --------------------------------------------


POLL_INTERVAL_S = 1.0


def run_requests(
    engine: RolloutEngine,
    requests: Sequence[GenerationRequest],
    vocab_size: int | None = None,
    timeout_s: float = 600.0,
    on_progress: Callable[[], None] = lambda: None,
) -> list[list[Completion]]:
    """All completions of each request, by sample index; blocks until they are finished.

    A request that the engine gave up has none, and one with samples given up has fewer.

    Args:
        engine: with weights; no other thread polls it.
        requests: with different ids.
        vocab_size: vocabulary size of the model, to validate completions.
        timeout_s: longest time in seconds without a token or completion, except during an environment's calls within
            their limits.
        on_progress: called about once a second while tokens are sampled.

    Raises:
        CompletionError: the engine returned an invalid completion.
        StalledError: there was no token or completion for `timeout_s`.
    """
    found: dict[int, list[Completion]] = {request.id: [] for request in requests}
    missing = sum(request.num_samples for request in requests)
    ledger = RequestLedger(engine, vocab_size)
    ledger.open(requests)
    engine.submit(requests)

    def stalled() -> str:
        rest = f": {work}, which never returns" if work is not None else ""
        return f"{type(engine).__name__} gave no token for {timeout_s:g} s; {missing} samples lack{rest}"

    wait = Wait(timeout_s, stalled)
    num_tokens = engine.num_tokens
    while missing:
        for completion in ledger.listed(engine.poll(min(POLL_INTERVAL_S, timeout_s)), "poll"):
            if ledger.receive(completion):
                found[completion.request_id].append(completion)
                missing -= 1
                wait.restart()
        for request_id in engine.take_given_up():
            lacking = ledger.num_missing(request_id)
            ledger.abort([request_id])
            found[request_id] = []
            missing -= lacking
            wait.restart()
        for request_id, sample in engine.take_lost():
            missing -= ledger.lose(request_id, sample)
            wait.restart()
        work = engine.outside_work()
        if work is not None and work.is_within_limits:
            wait.restart()
            on_progress()
        if num_tokens != (num_tokens := engine.num_tokens):
            wait.restart()
            on_progress()
        if missing:
            wait.raise_if_over()
    return [sorted(found[request.id], key=lambda c: c.sample_index) for request in requests]
