"""Base class of engines that generate in other processes: requests, weight updates, sleep."""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Literal

from torch import Tensor

from lit_async_rl.engines.base import RolloutEngine, check_request
from lit_async_rl.errors import EngineError, StalledError
from lit_async_rl.models.loading import load_config
from lit_async_rl.types import Completion, GenerationRequest, SamplingParams
from lit_async_rl.utils.checks import check_range
from lit_async_rl.utils.device_memory import free_cached_memory
from lit_async_rl.vllm.engine_arguments import is_cpu_build
from lit_async_rl.vllm.file_transfer import FileTransfer
from lit_async_rl.vllm.process import VLLMProcess
from lit_async_rl.vllm.requests import RequestBook, check_sampling
from lit_async_rl.vllm.weight_transfer import WeightTransfer


class BackgroundEngine(RolloutEngine):
    """Engine around a `RequestBook`, which the calling threads share with the generating thread or processes.

    Subclasses start and end requests (`_launch`, `_cancel`) and publish weights (`_publish`). The first failure is
    recorded in the book; afterwards every call raises it, and nothing is sampled.

    Args:
        name: name of the generating side, for messages.
        transfer: transfer of weights to it.
        in_flight_weight_updates: False: running requests finish under the old weights before an update.
        clear_cache: whether running completions recompute their KV cache after an update.
    """

    records_heads = True
    records_entropy = False
    records_spans = True

    def __init__(self, name: str, transfer: WeightTransfer, in_flight_weight_updates: bool, clear_cache: bool) -> None:
        self.name = name
        self.transfer = transfer
        self.in_flight_weight_updates = in_flight_weight_updates
        self.clear_cache = clear_cache
        self.takes_adapters = transfer.takes_adapters
        self.update_pauses_s: list[float] = []  # seconds without generation in each weight update
        self._book = RequestBook(name)
        self._max_model_len = self._vocab_size = 0

    def _read_config(self, model: str) -> None:
        """Reads the size of the vocabulary. Raises FileNotFoundError if there is no such model."""
        self._vocab_size = int(load_config(model).get_text_config().vocab_size)
        self.transfer.check_room(model)

    @property
    def max_model_len(self) -> int:
        return self._max_model_len

    # -- trainer's thread ---------------------------------------------------------------------------------------------

    def load_weights(self, version: int, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Stages the weights while generation continues, then pauses it until they are loaded.

        Raises:
            EngineError: loading failed; the engine no longer samples.
            StalledError: a step timed out, or requests did not finish in time; the engine no longer samples.
        """
        stream = iter(weights)
        try:
            self._check()
            self.update_pauses_s.append(self._publish(version, stream))
        except Exception as error:
            self._book.fail(error)
            for _ in stream:  # gathering a tensor is a collective: other ranks wait for this one
                pass
            if isinstance(error, EngineError | StalledError):
                raise
            what = f"{self.name} did not take the weights of version {version} and was stopped"
            raise EngineError(f"{what}: {str(error) or type(error).__name__}") from error
        except BaseException as interrupt:  # Ctrl-C reaches all ranks, so that none waits for this one's tensors
            self._book.fail(interrupt)
            raise
        self._book.pause(self.update_pauses_s[-1])
        self._book.version = version

    @abstractmethod
    def _publish(self, version: int, weights: Iterator[tuple[str, Tensor]]) -> float:
        """Publishes `weights`; returns the seconds without generation. After an error nothing may be sampled."""

    @property
    def num_running(self) -> int:
        """Number of requests being generated, each of one or more samples."""
        return self._book.num_running

    # -- producer's thread --------------------------------------------------------------------------------------------

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """Queues requests.

        Raises:
            ValueError: prompt and completion would not fit into `max_model_len`, a token is not in the vocabulary, or
                vLLM refuses a sampling parameter.
            EngineError: the engine failed, or was closed.
        """
        for request in requests:
            check_sampling("data.sampling", request.sampling, request.num_samples)
            check_request(request, self.max_model_len, self._vocab_size)
            if (request.sampling.head or 0) > self._vocab_size:
                raise ValueError(
                    f"with vLLM, data.sampling.head must be <= {self._vocab_size} (vocabulary size of model.model), "
                    f"got {request.sampling.head}"
                )
        self._check()
        self._launch(requests)

    def check_sampling(self, setting: str, sampling: SamplingParams, num_samples: int) -> None:
        check_sampling(setting, sampling, num_samples)

    @abstractmethod
    def _launch(self, requests: Sequence[GenerationRequest]) -> None:
        """Registers requests in the book and starts them."""

    def poll(self, timeout_s: float) -> list[Completion]:
        return self._book.take(timeout_s)

    def abort(self, request_ids: Sequence[int]) -> None:
        aborted = set(request_ids)
        self._cancel(aborted)
        self._book.drop(aborted)  # after `_cancel`: completions that arrive in between are dropped, too

    @abstractmethod
    def _cancel(self, request_ids: set[int]) -> None:
        """Cancels running and queued requests; other ids are ignored."""

    # -- any thread ---------------------------------------------------------------------------------------------------

    def _check(self) -> None:
        """Raises the recorded failure."""
        self._book.check()

    @property
    def busy_s(self) -> float:
        """Seconds with running requests, without weight updates."""
        return self._book.busy_s

    @property
    def num_tokens(self) -> int:
        """Tokens reported so far."""
        return self._book.num_tokens


# -- Gate between submission and vLLM: holds requests until new weights are loaded or vLLM is awake -------------------


Reason = Literal["update", "sleep"]


class Gate:
    """Forwards requests while it is open, and holds them while it is shut; thread-safe.

    Args:
        start: starts requests under the weights of a version; called with the gate's lock held.
    """

    def __init__(self, start: Callable[[Sequence[GenerationRequest], int], None]) -> None:
        self._start = start
        # requests are started under the lock: released before, one could start after `shut`, under the old weights
        self._lock = threading.Lock()
        self._held: list[GenerationRequest] = []
        self._reasons: set[Reason] = set()
        self._version = 0

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """Starts requests, or holds them."""
        with self._lock:
            if self._reasons:
                self._held += requests
            else:
                self._start(requests, self._version)

    def drop(self, request_ids: Collection[int]) -> None:
        """Drops held requests with these ids."""
        with self._lock:
            self._held = [request for request in self._held if request.id not in request_ids]

    def shut(self, reason: Reason) -> None:
        """Holds new requests until `open` is called with the same reason."""
        with self._lock:
            self._reasons.add(reason)

    def open(self, *reasons: Reason, version: int | None = None) -> None:
        """Withdraws reasons, and starts the held requests if none is left.

        Args:
            *reasons: reasons to withdraw.
            version: version of newly loaded weights; None if they did not change.
        """
        with self._lock:
            self._reasons.difference_update(reasons)
            self._version = self._version if version is None else version
            if not self._reasons:
                held = self._held
                self._held = []
                self._start(held, self._version)


# -- Sleep of vLLM while a trainer on the same GPU trains -------------------------------------------------------------


# shares of a GPU's memory for vLLM
OWN_GPU_MEMORY_SHARE = 0.9
SHARED_GPU_MEMORY_SHARE = 0.4
ALTERNATING_MEMORY_SHARE = 0.6  # vLLM sleeps while the trainer trains


class Sleep:
    """Sleep of a vLLM in the trainer's processes; thread-safe.

    Args:
        level: `sleep_level` of `VLLMEngine`.
        gate: gate that holds requests during sleep.
    """

    def __init__(self, level: int, gate: Gate) -> None:
        self.level = level
        self._gate = gate
        # held while vLLM falls asleep or wakes up: the trainer puts it to sleep, and the producer may wake it up
        self._lock = threading.RLock()
        self.is_on = False

    def begin(self, vllm: VLLMProcess, is_idle: Callable[[], bool]) -> None:
        """Makes vLLM free its memory, unless requests are running."""
        with self._lock:
            if self.is_on:
                return
            self._gate.shut("sleep")  # before the check, so that no request starts after it
            if not is_idle():
                self._gate.open("sleep")
                return
            vllm.call(vllm.llm.sleep(self.level, "keep"), "putting vLLM to sleep")
            self.is_on = True

    @contextmanager
    def ending(self, vllm: VLLMProcess) -> Iterator[None]:
        """Context that wakes vLLM in two steps: memory for weights before the block, and the KV cache after it."""
        with self._lock:
            self._wake(vllm, ["weights"])
            yield
            self._wake(vllm, ["kv_cache"])
            self.is_on = False

    def interrupt(self, vllm: VLLMProcess) -> None:
        """Wakes vLLM with its previous weights, if its sleep level kept them."""
        if self.level != 1:
            return
        with self._lock:
            if not self.is_on:
                return
            self._wake(vllm, None)
            self.is_on = False
            self._gate.open("sleep")

    def _wake(self, vllm: VLLMProcess, tags: list[str] | None) -> None:
        if self.is_on:
            free_cached_memory()
            vllm.call(vllm.llm.wake_up(tags), "waking vLLM")


def check_sleep_level(level: int, transfer: WeightTransfer | None) -> int:
    """Returns the level after checking it against the weight transfer.

    Raises:
        ValueError: it is not 0, 1 or 2; or a transfer of changes would update weights that sleep had dropped.
    """
    check_range("data.engine", "integer in [0, 2]", sleep_level=level)
    if level == 2 and isinstance(transfer, FileTransfer) and transfer.delta:
        raise ValueError(
            "data.engine.sleep_level=2 discards the weights, but data.engine.transfer.delta=true needs them for its "
            "updates: use sleep_level=1, or delta=false"
        )
    return level


def check_can_sleep(level: int) -> None:
    """Checks that vLLM supports sleep.

    Raises:
        ValueError: vLLM is the CPU build, where sleep has no effect.
    """
    if level and is_cpu_build():
        raise ValueError(f"data.engine.sleep_level={level} needs a GPU: vLLM's CPU build has no sleep mode")


def default_memory_share(device_ids: list[int] | None, sleep_level: int) -> float:
    """Share of a GPU's memory for vLLM.

    A trainer on the same GPU needs memory for weights, optimizer state and, unless vLLM sleeps meanwhile, activations.
    """
    if device_ids is not None:
        return OWN_GPU_MEMORY_SHARE
    return ALTERNATING_MEMORY_SHARE if sleep_level else SHARED_GPU_MEMORY_SHARE
