"""Wardens as the trainer sees them: start, requests, and running programs."""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from lit_async_rl.runtime.process import ChildEnded, start_process
from lit_async_rl.sandbox import room
from lit_async_rl.sandbox.program import Program, ProgramResult, SandboxError, SandboxLimits, Verdict
from lit_async_rl.sandbox.warden import END_S, STOP

START_S = 60.0  # for the start of a warden, on a busy machine
ANSWER_S = END_S + 20.0  # for the answer of a warden, beyond its program's time limit
REAP_S = 10.0
LAST_WORDS_S = 1.0
MAX_ANSWER_BYTES = 2**16
CHUNK = 2**16
_HERE = Path(__file__).resolve().parent
_BOOT = f"""
import sys, types
for name, path in (("lit_async_rl", {str(_HERE.parent)!r}), ("lit_async_rl.sandbox", {str(_HERE)!r})):
    module = types.ModuleType(name)
    module.__path__ = [path]
    sys.modules[name] = module
from lit_async_rl.sandbox.warden import main
main()
"""  # bypasses the package's `__init__`: the interpreter does not have its imports


def _base_python() -> str:
    """The interpreter, outside of a virtual environment."""
    return os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable)


class WardenProcess:
    """A warden's process and the socket to it.

    Args:
        settings: of `Sandbox`.

    Raises:
        SandboxError: it did not start, has ended, or reports why it cannot begin.
    """

    def __init__(self, settings: dict[str, Any]) -> None:
        self.guards: tuple[str, ...] = ()
        self._folder: str | None = None
        ours, theirs = socket.socketpair()
        self.socket = ours
        command = [_base_python(), "-s", "-S", "-B", "-c", _BOOT]
        if settings["level"] == "bubblewrap":
            readable = [*settings["readable"], str(_HERE)]
            bwrap = shutil.which("bwrap") or "bwrap"
            command = [bwrap, *room.bubblewrap_options(readable, settings["scratch_bytes"]), *command]
        if settings["level"] == "limits":
            self._folder = settings["scratch"] = tempfile.mkdtemp(prefix="sandbox-")
        with theirs:
            start: Callable[[], subprocess.Popen[bytes]] = lambda: subprocess.Popen(  # noqa: E731
                [*command, json.dumps(settings), str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                pass_fds=[theirs.fileno()],
                env={"PYTHONHASHSEED": "0", "LANG": "C.UTF-8", "PATH": os.defpath},  # nothing from the trainer's
                start_new_session=True,  # without the trainer's Ctrl-C
                cwd="/",
            )
            try:
                self._process = start_process(start)
            except (ChildEnded, OSError) as error:
                self.socket.close()
                raise SandboxError(str(error)) from error
        self.socket.settimeout(START_S)
        self._end = weakref.finalize(self, _end_process, self._process, self.socket, self._folder)
        self._wait_until_ready()

    def _wait_until_ready(self) -> None:
        try:
            answer = self.answer(time.monotonic() + START_S)
        except SandboxError as error:
            reason = self._last_words()
            self.kill()
            raise SandboxError(reason or str(error)) from None
        if "error" in answer:
            self.kill()
            raise SandboxError(str(answer["error"])[:300])
        self.guards = tuple(str(one) for one in answer["guards"])

    def _last_words(self) -> str:
        """Last line of its standard error so far."""
        file = self._process.stderr
        if file is None or not select.select([file], [], [], LAST_WORDS_S)[0]:
            return ""
        return os.read(file.fileno(), CHUNK).decode(errors="replace").strip().rpartition("\n")[2][:300]

    @property
    def is_there(self) -> bool:
        """Whether it appears to be waiting for a request."""
        return not select.select([self.socket], [], [], 0)[0] and self._process.poll() is None

    def send(self, task: dict[str, Any], files: Sequence[int]) -> None:
        """Sends a request."""
        socket.send_fds(self.socket, [json.dumps(task).encode() + b"\n"], list(files))

    def answer(self, deadline: float) -> dict[str, Any]:
        """Receives the next message.

        Raises:
            SandboxError: no message by the deadline, or an invalid one.
        """
        data = b""
        while not data.endswith(b"\n"):
            self.socket.settimeout(max(0.01, deadline - time.monotonic()))
            try:
                part = self.socket.recv(MAX_ANSWER_BYTES)
            except TimeoutError:
                raise SandboxError("the process that supervises sandboxed programs does not respond") from None
            except OSError as error:
                raise SandboxError(f"the process that supervises sandboxed programs has ended: {error}") from None
            if not part or len(data) > MAX_ANSWER_BYTES:
                raise SandboxError("the process that supervises sandboxed programs has ended")
            data += part
        found: dict[str, Any] = json.loads(data)
        return found

    def close(self) -> None:
        """Closes the socket, whereupon the warden ends its program and itself."""
        self._end()

    def kill(self) -> None:
        """Kills the warden."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        self._end()


def _end_process(process: subprocess.Popen[bytes], connection: socket.socket, folder: str | None) -> None:
    connection.close()
    try:
        process.wait(REAP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(REAP_S)
    if process.stderr is not None:
        process.stderr.close()
    if folder is not None:
        shutil.rmtree(folder, ignore_errors=True)


class GuardError(SandboxError):
    """A guard could not be applied in the fork."""


# -- Running programs -------------------------------------------------------------------------------------------------


class Run:
    """A program in a warden, and its outputs; `paths` are folders of commands."""

    def __init__(self, warden: WardenProcess, program: Program, limits: SandboxLimits, paths: list[str]) -> None:
        self._warden = warden
        self._deadline = time.monotonic() + limits.wall_s + ANSWER_S
        # by file descriptor: of answers, standard output and errors
        self._outputs: dict[int, bytearray] = {}
        self._room: dict[int, int] = {}
        self._answers: int | None = None
        self._is_too_long = False
        self._has_been_stopped = False
        try:
            self._begin(program, limits, paths)
        except BaseException:
            self._close()
            raise

    def _begin(self, program: Program, limits: SandboxLimits, paths: list[str]) -> None:
        numbers = {
            "wall_s": limits.wall_s,
            "cpu_s": limits.cpu_s,
            "memory_bytes": limits.memory_mb * 2**20,
            "processes": limits.processes,
            "file_bytes": limits.file_mb * 2**20,
        }
        theirs: list[int] = []
        channel: list[int] = []
        try:
            if program.kind != "python":
                ours, other = socket.socketpair()
                self._answers = ours.detach()
                self._expect(self._answers, limits.output_kb * 1024 + program.answer_bytes)
                channel = [other.detach()]
                theirs += channel
            files = [_file_with(program.stdin)]
            theirs += files
            for _ in range(2):
                reads, writes = os.pipe()
                self._expect(reads, limits.output_kb * 1024)
                theirs.append(writes)
                files.append(writes)
            source = _file_with(program.source)
            theirs.append(source)
            kind = program.kind if program.command is None else "command"
            task = {"kind": kind, "command": program.command, "file": program.file, "limits": numbers}
            self._warden.send(task | {"shows_last": program.shows_last, "paths": paths}, [*files, source, *channel])
        finally:
            for file in theirs:
                os.close(file)

    def _expect(self, file: int, num_bytes: int) -> None:
        self._outputs[file] = bytearray()
        self._room[file] = num_bytes

    def result(self, is_enough: Callable[[bytearray], bool] = lambda answers: False) -> ProgramResult:
        """Waits for the program to end.

        Args:
            is_enough: whether these answers suffice; then the program is ended.

        Raises:
            SandboxError: the warden does not answer, or has ended.
        """
        try:
            return self._result(self._wait(is_enough))
        finally:
            self._close()

    def _wait(self, is_enough: Callable[[bytearray], bool]) -> dict[str, Any]:
        poll = select.poll()
        warden = self._warden.socket.fileno()
        waiting = {warden, *self._outputs}
        for file in waiting:
            poll.register(file, select.POLLIN)
        answer: dict[str, Any] = {}
        while waiting:
            left_s = self._deadline - time.monotonic()
            if (
                not (ready := poll.poll(1000 * max(0.0, left_s))) and left_s <= 0
            ):  # polls at least once, even after this process was stopped
                raise SandboxError("the process that supervises sandboxed programs does not respond")
            for file, _ in ready:
                if file == warden:
                    answer = self._warden.answer(self._deadline)
                    is_over = True
                else:
                    is_over = not self._read(file, can_stop=not answer)
                    if file == self._answers and not answer and is_enough(self._outputs[file]):
                        self._stop()
                if is_over:
                    poll.unregister(file)
                    waiting.remove(file)
        return answer

    def _read(self, file: int, can_stop: bool) -> bool:
        """Reads available output; returns whether there may be more."""
        part = os.read(file, CHUNK)
        data = self._outputs[file]
        most = self._room[file]
        data += part[: max(0, most - len(data))]
        if len(part) and len(data) >= most and not self._is_too_long:
            self._is_too_long = True
            if can_stop:
                self._stop()
        return bool(part)

    def _stop(self) -> None:
        if not self._has_been_stopped:
            self._has_been_stopped = True
            with contextlib.suppress(OSError):
                self._warden.socket.send(STOP)

    def _result(self, answer: dict[str, Any]) -> ProgramResult:
        if answer["problem"]:
            raise GuardError(str(answer["problem"])[:300])
        *channel, stdout, stderr = self._outputs.values()
        verdict: Verdict = answer["verdict"]
        if self._is_too_long and verdict in ("stopped", "ended"):
            verdict = "output"
        return ProgramResult(
            verdict=verdict,
            status=int(answer["status"]),
            stdout=stdout.decode(errors="replace"),
            stderr=stderr.decode(errors="replace"),
            wall_s=float(answer["wall_s"]),
            cpu_s=float(answer["cpu_s"]),
            channel=bytes(channel[0]) if channel else b"",
        )

    def _close(self) -> None:
        for file in self._outputs:
            os.close(file)
        self._outputs.clear()


def _file_with(text: str) -> int:
    """File descriptor at the start of an anonymous, sealed file with a text."""
    data = text.encode(errors="replace")
    if not hasattr(os, "memfd_create"):  # macOS
        with tempfile.TemporaryFile() as file:
            file.write(data)
            file.seek(0)
            return os.dup(file.fileno())
    import fcntl

    made = os.memfd_create("text", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    with open(made, "wb", closefd=False) as memory:
        memory.write(data)
    os.lseek(made, 0, os.SEEK_SET)
    fcntl.fcntl(made, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK)
    return made
