"""Default engine: a continuous-batching decode loop for Hugging Face causal LMs with a KV cache.

`EmbeddedEngine` hands every call to a `DecodeLoop` in this process, or with `own_process` to a `DecodeProcess`, which
sends it to a `DecodeLoop` in a child process.

Each step of the loop samples one token for every active row. A queued sample replaces a finished row at once, so none
waits for the longest completion of a batch. Each prompt is prefilled once; its KV cache is copied to every sample.

| who | waits for | woken by |
|---|---|---|
| `poll` (producer's thread) | something to decode | `submit`, `close` |
| `abort` (producer's thread) | the current decode step | the loop, which yields the lock |
| `load_weights` in flight (trainer's thread) | nothing: the loop takes the weights before its next step | |
| `load_weights` otherwise | one of two pending updates to be applied | the loop, `close`, an error |
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from lit_async_rl.engines.base import EngineWrapper, RolloutEngine, WeightReport, set_up
from lit_async_rl.engines.completion_check import run_requests
from lit_async_rl.engines.embedded.cuda_stream import EngineStream
from lit_async_rl.engines.embedded.decode_graphs import cuda_graphs
from lit_async_rl.engines.embedded.decoding_check import check_decoding
from lit_async_rl.engines.embedded.kv_cache import SlotCache
from lit_async_rl.engines.embedded.own_process import DecodeProcess
from lit_async_rl.engines.embedded.packed_linear import in_modules
from lit_async_rl.engines.embedded.queue import RequestQueue, Update
from lit_async_rl.engines.embedded.settings import Decoder, DecodeSettings
from lit_async_rl.engines.embedded.slots import Slots
from lit_async_rl.errors import StalledError
from lit_async_rl.models.architecture import context_length, stored_buffers
from lit_async_rl.models.end_tokens import eos_token_ids
from lit_async_rl.models.loading import build_policy, evaluation_mode, find_device
from lit_async_rl.models.self_check import plain_pass
from lit_async_rl.models.weights import apply_weights, receive_weights, tensors_of
from lit_async_rl.runtime.spans import ENGINE, Lane, recorder
from lit_async_rl.runtime.waiting import FairLock, Wait
from lit_async_rl.types import Completion, GenerationRequest
from lit_async_rl.utils.device_memory import has_streams

MAX_PENDING_UPDATES = 2
VLLM_PARAMETERS = 200_000_000  # from about this size on vLLM's start, a minute, is soon made up for
log = logging.getLogger(__name__)
CLOSE_TIMEOUT_S = 5.0


class EmbeddedEngine(EngineWrapper):
    """Generates inside `poll`, with its own copy of the weights and its own random number generator.

    Example:
        ```python
        import lit_async_rl as rl

        engine = rl.EmbeddedEngine(num_slots=4, seed=1)
        engine.setup(str(rl.asset("sort_policy")))
        module = rl.PolicyModule(str(rl.asset("sort_policy")))
        engine.load_weights(version=0, weights=module.policy.causal_lm.named_parameters())
        sampling = rl.SamplingParams(max_tokens=5)
        request = rl.GenerationRequest(id=0, prompt_ids=(3, 4, 5), num_samples=2, sampling=sampling)
        first, second = engine.run([request])[0]
        assert first.versions == (0,) * len(first.token_ids)
        ```

    Args:
        num_slots: rows decoded together.
        seed: of the random number generator.
        in_flight_weight_updates: True: new weights are used from the next token on; running completions keep their KV
            cache. False: the requests of one `submit` are a batch that starts when all earlier ones are finished, and
            updates are applied between batches. Samples then depend only on the seed, the id of each batch's first
            request and the order of calls, not on timing, even after a resume.
        device: `auto` is the first accelerator, or the CPU.
        dtype: precision of the weights; log-probabilities are always float32.
        num_threads: torch threads of the polling thread and of threads started later; None keeps torch's number.
        max_model_len: maximum number of tokens of prompt and completion together; None is the model's limit.
        update_timeout_s: timeout of `load_weights`, and of any wait for the current decode step, in seconds.
        self_check: compare a few tokens of the first weights with full forward passes; raise if they differ.
        own_process: generate in a child process, which does not share the trainer's GIL; matters most for small models.
        cuda_graphs: record each decode step once as a CUDA graph and replay it, four tokens at a time, which saves
            Python's launches of kernels. For Llama, Mistral, Qwen2 and Qwen3 on a GPU, with `own_process`. With
            `in_flight_weight_updates: false`, each batch records anew.

    Attributes:
        engine: the decode loop, or the process that runs it.
        cache_class: of the KV cache.

    Raises:
        ValueError: a setting is out of range.
    """

    engine: DecodeLoop | DecodeProcess
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
        cuda_graphs: bool = False,
    ) -> None:
        settings = DecodeSettings(
            num_slots=num_slots,
            seed=seed,
            in_flight_weight_updates=in_flight_weight_updates,
            device=device,
            dtype=dtype,
            num_threads=num_threads,
            max_model_len=max_model_len,
            update_timeout_s=update_timeout_s,
            self_check=self_check,
            cuda_graphs=cuda_graphs,
        )
        if own_process and self.cache_class is not SlotCache:
            raise ValueError(
                f"data.engine.own_process must be False with {type(self).__name__}, got True: the child process does "
                f"not know the cache class {self.cache_class.__name__}"
            )
        if cuda_graphs and not own_process:
            raise ValueError(
                "data.engine.own_process must be True with data.engine.cuda_graphs, got False: while the engine "
                "records a CUDA graph, no other thread of its process, such as the trainer's, may wait for the GPU"
            )
        super().__init__(DecodeProcess(settings) if own_process else DecodeLoop(settings, self.cache_class))
        self.seed = seed
        self.in_flight_weight_updates = in_flight_weight_updates
        self.device = device
        self.num_threads = num_threads
        self.own_process = own_process

    @classmethod
    def from_module(
        cls, lm: PreTrainedModel, num_slots: int = 256, seed: int = 0, self_check: bool = True, side: str = "engine"
    ) -> EmbeddedEngine:
        """An engine that samples from the live weights of `lm`; only for `run`, in the thread of `lm`.

        Args:
            lm: model to sample from.
            num_slots: rows decoded together.
            seed: of the random number generator.
            self_check: compare a few tokens with full forward passes.
            side: name of the model in errors of the check, see `check_decoding`.
        """
        engine = cls(num_slots=num_slots, seed=seed, num_threads=None, self_check=self_check)
        loop = DecodeLoop(engine.engine.settings, cls.cache_class)
        loop.adopt(lm, owns_weights=False)
        if self_check:
            check_decoding(loop.slots, side)
        engine.engine = loop
        return engine

    def fresh(self, out_of_memory: bool = False) -> RolloutEngine:
        """A new engine with the same settings; with half the slots if this one ran out of memory."""
        engine: Any = super().fresh(out_of_memory)
        engine.engine.settings.num_slots = max(1, self.num_slots // (2 if out_of_memory else 1))
        return engine

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """Queues requests atomically.

        Raises:
            ValueError: prompt and completion would not fit into `max_model_len`, or a token is not in the vocabulary.
        """
        self.engine.submit(requests)

    def poll(self, timeout_s: float) -> list[Completion]:
        return self.engine.poll(timeout_s)

    def abort(self, request_ids: Sequence[int]) -> None:
        self.engine.abort(request_ids)

    def partial_completions(self) -> list[Completion]:
        return self.engine.partial_completions()

    def random_state(self) -> Tensor | None:
        return self.engine.random_state()

    def set_random_state(self, state: Tensor) -> None:
        self.engine.set_random_state(state)

    def run(self, requests: Sequence[GenerationRequest]) -> list[list[Completion]]:
        """All completions of each request, by sample index; blocks until they are finished. Needs no producer."""
        loop = self.engine
        with loop.borrowing() if isinstance(loop, DecodeLoop) else contextlib.nullcontext():
            return run_requests(self, requests)


# -- The loop ---------------------------------------------------------------------------------------------------------


class DecodeLoop(Decoder):
    """Decodes inside `poll`, in the thread that calls it."""

    takes_adapters = True

    def __init__(self, settings: DecodeSettings, cache_class: type[SlotCache] = SlotCache) -> None:
        super().__init__(settings)
        self._cache_class = cache_class
        self._slots: Slots | None = None
        self._stream = EngineStream(None)
        self._queue = RequestQueue()
        # Requests that are not in the queue yet, in order: `submit` waits for no step, as agents and environments call
        # it one after the other. Whoever has the lock moves them.
        self._submitted: deque[tuple[GenerationRequest, ...]] = deque()
        self._lane: Lane | None = None  # of the timeline; None for an engine that does not sample for training
        self._version = 0  # of the weights in use
        self._newest = NewestUpdate()
        self._report: WeightReport | None = None
        self._error: BaseException | None = None  # raised by `poll`, which does not use updates afterwards
        # Cleared while `MAX_PENDING_UPDATES` are queued; `load_weights` waits for it. Set under the lock when the loop
        # uses an update, and for good when the loop fails.
        self._has_room = threading.Event()
        self._has_room.set()
        # Protects slots and queue. The polling thread holds it for one step at a time. Fair, because otherwise the
        # polling thread would acquire it again before a waiting thread wakes up.
        self._lock = FairLock(
            settings.update_timeout_s, f"the token that the embedded engine computes ({self._update_limit})"
        )
        self._work = threading.Event()  # set while there may be something to decode
        self._threads_set = False

    def setup(self, model: str) -> None:
        """Builds the architecture without reading weights from disk; `load_weights` loads them."""
        device = find_device(self.settings.device)
        self._stream = EngineStream(device)
        with self._stream.use():  # builds a model without weights
            self.adopt(build_policy(model, self.dtype, self.settings.device), owns_weights=True)
        if has_streams(device):
            recommend_vllm(self.slots.lm)
        self._lane = recorder().lane(ENGINE)

    def adopt(self, lm: PreTrainedModel, owns_weights: bool) -> None:
        """Sets the model to decode.

        Args:
            lm: model.
            owns_weights: see `LlamaForward`.

        Raises:
            ValueError: its context is shorter than `max_model_len`, or its decode steps cannot be recorded.
        """
        context = context_length(lm)
        longest = self.settings.max_model_len
        if longest is not None and longest > context:
            raise ValueError(f"data.engine.max_model_len={longest} exceeds the model's context of {context} tokens")
        self._max_model_len = longest or context
        self._slots = Slots(
            lm,
            self.num_slots,
            eos_token_ids(lm),
            seed=self.settings.seed,
            owns_weights=owns_weights,
            cache_class=self._cache_class,
            recorder=cuda_graphs if self.settings.cuda_graphs else None,
        )
        self._vocab_size = self._slots.vocab_size
        self._has_weights = not owns_weights

    @property
    def slots(self) -> Slots:
        """Rows of the batch.

        Raises:
            SetupError: there is no model yet.
        """
        return set_up(self._slots)

    @property
    def num_running(self) -> int:
        return 0 if self._slots is None else self._slots.num_active

    # -- producer's thread --------------------------------------------------------------------------------------------

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        self._check(requests)
        self._submitted.append(tuple(requests))
        self._work.set()

    def poll(self, timeout_s: float) -> list[Completion]:
        """Decodes until a completion is finished or `timeout_s` has passed."""
        if self.settings.num_threads is not None and not self._threads_set:
            torch.set_num_threads(self.settings.num_threads)  # here because it applies to the calling thread
            self._threads_set = True
        deadline = time.monotonic() + timeout_s
        while not self._closed:
            # Held for one step, so that other threads with requests or weights wait for one token at most. An error of
            # the step also ends a wait of `load_weights` for room in the queue: no further step would use an update.
            with self._exclusive():
                try:
                    finished = [] if self._closed else self.step()
                except BaseException as error:
                    self._error = self._error or error
                    self._has_room.set()
                    raise
            remaining = deadline - time.monotonic()
            if finished or remaining <= 0:
                return finished
            self._work.wait(remaining)
        return []

    def step(self) -> list[Completion]:
        """Applies new weights, then fills free slots or samples one token for every active row.

        The caller holds the lock.
        """
        slots = self.slots
        if (newest := self._newest.take()) is not None:
            self._use(newest)
        while (barrier := self._queue.take_barrier(slots.num_active)) is not None:
            if isinstance(barrier, Update):
                self._use(barrier)
                self._has_room.set()
            else:
                slots.begin_batch(barrier.seed)
        began = time.monotonic()
        if pending := self._queue.take_requests(slots.num_active, self.num_slots):
            name = "prefill"
            finished = slots.admit(pending, self._version)
        elif slots.num_active:
            name = "decode"
            finished = slots.decode(self._version)
        else:
            self._work.clear()
            if self._submitted:  # after `clear`, so that a concurrent `submit` is seen here or sets it afterwards
                self._work.set()
            return []
        self._count(name, began, slots)
        return finished

    def _count(self, name: str, began: float, slots: Slots) -> None:
        """Adds a decode or prefill step, begun at `began` of `time.monotonic`, to metrics and timeline."""
        num_tokens = slots.num_tokens - self.num_tokens
        self.num_tokens = slots.num_tokens
        seconds = time.monotonic() - began
        self.busy_s += seconds
        if self._lane is not None:
            version = self._version
            self._lane.add(name, began, seconds, version, version=version, slots=slots.num_active, tokens=num_tokens)

    def abort(self, request_ids: Sequence[int]) -> None:
        gone = set(request_ids)
        with self._exclusive():
            self._queue.drop(gone)
            self.slots.drop(gone)

    def partial_completions(self) -> list[Completion]:
        with self._exclusive():
            return self.slots.partial_completions()

    # -- trainer's thread ---------------------------------------------------------------------------------------------

    def _unused_updates(self) -> str:
        return (
            f"the embedded engine used no update within {self._update_limit}: "
            f"{len(self._queue)} items queued, {self.num_running} rows active"
        )

    def load_weights(self, version: int, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Samples from these weights from the next token on, or after all earlier requests (see `EmbeddedEngine`).

        Raises:
            ValueError: names or shapes are not the model's; the engine then keeps the weights it has.
            StalledError: older updates were not used within `update_timeout_s`.
            RuntimeError: `poll` has raised; its error is the cause.
        """
        # before the copy, which bounds memory: each pending update is a complete copy of the weights
        if not self.in_flight_weight_updates:
            wait = Wait(self.update_timeout_s, self._unused_updates)
            wait.until(lambda seconds: self._closed or self._has_room.wait(seconds))
            if self._error is not None:
                raise RuntimeError(f"the embedded engine broke: {self._error}") from self._error
        received = receive_weights(self.slots.lm, weights)
        update = Update(version, received, self._stream.mark())
        if self.in_flight_weight_updates and self._has_weights:
            self._newest.put(update)  # not `_use`: the trainer must not wait for the lock or the merging of adapters
            return
        with self._exclusive():
            if not self.in_flight_weight_updates and (self._queue or self.slots.num_active):
                self._queue.push_barrier(update)
                if self._queue.num_updates >= MAX_PENDING_UPDATES and self._error is None:
                    self._has_room.clear()
                self._work.set()
            else:
                self._use(update)

    def _use(self, update: Update) -> None:
        """Applies an update. The caller holds the lock."""
        slots = self.slots
        self._stream.receive(update.ready, tensors_of(update.weights))
        apply_weights(slots.lm, update.weights, {name: linear.write for name, linear in slots.packed.items()})
        if self.self_check and not self._has_weights:
            check_decoding(slots)
        self._version = update.version
        self._has_weights = True
        slots.invalidate_prompts()  # their keys and values were computed with the previous weights
        if self._report is not None:
            self._report(update.version, self._weights_in_use(update.weights))

    def _weights_in_use(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        lm = self.slots.lm
        own = dict(lm.named_parameters()) | dict(stored_buffers(lm))
        for name in names:
            packed = self.slots.packed.get(name)
            yield name, own[name].detach() if packed is None else packed.dense()

    def watch_weights(self, report: WeightReport) -> bool:
        self._report = report
        return True

    @torch.no_grad()
    def prompt_logprobs(self, token_ids: Sequence[int]) -> list[float]:
        slots = self.slots
        with self._exclusive(), evaluation_mode(slots.lm), in_modules(slots.packed.values()):
            found: list[float] = plain_pass(slots.lm, [token_ids])[0][0].tolist()
        return found

    def random_state(self) -> Tensor:
        return self.slots.generator.get_state()

    def set_random_state(self, state: Tensor) -> None:
        self.slots.generator.set_state(state)

    # -- any thread ---------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _exclusive(self) -> Iterator[None]:
        """Context of a thread that uses slots or queue: it has the lock, and the loop's stream."""
        with self._lock.hold(), self._stream.use():
            while self._submitted:
                seed = None if self.in_flight_weight_updates else self.settings.seed
                self._queue.push_requests(self._submitted.popleft(), seed)
            yield

    @contextlib.contextmanager
    def borrowing(self) -> Iterator[None]:
        """Context of decoding with another object's model, which may have been trained since the last time."""
        self.slots.invalidate_prompts()  # their keys and values may have been computed with other weights
        with evaluation_mode(self.slots.lm):
            yield

    def close(self) -> None:
        """Unblocks `poll` and `load_weights` and releases the model."""
        self._closed = True
        self._work.set()
        self._has_room.set()
        # if a thread hangs in a decode step, which cannot be ended, it keeps the model
        with contextlib.suppress(StalledError), self._lock.hold(CLOSE_TIMEOUT_S):
            self._slots = None
            self._submitted.clear()
            self._queue = RequestQueue()
            self._newest.take()


def recommend_vllm(lm: PreTrainedModel) -> None:
    """Says that vLLM is faster for so large a model on a GPU; docs/hardware.md says why it is not the default."""
    num_parameters = sum(parameter.numel() for parameter in lm.parameters())
    if num_parameters < VLLM_PARAMETERS:
        return
    is_installed = importlib.util.find_spec("vllm") is not None
    log.warning(
        "EmbeddedEngine on a GPU launches each kernel from Python; for a model of %.1f billion parameters, vLLM "
        "samples faster: set data.engine=VLLMEngine%s",
        *(num_parameters / 1e9, "" if is_installed else ' (pip install "lit-async-rl[vllm]")'),
    )


class NewestUpdate:
    """Hands the newest weights from the trainer's thread (`put`) to the decode loop (`take`). Thread-safe.

    An update that was not taken is merged into the next, which may omit unchanged weights.
    """

    def __init__(self) -> None:
        # not the engine's lock: the trainer must not wait for a decode step
        self._lock = threading.Lock()
        self._update: Update | None = None

    def put(self, update: Update) -> None:
        """Adds an update."""
        with self._lock:
            earlier = {} if self._update is None else self._update.weights
            # the later event is enough: both were recorded by the trainer's thread
            self._update = Update(update.version, earlier | update.weights, update.ready)

    def take(self) -> Update | None:
        """Removes and returns the update; None if there is none."""
        with self._lock:
            update = self._update
            self._update = None
        return update
