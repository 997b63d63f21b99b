"""Validation of completions where they enter: in the producer, in evaluation, in validation and in episodes.

An engine that returns an impossible completion is considered broken: the error counts as an engine failure, and
completions validated earlier are kept.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from lit_async_rl.engines.base import Completion, GenerationRequest, RolloutEngine
from lit_async_rl.engines.completion_check import find_fault, show
from lit_async_rl.errors import CompletionError

NUM_REMEMBERED = 16384  # requests that have ended: what comes of them is late, or a duplicate


@dataclass
class _Asked:
    request: GenerationRequest
    oldest: int | None  # version that a token may have
    received: set[int] = field(default_factory=set)  # samples: of a hundred thousand, most come later


@dataclass(frozen=True)
class _Ended:
    """The rest of a request that has ended: never its prompt and samples, which are thousands of tokens long."""

    num_samples: int
    received: frozenset[int] | None  # None: all of them

    @classmethod
    def of(cls, asked: _Asked) -> _Ended:
        num_samples = asked.request.num_samples
        return cls(num_samples, None if len(asked.received) == num_samples else frozenset(asked.received))


class RequestLedger:
    """Requests submitted to an engine and the samples received for them. Not thread-safe.

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
        self._ended: OrderedDict[int, _Ended] = OrderedDict()

    def open(self, requests: Iterable[GenerationRequest]) -> None:
        """Registers submitted requests."""
        for request in requests:
            self._ended.pop(request.id, None)
            self._running[request.id] = _Asked(request, self.loaded)

    def abort(self, request_ids: Iterable[int]) -> None:
        """Unregisters requests; samples of them that still arrive are dropped."""
        for request_id in request_ids:
            self._end(request_id)

    def _end(self, request_id: int) -> None:
        if (asked := self._running.pop(request_id, None)) is not None:
            self._ended[request_id] = _Ended.of(asked)
            while len(self._ended) > NUM_REMEMBERED:
                self._ended.popitem(last=False)

    def receive(self, completion: Any) -> bool:
        """Validates a finished completion; False for a late one of an aborted request.

        Raises:
            CompletionError: it cannot be right: unknown, there already, or a field is wrong.
        """
        asked, sample = self._find(completion), completion.sample_index
        if asked.received is None or sample in asked.received:
            raise self._error(completion, "has come already: sample_index is a duplicate")
        if isinstance(asked, _Ended):
            self._ended[completion.request_id] = _Ended(asked.num_samples, asked.received | {sample})
            return False
        self._check_fields(completion, asked, is_partial=False)
        asked.received.add(sample)
        if len(asked.received) == asked.request.num_samples:
            self._end(completion.request_id)
        return True

    def num_missing(self, request_id: int) -> int:
        """Samples of a registered request that have not come; 0 for any other."""
        asked = self._running.get(request_id)
        return 0 if asked is None else asked.request.num_samples - len(asked.received)

    def receive_partials(self, completions: Any) -> list[Completion]:
        """Validates partial completions and returns those of registered requests.

        Raises:
            CompletionError: one of them cannot be right.
        """
        wanted = []
        for completion in self.listed(completions, "partial_completions"):
            asked = self._find(completion)
            if isinstance(asked, _Ended):
                continue
            self._check_fields(completion, asked, is_partial=True)
            if completion.sample_index not in asked.received:
                wanted.append(completion)
        return wanted

    def listed(self, completions: Any, call: str) -> Sequence[Any]:
        """Checks that a call of the engine returned a list.

        Raises:
            CompletionError: it is no list.
        """
        if not isinstance(completions, list | tuple):
            raise CompletionError(f"{self.name}.{call} returned {show(completions)} instead of a list of completions")
        return completions

    def _find(self, completion: Any) -> _Asked | _Ended:
        if not isinstance(completion, Completion):
            raise CompletionError(f"{self.name} returned {show(completion)} instead of a Completion")
        number, sample = completion.request_id, completion.sample_index
        if type(number) is not int:
            raise self._error(completion, f"has request_id={show(number)}, which is not an int")
        asked = self._running.get(number) or self._ended.get(number)
        if asked is None:
            raise self._error(completion, f"has request_id={number}, which was never asked for")
        num_samples = asked.num_samples if isinstance(asked, _Ended) else asked.request.num_samples
        if type(sample) is not int or not 0 <= sample < num_samples:
            rule = f"must be an int from 0 to {num_samples - 1}"
            raise self._error(completion, f"has sample_index={show(sample)}, {rule}")
        return asked

    def _check_fields(self, completion: Completion, asked: _Asked, is_partial: bool) -> None:
        problem = find_fault(
            completion,
            asked.request,
            versions=(asked.oldest, self.newest),
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
