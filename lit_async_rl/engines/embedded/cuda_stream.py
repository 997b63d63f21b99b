"""CUDA stream of a decode loop.

On the default stream each decoded token would wait for the training step queued before it, whichever thread queued it:
sampling and training would take turns. The loop therefore has a stream of its own, of higher priority: its kernels are
short, and the trainer's fill the GPU. Tensors that cross are ordered by events.

| tensor | written on | read on | order |
|---|---|---|---|
| new weights | the trainer's stream | the loop's | `mark` behind the copies, `receive` before the first use |
| completions, log-probabilities | the loop's | the CPU | the transfer waits for the loop's stream alone |
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from lit_async_rl.utils.device_memory import has_streams

HIGH_PRIORITY = -1


class EngineStream:
    """A stream of `device` for one decode loop.

    Args:
        device: that of the loop's model; None for a loop that shares its caller's stream, because it decodes with the
            caller's weights.
    """

    def __init__(self, device: torch.device | None) -> None:
        is_needed = device is not None and has_streams(device)
        self._stream: Any = torch.cuda.Stream(device, priority=HIGH_PRIORITY) if is_needed else None
        # with its number, which `device` may lack, and tensors and other threads need
        self._device = device if self._stream is None else self._stream.device

    def use(self) -> AbstractContextManager[Any]:
        """Context in which this thread queues its work on the stream."""
        return contextlib.nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def mark(self) -> Any:
        """Event behind all that this thread has queued on the device; None without streams."""
        if self._stream is None:
            return None
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return event

    def receive(self, event: Any, tensors: Iterable[Tensor]) -> None:
        """Makes the stream wait for `event`, and keeps the memory of `tensors` until its present work is done.

        Args:
            event: result of `mark`.
            tensors: allocated on the marked stream. Without `record_stream` the trainer could get their memory again
                while kernels that read it are queued here.
        """
        if self._stream is None:
            return
        if event is not None:
            self._stream.wait_event(event)
        for tensor in tensors:
            if tensor.device == self._device:
                tensor.record_stream(self._stream)
