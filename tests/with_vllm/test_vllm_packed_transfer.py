"""Chunks go through vLLM's real packed senders and receivers; streams, memory handles and NCCL are stand-ins.

There is no GPU: buffers are in the CPU's memory, a handle is a number, and a broadcast is a copy into a queue. The
bytes, names, sizes and order that both sides must agree on are those of a GPU.
"""

from __future__ import annotations

import base64
import contextlib
import pickle
from queue import Queue
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

pytest.importorskip("vllm")

from vllm.distributed.weight_transfer import packed_tensor

from lit_async_rl.vllm.gpu_weight_transfer import IpcTransfer, NcclTransfer
from lit_async_rl.vllm.weight_transfer import EngineControl

WAIT_S = 30.0


def some_weights() -> dict[str, Tensor]:
    """Odd sizes and mixed dtypes: bytes behind a bfloat16 of odd length are no place for a float32."""
    torch.manual_seed(0)
    sizes = {"odd": (3, 5), "wide": (7,), "matrix": (64, 33), "scalar": (), "last": (9, 2)}
    weights = {f"{name}.{kind}": torch.randn(size) for name, size in sizes.items() for kind in ("a", "b")}
    return {name: w.bfloat16() if name.endswith("a") else w for name, w in weights.items()} | {
        "n": torch.tensor([70001])
    }


class _CPU:
    """torch, with buffers of `device="cuda"` in the CPU's memory."""

    def __getattr__(self, name):
        return getattr(torch, name)

    @staticmethod
    def empty(*size, dtype=None, device=None):
        return torch.empty(*size, dtype=dtype)


@pytest.fixture
def log(monkeypatch):
    found: list[str] = []
    stream = SimpleNamespace(synchronize=lambda: found.append("synchronize"))
    monkeypatch.setattr(packed_tensor, "torch", _CPU())
    monkeypatch.setattr(packed_tensor, "_get_streams", lambda device, number: (stream,) * number)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    monkeypatch.setattr(torch.cuda, "stream", lambda chosen: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_device", lambda gpu: found.append("set_device"))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda gpu: SimpleNamespace(uuid="gpu"))
    monkeypatch.setattr(torch.cuda, "ipc_collect", lambda: found.append("ipc_collect"))
    return found


class Worker(EngineControl):
    """A worker's side: vLLM's own unpacking, and a note of each call."""

    num_workers, update_timeout_s = 1, WAIT_S

    def __init__(self, receive, log):
        self.receive, self.log = receive, log
        self.seen: dict[str, Tensor] = {}

    def collective_rpc(self, method, kwargs):
        self.log.append(method)
        if method == "update_weights":
            self.receive(self, kwargs["update_info"])
        elif method == "init_weight_transfer_engine":
            self.init_info = kwargs["init_info"]
        return [None]


def check(worker, expected) -> None:
    assert worker.seen.keys() == expected.keys()
    for name, weight in expected.items():
        assert worker.seen[name].dtype == weight.dtype
        assert torch.equal(worker.seen[name], weight)


@pytest.mark.parametrize("chunk_gb", [1.0, 300 / 2**30], ids=["one chunk", "many chunks"])
def test_ipc_sends_packed_chunks_that_the_worker_unpacks(chunk_gb, log, monkeypatch):
    memory: dict[int, Tensor] = {}  # by handle

    def share(tensor):
        memory[len(memory)] = tensor
        return None, (0, 0, 0, 0, 0, 0, -1, len(memory) - 1)  # the sixth is the device

    monkeypatch.setattr(packed_tensor, "reduce_tensor", share)
    monkeypatch.setattr(torch.multiprocessing.reductions, "rebuild_cuda_tensor", lambda *args: memory[args[-1]])
    importer = packed_tensor.PackedBufferImporter()

    def receive(worker, info):
        handle = pickle.loads(base64.b64decode(info["ipc_handles_pickled"]))
        fields = {name: info[name] for name in ("names", "shapes", "dtype_names", "tensor_sizes")}
        weights = packed_tensor.packed_ipc_consumer(ipc_handle=handle, **fields, device_index=0, importer=importer)
        worker.seen.update(weights)

    transfer = IpcTransfer(chunk_gb=chunk_gb)
    transfer.device = "cpu"
    worker = Worker(receive, log)
    for _ in range(2):
        transfer.stage(some_weights().items())
        transfer.deliver(worker)
        check(worker, some_weights())
    transfer.close()
    assert worker.init_info == {"packed": True}
    assert log[-1] == "ipc_collect"
    updates = log.count("update_weights")
    assert updates == 2 if chunk_gb == 1 else updates > 4
    assert len(memory) == updates  # a handle for each chunk, not for each of 11 tensors


@pytest.mark.parametrize("chunk_gb", [1.0, 300 / 2**30], ids=["one chunk", "many chunks"])
def test_nccl_broadcasts_packed_chunks_that_the_worker_unpacks(chunk_gb, log):
    sent: Queue[Tensor] = Queue()

    class Receiver:
        def broadcast(self, tensor, src):
            tensor.copy_(sent.get(timeout=WAIT_S))

    def receive(worker, info):
        described = zip(info["names"], info["shapes"], info["dtype_names"], strict=True)
        packed_tensor.packed_nccl_broadcast_consumer(
            iterator=iter([(name, (shape, getattr(torch, dtype))) for name, shape, dtype in described]),
            group=Receiver(),
            src=0,
            post_unpack_func=lambda weights: worker.seen.update((n, w.clone()) for n, w in weights),
            buffer_size_bytes=int(chunk_gb * 2**30),
            device="cpu",
        )

    transfer = NcclTransfer(chunk_gb=chunk_gb)
    transfer.device = "cpu"
    transfer._group = SimpleNamespace(broadcast=lambda tensor, src: sent.put(tensor.clone()), destroy=lambda: None)
    transfer._is_open = True  # the group needs NCCL
    worker = Worker(receive, log)
    transfer.stage(some_weights().items())
    transfer.deliver(worker)
    transfer.close()
    check(worker, some_weights())
    assert log.index("synchronize") < log.index("set_device")  # the chunk is there before the sender's streams read it
    assert log[-2:] == ["finish_weight_update", "check_loaded_weights"]
