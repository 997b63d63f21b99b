"""CPU copies of tensors in huge pages, which are fast to fill and returned to the system when freed."""

from __future__ import annotations

import contextlib
import mmap

import torch
from torch import Tensor

HUGE_PAGE_BYTES = 2**21


def host_copy(tensor: Tensor) -> Tensor:
    """A copy in CPU memory; a large one has memory of its own, outside of the allocator.

    New memory costs one page fault per 4 KB, most of the time of a large copy. Huge pages, where Linux has them, cost
    one per 2 MB. The allocator would also keep freed memory in the process.
    """
    source = tensor.detach()
    if type(source) is not Tensor or source.nbytes < HUGE_PAGE_BYTES or not source.is_contiguous():
        return source.to("cpu", copy=True)
    memory = mmap.mmap(-1, source.nbytes)  # referenced by the tensor, and unmapped with it
    with contextlib.suppress(AttributeError, OSError):  # no huge pages on this system
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=source.dtype).view(source.shape).copy_(source)
