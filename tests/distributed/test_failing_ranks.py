"""A rank that never comes, or that fails where another callback then waits for all ranks: the others end in time."""

import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from launch import finish, start

from lit_async_rl.runtime.ports import free_port

ROOT = Path(__file__).parents[2]
SAVE_ON_EXCEPTION = ROOT / "tests" / "helpers" / "distributed_save_on_exception.py"
LIMIT_S = 4
FLAGS = [
    *("--config", "configs/quickstart.yaml", "--config", "configs/strategies/ddp.yaml"),
    *("--trainer.devices", "2", "--trainer.accelerator", "cpu", "--data.groups_per_step", "2"),
    *("--data.limits.start_timeout_s", str(LIMIT_S)),
]


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_a_rank_that_was_killed_before_the_ranks_met_ends_the_others(tmp_path):
    processes = []
    for rank in (0, 1):  # each of another run, whose other rank never comes
        shared = dict(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2")
        shared |= dict(RANK=str(rank), LOCAL_RANK=str(rank), GROUP_RANK="0", TORCHELASTIC_RUN_ID="test")
        command = [sys.executable, "scripts/train.py", *FLAGS]
        command += ["--trainer.logger.init_args.save_dir", str(tmp_path / str(rank))]
        environment = os.environ | shared | dict(OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo", PYTHONPATH=str(ROOT))
        pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment, cwd=ROOT)
        processes.append(subprocess.Popen(command, **pipes))
    for process, output in zip(processes, finish(processes, 150), strict=True):
        assert process.returncode == 1, output
        (line,) = re.findall(r"^error: .*", output, re.MULTILINE)
        assert f"the 2 ranks did not all connect within data.limits.start_timeout_s={LIMIT_S}" in line
        assert "Traceback" not in output


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_a_port_in_use_is_one_line_and_leaves_no_process(tmp_path):
    with socket.socket() as used:
        used.bind(("127.0.0.1", 0))
        used.listen()
        environment = os.environ | dict(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(used.getsockname()[1]))
        environment |= dict(OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo", PYTHONPATH=str(ROOT))
        flags = [*FLAGS[:-1], "60", "--trainer.logger.init_args.save_dir", str(tmp_path)]
        pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment, cwd=ROOT)
        with subprocess.Popen([sys.executable, "scripts/train.py", *flags], **pipes) as process:
            said, _ = process.communicate(timeout=100)  # until all that hold the pipe have ended
    assert process.returncode == 1, said
    (line,) = re.findall(r"^error: .*", said, re.MULTILINE)
    assert "Is MASTER_ADDR:MASTER_PORT unreachable, or used by another program?" in line
    assert "Traceback" not in said


@pytest.mark.slow
@pytest.mark.timeout(200)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_raises_tells_the_others_before_it_saves(rank, tmp_path):
    processes = start(SAVE_ON_EXCEPTION, [str(rank), str(tmp_path)], 2)
    seen = next((line for line in processes[rank].stdout if "raising now" in line), None)
    began = time.monotonic()
    outputs = finish(processes, 120)
    assert seen, outputs
    took = time.monotonic() - began
    print(f"rank {rank} raised: both ended after {took:.1f} s")
    assert took < 30.0 + 10.0
    assert any("KeyError: 'broken here'" in output for output in outputs)
    told = re.compile(rf"because rank {rank} \(.+\) failed: KeyError: 'broken here'")
    assert told.search(outputs[1 - rank]), outputs  # why, and not that it has ended
    assert all(process.returncode for process in processes)


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_every_rank_checks_the_same_versions_after_an_engine_was_restarted():
    processes = start(Path(__file__).parents[1] / "helpers" / "distributed_restart.py", [], 2)
    outputs = finish(processes, 150)
    assert [process.returncode for process in processes] == [0, 0], outputs[0][-3000:] + outputs[1][-3000:]
    checked = [output.rpartition("checked ")[2].split()[0] for output in outputs]
    assert checked[0] == checked[1]
