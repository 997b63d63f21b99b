"""Weights written by the trainer are, bit for bit, those a worker reads; vLLM is in test_vllm_engine.py."""

import os
import shutil
import signal
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from processes import wait_for_the_end_of
from safetensors.torch import save_file

from lit_async_rl.assets import asset
from lit_async_rl.engines.weight_files import read_folder
from lit_async_rl.errors import StalledError
from lit_async_rl.vllm.engine import VLLMEngine
from lit_async_rl.vllm.file_transfer import FileTransfer, SharedMemoryTransfer
from lit_async_rl.vllm.gpu_weight_transfer import IpcTransfer, NcclTransfer, run_together
from lit_async_rl.vllm.weight_transfer import EngineControl


class Control(EngineControl):
    """Reads what a worker would."""

    num_workers, update_timeout_s = 1, 10.0

    def __init__(self):
        self.seen = []

    def collective_rpc(self, method, kwargs):
        assert method == "load_policy_weights"
        self.seen.append({name: tensor.clone() for name, tensor in read_folder(**kwargs)})
        return [None]


def some_weights(seed=0):
    torch.manual_seed(seed)
    yield "transposed", torch.randn(7, 5).T
    yield "half", torch.randn(11, 3).bfloat16()
    yield "scalar", torch.tensor(2.5)
    yield "large", torch.randn(64, 64)
    yield "part", torch.randn(10)[::2]


@pytest.mark.parametrize("kind", ["files", "shared memory"])
@pytest.mark.parametrize("shard_gb", [1.0, 1e-9])
def test_a_worker_reads_what_the_trainer_wrote_any_number_of_times(kind, shard_gb, tmp_path):
    transfer = FileTransfer(str(tmp_path / "new"), shard_gb) if kind == "files" else SharedMemoryTransfer(shard_gb)
    for update in range(3):
        control = Control()
        transfer.stage(some_weights(update))
        transfer.deliver(control)
        transfer.deliver(control)
        expected = dict(some_weights(update))
        for seen in control.seen:
            assert seen.keys() == expected.keys()
            assert all(torch.equal(seen[n], expected[n]) and seen[n].dtype == expected[n].dtype for n in expected)
        folder = Path(transfer.staged)
        assert len(list(folder.iterdir())) == (1 if shard_gb == 1 else 5)
        assert len(list(folder.parent.glob(f"{folder.name}*"))) == 1
    transfer.close()
    transfer.close()
    assert not folder.exists()
    if kind == "files":
        assert os.listdir(tmp_path / "new") == []


def test_a_tensor_is_taken_before_the_next_is_asked_for():
    shared = torch.zeros(4)

    def gathered():
        for n in range(3):
            shared.fill_(n)
            yield str(n), shared
        shared.fill_(-1)

    control, transfer = Control(), SharedMemoryTransfer()
    transfer.stage(gathered())
    transfer.deliver(control)
    transfer.close()
    assert {name: tensor.tolist() for name, tensor in control.seen[0].items()} == {str(n): [n] * 4 for n in range(3)}


def test_floating_point_weights_travel_in_the_dtype_asked_for():
    control, transfer = Control(), SharedMemoryTransfer(dtype="bfloat16")
    transfer.stage([("a", torch.tensor([1.0, 1 / 3])), ("index", torch.tensor([300, 70001]))])
    transfer.deliver(control)
    transfer.close()
    assert torch.equal(control.seen[0]["a"], torch.tensor([1.0, 1 / 3]).bfloat16())
    assert torch.equal(control.seen[0]["index"], torch.tensor([300, 70001]))


def test_wrong_things_are_named(tmp_path):
    with pytest.raises(ValueError, match=r"transfer\.shard_gb must be positive, got 0"):
        FileTransfer(shard_gb=0.0)
    with pytest.raises(ValueError, match=r"transfer\.dtype .* got 'float33'"):
        SharedMemoryTransfer(dtype="float33")
    if not torch.cuda.is_available():
        for kind in (IpcTransfer, NcclTransfer):
            with pytest.raises(ValueError, match=rf"transfer={kind.__name__} .* has no GPU: use SharedMemoryTransfer"):
                kind().engine_arguments()
    with pytest.raises(FileNotFoundError, match="can this machine see"):
        list(read_folder(str(tmp_path / "lit_async_rl_weights_1_0")))


def test_a_worker_reads_nothing_but_what_trainers_wrote(tmp_path):
    """Whoever may ask a server to load weights must not have it read other models of its machine."""
    private, ours = tmp_path / "private", tmp_path / "lit_async_rl_weights_1_0"
    for folder in (private, ours):
        folder.mkdir()
    save_file({"a": torch.ones(2)}, private / "model.safetensors")
    (tmp_path / "lit_async_rl_weights_2_0").symlink_to(private)
    (ours / "0.safetensors").symlink_to(private / "model.safetensors")
    for folder in (private, tmp_path / "lit_async_rl_weights_2_0", ours):
        with pytest.raises(PermissionError, match="a trainer"):
            list(read_folder(str(folder)))
    (ours / "0.safetensors").unlink()
    os.mkfifo(ours / "0.safetensors")  # opening it would wait for ever
    with pytest.raises(PermissionError, match="is a link or a device"):
        list(read_folder(str(ours)))


def test_without_room_in_shared_memory_files_take_its_place_and_the_remedy_is_named(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    transfer = SharedMemoryTransfer()
    transfer.check_room(asset("sort_policy"))
    assert transfer.folder == "/dev/shm"
    small = shutil._ntuple_diskusage(64 << 20, 63 << 20, 1 << 20)  # what a container has without --shm-size
    monkeypatch.setattr(shutil, "disk_usage", lambda path: small)
    transfer.check_room(asset("sort_policy"))
    assert "/dev/shm has 0.00 GiB free" in caplog.text
    assert "--shm-size=1g" in caplog.text
    control = Control()
    transfer.stage(some_weights())
    transfer.deliver(control)
    assert Path(transfer.staged).parent == tmp_path
    assert control.seen[0].keys() == dict(some_weights()).keys()
    transfer.close()


def test_an_error_of_one_of_two_that_wait_for_each_other_ends_the_wait_for_both():
    began = time.monotonic()

    def failing():
        raise RuntimeError("the worker ran out of memory")

    with pytest.raises(RuntimeError, match="ran out of memory"):
        run_together(60.0, "a broadcast", failing, lambda: time.sleep(30))
    with pytest.raises(StalledError, match=r"a broadcast did not end within data\.engine\.update_timeout_s=0\.1"):
        run_together(0.1, "a broadcast", lambda: None, lambda: time.sleep(30))
    assert time.monotonic() - began < 20
    run_together(60.0, "a broadcast", lambda: None, lambda: None)


TWO_RUNS = """
import os, pathlib, signal, sys, time, torch
from lit_async_rl.vllm.file_transfer import FileTransfer

def run(name):
    transfer = FileTransfer(sys.argv[1])
    transfer.stage([("a", torch.ones(4))])
    pathlib.Path(name).write_text(f"{os.getpid()} {transfer.staged}")
    return transfer

if os.fork() == 0:
    os.setsid()  # outlives the other
    alive = run("alive")
    time.sleep(600)
    os._exit(1)
while not pathlib.Path("alive").exists() or not pathlib.Path("alive").read_text():
    time.sleep(0.01)
killed = run("killed")
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
def test_what_a_killed_run_leaves_is_deleted_by_the_next_and_that_of_a_live_run_never(process, tmp_path):
    others = tmp_path / "weights" / "lit_async_rl_weights_of_an_old_version"  # nothing says that its owner is dead
    others.mkdir(parents=True)
    done = process.run([str(others.parent)], tmp_path, code=TWO_RUNS)
    assert done.status == -signal.SIGKILL, done.said
    (_, left), (pid, used) = ((tmp_path / name).read_text().split(" ", 1) for name in ("killed", "alive"))
    left, used = Path(left), Path(used)
    transfer = FileTransfer(str(others.parent))
    try:
        assert left.is_dir()
        transfer.stage(some_weights())
        assert not left.exists()
        assert (used / "00000.safetensors").exists()
        assert others.exists()
    finally:
        os.kill(int(pid), signal.SIGKILL)
    wait_for_the_end_of(int(pid))
    FileTransfer(str(others.parent)).stage([])  # what it made is left by a run that did not close it, but lives
    assert not used.exists()
    assert Path(transfer.staged).exists()
    transfer.close()
    transfer.close()
    transfer.stage(some_weights())  # again, after it was closed
    assert Path(transfer.staged).exists()
    transfer.close()


def test_two_threads_may_close_at_once(tmp_path, monkeypatch):
    transfer, unlink = FileTransfer(str(tmp_path)), Path.unlink
    transfer.stage(some_weights())

    def slowly(path, **options):
        time.sleep(0.3)  # both threads come this far, unless one waits for the other
        unlink(path, **options)

    monkeypatch.setattr(Path, "unlink", slowly)
    with ThreadPoolExecutor(2) as threads:
        for closed in [threads.submit(transfer.close) for _ in range(2)]:
            closed.result(30)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("transfer", "settings", "message"),
    [
        (IpcTransfer, {"tensor_parallel_size": 2}, r"IpcTransfer needs an engine that uses only .* uses 2"),
        (IpcTransfer, {"device_ids": [0, 1]}, r"IpcTransfer needs an engine that uses only .* uses 2"),
        (IpcTransfer, {"engine_args": {"data_parallel_size": 4}}, r"IpcTransfer .* uses 4"),
    ],
)
def test_gpus_that_a_transfer_cannot_reach_are_refused_before_anything_starts(transfer, settings, message):
    with pytest.raises(ValueError, match=message):
        VLLMEngine(transfer=transfer(), **settings)


def test_a_transfer_is_refused_for_the_wrong_side_of_the_trainers_gpu():
    with pytest.raises(
        ValueError, match=r"IpcTransfer needs trainer and engine on the same GPU, but the trainer is on GPU 0 .*\[3\]"
    ):
        IpcTransfer().check_gpus([3], trainer_gpu=0)
    with pytest.raises(
        ValueError, match=r"NcclTransfer needs an engine on GPUs that the trainer does not use, but both use GPU 1"
    ):
        NcclTransfer().check_gpus([0, 1], trainer_gpu=1)
    IpcTransfer().check_gpus([1], trainer_gpu=1)
    NcclTransfer().check_gpus([1, 2], trainer_gpu=0)
    NcclTransfer(host="10.0.0.1").check_gpus([0], trainer_gpu=0)  # of other machines
    SharedMemoryTransfer().check_gpus([0, 1], trainer_gpu=0)
