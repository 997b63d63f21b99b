"""Interface of weight transfers to vLLM's worker processes: `(name, tensor)` pairs, one at a time, in four steps.

| step | engine | files (`SharedMemoryTransfer`, `FileTransfer`) | GPU to GPU (`IpcTransfer`, `NcclTransfer`) |
|---|---|---|---|
| `stage` | generates | write safetensors files | keep the stream for `deliver` |
| `prepare` | generates | make the workers load them beside the weights in use | nothing |
| `deliver` | is paused | make the workers use them | send the stream |
| `release` | generates again | delete the files | nothing |

Every rank of a sharded policy must read the stream to its end, so after an error the caller of `stage` reads the rest.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

EXTENSION = "lit_async_rl.vllm.worker.WorkerExtension"


class EngineControl(ABC):
    """Interface of an engine, or of several as one, for weight transfers.

    Attributes:
        num_workers: worker processes of all parallel dimensions and engines.
        update_timeout_s: timeout of a call and of `FileTransfer.prepare`, in seconds.
    """

    num_workers: int
    update_timeout_s: float

    @abstractmethod
    def collective_rpc(self, method: str, kwargs: dict[str, Any]) -> list[Any]:
        """Calls a method of vLLM's worker or our extension on all workers; returns their results.

        Raises:
            RuntimeError: a worker raised.
        """


class WeightTransfer(ABC):
    """Base class of transfers; see the table of this module.

    Attributes:
        takes_adapters: whether low-rank adapters may be separate tensors, beside frozen weights.
        staged_bytes: bytes written or sent for the last update.
    """

    takes_adapters = False
    staged_bytes = 0

    def check_room(self, model: str) -> None:  # noqa: B027  (most need none)
        """Checks, before the engine starts, that the weights of `model` fit."""

    def check_gpus(self, gpus: Sequence[int], trainer_gpu: int | None) -> None:  # noqa: B027  (most take any)
        """Checks, before the engine starts, that its GPUs can be reached.

        Args:
            gpus: numbers of the engine's GPUs.
            trainer_gpu: number of the trainer's; None before that is known.

        Raises:
            ValueError: names the setting and its value.
        """

    @abstractmethod
    def engine_arguments(self) -> dict[str, Any]:
        """Fields of vLLM's `AsyncEngineArgs` that this transfer needs."""

    def environment(self) -> dict[str, str]:
        """Environment variables that the engine's processes need."""
        return {}

    @abstractmethod
    def stage(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Reads the weights; the engine may still generate."""

    def prepare(self, control: EngineControl) -> None:  # noqa: B027  (most have nothing to do)
        """Prepares what needs no pause; the engine may still generate."""

    @abstractmethod
    def deliver(self, control: EngineControl) -> None:
        """Loads the staged weights into the paused engine. After an error its weights may be mixed."""

    @abstractmethod
    def release(self) -> None:
        """Releases the staged weights."""

    def close(self) -> None:
        """Releases all resources. Safe to call twice."""
        self.release()


def as_dtype(name: str | None) -> torch.dtype | None:
    """The torch dtype `name`; None for None.

    Raises:
        ValueError: there is no such dtype.
    """
    dtype = None if name is None else getattr(torch, name, None)
    if name is not None and not isinstance(dtype, torch.dtype):
        raise ValueError(f"transfer.dtype must be the name of a torch dtype such as bfloat16, got {name!r}")
    return dtype
