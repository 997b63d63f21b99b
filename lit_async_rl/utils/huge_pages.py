"""Copies of tensors in memory of their own, which is cheap to fill and returns to the system when they are gone."""

from __future__ import annotations

import contextlib
import mmap

import torch
from torch import Tensor

LARGE = 2**21  # bytes of a huge page


def host_copy(tensor: Tensor) -> Tensor:
    """A copy in CPU memory; large ones are outside of the allocator's memory.

    Fresh memory costs a page fault for every 4 KB, which is most of the time of a large copy. Huge pages, where Linux
    has them, need one for every 2 MB. Freed memory does not stay with the process either.
    """
    source = tensor.detach()
    if type(source) is not Tensor or source.nbytes < LARGE or not source.is_contiguous():
        return source.to("cpu", copy=True)
    memory = mmap.mmap(-1, source.nbytes)  # unmapped with the tensor, which keeps it
    with contextlib.suppress(AttributeError, OSError):  # no such pages on this system
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=source.dtype).view(source.shape).copy_(source)
