"""The default engine: a decode loop over slots, in this process, for any Hugging Face causal LM.

Each turn of the loop samples one token for every active row. Rows are independent: one that finishes is replaced by a
waiting one at once, so nobody waits for the longest completion of a batch. A prompt is read once and its keys and
values are copied to all of its samples.

Who waits for whom: `poll` (producer's thread) holds the lock for one token at a time; `load_weights` and `submit`
(trainer's thread) come in between two tokens, with priority. Nobody waits for anything else, except that `load_weights`
without in-flight updates waits while two older updates are still unused.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from lit_async_rl.engine import Completion, GenerationRequest, RolloutEngine
from lit_async_rl.errors import StalledError
from lit_async_rl.hf_models import context_length, eos_token_ids, load_policy
from lit_async_rl.slots import Pending, Slots

MAX_PENDING_UPDATES = 2


@dataclass(frozen=True)
class _Update:
    """Weights that wait in the queue for all requests before them to finish."""

    version: int
    weights: dict[str, Tensor]


class EmbeddedEngine(RolloutEngine):
    """Generates inside `poll`, with its own copy of the weights and its own random numbers.

    Args:
        num_slots: rows decoded together.
        seed: of the random numbers.
        in_flight_weight_updates: True: new weights are used from the next token on, running completions keep the keys
            and values they have. False: requests submitted before an update finish under the old weights, later ones
            wait for it; what is sampled then depends only on the order of calls, never on timing.
        device: `auto` is the first accelerator, or the CPU.
        dtype: of the weights; log-probabilities are float32 always.
        num_threads: torch threads of the thread that polls; None leaves it alone.
        max_model_len: tokens of prompt and completion together; None is the model's own limit.
        update_timeout_s: longest wait of `load_weights`.

    Raises:
        ValueError: a setting is out of range.
    """

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
    ) -> None:
        if num_slots < 1:
            raise ValueError(f"data.engine.num_slots must be >= 1, got {num_slots}")
        if max_model_len is not None and max_model_len < 2:
            raise ValueError(f"data.engine.max_model_len must be >= 2, got {max_model_len}")
        if num_threads is not None and num_threads < 1:
            raise ValueError(f"data.engine.num_threads must be >= 1, got {num_threads}")
        self.num_slots, self.seed, self.in_flight_weight_updates = num_slots, seed, in_flight_weight_updates
        self.device, self.dtype, self.num_threads = device, dtype, num_threads
        self.update_timeout_s = update_timeout_s
        self._max_model_len = max_model_len
        self._slots: Slots | None = None
        self._queue: deque[Pending | _Update] = deque()
        self._version = 0
        self._busy_s = 0.0
        self._num_tokens = 0
        self._lock = _PriorityLock()
        self._work = threading.Event()  # set while there may be something to decode
        self._closed = False
        self._threads_set = False

    @classmethod
    def from_module(cls, lm: PreTrainedModel, num_slots: int = 256, seed: int = 0) -> EmbeddedEngine:
        """Samples with the live weights of `lm`, without a copy; for `run` in the thread that owns it."""
        engine = cls(num_slots=num_slots, seed=seed, num_threads=None)
        engine._adopt(lm)
        return engine

    def setup(self, model: str) -> None:
        """Loads the architecture; the weights come by `load_weights`."""
        device = self.device
        if device == "auto":
            accelerator = torch.accelerator.current_accelerator()
            device = str(accelerator) if accelerator is not None and torch.accelerator.is_available() else "cpu"
        self._adopt(load_policy(model, dtype=self.dtype).to(device).requires_grad_(False))

    def _adopt(self, lm: PreTrainedModel) -> None:
        limit = context_length(lm)
        if self._max_model_len is not None and self._max_model_len > limit:
            raise ValueError(f"data.engine.max_model_len={self._max_model_len} exceeds the model's context of {limit}")
        self._max_model_len = self._max_model_len or limit
        self._slots = Slots(lm, self.num_slots, eos_token_ids(lm), self.seed)

    @property
    def max_model_len(self) -> int:
        """Tokens of prompt and completion together."""
        assert self._max_model_len is not None, "setup first"
        return self._max_model_len

    @property
    def busy_s(self) -> float:
        """Seconds spent decoding."""
        return self._busy_s

    @property
    def num_tokens(self) -> int:
        """Tokens sampled so far."""
        return self._num_tokens

    # -- requests -----------------------------------------------------------------------------------------------------

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """Queues requests, all at once.

        Raises:
            ValueError: prompt and completion would not fit into `max_model_len`.
        """
        pending = []
        for request in requests:
            length = len(request.prompt_ids) + request.sampling.max_tokens
            if not request.prompt_ids or length > self.max_model_len:
                raise ValueError(
                    f"a prompt of {len(request.prompt_ids)} tokens and sampling.max_tokens="
                    f"{request.sampling.max_tokens} need {length} positions, at least one of them for the prompt; the "
                    f"engine has max_model_len={self.max_model_len}"
                )
            for first in range(0, request.num_samples, self.num_slots):
                pending.append(Pending(request, first, min(self.num_slots, request.num_samples - first)))
        with self._lock.urgent():
            self._queue.extend(pending)
            self._work.set()

    def abort(self, request_ids: Sequence[int]) -> None:
        """Ends these requests and drops what they have."""
        gone = set(request_ids)
        with self._lock.urgent():
            self._queue = deque(
                item for item in self._queue if isinstance(item, _Update) or item.request.id not in gone
            )
            self._active_slots.drop(gone)

    def poll(self, timeout_s: float) -> list[Completion]:
        """Decodes until a completion has finished or the time is up."""
        if self.num_threads is not None and not self._threads_set:
            torch.set_num_threads(self.num_threads)  # of this thread only
            self._threads_set = True
        deadline = time.monotonic() + timeout_s
        while not self._closed:
            with self._lock.patient():
                finished = [] if self._closed else self._step()
            remaining = deadline - time.monotonic()
            if finished or remaining <= 0:
                return finished
            self._work.wait(remaining)
        return []

    def _step(self) -> list[Completion]:
        """Fills free slots from the queue, or samples one token for every active row."""
        began = time.monotonic()
        slots = self._active_slots
        pending = self._next_pending()
        if pending:
            finished = slots.admit(pending, self._version)
            self._num_tokens += sum(item.num_samples for item in pending)
        elif slots.num_active:
            self._num_tokens += slots.num_active
            finished = slots.decode(self._version)
        else:
            self._work.clear()
            return []
        self._busy_s += time.monotonic() - began
        return finished

    def _next_pending(self) -> list[Pending]:
        """Takes what fits from the head of the queue; applies updates that have nothing left to wait for."""
        free, batch = self.num_slots - self._active_slots.num_active, list[Pending]()
        while self._queue:
            head = self._queue[0]
            if isinstance(head, _Update):
                if batch or self._active_slots.num_active:
                    break
                self._apply(head)
            elif head.num_samples <= free:
                batch.append(head)
                free -= head.num_samples
            else:
                break
            self._queue.popleft()
        return batch

    # -- weights ------------------------------------------------------------------------------------------------------

    def load_weights(self, version: int, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Uses these weights from the next token on, or after what was submitted before (see the class).

        Raises:
            ValueError: names or shapes are not the model's; the engine then keeps the weights it has.
            StalledError: older updates were not used within `update_timeout_s`.
        """
        update = _Update(version, dict(weights))
        self._check(update.weights)
        if self.in_flight_weight_updates:
            with self._lock.urgent():
                self._apply(update)
            return
        copies = {name: tensor.detach().clone() for name, tensor in update.weights.items()}
        self._wait_for_older_updates()
        with self._lock.urgent():
            if self._queue or self._active_slots.num_active:
                self._queue.append(_Update(version, copies))
                self._work.set()
            else:
                self._apply(update)

    def _check(self, weights: dict[str, Tensor]) -> None:
        lm = self._active_slots.lm
        own = dict(lm.named_parameters())
        if missing := own.keys() - weights.keys():
            raise ValueError(f"the policy's weights lack what the engine's model has, for example {min(missing)!r}")
        if unknown := weights.keys() - lm.state_dict().keys():
            raise ValueError(f"the engine's model has no weight {min(unknown)!r}: policy and engine differ")
        for name, parameter in own.items():
            if weights[name].shape != parameter.shape:
                raise ValueError(
                    f"weight {name!r} has shape {tuple(weights[name].shape)} in the policy and "
                    f"{tuple(parameter.shape)} in the engine"
                )

    @torch.no_grad()
    def _apply(self, update: _Update) -> None:
        for name, parameter in self._active_slots.lm.named_parameters():
            parameter.copy_(update.weights[name])
        self._version = update.version

    def _wait_for_older_updates(self) -> None:
        deadline = time.monotonic() + self.update_timeout_s
        while sum(isinstance(item, _Update) for item in list(self._queue)) >= MAX_PENDING_UPDATES:
            if time.monotonic() > deadline:
                raise StalledError(
                    f"the embedded engine did not use an update within data.engine.update_timeout_s="
                    f"{self.update_timeout_s:g}: {len(self._queue)} items queued, "
                    f"{self._active_slots.num_active} rows active"
                )
            time.sleep(0.001)

    # -- the rest -----------------------------------------------------------------------------------------------------

    @property
    def _active_slots(self) -> Slots:
        assert self._slots is not None, "setup first"
        return self._slots

    def run(self, requests: Sequence[GenerationRequest]) -> list[list[Completion]]:
        """All completions of each request, by sample index; blocks until done. For use without a producer."""
        self.submit(requests)
        found: dict[int, list[Completion]] = {request.id: [] for request in requests}
        missing = sum(request.num_samples for request in requests)
        while missing:
            completions = self.poll(60.0)
            missing -= len(completions)
            for completion in completions:
                found[completion.request_id].append(completion)
        return [sorted(found[request.id], key=lambda c: c.sample_index) for request in requests]

    def close(self) -> None:
        """Lets `poll` return and frees the model."""
        self._closed = True
        self._work.set()
        with self._lock.urgent():
            self._slots = None
            self._queue.clear()

    def state_dict(self) -> dict[str, Tensor]:
        """State of the random numbers."""
        return {"generator": self._active_slots.generator.get_state()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Continues the random numbers of `state_dict`."""
        self._active_slots.generator.set_state(state["generator"])


class _PriorityLock:
    """A lock that a loop which takes it again and again cannot keep from others.

    The loop takes it `patient`ly, others `urgent`ly: whoever waits urgently comes next.
    """

    def __init__(self) -> None:
        self._lock, self._next, self._patient = threading.Lock(), threading.Lock(), threading.Lock()

    @contextmanager
    def urgent(self) -> Iterator[None]:
        with self._next:
            self._lock.acquire()
        try:
            yield
        finally:
            self._lock.release()

    @contextmanager
    def patient(self) -> Iterator[None]:
        with self._patient, self.urgent():
            yield
