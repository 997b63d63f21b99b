"""CPU memory in huge pages, which is fast to fill and returned to the system when freed."""

from __future__ import annotations

import contextlib
import mmap

import torch
from torch import Tensor

HUGE_PAGE_BYTES = 2**21


def mapped_memory(num_bytes: int) -> Tensor:
    """New memory, as bytes, outside of the allocator; unmapped with the last tensor in it."""
    memory = mmap.mmap(-1, num_bytes)  # referenced by the tensor
    with contextlib.suppress(AttributeError, OSError):  # no huge pages on this system
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)
