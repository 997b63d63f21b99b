"""Sleep of vLLM while a trainer on the same GPU trains: its settings, and what the trainer does for it."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from lit_async_rl.engines.vllm.file_transfer import FileTransfer
from lit_async_rl.engines.vllm.gate import Gate
from lit_async_rl.engines.vllm.installation import is_cpu_build
from lit_async_rl.engines.vllm.process import VLLMProcess
from lit_async_rl.engines.vllm.weight_transfer import WeightTransfer
from lit_async_rl.utils.checks import check_range

OWN_GPU, SHARED_GPU, SHARED_BY_TURNS = 0.9, 0.4, 0.6  # shares of a GPU's memory


class Sleep:
    """Sleep of a vLLM in the trainer's processes; thread-safe.

    Args:
        level: see `VLLMEngine`.
        gate: holds requests back meanwhile.
    """

    def __init__(self, level: int, gate: Gate) -> None:
        self.level, self._gate = level, gate
        self._lock = threading.RLock()  # held while it falls asleep or wakes up
        self.is_on = False

    def begin(self, vllm: VLLMProcess, is_idle: Callable[[], bool]) -> None:
        """Has vLLM free its memory, unless requests are running."""
        with self._lock:
            if self.is_on:
                return
            self._gate.shut("sleep")
            if not is_idle():
                self._gate.open("sleep")
                return
            vllm.call(vllm.llm.sleep(self.level, "keep"), "putting vLLM to sleep")
            self.is_on = True

    @contextmanager
    def ending(self, vllm: VLLMProcess) -> Iterator[None]:
        """Wakes vLLM in two steps: at the beginning of the block it has memory for weights, at its end also a cache."""
        with self._lock:
            self._wake(vllm, ["weights"])
            yield
            self._wake(vllm, ["kv_cache"])
            self.is_on = False

    def interrupt(self, vllm: VLLMProcess) -> None:
        """Wakes vLLM with the weights that it had, if they are not lost."""
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
    """The level, if it goes together with the transfer of weights.

    Raises:
        ValueError: it is not 0, 1 or 2; or weights that were dropped would be updated by what has changed in them.
    """
    check_range("data.engine", "integer in [0, 2]", sleep_level=level)
    if level == 2 and isinstance(transfer, FileTransfer) and transfer.delta:
        raise ValueError(
            "data.engine.sleep_level=2 drops the weights that updates with data.engine.transfer.delta=true build on: "
            "use sleep_level=1, or delta=false"
        )
    return level


def check_can_sleep(level: int) -> None:
    """Refuses sleep where vLLM only pretends.

    Raises:
        ValueError: vLLM is the CPU build.
    """
    if level and is_cpu_build():
        raise ValueError(f"data.engine.sleep_level={level} needs a GPU: vLLM's CPU build has no sleep mode")


def default_memory_share(device_ids: list[int] | None, sleep_level: int) -> float:
    """Share of a GPU's memory for vLLM.

    A trainer that may be on the same GPU keeps weights, optimizer state and, unless they take turns, activations there.
    """
    if device_ids is not None:
        return OWN_GPU
    return SHARED_BY_TURNS if sleep_level else SHARED_GPU


def free_cached_memory() -> None:
    """Gives memory that the trainer's allocator keeps for later back to the GPU, for vLLM to wake up in."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        gc.collect()
        torch.cuda.empty_cache()
