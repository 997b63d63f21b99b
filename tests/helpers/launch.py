"""Starts a script in several processes that find each other as under torchrun, and never waits for ever.

Each is a fork of one process that has imported everything, as a new one would in ten seconds; arguments, environment
and output are its own. What Lightning or torchrun starts by itself is tested where commands are typed.
"""

import multiprocessing
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from multiprocessing import forkserver
from pathlib import Path

import pytest
from preloaded import become, wind_up

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["lit_async_rl.api.run", "lit_async_rl.cli.app", "ready_to_fork"])


def _start_server() -> None:
    """Starts the process that forks, unless it runs, with this folder on its path."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)
        forkserver.ensure_running()


class Rank:
    """A process that runs a script as `python SCRIPT ARGUMENTS`, with what tests use of `subprocess.Popen`."""

    def __init__(self, script: Path, arguments: list[str], environment: dict[str, str]) -> None:
        with tempfile.NamedTemporaryFile(delete=False) as said:
            self._said = open(said.name, errors="replace")  # noqa: SIM115  read while it runs
        call = (str(script), [str(word) for word in arguments], environment, os.getcwd(), said.name)
        _start_server()
        self._process = FORKS.Process(target=_run, args=call)
        self._process.start()

    @property
    def pid(self) -> int | None:
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    @property
    def stdout(self) -> Iterator[str]:
        """The lines that it prints, until it ends."""
        line = ""
        while True:
            ended = not self._process.is_alive()
            line += self._said.readline()
            if line.endswith("\n") or (ended and line):
                yield line
                line = ""
            elif ended:
                return
            else:
                time.sleep(0.01)

    def communicate(self, timeout: float) -> tuple[str, None]:
        """The rest of what it printed, once it has ended."""
        self._process.join(timeout)
        if self._process.is_alive():
            raise TimeoutError(f"still running after {timeout:.0f} s: {self._said.read()[-4000:]}")
        return self._said.read(), None

    def send_signal(self, number: int) -> None:
        if self._process.is_alive():
            os.kill(self._process.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _run(script: str, arguments: list[str], environment: dict[str, str], folder: str, said: str) -> None:
    """In the fork: the script as an interpreter runs it. multiprocessing reports errors and waits for threads."""
    become([script, *arguments], folder, environment, said=said)
    os.unlink(said)
    sys.path.insert(0, str(Path(script).parent))
    try:
        runpy.run_path(script, run_name="__main__")
    finally:
        wind_up()


def launch(script: Path, arguments: list[str], num_processes: int, timeout_s: float, anew: bool = False) -> None:
    """Runs the script; raises with the end of each process's output if one fails or time runs out."""
    processes = start(script, arguments, num_processes, anew=anew)
    outputs = finish(processes, timeout_s)
    failed = [n for n, process in enumerate(processes) if process.returncode != 0]
    assert not failed, "\n".join(f"-- rank {n}:\n{outputs[n][-4000:]}" for n in failed)


def start(script: Path, arguments: list[str], num_processes: int, anew: bool = False) -> list:
    """Starts one process for each rank; the caller ends them (`finish`).

    Args:
        anew: new interpreters, for variables that the C library reads when a process begins.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = dict(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), WORLD_SIZE=str(num_processes), OMP_NUM_THREADS="1")
    shared |= dict(
        LOCAL_WORLD_SIZE=str(num_processes), GROUP_RANK="0", TORCHELASTIC_RUN_ID="test", GLOO_SOCKET_IFNAME="lo"
    )
    ranks = range(num_processes)
    own = [shared | dict(RANK=str(rank), LOCAL_RANK=str(rank)) if num_processes > 1 else {} for rank in ranks]
    if not anew:
        return [Rank(script, arguments, os.environ | variables) for variables in own]
    command = [sys.executable, script, *arguments]
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    return [subprocess.Popen(command, env=os.environ | variables, text=True, **pipes) for variables in own]


def consolidate(folder: str) -> None:
    """Runs `python -m lightning.pytorch.utilities.consolidate_checkpoint FOLDER`, in this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["consolidate_checkpoint", folder])
        runpy.run_module("lightning.pytorch.utilities.consolidate_checkpoint", run_name="__main__")


def finish(processes: list, timeout_s: float) -> list[str]:
    """Output of the processes; kills all of them and raises when time runs out."""
    deadline = time.monotonic() + timeout_s
    try:
        return [process.communicate(timeout=max(1.0, deadline - time.monotonic()))[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
