"""Wardens as the trainer sees them: start, requests, and running programs."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import select
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

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


class Keeper:
    """Starts wardens in a thread that outlives them."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self._orders: queue.SimpleQueue[tuple[dict[str, Any], queue.SimpleQueue[Any]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=_keep, args=(self._orders,), name="sandbox-keeper", daemon=True)
        self._thread.start()

    def start(self, settings: dict[str, Any]) -> WardenProcess:
        """Starts a warden and waits for it.

        Raises:
            SandboxError: the warden could not be started.
        """
        answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._orders.put((settings, answers))
        try:
            answer = answers.get(timeout=START_S)
        except queue.Empty:
            raise SandboxError(f"no process was started in {START_S:g} s") from None
        if isinstance(answer, BaseException):
            raise SandboxError(str(answer)) from answer
        warden: WardenProcess = answer
        warden.wait_until_ready()
        return warden

    def close(self) -> None:
        """Ends the thread, and with it all its wardens."""
        self._orders.put(None)
        if self.pid == os.getpid():
            self._thread.join(REAP_S)


def _keep(orders: queue.SimpleQueue[Any]) -> None:
    while (order := orders.get()) is not None:
        settings, answers = order
        try:
            answers.put(WardenProcess(settings))
        except BaseException as error:
            answers.put(error)


class WardenProcess:
    """A warden's process and the socket to it.

    Args:
        settings: of `Sandbox`.
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
            self._process = subprocess.Popen(
                [*command, json.dumps(settings), str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                pass_fds=[theirs.fileno()],
                env={"PYTHONHASHSEED": "0", "LANG": "C.UTF-8", "PATH": os.defpath},  # nothing from the trainer's
                start_new_session=True,  # without the trainer's Ctrl-C
                cwd="/",
            )
        self.socket.settimeout(START_S)
        self._end = weakref.finalize(self, _end_process, self._process, self.socket, self._folder)

    def wait_until_ready(self) -> None:
        """Waits for the first message.

        Raises:
            SandboxError: the warden has ended, or reports why it cannot start.
        """
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
                raise SandboxError("the process that guards programs does not answer") from None
            except OSError as error:
                raise SandboxError(f"the process that guards programs has ended: {error}") from None
            if not part or len(data) > MAX_ANSWER_BYTES:
                raise SandboxError("the process that guards programs has ended")
            data += part
        found: dict[str, Any] = json.loads(data)
        return found

    def close(self) -> None:
        """Closes the socket, on which the warden ends its program and itself."""
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


@dataclass(eq=False)
class _Run:
    warden: WardenProcess
    outputs: dict[int, bytearray] = field(default_factory=dict)  # by file descriptor: standard output, errors, channel
    is_too_long: bool = False
    has_been_stopped: bool = False
    answer: dict[str, Any] | None = None

    def stop(self) -> None:
        if self.answer is None and not self.has_been_stopped:
            self.has_been_stopped = True
            with contextlib.suppress(OSError):
                self.warden.socket.send(STOP)


class Runs:
    """Concurrent programs and their outputs."""

    def __init__(
        self, wardens: Sequence[WardenProcess], programs: Sequence[Program], limits: SandboxLimits, paths: list[str]
    ) -> None:
        self._limits = limits
        self._deadline = time.monotonic() + limits.wall_s + ANSWER_S
        self._open: list[int] = []
        self._runs = [_Run(warden) for warden in wardens]
        try:
            self._begin(programs, paths)
        except BaseException:
            self._close()
            raise

    def _begin(self, programs: Sequence[Program], paths: list[str]) -> None:
        limits = self._limits
        numbers = {
            "wall_s": limits.wall_s,
            "cpu_s": limits.cpu_s,
            "memory_bytes": limits.memory_mb * 2**20,
            "processes": limits.processes,
            "file_bytes": limits.file_mb * 2**20,
        }
        channels: list[int] = []
        if len(programs) == 2:
            ends = socket.socketpair()
            channels = [end.detach() for end in ends]
        elif programs[0].kind == "together":
            ours, theirs = socket.socketpair()
            channels = [theirs.detach()]
            self._open.append(number := ours.detach())
            self._runs[0].outputs[number] = bytearray()
        theirs_too = list(channels)
        try:
            for place, (run, program) in enumerate(zip(self._runs, programs, strict=True)):
                files = [_file_with(program.stdin)]
                theirs_too.append(files[0])
                for _ in range(2):
                    reads, writes = os.pipe()
                    self._open.append(reads)
                    theirs_too.append(writes)
                    files.append(writes)
                    run.outputs[reads] = bytearray()
                source = _file_with(program.source)
                theirs_too.append(source)
                files.append(source)
                files += channels[place : place + 1]
                kind = program.kind if program.command is None else "command"
                task = {"kind": kind, "command": program.command, "file": program.file, "limits": numbers}
                run.warden.send(task | {"shows_last": program.shows_last, "paths": paths}, files)
        finally:
            for file in theirs_too:
                os.close(file)

    def results(self) -> list[ProgramResult]:
        """Waits for all programs to end.

        Raises:
            SandboxError: a warden does not answer, or has ended.
        """
        try:
            self._wait()
            return [self._result(run) for run in self._runs]
        finally:
            self._close()

    def _wait(self) -> None:
        poll = select.poll()
        owners: dict[int, _Run] = {}
        for run in self._runs:
            poll.register(run.warden.socket.fileno(), select.POLLIN)
            owners[run.warden.socket.fileno()] = run
            for file in run.outputs:
                poll.register(file, select.POLLIN)
                owners[file] = run
        while owners:
            left_s = self._deadline - time.monotonic()
            if (
                not (ready := poll.poll(1000 * max(0.0, left_s))) and left_s <= 0
            ):  # polls at least once, even after this process was stopped
                raise SandboxError("the process that guards programs does not answer")
            for file, _ in ready:
                run = owners[file]
                if file == run.warden.socket.fileno():
                    run.answer = run.warden.answer(self._deadline)
                    is_over = True
                    if run is self._runs[0]:
                        for other in self._runs[1:]:
                            other.stop()
                else:
                    is_over = not self._read(run, file)
                if is_over:
                    poll.unregister(file)
                    del owners[file]

    def _read(self, run: _Run, file: int) -> bool:
        """Reads available output; returns whether there may be more."""
        part = os.read(file, CHUNK)
        data = run.outputs[file]
        most = self._limits.output_kb * 1024
        data += part[: max(0, most - len(data))]
        if len(part) and len(data) >= most and not run.is_too_long:
            run.is_too_long = True
            run.stop()
        return bool(part)

    def _result(self, run: _Run) -> ProgramResult:
        answer = run.answer or {}
        if answer["problem"]:
            raise GuardError(str(answer["problem"])[:300])
        *channel, stdout, stderr = run.outputs.values()
        verdict: Verdict = answer["verdict"]
        if run.is_too_long and verdict in ("stopped", "ended"):
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
        for file in self._open:
            os.close(file)
        self._open.clear()


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
