"""Starts a script in several processes that find each other as under torchrun, and never waits for ever."""

import os
import socket
import subprocess
import sys
import time
from pathlib import Path


def launch(script: Path, arguments: list[str], num_processes: int, timeout_s: float) -> None:
    """Runs the script; raises with the end of each process's output if one fails or time runs out."""
    processes = start(script, arguments, num_processes)
    outputs = finish(processes, timeout_s)
    failed = [n for n, process in enumerate(processes) if process.returncode != 0]
    assert not failed, "\n".join(f"-- rank {n}:\n{outputs[n][-4000:]}" for n in failed)


def start(script: Path, arguments: list[str], num_processes: int) -> list[subprocess.Popen]:
    """Starts one process for each rank; the caller ends them (`finish`)."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = dict(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), WORLD_SIZE=str(num_processes), OMP_NUM_THREADS="1")
    shared |= dict(
        LOCAL_WORLD_SIZE=str(num_processes), GROUP_RANK="0", TORCHELASTIC_RUN_ID="test", GLOO_SOCKET_IFNAME="lo"
    )
    processes = []
    for rank in range(num_processes):
        env = os.environ | (shared | dict(RANK=str(rank), LOCAL_RANK=str(rank)) if num_processes > 1 else {})
        command = [sys.executable, str(script), *arguments]
        processes.append(
            subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        )
    return processes


def finish(processes: list[subprocess.Popen], timeout_s: float) -> list[str]:
    """What they printed; kills all of them when time runs out, and raises."""
    deadline = time.monotonic() + timeout_s
    try:
        return [process.communicate(timeout=max(1.0, deadline - time.monotonic()))[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
