"""A vLLM server in a child process of the trainer, on loopback."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from lit_async_rl.engines.vllm.engine_arguments import LAUNCHER_VARIABLES
from lit_async_rl.utils.ports import LOOPBACK, free_port

PROGRAM = "from lit_async_rl.engines.vllm.serve import main; main()"
STOP_S = 10.0
LOOK_S = 0.5  # between two looks at a replica that starts
MAX_RESTARTS = 3  # in a row, each within `STABLE_S` of the one before
STABLE_S = 600.0
NEGATED = ("enable_prefix_caching",)  # on by default


class Replica:
    """One server in a child process, which ends with the trainer.

    Args:
        number: counts from 0.
        model: Hugging Face name or folder.
        arguments: fields of vLLM's `AsyncEngineArgs`.
        environment: variables of the process, besides the trainer's own.
    """

    def __init__(self, number: int, model: str, arguments: Mapping[str, Any], environment: Mapping[str, str]) -> None:
        self.number = number
        self.model = model
        self.arguments = arguments
        self.environment = environment
        self.port = free_port()
        self.num_restarts = 0
        self._began = 0.0
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> str:
        return f"{LOOPBACK}:{self.port}"

    def start(self) -> None:
        """Starts the process and returns at once."""
        own = ["--model", self.model, "--host", LOOPBACK, "--port", str(self.port), "--die_with_parent"]
        command = [sys.executable, "-c", PROGRAM, *own, *flags(self.arguments)]
        inherited = {name: value for name, value in os.environ.items() if name not in LAUNCHER_VARIABLES}
        self._process = subprocess.Popen(command, env=inherited | dict(self.environment), start_new_session=True)

    def listens(self) -> bool:
        """Whether it accepts connections."""
        with socket.socket() as probe:
            probe.settimeout(LOOK_S)
            return probe.connect_ex((LOOPBACK, self.port)) == 0

    @property
    def exit_code(self) -> int | None:
        """Of a process that has ended."""
        return None if self._process is None else self._process.poll()

    def restart(self, now: float) -> bool:
        """Starts it again after its process has ended, unless that keeps happening."""
        self.num_restarts = 1 if now - self._began > STABLE_S else self.num_restarts + 1
        if self.num_restarts > MAX_RESTARTS:
            return False
        self._began = now
        self.start()
        return True

    def stop(self) -> None:
        """Ends the process and its children."""
        if self._process is not None:
            self._process.terminate()
            try:
                self._process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait(STOP_S)


def flags(arguments: Mapping[str, Any]) -> list[str]:
    """Command line of a server with these fields of `AsyncEngineArgs`; those that are None keep their defaults."""
    found = []
    for name, value in arguments.items():
        flag = name.replace("_", "-")
        if value is True:
            found.append(f"--{flag}")
        elif value is False:
            found += [f"--no-{flag}"] if name in NEGATED else []
        elif isinstance(value, dict):
            found += [f"--{flag}", json.dumps(value)]
        elif isinstance(value, list | tuple):
            found += [f"--{flag}", ",".join(map(str, value))]
        elif value is not None:
            found += [f"--{flag}", str(value)]
    return found
