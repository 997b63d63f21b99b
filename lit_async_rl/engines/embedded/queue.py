"""FIFO request queue with priorities and barriers (not thread-safe: the engine's lock is held)."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from torch import Tensor
from transformers import PreTrainedModel

from lit_async_rl.errors import InvariantError, SetupError
from lit_async_rl.models.loading import context_length
from lit_async_rl.models.weights import LowRankSum
from lit_async_rl.types import GenerationRequest
from lit_async_rl.utils.checks import check_device, check_dtype, check_range


@dataclass(frozen=True)
class Pending:
    """Samples `first_sample ... first_sample + num_samples - 1` of a request."""

    request: GenerationRequest
    first_sample: int
    num_samples: int

    @property
    def stream(self) -> int | None:
        """Of the first sample's random numbers; None if they are the engine's."""
        return None if self.request.seed is None else self.request.seed + self.first_sample


@dataclass(frozen=True)
class Update:
    """Barrier: new weights, applied when all earlier requests are finished."""

    version: int
    weights: dict[str, Tensor | LowRankSum]


@dataclass(frozen=True)
class NewBatch:
    """Barrier: re-seeds the random number generator when all earlier requests are finished."""

    seed: int


class RequestQueue:
    """FIFO queue; a higher priority goes first, but never past a barrier.

    Prefilling a prompt costs about as much as decoding one token of all rows, so slots are filled several at a time: as
    soon as an eighth of them is free, or everything queued fits.

    Args:
        num_slots: rows decoded together.
    """

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._items: deque[Pending | Update | NewBatch] = deque()

    def __len__(self) -> int:
        return len(self._items)

    def push_requests(self, requests: Sequence[GenerationRequest], seed: int | None = None) -> None:
        """Queues all samples of these requests, behind all others of at least their priority.

        With a seed they form a batch: it starts when all earlier requests are finished, with its own random numbers.
        """
        if requests and seed is not None:
            self.push_barrier(NewBatch(random.Random(f"{seed} {requests[0].id}").getrandbits(63)))
        for request in requests:
            place = len(self._items)
            while place and self._yields(self._items[place - 1], request):
                place -= 1
            self._items.insert(place, Pending(request, 0, request.num_samples))

    @staticmethod
    def _yields(item: Pending | Update | NewBatch, request: GenerationRequest) -> bool:
        return isinstance(item, Pending) and item.request.priority < request.priority

    def push_barrier(self, barrier: Update | NewBatch) -> None:
        """Appends a barrier, which is reached when everything before it is finished."""
        self._items.append(barrier)

    def drop(self, request_ids: set[int]) -> None:
        """Removes these requests."""
        kept = (item for item in self._items if not (isinstance(item, Pending) and item.request.id in request_ids))
        self._items = deque(kept)

    def take_barrier(self, num_active: int) -> Update | NewBatch | None:
        """Pops the head of the queue if it is a barrier that has been reached."""
        if num_active or not self._items or isinstance(self._items[0], Pending):
            return None
        barrier = self._items.popleft()
        if isinstance(barrier, Pending):
            raise InvariantError("a request where a barrier should be")
        return barrier

    def take_requests(self, num_active: int) -> list[Pending]:
        """Pops the requests to prefill now.

        A request that does not fit waits for more free slots, so that its prompt is prefilled once; it is split when
        waiting would leave a quarter of the slots idle.
        """
        free = self.num_slots - num_active
        if num_active and free < self.num_slots / 8 and not self._all_fit(free):
            return []
        taken: list[Pending] = []
        while free and self._items and isinstance(head := self._items[0], Pending):
            if head.num_samples > free:
                if num_active and free < self.num_slots / 4:
                    break
                rest = Pending(head.request, head.first_sample + free, head.num_samples - free)
                head = Pending(head.request, head.first_sample, free)
                self._items[0] = rest
            else:
                self._items.popleft()
            taken.append(head)
            free -= head.num_samples
        return taken

    def _all_fit(self, free: int) -> bool:
        for item in self._items:
            if not isinstance(item, Pending) or item.num_samples > free:
                return not isinstance(item, Pending)
            free -= item.num_samples
        return True


# -- Limits of an engine: its settings, its model's length, and the requests that it can serve ------------------------


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
    ids = request.prompt_ids
    max_tokens = request.sampling.max_tokens
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
