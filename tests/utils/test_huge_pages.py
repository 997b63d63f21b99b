"""Copies of tensors in memory of their own."""

import gc
from pathlib import Path

import pytest
import torch

from lit_async_rl.utils.device_memory import host_copy
from lit_async_rl.utils.huge_pages import HUGE_PAGE_BYTES


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64])
@pytest.mark.parametrize("shape", [(), (0,), (3, 5), (1025, 2048), (2, 1024, 1031)])
def test_a_copy_is_equal_and_of_its_own(shape, dtype):
    source = torch.randint(0, 2, shape).to(dtype)
    copied = host_copy(source)
    assert copied.shape == source.shape
    assert copied.dtype == dtype
    assert torch.equal(copied, source)
    before = source.clone()
    copied.fill_(1)
    copied.zero_()
    assert torch.equal(source, before)


def test_layouts_stay_and_gradients_do_not():
    for source in (torch.randn(1024, 1024).t(), torch.randn(3, 2048, 1024)[1:], torch.randn(2048, 1024)[:, ::2]):
        copied = host_copy(source)
        assert torch.equal(copied, source)
    assert host_copy(torch.randn(1024, 1024).t()).stride() == (1, 1024)
    assert not host_copy(torch.nn.Parameter(torch.randn(1024, 1024))).requires_grad


def test_a_copy_can_be_saved_and_holds_no_more_than_itself(tmp_path):
    source = torch.randn(4, 1024, 1024)
    torch.save(host_copy(source[1]), tmp_path / "a.pt")
    assert torch.equal(torch.load(tmp_path / "a.pt"), source[1])
    assert (tmp_path / "a.pt").stat().st_size < source[1].nbytes + 10_000


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads Linux's /proc")
def test_freed_copies_leave_the_process():
    sources = [torch.ones(HUGE_PAGE_BYTES) for _ in range(16)]  # 128 MB in pieces that the allocator would keep
    before = resident_bytes()
    copies = [host_copy(source) for source in sources]
    held = resident_bytes() - before
    assert held > 100e6
    del copies
    gc.collect()
    assert resident_bytes() - before < 20e6
