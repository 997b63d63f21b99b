"""A program to run in a sandbox, its resource limits and its outcome."""

from __future__ import annotations

import contextlib
import signal
from dataclasses import dataclass
from typing import Literal

from lit_async_rl.utils.checks import check_range

Verdict = Literal["ended", "time", "memory", "processes", "output", "stopped"]


class SandboxError(RuntimeError):
    """A sandbox failed to run a program, for no fault of the program."""


@dataclass(frozen=True, kw_only=True)
class SandboxLimits:
    """Resource limits of one program. Exceeding one ends it, or fails its call.

    Args:
        wall_s: seconds until it is killed.
        cpu_s: processor seconds of each process.
        memory_mb: MB of all processes together.
        processes: number of processes and threads.
        output_kb: KB each of standard output and error; a program that writes more is ended.
        file_mb: MB of each file.
        scratch_mb: MB of the scratch folder.

    Raises:
        ValueError: a limit is out of range.
    """

    wall_s: float = 5.0
    cpu_s: int = 5
    memory_mb: int = 512
    processes: int = 32
    output_kb: int = 1024
    file_mb: int = 16
    scratch_mb: int = 64

    def __post_init__(self) -> None:
        check_range("SandboxLimits", "positive", wall_s=self.wall_s)
        check_range("SandboxLimits", "integer positive", cpu_s=self.cpu_s, memory_mb=self.memory_mb)
        check_range("SandboxLimits", "integer positive", output_kb=self.output_kb, file_mb=self.file_mb)
        check_range("SandboxLimits", "integer positive", scratch_mb=self.scratch_mb)
        check_range("SandboxLimits", "integer >= 4", processes=self.processes)


@dataclass(frozen=True, kw_only=True)
class Program:
    """A program to run, once.

    Attributes:
        source: program text.
        stdin: standard input.
        command: for `/bin/sh -c` in a folder with the source as `file`; None runs it as Python, in the fork.
        file: name of the source for a command.
        shows_last: whether Python prints the value of a final expression, as a notebook does.
        kind: `python`; `calls`: JSON with calls of its functions, see `functions`; `tests`: JSON with tests beside it,
            see `tests`.
        answer_bytes: room for answers to the trainer, besides that of an output.
    """

    source: str
    stdin: str = ""
    command: str | None = None
    file: str = "main.py"
    shows_last: bool = False
    kind: Literal["python", "calls", "tests"] = "python"
    answer_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class ProgramResult:
    """Outcome of a program.

    Attributes:
        verdict: `ended` by itself, or why it was ended: `time`, `memory`, `processes`, `output`, or `stopped` when no
            longer needed.
        status: exit status, or the negative number of the signal that ended it.
        stdout: output up to the limit; undecodable bytes are replaced.
        stderr: likewise.
        wall_s: seconds from the fork to its end.
        cpu_s: processor seconds of all processes.
        channel: answers of calls or tests to the trainer.
    """

    verdict: Verdict
    status: int
    stdout: str
    stderr: str
    wall_s: float
    cpu_s: float
    channel: bytes = b""

    @property
    def is_ok(self) -> bool:
        """Whether it ended by itself, with exit status 0."""
        return self.verdict == "ended" and self.status == 0


def signal_name(status: int) -> str:
    """`exit status 1`, or the name of the signal."""
    if status >= 0:
        return f"exit status {status}"
    with contextlib.suppress(ValueError):
        return signal.Signals(-status).name
    return f"signal {-status}"
