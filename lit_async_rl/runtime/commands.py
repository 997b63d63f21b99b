"""Commands that are run to their end, in an event loop or by a thread that waits."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lit_async_rl.runtime.lifetime import guarded, kill_group

MAX_OUTPUT_BYTES = 2**16
READ_BYTES = 2**16
REAP_TIMEOUT_S = 5.0
READ_TIMEOUT_S = 2.0  # from the end of a process to that of its output
POLL_INTERVAL_S = 0.25  # until a process is noticed that has ended while others hold its output


@dataclass(frozen=True)
class Finished:
    """A command that has ended.

    Attributes:
        status: exit status, or the negative number of the signal that has ended it; None if it cannot be killed.
        output: last `MAX_OUTPUT_BYTES` of its standard output.
        errors: end of its standard error.
    """

    status: int | None
    output: str
    errors: str


def output_of(command: Sequence[str], timeout_s: float, folder: str | os.PathLike[str] | None = None) -> Finished:
    """Runs a command of this machine, such as git or pip, and waits for its end.

    Args:
        command: program and arguments; no shell reads it.
        timeout_s: time after which it is killed.
        folder: in which it runs; None is the present one.

    Raises:
        OSError: it cannot be started, or was killed.
    """
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=timeout_s)
    except subprocess.TimeoutExpired as error:
        raise OSError(f"{command[0]} did not end within {timeout_s:g} s") from error
    return Finished(done.returncode, done.stdout, done.stderr)


async def run_to_end(command: Sequence[str], given: bytes, variables: Mapping[str, str]) -> Finished:
    """Runs a command, under a guard (see `lifetime.guarded`) that is ended with this task.

    Args:
        command: program and arguments; no shell reads it.
        given: its standard input, which it need not read.
        variables: its environment.

    Raises:
        OSError: no process can be started.
    """
    process = await asyncio.create_subprocess_exec(
        *guarded(command),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=variables,
        start_new_session=True,  # a process group to kill, without the parent's Ctrl-C
    )
    output = _Tail(process.stdout)
    errors = _Tail(process.stderr)
    work = [asyncio.ensure_future(one) for one in (_write(process, given), output.read(), errors.read())]
    try:
        await _ended(process, work)
    finally:
        for one in work:
            one.cancel()
        await _end(process)
    return Finished(status=process.returncode, output=output.text, errors=errors.text)


async def _write(process: asyncio.subprocess.Process, given: bytes) -> None:
    if process.stdin is None:
        return
    with contextlib.suppress(ConnectionError):
        process.stdin.write(given)
        await process.stdin.drain()
        process.stdin.close()
        await process.stdin.wait_closed()


class _Tail:
    """The last `MAX_OUTPUT_BYTES` of a stream that `read` reads to its end."""

    def __init__(self, stream: asyncio.StreamReader | None) -> None:
        self._stream = stream
        self._kept = b""

    async def read(self) -> None:
        while self._stream is not None and (part := await self._stream.read(READ_BYTES)):
            self._kept = (self._kept + part)[-MAX_OUTPUT_BYTES:]

    @property
    def text(self) -> str:
        return self._kept.decode(errors="replace")


async def _ended(process: asyncio.subprocess.Process, work: Sequence[asyncio.Future[None]]) -> None:
    """Waits until a process has ended and its output was read, unless processes that its guard missed hold it open."""
    while (await asyncio.wait(work, timeout=POLL_INTERVAL_S))[1]:
        if process.returncode is not None:
            await asyncio.wait(work, timeout=READ_TIMEOUT_S)
            return
    for one in work:
        one.result()
    await process.wait()  # it may have closed its output before its end


async def _end(process: asyncio.subprocess.Process) -> None:
    """Ends and reaps a guard, and ends what it has started."""
    if process.returncode is not None:
        return
    with contextlib.suppress(asyncio.TimeoutError, ProcessLookupError):
        process.terminate()
        await asyncio.wait_for(process.wait(), REAP_TIMEOUT_S)
    if process.returncode is None:
        kill_group(process.pid)
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(process.wait(), REAP_TIMEOUT_S)
