"""The actor of one rank: starts the rank as a process, as torchrun does, and reports its output and end.

A process of its own lets training run in a main thread, where signals arrive and save `last.ckpt`. It gets torchrun's
variables, by which Lightning finds the other ranks; nobody makes a process group for it.

The actor's event loop reads the process's pipes, so that the process never waits for a reader, and answers the command.
If the command is gone, Ray ends its actors.
"""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import os
import sys
import time
from asyncio.subprocess import PIPE
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from lit_async_rl.ray.security import CLUSTERS, auth_mode, is_loopback, refusal
from lit_async_rl.runtime.ports import free_port
from lit_async_rl.runtime.process import end_reason

Stream = Literal["stdout", "stderr"]
Said = tuple[int, Stream, str]  # rank, stream, text
PAUSE_S = 0.2
QUIET_S = 5.0  # without news until an answer that has none
ANSWER_S = 60.0  # the coordinator's time for an answer; without it the rank ends
FINAL_S = 5.0  # for the last words of a process that has ended, and for another rank's end that explains one
NUM_LAST_LINES = 20
MAX_UNSENT = 1 << 20  # characters of output that wait for the command; what is older is left out
FINAL_STATUS = 79  # of `rank.py`: starting again would not help; no status of shells or sysexits.h
# without the working folder in front of the path, where a file of any name would hide a module
PROGRAM = "import sys; sys.path[:] = filter(None, sys.path); from lit_async_rl.ray.rank import main; main()"
RUN_ID = "LIT_ASYNC_RL_RAY_RUN"
RESUME = "LIT_ASYNC_RL_RAY_RESUME"


@dataclass(frozen=True)
class Spot:
    """Where Ray has placed an actor.

    Args:
        node: Ray's name of the node.
        ip: its address.
        gpus: that Ray has given to the actor.
        port: free there at the moment.
        checkpoint: newest of the run on that node; None without one.
        problem: why no rank can run there; empty if one can.
    """

    node: str
    ip: str
    gpus: tuple[str, ...]
    port: int
    checkpoint: str | None
    problem: str


@dataclass(frozen=True)
class Ended:
    """How the process of a rank ended.

    Args:
        rank: None before the actors have numbers.
        status: exit status; the negative number of the signal that killed it, or None if it was lost with its actor.
        where: node and process, for messages.
        last_lines: of what it wrote to stderr.
    """

    rank: int | None
    status: int | None
    where: str
    last_lines: str


class RankActor:
    """The actor that starts the process of a rank; the command calls its methods."""

    def __init__(self) -> None:
        import ray

        self._context = ray.get_runtime_context()
        self._ip = str(ray.util.get_node_ip_address())
        self._rank = 0
        self._process: asyncio.subprocess.Process | None = None
        self._output = Output()
        self._reading: list[asyncio.Future[None]] = []  # of its pipes
        self._ended: Ended | None = None

    async def spot(self, cwd: str, folder: str | None) -> Spot:
        """Place of the actor, for a command in the folder `cwd` and a run with checkpoints in `folder`."""
        return Spot(
            node=self._context.get_node_id(),
            ip=self._ip,
            gpus=tuple(self._context.get_accelerator_ids().get("GPU", ())),
            port=free_port(""),
            checkpoint=newest_checkpoint(folder),
            problem=misplaced(self._ip, cwd),
        )

    async def start(self, variables: Mapping[str, str], cwd: str, argv: Sequence[str]) -> None:
        """Starts the process, with the folder and the arguments of the command.

        `variables`, torchrun's among them, are added to the actor's environment.
        """
        self._rank = int(variables["RANK"])
        address = self._context.gcs_address
        environment = {**os.environ, **variables, "RAY_ADDRESS": address}
        if is_loopback(self._ip):
            environment[CLUSTERS] = "0"  # or the rank would look for its node at another address
        environment.pop("RAY_JOB_ID", None)  # the rank's is a job of its own
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", PROGRAM, *argv),
            cwd=cwd,
            env=environment,
            stdin=PIPE,  # whose end tells the process that this one is gone
            stdout=PIPE,
            stderr=PIPE,
        )
        pipes: dict[Stream, Any] = {"stdout": self._process.stdout, "stderr": self._process.stderr}
        self._reading = [asyncio.ensure_future(self._read(pipe, stream)) for stream, pipe in pipes.items()]

    async def follow(self) -> tuple[list[Said], Ended | None]:
        """New output as soon as there is some, and the process's end after all of its output.

        Without either it answers after `QUIET_S`.
        """
        answers_at = time.monotonic() + QUIET_S
        while self._ended is None:
            await asyncio.sleep(PAUSE_S)
            self._ended = await self._end()
            if self._output.has_some or time.monotonic() >= answers_at:
                break
        return [(self._rank, stream, text) for stream, text in self._output.take()], self._ended

    async def send_signal(self, number: int) -> None:
        """Has the process receive a signal, unless it has ended."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)

    async def _end(self) -> Ended | None:
        """How the process has ended, once its output was read; None if it is running."""
        if self._process is None or (status := self._process.returncode) is None:
            return None
        await asyncio.wait(self._reading, timeout=FINAL_S)  # a child of the process may hold a pipe open
        where = f"node {self._ip}, pid {self._process.pid}"
        return Ended(self._rank, status, where=where, last_lines="\n".join(self._output.last_lines))

    async def _read(self, pipe: asyncio.StreamReader, stream: Stream) -> None:
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        while data := await pipe.read(1 << 16):
            self._output.add(stream, decoder.decode(data))


def misplaced(ip: str, cwd: str) -> str:
    """Why a rank cannot run on the node of this address; empty if it can. `cwd` is the command's folder."""
    if not os.path.isdir(cwd):
        return f"the command's folder {cwd} is not on the node {ip}: all nodes must share it, docs/ray.md"
    if not is_loopback(ip) and auth_mode() != "token":  # a node that came later
        return refusal(ip, auth_mode())
    return ""


def newest_checkpoint(folder: str | None) -> str | None:
    """`last.ckpt` of the run, file or folder; None if there is none yet."""
    path = None if folder is None else Path(folder) / "last.ckpt"
    return str(path) if path is not None and path.exists() else None


def describe_end(ended: Ended, has_lines: bool = True) -> str:
    """A message about a rank's end, by default with its last lines."""
    start = f"{'a rank' if ended.rank is None else f'rank {ended.rank}'} ({ended.where})"
    if ended.status is None:
        return f"{start} was lost, with its machine or its process of Ray"
    if ended.status < 0:
        how = f"was killed by {end_reason(ended.status)}"
    elif ended.status == 0:
        how = "was saved, because its node or another's is taken away"
    else:
        how = f"ended with {end_reason(ended.status)}"
    lines = f"; its last lines:\n{ended.last_lines}" if ended.last_lines else "; it wrote nothing to stderr"
    return f"{start} {how}{lines if has_lines else ''}"


class Output:
    """Output of the process, buffered until the command asks for it."""

    def __init__(self) -> None:
        self._unsent: deque[tuple[Stream, str]] = deque()
        self._num_unsent = 0
        self._tail: deque[str] = deque(maxlen=NUM_LAST_LINES + 1)

    @property
    def has_some(self) -> bool:
        """Whether there is any."""
        return bool(self._unsent)

    def add(self, stream: Stream, text: str) -> None:
        """Appends a text."""
        if not text:
            return
        if stream == "stderr":
            rest = self._tail.pop() if self._tail else ""
            self._tail.extend((rest + text).split("\n"))
        self._unsent.append((stream, text))
        self._num_unsent += len(text)
        while self._num_unsent > MAX_UNSENT and len(self._unsent) > 1:
            self._num_unsent -= len(self._unsent.popleft()[1])

    def take(self) -> list[tuple[Stream, str]]:
        """Takes all that is there."""
        taken = list(self._unsent)
        self._unsent.clear()
        self._num_unsent = 0
        return taken

    @property
    def last_lines(self) -> list[str]:
        """Of stderr."""
        return [line for line in self._tail if line.strip()][-NUM_LAST_LINES:]
