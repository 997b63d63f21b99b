"""Pinned memory as one mapping, copies from a GPU through two buffers, and copies of tensors in memory of their own.

There is no GPU: streams, events and the calls that pin memory are stand-ins that record, and `has_streams` is forced.
"""

from __future__ import annotations

import contextlib
import gc
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from lit_async_rl.training import checkpoint_io
from lit_async_rl.training.checkpoint_io import BackgroundCheckpointIO
from lit_async_rl.utils import device_memory
from lit_async_rl.utils.device_memory import HUGE_PAGE_BYTES, PinnedArena, StagedCopies, host_copy, is_out_of_memory


class Cuda:
    """Stand-in of `torch.cuda` that records calls."""

    def __init__(self, monkeypatch, error: int = 0) -> None:
        self.log: list[str] = []
        log = self.log

        class Stream:
            def __init__(self, device=None):
                log.append("stream")

            def wait_stream(self, other):
                log.append("wait for the trainer's stream")

        class Event:
            def record(self, stream):
                log.append("record")

            def synchronize(self):
                log.append("synchronize")

        @contextlib.contextmanager
        def stream(chosen):
            log.append("begin")
            yield
            log.append("end")

        runtime = SimpleNamespace(
            cudaHostRegister=lambda place, size, flags: log.append(f"register {size}") or error,
            cudaHostUnregister=lambda place: log.append("unregister"),
        )
        monkeypatch.setattr(device_memory, "has_streams", lambda device: True)
        monkeypatch.setattr(device_memory, "pinned_bytes", lambda size: torch.zeros(size, dtype=torch.uint8))
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
        monkeypatch.setattr(torch.cuda, "Stream", Stream)
        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "stream", stream)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: None)


def weights(seed: int, scale: int = 1) -> list[torch.Tensor]:
    torch.manual_seed(seed)
    sizes = [(3, 5), (1000 * scale, 7), (), (0, 4), (129,)]
    return [torch.randn(size).to(torch.bfloat16 if n % 2 else torch.float32) for n, size in enumerate(sizes)]


def test_weights_of_all_updates_are_in_one_registered_mapping(monkeypatch):
    cuda = Cuda(monkeypatch)
    arena = PinnedArena()
    for seed in range(3):
        expected = weights(seed)
        copies = arena.copies(expected)
        assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(copies, expected, strict=True))
    assert arena.num_bytes < sum(w.nbytes for w in expected) + 512 * len(expected)  # no powers of two
    assert cuda.log == [f"register {arena.num_bytes}"]
    assert torch.equal(arena.copies(weights(5, scale=2))[1], weights(5, scale=2)[1])
    assert cuda.log[1:] == ["unregister", f"register {arena.num_bytes}"]
    arena.close()
    arena.close()
    assert cuda.log[3:] == ["unregister"]


def test_memory_that_cannot_be_pinned_is_used_all_the_same(monkeypatch, caplog):
    cuda = Cuda(monkeypatch, error=2)
    arena = PinnedArena()
    assert torch.equal(arena.copies(weights(0))[1], weights(0)[1])
    arena.close()
    assert "could not be pinned (CUDA error 2)" in caplog.text
    assert "unregister" not in cuda.log


@pytest.mark.parametrize("num_buffers", [1, 2, 5])
def test_a_large_tensor_passes_through_two_buffers(num_buffers, monkeypatch):
    monkeypatch.setattr(device_memory, "BUFFER_BYTES", 2**20)
    cuda = Cuda(monkeypatch)
    monkeypatch.setattr(device_memory, "HUGE_PAGE_BYTES", 2**10)
    source = torch.randn(2**18 * num_buffers - 5)
    staged = StagedCopies(source.device)
    assert cuda.log == ["stream", "wait for the trainer's stream"]
    cuda.log.clear()
    copied = host_copy(source, staged)
    assert torch.equal(copied, source)
    assert copied.data_ptr() != source.data_ptr()
    queued = ["begin", "end", "record"]
    assert cuda.log == queued + [*queued, "synchronize"] * (num_buffers - 1) + ["synchronize"]


def test_a_checkpoint_is_copied_on_a_stream_beside_training(monkeypatch, tmp_path):
    monkeypatch.setattr(device_memory, "HUGE_PAGE_BYTES", 2**10)
    cuda = Cuda(monkeypatch)
    copies = []
    copy = checkpoint_io.host_copy
    monkeypatch.setattr(
        checkpoint_io, "host_copy", lambda value, staged: copies.append((staged, cuda.log[-1])) or copy(value, staged)
    )
    weight, moment = torch.randn(100, 100), torch.randn(100, 100)
    saved = {
        "state_dict": {"weight": weight},
        "optimizer_states": [{"state": {0: {"exp_avg": moment}}}],
        "global_step": 1,
    }
    io = BackgroundCheckpointIO()
    io.save_checkpoint(saved, tmp_path / "a.ckpt")
    io.teardown()
    assert len(copies) == 2
    assert all(isinstance(staged, StagedCopies) and before == "begin" for staged, before in copies)
    assert cuda.log[:2] == ["stream", "wait for the trainer's stream"]  # in the trainer's thread, before both copies
    assert cuda.log.count("synchronize") == 2
    loaded = torch.load(tmp_path / "a.ckpt", weights_only=True)
    assert torch.equal(loaded["state_dict"]["weight"], weight)
    assert torch.equal(loaded["optimizer_states"][0]["state"][0]["exp_avg"], moment)


@pytest.mark.parametrize(
    "error",
    [  # the last four are of 25 runs that had to share a GPU's 80 GB
        MemoryError("the engine ran out of memory"),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB."),
        torch.AcceleratorError("CUDA error: out of memory\nSearch for `cudaErrorMemoryAllocation'"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR"),
    ],
)
def test_every_way_to_say_that_the_memory_is_full_is_known(error):
    assert is_out_of_memory(error)


@pytest.mark.parametrize(
    "error", [RuntimeError("CUDA error: device-side assert triggered"), ValueError("CUDA out of memory"), KeyError("x")]
)
def test_other_errors_do_not_speak_of_memory(error):
    assert not is_out_of_memory(error)


def test_the_cause_of_an_error_counts():
    error = ValueError("the producer failed")
    error.__cause__ = torch.OutOfMemoryError("CUDA out of memory.")
    assert is_out_of_memory(error)


# -- Copies in memory of their own ------------------------------------------------------------------------------------


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
