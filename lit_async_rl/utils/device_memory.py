"""A GPU's memory: copies to and from CPU memory that wait for no other work, and errors that say it is full.

Only copies from and to pinned memory run beside kernels. Torch rounds pinned allocations up to powers of two and never
shrinks them: a model of 15 GB pinned tensor by tensor takes 27. Hence large memory is pinned here as one mapping
(`PinnedArena`), or passed through two small buffers (`StagedCopies`).
"""

from __future__ import annotations

import contextlib
import gc
import logging
import mmap
import re
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

HUGE_PAGE_BYTES = 2**21
ALIGNMENT = 512  # bytes; that of torch's own allocations
BUFFER_BYTES = 2**26  # of a staging buffer: 64 MiB take 3 ms of PCIe 4, much longer than it takes to start a copy
FULL_MEMORY = re.compile(
    r"CUDA.*out of memory|can't allocate memory"
    # a GPU that other processes fill has no room for a library's handle or workspace either
    r"|CUBLAS_STATUS_ALLOC_FAILED|CUDNN_STATUS_(ALLOC_FAILED|INTERNAL_ERROR|NOT_SUPPORTED\.)"
)
log = logging.getLogger(__name__)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the error or one of its causes reports that the memory of the machine or its GPU is full."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    if isinstance(error, RuntimeError) and FULL_MEMORY.search(str(error)):
        return True
    return error.__cause__ is not None and is_out_of_memory(error.__cause__)


def has_streams(device: torch.device) -> bool:
    """Whether work on the device is queued in streams, and copies from pinned memory do not wait for it."""
    return device.type == "cuda"


def to_device(values: Sequence[Any] | Tensor, device: torch.device) -> Tensor:
    """The values as a tensor on `device`, without waiting for work queued there.

    `torch.tensor(values, device="cuda")` copies from pageable memory, and waits for the stream.

    Args:
        values: integers, or a tensor, which keeps its dtype.
        device: target.
    """
    if isinstance(values, Tensor):
        is_far = has_streams(device) and values.device.type == "cpu"
        return values.pin_memory().to(device, non_blocking=True) if is_far else values.to(device)
    if not has_streams(device):
        return torch.tensor(values, dtype=torch.long, device=device)
    return torch.tensor(values, dtype=torch.long, pin_memory=True).to(device, non_blocking=True)


def own_stream(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Context in which this thread queues its work in a separate stream, concurrent with other threads."""
    return torch.cuda.stream(torch.cuda.Stream(device)) if has_streams(device) else contextlib.nullcontext()


# -- CPU memory in huge pages, which is fast to fill and returned to the system when freed ----------------------------


def mapped_memory(num_bytes: int) -> Tensor:
    """New memory, as bytes, outside of the allocator; unmapped with the last tensor in it."""
    memory = mmap.mmap(-1, num_bytes)  # referenced by the tensor
    with contextlib.suppress(AttributeError, OSError):  # no huge pages on this system
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)


# -- Many tensors in one mapping of pinned memory ---------------------------------------------------------------------


class PinnedArena:
    """Pinned memory for sets of tensors of similar size, such as the weights of each update.

    Each set reuses the memory of the last one.
    """

    def __init__(self) -> None:
        self._memory: Tensor | None = None
        self._is_registered = False

    @property
    def num_bytes(self) -> int:
        """Size of the mapping."""
        return 0 if self._memory is None else self._memory.nbytes

    def copies(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Copies of these tensors; valid until the next call."""
        places = [0]
        for tensor in tensors:
            places.append(places[-1] + -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT)
        if places[-1] > self.num_bytes:
            self.close()
            self._memory = mapped_memory(places[-1])
            self._is_registered = _register(self._memory)
        copied = []
        for begin, tensor in zip(places, tensors, strict=False):
            if not tensor.nbytes or self._memory is None:
                copied.append(tensor.clone())
                continue
            part = self._memory[begin : begin + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            copied.append(part.copy_(tensor))
        return copied

    def close(self) -> None:
        """Unpins the memory; it is freed with the last tensor in it."""
        if self._is_registered and self._memory is not None:
            torch.cuda.cudart().cudaHostUnregister(self._memory.data_ptr())
        self._is_registered = False
        self._memory = None


def _register(memory: Tensor) -> bool:
    """Pins memory; whether that was possible. Else copies are correct, but slower."""
    if not torch.cuda.is_available():
        return False
    error = int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0))
    if error:
        log.warning(
            "%.1f GiB of CPU memory could not be pinned (CUDA error %d), so copying weights to the GPU is slower",
            *(memory.nbytes / 2**30, error),
        )
    return not error


# -- Copies of a GPU's tensors in ordinary memory, through pinned buffers ---------------------------------------------


class StagedCopies:
    """Copies tensors of a GPU to CPU memory on a separate stream, without blocking other streams.

    Args:
        device: the GPU.

    It waits for what the creating thread has queued. Copies may be made in another thread; until they are made, nobody
    may change the tensors.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream: Any = torch.cuda.Stream(device)
        self._stream.wait_stream(torch.cuda.current_stream(device))
        self._buffers: list[Tensor] = []  # pinned by the first large copy

    @contextlib.contextmanager
    def use(self) -> Iterator[None]:
        """Context in which this thread's other copies are on the same stream."""
        with torch.cuda.stream(self._stream):
            yield

    def fill(self, target: Tensor, source: Tensor) -> None:
        """Copies `source` to `target`, both contiguous; returns when it is done."""
        if not self._buffers:
            self._buffers = [pinned_bytes(BUFFER_BYTES) for _ in range(2)]
        read = source.flatten().view(torch.uint8)
        write = target.flatten().view(torch.uint8)
        copied: tuple[Any, Tensor, slice] | None = None  # event, buffer, place of the copy before
        for number, begin in enumerate(range(0, len(read), BUFFER_BYTES)):
            part = slice(begin, min(begin + BUFFER_BYTES, len(read)))
            buffer = self._buffers[number % 2][: part.stop - part.start]
            with self.use():
                buffer.copy_(read[part], non_blocking=True)
            event = torch.cuda.Event()
            event.record(self._stream)
            if copied is not None:
                _finish(write, *copied)  # while the next part is on its way
            copied = event, buffer, part
        if copied is not None:
            _finish(write, *copied)


def _finish(write: Tensor, event: Any, buffer: Tensor, part: slice) -> None:
    event.synchronize()
    write[part] = buffer


def pinned_bytes(size: int) -> Tensor:
    """Pinned memory from torch's allocator; `size` should be a power of two."""
    return torch.empty(size, dtype=torch.uint8, pin_memory=True)


def host_copy(tensor: Tensor, staged: StagedCopies | None = None) -> Tensor:
    """A copy in CPU memory; a large one is allocated separately, outside the allocator.

    New memory costs one page fault per 4 KB, most of the time of a large copy; huge pages, where Linux has them, one
    per 2 MB. The allocator would also keep freed memory in the process.

    Args:
        tensor: on any device.
        staged: copies large tensors of its GPU; the caller is in its context.
    """
    source = tensor.detach()
    if type(source) is not Tensor or source.nbytes < HUGE_PAGE_BYTES or not source.is_contiguous():
        return source.to("cpu", copy=True)
    copied = mapped_memory(source.nbytes).view(source.dtype).view(source.shape)
    if staged is None or not has_streams(source.device):
        return copied.copy_(source)
    staged.fill(copied, source)
    return copied


def staged_copies(tensors: Iterator[Tensor]) -> StagedCopies | None:
    """`StagedCopies` of the first GPU among the tensors' devices; None if there is none."""
    device = next((tensor.device for tensor in tensors if has_streams(tensor.device)), None)
    return None if device is None else StagedCopies(device)


def free_cached_memory() -> None:
    """Returns the trainer's cached memory to the GPU, where another process needs it."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        gc.collect()
        torch.cuda.empty_cache()
