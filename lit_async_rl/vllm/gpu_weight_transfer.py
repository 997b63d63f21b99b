"""GPU-to-GPU weight transfer through vLLM's own backends, see `lit_async_rl.vllm.weight_transfer`.

Both use the packed trainer sides of vLLM 0.32 and 0.33: the tensors of a chunk travel as one buffer of bytes, because a
handle or broadcast for each takes longer than the copies. Ours are the chunks, which bound memory, the time limits, and
the check that all weights arrived. On a CPU, tests pass the chunks through vLLM's real senders and receivers with
stand-ins for streams, handles and NCCL; neither class has been run on GPUs yet. `SharedMemoryTransfer` and
`FileTransfer` are tested, and support GPUs, too.
"""

from __future__ import annotations

import base64
import os
import pickle
from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor

from lit_async_rl.engines.weight_files import chunks
from lit_async_rl.errors import InvariantError
from lit_async_rl.runtime.ports import free_port
from lit_async_rl.runtime.threads import start_thread
from lit_async_rl.runtime.waiting import Wait
from lit_async_rl.utils.checks import check_range
from lit_async_rl.vllm.weight_transfer import EXTENSION, EngineControl, WeightTransfer, as_dtype

NUM_BUFFERS = 2  # of a sender of NCCL: one is packed while the other is sent
LOOPBACK = ("127.0.0.1", "localhost", "::1")
INSECURE_VARIABLE = "VLLM_ALLOW_INSECURE_SERIALIZATION"


class _VLLMBackend(WeightTransfer):
    """Base class: sends weights once, in chunks, while the engine is paused."""

    backend: str
    device = "cuda"

    def __init__(self, chunk_gb: float, dtype: str | None) -> None:
        check_range("transfer", "positive", chunk_gb=chunk_gb)
        self.chunk_gb = chunk_gb
        self._chunk_bytes = int(chunk_gb * 2**30)
        self.dtype = as_dtype(dtype)
        self._weights: Iterable[tuple[str, Tensor]] | None = None
        self._is_open = False

    def engine_arguments(self) -> dict[str, Any]:
        """Selects vLLM's weight transfer backend.

        Raises:
            ValueError: there is no GPU.
        """
        if not torch.cuda.is_available():
            raise ValueError(
                f"data.engine.transfer={type(self).__name__} moves weights from GPU to GPU, but the trainer has no "
                "GPU: use SharedMemoryTransfer, the default"
            )
        return {"weight_transfer_config": {"backend": self.backend}, "worker_extension_cls": EXTENSION}

    def stage(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Stores the iterator for `deliver`."""
        self._weights = weights

    def deliver(self, control: EngineControl) -> None:
        """Sends the weights chunk by chunk."""
        if self._weights is None:
            raise InvariantError("no weights are left to deliver: call `stage` with new weights before each `deliver`")
        weights = self._weights
        self._weights = None
        if not self._is_open:
            self._open(control)
            self._is_open = True
        control.collective_rpc("record_loaded_weights", {})
        control.collective_rpc("start_weight_update", {})
        self.staged_bytes = 0
        for chunk in chunks(weights, self._chunk_bytes, self.device, dtype=self.dtype):
            # wide elements first: in a buffer of bytes each tensor must begin at a multiple of its element's size
            chunk.sort(key=lambda item: -item[1].dtype.itemsize)
            self._send(chunk, control)
            self.staged_bytes += sum(tensor.nbytes for _, tensor in chunk)
        control.collective_rpc("finish_weight_update", {})
        control.collective_rpc("check_loaded_weights", {})  # vLLM itself only logs missing weights
        self._clean_up()

    def release(self) -> None:
        """Drops weights that were not delivered."""
        self._weights = None

    def _clean_up(self) -> None:
        """Frees what the workers have read to the end."""

    @abstractmethod
    def _open(self, control: EngineControl) -> None: ...

    @abstractmethod
    def _send(self, chunk: list[tuple[str, Tensor]], control: EngineControl) -> None: ...


class IpcTransfer(_VLLMBackend):
    """vLLM's `ipc` backend: its worker reads the trainer's GPU memory. Trainer and engine share one GPU.

    vLLM passes the memory handles as pickles between its processes, for which it requires
    VLLM_ALLOW_INSECURE_SERIALIZATION=1. The variable is set for them and, until `close`, for the trainer, which
    receives their replies: use this only with an engine that this trainer started.

    Not run on a GPU yet.

    Args:
        chunk_gb: GiB sent at a time. Trainer and worker hold two copies of a chunk each; a larger tensor is a chunk.
        dtype: as in `FileTransfer`.
    """

    backend = "ipc"

    def __init__(self, chunk_gb: float = 1.0, dtype: str | None = None) -> None:
        super().__init__(chunk_gb, dtype)
        self._has_allowed = False

    def environment(self) -> dict[str, str]:
        """Allows vLLM to unpickle memory handles."""
        return {INSECURE_VARIABLE: "1"}

    def check_gpus(self, gpus: Sequence[int], trainer_gpu: int | None) -> None:
        """Refuses engines with another GPU than the trainer's.

        Raises:
            ValueError: names the GPUs.
        """
        if len(gpus) != 1:
            raise ValueError(
                f"data.engine.transfer=IpcTransfer needs an engine that uses only the trainer's GPU, but this engine "
                f"uses {len(gpus)} GPUs: set tensor_parallel_size=1, or use NcclTransfer or SharedMemoryTransfer"
            )
        if trainer_gpu is not None and gpus[0] != trainer_gpu:
            raise ValueError(
                f"data.engine.transfer=IpcTransfer needs trainer and engine on the same GPU, but the trainer "
                f"is on GPU {trainer_gpu} and data.engine.device_ids=[{gpus[0]}]: use NcclTransfer or "
                "SharedMemoryTransfer"
            )

    def close(self) -> None:
        """Withdraws that permission in the trainer."""
        super().close()
        if self._has_allowed:
            os.environ.pop(INSECURE_VARIABLE, None)

    def _open(self, control: EngineControl) -> None:
        self._has_allowed = INSECURE_VARIABLE not in os.environ
        os.environ[INSECURE_VARIABLE] = "1"
        control.collective_rpc("init_weight_transfer_engine", {"init_info": {"packed": True}})

    def _send(self, chunk: list[tuple[str, Tensor]], control: EngineControl) -> None:
        from vllm.distributed.weight_transfer.packed_tensor import packed_ipc_producer

        gpu = str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
        size = sum(tensor.nbytes for _, tensor in chunk)
        packed_chunks = packed_ipc_producer(
            iterator=iter(chunk), gpu_uuid=gpu, post_iter_func=_flat, buffer_size_bytes=size
        )
        for packed in packed_chunks:  # the producer waits for its copies before it yields
            pickled = base64.b64encode(pickle.dumps(packed.ipc_handle)).decode()
            info = {
                "names": packed.names,
                "dtype_names": packed.dtype_names,
                "shapes": packed.shapes,
                "tensor_sizes": packed.tensor_sizes,
                "ipc_handles_pickled": pickled,
            }
            control.collective_rpc("update_weights", {"update_info": info})

    def _clean_up(self) -> None:
        torch.cuda.ipc_collect()  # memory that a worker had mapped stays allocated without it


class NcclTransfer(_VLLMBackend):
    """vLLM's `nccl` backend: broadcast from the trainer's first GPU to all workers, on this or other machines.

    NCCL has no group with two members on one GPU: the engine needs other GPUs than the trainer's.

    Not run on GPUs yet.

    Args:
        host: address of this machine for the workers.
        port: port of the rendezvous; 0 takes a free one.
        chunk_gb: as in `IpcTransfer`.
        dtype: as in `FileTransfer`.
    """

    backend = "nccl"

    def __init__(self, host: str = "127.0.0.1", port: int = 0, chunk_gb: float = 1.0, dtype: str | None = None) -> None:
        super().__init__(chunk_gb, dtype)
        check_range("data.engine.transfer", "integer in [0, 65535]", port=port)
        self.host = host
        self.port = port
        self._group: Any = None

    def check_gpus(self, gpus: Sequence[int], trainer_gpu: int | None) -> None:
        """Refuses an engine on the trainer's GPU.

        Raises:
            ValueError: names the GPU.
        """
        if trainer_gpu is not None and self.host in LOOPBACK and trainer_gpu in gpus:
            raise ValueError(
                "data.engine.transfer=NcclTransfer needs an engine on GPUs that the trainer does not use, but both use "
                f"GPU {trainer_gpu}: set data.engine.device_ids, or use IpcTransfer or SharedMemoryTransfer"
            )

    def _open(self, control: EngineControl) -> None:
        from vllm.distributed.weight_transfer.nccl_common import stateless_init_process_group

        port = self.port or free_port(self.host)
        world_size = control.num_workers + 1
        init_info = {
            "master_address": self.host,
            "master_port": port,
            "world_size": world_size,
            "rank_offset": 1,
            "packed": True,
            "packed_buffer_size_bytes": self._chunk_bytes,
            "packed_num_buffers": NUM_BUFFERS,
        }
        gpu = torch.cuda.current_device()

        def join() -> None:
            self._group = stateless_init_process_group(self.host, port, 0, world_size, gpu)

        invite = partial(control.collective_rpc, "init_weight_transfer_engine", {"init_info": init_info})
        run_together(control.update_timeout_s, "forming NCCL's group with vLLM", invite, join)

    def _send(self, chunk: list[tuple[str, Tensor]], control: EngineControl) -> None:
        from vllm.distributed.weight_transfer.packed_tensor import packed_nccl_broadcast_producer

        gpu = torch.cuda.current_device()
        torch.cuda.current_stream().synchronize()  # the sender packs on streams of its own, which wait for nothing

        def broadcast() -> None:
            torch.cuda.set_device(gpu)  # each thread has a current device
            packed_nccl_broadcast_producer(
                iterator=iter(chunk),
                group=self._group,
                src=0,
                post_iter_func=_flat,
                buffer_size_bytes=self._chunk_bytes,
                num_buffers=NUM_BUFFERS,
            )

        receive = partial(control.collective_rpc, "update_weights", {"update_info": _describe(chunk)})
        try:
            run_together(control.update_timeout_s, "a broadcast to vLLM", receive, broadcast)
        except BaseException:
            self._leave()  # aborts the broadcast, which a worker that failed would never join
            raise

    def close(self) -> None:
        """Leaves the process group."""
        super().close()
        self._leave()

    def _leave(self) -> None:
        group = self._group
        self._group = None
        self._is_open = False
        if group is not None:
            group.destroy()


def run_together(timeout_s: float, what: str, *calls: Callable[[], Any]) -> None:
    """Runs calls that wait for each other in threads; the first error ends the wait for all.

    Raises:
        StalledError: they did not all return in time; threads that hang are abandoned.
    """
    results: SimpleQueue[BaseException | None] = SimpleQueue()

    def run(call: Callable[[], Any]) -> None:
        try:
            call()
        except BaseException as error:
            results.put(error)
        else:
            results.put(None)

    for call in calls:
        start_thread(run, call, name=what)
    wait = Wait(timeout_s, f"{what} did not end within data.engine.update_timeout_s={timeout_s:g}")
    for _ in calls:
        if (error := wait.get(results)) is not None:
            raise error


def _flat(item: tuple[str, Tensor]) -> Tensor:
    """The tensor in one dimension: newer senders cannot read a scalar as bytes."""
    return item[1].reshape(-1)


def _describe(chunk: list[tuple[str, Tensor]]) -> dict[str, Any]:
    return {
        "names": [name for name, _ in chunk],
        "dtype_names": [str(tensor.dtype).removeprefix("torch.") for _, tensor in chunk],
        "shapes": [list(tensor.shape) for _, tensor in chunk],
    }
