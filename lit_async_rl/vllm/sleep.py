"""Sleep of vLLM while a trainer on its GPU trains, and the gate that holds requests until it wakes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Literal

from lit_async_rl.types import GenerationRequest
from lit_async_rl.utils.checks import check_range
from lit_async_rl.utils.device_memory import free_cached_memory
from lit_async_rl.vllm.engine_arguments import is_cpu_build
from lit_async_rl.vllm.file_transfer import FileTransfer
from lit_async_rl.vllm.process import VLLMProcess
from lit_async_rl.vllm.weight_transfer import WeightTransfer

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
        """Withdraws reasons, and starts held requests if none is left.

        Args:
            *reasons: to withdraw.
            version: of newly loaded weights; None if they did not change.
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
        gate: holds requests during sleep.
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
        """Context that wakes vLLM in two steps: memory of weights before the block, KV cache after it."""
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
        ValueError: it is not 0, 1 or 2, or drops weights that a transfer of changes would update.
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

    A trainer on the same GPU needs some for weights, optimizer state and, unless vLLM sleeps meanwhile, activations.
    """
    if device_ids is not None:
        return OWN_GPU_MEMORY_SHARE
    return ALTERNATING_MEMORY_SHARE if sleep_level else SHARED_GPU_MEMORY_SHARE
