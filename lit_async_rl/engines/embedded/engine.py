"""Default engine: a continuous-batching decode loop for Hugging Face causal LMs with a KV cache.

Each iteration samples one token for every active row. A finished row is replaced by a queued sample at once, so none
waits for the longest completion of a batch. Each prompt is prefilled once; its KV cache is copied to every sample.

| who | waits for | woken by |
|---|---|---|
| `poll` (producer's thread) | something to decode | `submit`, `close` |
| `submit`, `abort` (producer's thread) | the current decode step | the loop, which yields the lock |
| `load_weights` | see `WeightUpdates` | the loop, `close`, an error |
"""

from __future__ import annotations

import contextlib
import importlib
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from lit_async_rl.engines.base import RolloutEngine
from lit_async_rl.engines.completion_check import run_requests
from lit_async_rl.engines.embedded.kv_cache import SlotCache
from lit_async_rl.engines.embedded.queue import (
    RequestQueue,
    Update,
    check_requests,
    check_settings,
    model_length,
    set_up,
)
from lit_async_rl.engines.embedded.self_check import check_decoding
from lit_async_rl.engines.embedded.slots import Slots
from lit_async_rl.errors import SetupError, StalledError
from lit_async_rl.models.loading import build_policy, eos_token_ids, evaluation_mode
from lit_async_rl.models.weights import apply_weights, receive_weights
from lit_async_rl.types import Completion, GenerationRequest
from lit_async_rl.utils.checks import check_range
from lit_async_rl.utils.guarded_calls import FairLock, Room
from lit_async_rl.utils.spans import ENGINE, Lane, recorder

# -- Updates of the embedded engine's weights: how they arrive, and when they are applied -----------------------------
# In flight `load_weights` waits for nothing: the decode loop takes the weights before its next step. Without in-flight
# updates it waits until one of two pending updates is applied; the loop, `close` and an error wake it.


MAX_PENDING = 2


class NewestUpdate:
    """Place of an update between the thread that brings it and the decode loop, which takes it before its next token.

    An update that was not taken is joined with the next, which may leave unchanged weights out. Thread-safe.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._update: Update | None = None

    def put(self, update: Update) -> None:
        """Takes the place of an earlier update."""
        with self._lock:
            earlier = {} if self._update is None else self._update.weights
            self._update = Update(update.version, earlier | update.weights)

    def take(self) -> Update | None:
        """The update, which is gone then."""
        with self._lock:
            update = self._update
            self._update = None
        return update


class WeightUpdates:
    """Version of an engine's weights, and the updates that wait. The engine's lock is held, except by `receive`.

    Args:
        in_flight: updates are applied before the next token; otherwise in the order of requests, and at most
            `MAX_PENDING` wait.
        timeout_s: timeout of the wait for one of these to be applied.
        self_check: check decoding once the first weights are there.

    Attributes:
        version: of the weights that are used.
        are_loaded: whether there are weights.
        room: places for updates that wait; the decode loop's errors close it.
    """

    def __init__(self, in_flight: bool, timeout_s: float, self_check: bool) -> None:
        self.in_flight = in_flight
        self._timeout_s = timeout_s
        self._self_check = self_check
        self.version = 0
        self.are_loaded = True
        self.room = Room(MAX_PENDING)
        self._arrived = NewestUpdate()

    def receive(
        self, version: int, weights: Iterable[tuple[str, Tensor]], slots: Slots, num_queued: int
    ) -> Update | None:
        """Reads an update; None if the decode loop takes it before its next token.

        Raises:
            ValueError: names or shapes are not the model's.
            StalledError: older updates were not used in time.
        """
        if not self.in_flight and not self.room.wait(self._timeout_s):
            raise StalledError(
                f"the embedded engine used no update within data.engine.update_timeout_s={self._timeout_s:g}: "
                f"{num_queued} items queued, {slots.num_active} rows active"
            )
        update = Update(version, receive_weights(slots.lm, weights))
        if self.in_flight and self.are_loaded:
            self._arrived.put(update)  # the trainer does not wait for the merging of adapters either
            return None
        return update

    def apply_due(self, queue: RequestQueue, slots: Slots) -> None:
        """Applies what has arrived since the last token, and passes barriers that are reached."""
        if (update := self._arrived.take()) is not None:
            self.apply(update, slots)
        while (barrier := queue.take_barrier(slots.num_active)) is not None:
            if isinstance(barrier, Update):
                self.apply(barrier, slots)
                self.room.add(-1)
            else:
                slots.begin_batch(barrier.seed)

    def apply(self, update: Update, slots: Slots) -> None:
        """Uses these weights from now on."""
        apply_weights(slots.lm, update.weights, {name: linear.write for name, linear in slots.packed.items()})
        if self._self_check and not self.are_loaded:
            check_decoding(slots)
        self.version = update.version
        self.are_loaded = True
        slots.forget_prompts()

    def forget(self) -> None:
        """Drops what has arrived and was not applied."""
        self._arrived.take()


# -- Busy time and tokens of the embedded engine, for metrics and for a timeline --------------------------------------


class WorkRecord:
    """Adds up seconds and tokens of prefills and decode steps.

    Attributes:
        busy_s: seconds.
        num_tokens: tokens sampled.
        lane: of a timeline; None for an engine that does not sample for training.
    """

    def __init__(self) -> None:
        self.busy_s = 0.0
        self.num_tokens = 0
        self.lane: Lane | None = None

    def add(self, name: str, began: float, slots: Slots, version: int) -> None:
        """A step ends now, that began at `began` of `time.monotonic`."""
        num_tokens = slots.num_tokens - self.num_tokens
        self.num_tokens = slots.num_tokens
        seconds = time.monotonic() - began
        self.busy_s += seconds
        if self.lane is not None:
            self.lane.add(name, began, seconds, version, version=version, slots=slots.num_active, tokens=num_tokens)


CLOSE_S = 5.0


class EmbeddedEngine(RolloutEngine):
    """Generates inside `poll`, with its own copy of the weights and its own random number generator.

    Args:
        num_slots: rows decoded together.
        seed: of the random number generator.
        in_flight_weight_updates: True: new weights are used from the next token on; running completions keep their KV
            cache. False: the requests of one `submit` are a batch that starts when all earlier ones are finished, and
            updates are applied between batches. Samples then depend only on the seed, the id of the first request of
            each batch and the order of calls, not on timing, also after a resume.
        device: `auto` is the first accelerator, or the CPU.
        dtype: of the weights; log-probabilities are float32 always.
        num_threads: torch threads of the thread that polls, and of threads started later; None leaves it alone.
        max_model_len: tokens of prompt and completion together; None is the model's own limit.
        update_timeout_s: timeout of `load_weights`, and of any wait for the current decode step.
        self_check: compare a few tokens with full forward passes once there are weights; refuse wrong ones.
        own_process: generate in a child process. The trainer then has its interpreter's lock to itself, which is worth
            most where models are small.

    Raises:
        ValueError: a setting is out of range.
    """

    records_heads = records_entropy = records_experts = records_spans = takes_adapters = takes_changes = True
    cache_class: type[SlotCache] = SlotCache

    def __init__(
        self,
        num_slots: int = 64,
        seed: int = 0,
        in_flight_weight_updates: bool = True,
        device: str = "auto",
        dtype: str = "float32",
        num_threads: int | None = 1,
        max_model_len: int | None = None,
        update_timeout_s: float = 600.0,
        self_check: bool = True,
        *,
        own_process: bool = False,
    ) -> None:
        check_settings(num_slots, num_threads, max_model_len, update_timeout_s, device, dtype)
        check_range("data.engine", "integer", seed=seed)
        self.num_slots = num_slots
        self.seed = seed
        self.in_flight_weight_updates = in_flight_weight_updates
        self.device = device
        self.dtype = dtype
        self.num_threads = num_threads
        self.update_timeout_s = update_timeout_s
        self._max_model_len = max_model_len
        self.self_check = self_check
        self._slots: Slots | None = None
        self._queue = RequestQueue(num_slots)
        self._record = WorkRecord()
        what = f"the token that the embedded engine computes (data.engine.update_timeout_s={update_timeout_s:g})"
        self._lock = FairLock(update_timeout_s, what)
        self._work = threading.Event()  # set while there may be something to decode
        self._updates = WeightUpdates(in_flight_weight_updates, update_timeout_s, self_check)
        self._closed = self._threads_set = False

    @classmethod
    def variant(cls, kwargs: Mapping[str, Any]) -> type[RolloutEngine]:
        if not kwargs.get("own_process"):
            return cls
        return importlib.import_module("lit_async_rl.engines.embedded.own_process").in_own_process(cls)

    @classmethod
    def from_module(
        cls, lm: PreTrainedModel, num_slots: int = 256, seed: int = 0, self_check: bool = True, side: str = "engine"
    ) -> EmbeddedEngine:
        """Samples from the live weights of `lm` without a copy; call `run` in its thread. For `side` see the check."""
        engine = cls(num_slots=num_slots, seed=seed, num_threads=None, self_check=self_check)
        engine._adopt(lm, owns_weights=False)
        if self_check:
            check_decoding(engine._active_slots, side)
        return engine

    def fresh(self, out_of_memory: bool = False) -> RolloutEngine:
        """A new engine with the same settings; after running out of memory, with half the slots from then on."""
        engine: Any = super().fresh(out_of_memory)
        engine.num_slots = engine._queue.num_slots = max(1, self.num_slots // (2 if out_of_memory else 1))
        return engine

    def setup(self, model: str) -> None:
        """Builds the architecture without reading weights from disk; `load_weights` loads them."""
        self._adopt(build_policy(model, self.dtype, self.device), owns_weights=True)
        self._record.lane = recorder().lane(ENGINE)
        self._updates.are_loaded = False

    def _adopt(self, lm: PreTrainedModel, owns_weights: bool) -> None:
        self._max_model_len = model_length(lm, self._max_model_len)
        self._slots = Slots(lm, self.num_slots, eos_token_ids(lm), self.seed, owns_weights, self.cache_class)

    @property
    def max_model_len(self) -> int:
        return set_up(self._max_model_len)

    @property
    def vocab_size(self) -> int:
        """Token ids of requests must be smaller."""
        return self._active_slots.vocab_size

    @property
    def busy_s(self) -> float:
        return self._record.busy_s

    @property
    def num_tokens(self) -> int:
        return self._record.num_tokens

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """Queues requests atomically.

        Raises:
            ValueError: prompt and completion would not fit into `max_model_len`, or a token is not in the vocabulary.
        """
        if not self._updates.are_loaded:
            raise SetupError("the engine was used before load_weights")
        check_requests(requests, self.max_model_len, self._active_slots.vocab_size)
        with self._lock.hold():
            self._queue.push_requests(requests, None if self.in_flight_weight_updates else self.seed)
            self._work.set()

    def abort(self, request_ids: Sequence[int]) -> None:
        gone = set(request_ids)
        with self._lock.hold():
            self._queue.drop(gone)
            self._active_slots.drop(gone)

    def partial_completions(self) -> list[Completion]:
        with self._lock.hold():
            return self._active_slots.partial_completions()

    @property
    def num_running(self) -> int:
        return 0 if self._slots is None else self._slots.num_active

    def random_state(self) -> Tensor:
        return self._active_slots.generator.get_state()

    def set_random_state(self, state: Tensor) -> None:
        self._active_slots.generator.set_state(state)

    def poll(self, timeout_s: float) -> list[Completion]:
        """Decodes until a completion is finished or `timeout_s` has passed."""
        if self.num_threads is not None and not self._threads_set:
            torch.set_num_threads(self.num_threads)
            self._threads_set = True
        deadline = time.monotonic() + timeout_s
        while not self._closed:
            with self._lock.hold(), self._updates.room.closed_by_errors():
                finished = [] if self._closed else self._step()
            remaining = deadline - time.monotonic()
            if finished or remaining <= 0:
                return finished
            self._work.wait(remaining)
        return []

    def _step(self) -> list[Completion]:
        """Fills free slots from the queue, or samples one token for every active row."""
        slots = self._active_slots
        self._updates.apply_due(self._queue, slots)
        began = time.monotonic()
        if pending := self._queue.take_requests(slots.num_active):
            name = "prefill"
            finished = slots.admit(pending, self._updates.version)
        elif slots.num_active:
            name = "decode"
            finished = slots.decode(self._updates.version)
        else:
            self._work.clear()
            return []
        self._record.add(name, began, slots, self._updates.version)
        return finished

    def load_weights(self, version: int, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Samples from these weights from the next token on, or after all earlier requests (see the class).

        Raises:
            ValueError: names or shapes are not the model's; the engine then keeps the weights it has.
            StalledError: older updates were not used within `update_timeout_s`.
            RuntimeError: `poll` has raised; its error is the cause.
        """
        update = self._updates.receive(version, weights, self._active_slots, len(self._queue))
        if update is None:
            return
        with self._lock.hold():
            if not self.in_flight_weight_updates and (self._queue or self._active_slots.num_active):
                self._updates.room.add(1)
                self._queue.push_barrier(update)
                self._work.set()
            else:
                self._updates.apply(update, self._active_slots)

    @property
    def _active_slots(self) -> Slots:
        return set_up(self._slots)

    def run(self, requests: Sequence[GenerationRequest]) -> list[list[Completion]]:
        """All completions of each request, by sample index; blocks until they are finished. Needs no producer."""
        self._active_slots.forget_prompts()  # the owner of the weights may have changed them
        with evaluation_mode(self._active_slots.lm):
            return run_requests(self, requests)

    def close(self) -> None:
        """Unblocks `poll` and `load_weights` and releases the model."""
        self._closed = True
        self._work.set()
        self._updates.room.close()
        # a thread that hangs in a token keeps what it works with; there is nothing that could end it
        with contextlib.suppress(StalledError), self._lock.hold(CLOSE_S):
            self._slots = None
            self._queue = RequestQueue(self.num_slots)
            self._updates.forget()
