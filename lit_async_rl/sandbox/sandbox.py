"""Runs programs of models behind guards: no network, no files of the machine, nothing of the trainer, and limits.

| who | waits for | woken by |
|---|---|---|
| caller of `run` | its program, at most its limits and `ANSWER_S` | the warden |
| keeper thread | wardens to start | callers, `close` |
| warden (a process, see `warden`) | requests | callers; the end of the trainer |

A warden is warm: it has imported what programs often import, and forks for each. Each caller has one for itself while
its program runs. The keeper starts them all, because the kernel ends a process with the *thread* that started it.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import select
import shutil
import signal
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
from typing import Any, Literal

from lit_async_rl.errors import SetupError
from lit_async_rl.sandbox import room
from lit_async_rl.sandbox.programs import PATHS
from lit_async_rl.sandbox.warden import END_S, STOP
from lit_async_rl.utils.checks import check_range

START_S = 60.0  # of a warden, on a crowded machine
ANSWER_S = END_S + 20.0  # of a warden, beyond the time limit of its program
REAP_S = 10.0
NUM_TRIES = 2  # of a program whose warden ends
MAX_ANSWER_BYTES = 2**16
MAX_IDLE = 16  # wardens that wait for programs
CHUNK = 2**16
LEVELS = ("bubblewrap", "namespace", "limits")
PRELOADED = (
    *("abc", "ast", "bisect", "collections", "copy", "datetime", "decimal", "enum", "fractions", "functools"),
    *("heapq", "io", "itertools", "json", "math", "operator", "queue", "random", "re", "statistics", "string"),
    *("threading", "time", "traceback", "typing", "dataclasses", "unittest"),
)


class SandboxError(RuntimeError):
    """A sandbox could not run a program, which says nothing about the program."""


@dataclass(frozen=True, kw_only=True)
class SandboxLimits:
    """What one program may use. A program that passes a limit is ended, or its call fails.

    Args:
        wall_s: seconds until it is killed.
        cpu_s: processor seconds of each of its processes.
        memory_mb: MB of all of its processes together.
        processes: number of processes and threads.
        output_kb: KB of each of standard output and standard error; a program that writes more is ended.
        file_mb: MB of a file.
        scratch_mb: MB of its folder.

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
        source: its text.
        stdin: its standard input.
        command: for `/bin/sh -c` in a folder that has the source as `file`; None runs it as Python, in the fork.
        file: name of the source for a command.
        shows_last: whether Python prints the value of a last line that is an expression, as a notebook does.
        kind: `python`, or a role in a test, see `tests`.
    """

    source: str
    stdin: str = ""
    command: str | None = None
    file: str = "main.py"
    shows_last: bool = False
    kind: Literal["python", "functions", "tests", "together"] = "python"


@dataclass(frozen=True, kw_only=True)
class ProgramResult:
    """What a program has done.

    Attributes:
        verdict: `ended` by itself, or what ended it: `time`, `memory` or `processes`, `output`, `stopped` because it
            was not needed any more.
        status: exit status, or the negative number of the signal that ended it.
        stdout: what it wrote, up to the limit; bytes that are no text are replaced.
        stderr: likewise.
        wall_s: seconds from the fork to its end.
        cpu_s: processor seconds of all of its processes.
        channel: what a test in one process wrote to the trainer.
    """

    verdict: Literal["ended", "time", "memory", "processes", "output", "stopped"]
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


class Sandbox:
    r"""Runs programs, each in a fork of its own, of which nothing is left for the next one.

    | `level` | programs are kept in by |
    |---|---|
    | `bubblewrap` | namespaces made by `bwrap`; seccomp, Landlock and resource limits |
    | `namespace` | user, mount, pid, network, ipc and uts namespaces; seccomp, Landlock and resource limits |
    | `limits` | resource limits; seccomp and Landlock where the kernel has them. This is no sandbox |

    Example:
        ```python
        import lit_async_rl as rl

        with rl.Sandbox(allow_unsandboxed=True) as sandbox:
            result = sandbox.run("print(6 * 7)")
        assert (result.verdict, result.stdout) == ("ended", "42\n")
        ```

    Args:
        level: one of them, or `auto`: the first that works here.
        allow_unsandboxed: whether `limits` will do where no namespace can be made.
        limits: of each program.
        readable: further folders and files that programs may read, such as that of a compiler; their subfolders `bin`
            are on the path.
        python_path: folders of modules for Python programs, such as `site-packages`; they may be read.
        preload: modules that are imported once, before the forks; what they hold is in every program.

    Raises:
        SetupError: no level that is allowed works on this machine; says why.
        ValueError: a setting is out of range, or a folder does not exist.
    """

    def __init__(
        self,
        level: Literal["auto", "bubblewrap", "namespace", "limits"] = "auto",
        allow_unsandboxed: bool = False,
        limits: SandboxLimits = SandboxLimits(),
        readable: Sequence[str] = (),
        python_path: Sequence[str] = (),
        preload: Sequence[str] = (),
    ) -> None:
        if level not in ("auto", *LEVELS):
            raise ValueError(f"Sandbox.level must be auto, {', '.join(LEVELS)}, got {level!r}")
        self.limits = limits
        self._readable = _folders("readable", readable)
        python_folders = _folders("python_path", python_path)
        self._settings: dict[str, Any] = {
            "readable": [*_python_folders(), *self._readable, *python_folders],
            "python_path": python_folders,
            "preload": [*PRELOADED, *preload],
            "scratch_bytes": limits.scratch_mb * 2**20,
            "parent": os.getpid(),
        }
        self._lock = threading.Lock()  # guards the next two
        self._idle: list[_Warden] = []
        self._keeper: _Keeper | None = None
        self._keepers: list[_Keeper] = []  # the present one, for the end of an object that nobody closes
        self._end = weakref.finalize(self, _close_all, self._idle, self._keepers)
        self.level, self.guards = self._choose(level, allow_unsandboxed)

    def _choose(self, level: str, allow_unsandboxed: bool) -> tuple[room.Level, tuple[str, ...]]:
        """The first level that works; its first warden waits for a program."""
        candidates: list[room.Level] = []
        problems = []
        for one in LEVELS if level == "auto" else (level,):
            if one == "bubblewrap" and shutil.which("bwrap") is None:
                problems.append("bubblewrap: bwrap is not installed")
            elif one == "namespace" and sys.platform != "linux":
                problems.append("namespace: Linux only")
            elif one == "limits" and not allow_unsandboxed:
                problems.append("limits: needs allow_unsandboxed")
            else:
                candidates.append(one)  # type: ignore[arg-type]
        for candidate in candidates:
            self._settings["level"] = candidate
            try:
                warden = self._start()
            except SandboxError as error:
                problems.append(f"{candidate}: {error}")
                continue
            self._idle.append(warden)
            return candidate, warden.guards
        raise SetupError(
            f"code cannot be run in a sandbox on this machine ({'; '.join(problems)}). Install bubblewrap, allow user "
            "namespaces, or set allow_unsandboxed: true, with which programs of the policy have your files, and are "
            "only limited in time and memory"
        )

    @property
    def description(self) -> str:
        """What is active, in one line."""
        limits = self.limits
        return (
            f"{self.level}: {', '.join(self.guards)}; {limits.wall_s:g} s, {limits.memory_mb} MB, "
            f"{limits.processes} processes, {limits.output_kb} KB of output"
        )

    def announce(self, owner: str) -> None:
        """Says at the start of a run, in one line, what keeps programs in.

        Args:
            owner: who runs them.
        """
        from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

        say = rank_zero_warn if self.level == "limits" else rank_zero_info
        say(f"{owner} runs programs in a sandbox, {self.description}")

    def run(self, program: str | Program, limits: SandboxLimits | None = None) -> ProgramResult:
        """Runs a program, a text as Python. Blocks; any number of threads may call it at a time.

        Args:
            program: source, or more than that.
            limits: of this program, in place of the sandbox's own.

        Raises:
            SandboxError: it could not be run, also not by another warden.
        """
        given = Program(source=program) if isinstance(program, str) else program
        return self.run_together([given], limits)[0]

    def run_together(self, programs: Sequence[Program], limits: SandboxLimits | None = None) -> list[ProgramResult]:
        """Runs programs at the same time, each in a warden of its own; two share a channel.

        The end of the first one ends all.

        Raises:
            SandboxError: they could not be run.
        """
        for attempt in range(NUM_TRIES):
            wardens: list[_Warden] = []
            try:
                wardens = [self._take() for _ in programs]
                results = _Runs(wardens, programs, limits=limits or self.limits, paths=self._paths).results()
            except (SandboxError, OSError) as error:
                for warden in wardens:
                    warden.kill()
                if attempt + 1 == NUM_TRIES or isinstance(error, _GuardError):
                    raise SandboxError(f"a program could not be run ({self.level}): {error}") from error
                continue
            except BaseException:
                for warden in wardens:
                    warden.kill()
                raise
            self._give_back(wardens)
            return results
        raise SandboxError("no try was made")

    def has_command(self, name: str) -> bool:
        """Whether programs find a command."""
        return shutil.which(name, path=":".join([PATHS, *self._paths])) is not None

    @property
    def _paths(self) -> list[str]:
        return [os.path.join(folder, "bin") for folder in self._readable]

    def close(self) -> None:
        """Ends the wardens, and what they run. A later `run` starts new ones."""
        with self._lock:
            self._keeper = None
            idle = list(self._idle)
            keepers = list(self._keepers)
            self._idle.clear()
            self._keepers.clear()
        _close_all(idle, keepers)

    def __enter__(self) -> Sandbox:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- wardens ------------------------------------------------------------------------------------------------------

    def _take(self) -> _Warden:
        """A warden that waits, or a new one."""
        while True:
            with self._lock:
                warden = self._idle.pop() if self._idle else None
            if warden is None:
                return self._start()
            if warden.is_there:
                return warden
            warden.kill()

    def _start(self) -> _Warden:
        with self._lock:
            if self._keeper is None or self._keeper.pid != os.getpid():  # a fork has no threads
                self._keeper = _Keeper()
                self._keepers[:] = [self._keeper]
            keeper = self._keeper
        return keeper.start(self._settings | {"parent": os.getpid()})

    def _give_back(self, wardens: Sequence[_Warden]) -> None:
        with self._lock:
            room_for = MAX_IDLE - len(self._idle) if self._keeper is not None else 0
            self._idle.extend(wardens[: max(0, room_for)])
        for warden in wardens[max(0, room_for) :]:
            warden.close()


def _close_all(idle: list[_Warden], keepers: list[_Keeper]) -> None:
    for warden in idle:
        warden.close()
    for keeper in keepers:
        keeper.close()


def _folders(setting: str, paths: Sequence[str]) -> list[str]:
    found = []
    for path in paths:
        real = os.path.realpath(os.path.expanduser(path))
        if not os.path.exists(real):
            raise ValueError(f"Sandbox.{setting}: there is no {path!r}")
        if real == "/" or (real + "/").startswith(room.SCRATCH + "/"):
            raise ValueError(f"Sandbox.{setting}={path!r} cannot be shown: it is the root, or in {room.SCRATCH}")
        found.append(real)
    return found


def _base_python() -> str:
    """The interpreter, outside of a virtual environment."""
    return os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable)


def _python_folders() -> list[str]:
    """Where the interpreter and its standard library are."""
    prefixes = {os.path.realpath(prefix) for prefix in (sys.base_prefix, sys.base_exec_prefix)}
    return sorted(prefix for prefix in prefixes if prefix not in ("/", "/usr"))


# -- A warden, from outside -------------------------------------------------------------------------------------------

_HERE = Path(__file__).resolve().parent
_BOOT = f"""
import sys, types
for name, path in (("lit_async_rl", {str(_HERE.parent)!r}), ("lit_async_rl.sandbox", {str(_HERE)!r})):
    module = types.ModuleType(name)
    module.__path__ = [path]
    sys.modules[name] = module
from lit_async_rl.sandbox.programs import PATHS
from lit_async_rl.sandbox.warden import main
main()
"""  # without the package's own `__init__`, whose imports the interpreter does not find


class _Keeper:
    """Starts wardens in a thread that lives as long as they do."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self._orders: queue.SimpleQueue[tuple[dict[str, Any], queue.SimpleQueue[Any]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=_keep, args=(self._orders,), name="sandbox-keeper", daemon=True)
        self._thread.start()

    def start(self, settings: dict[str, Any]) -> _Warden:
        """Starts a warden and waits for it.

        Raises:
            SandboxError: it could not be started.
        """
        answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._orders.put((settings, answers))
        try:
            answer = answers.get(timeout=START_S)
        except queue.Empty:
            raise SandboxError(f"no process was started in {START_S:g} s") from None
        if isinstance(answer, BaseException):
            raise SandboxError(str(answer)) from answer
        warden: _Warden = answer
        warden.wait_until_ready()
        return warden

    def close(self) -> None:
        """Ends the thread, and with it every warden that it has started."""
        self._orders.put(None)
        if self.pid == os.getpid():
            self._thread.join(REAP_S)


def _keep(orders: queue.SimpleQueue[Any]) -> None:
    while (order := orders.get()) is not None:
        settings, answers = order
        try:
            answers.put(_Warden(settings))
        except BaseException as error:
            answers.put(error)


class _Warden:
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
                env={"PYTHONHASHSEED": "0", "LANG": "C.UTF-8", "PATH": os.defpath},  # nothing of the trainer's
                start_new_session=True,  # without the trainer's Ctrl-C
                cwd="/",
            )
        self.socket.settimeout(START_S)
        self._end = weakref.finalize(self, _end_process, self._process, self.socket, self._folder)

    def wait_until_ready(self) -> None:
        """Waits for the first message.

        Raises:
            SandboxError: the warden has ended, or says why it cannot begin.
        """
        try:
            answer = self.answer(time.monotonic() + START_S)
        except SandboxError as error:
            self.kill()
            said = b"" if self._process.stderr is None else self._process.stderr.read(2000)
            reason = said.decode(errors="replace").strip().rpartition("\n")[2]
            raise SandboxError(reason or str(error)) from None
        if "error" in answer:
            self.kill()
            raise SandboxError(str(answer["error"])[:300])
        self.guards = tuple(str(one) for one in answer["guards"])

    @property
    def is_there(self) -> bool:
        """Whether it waits for a request, as far as one can see."""
        return not select.select([self.socket], [], [], 0)[0] and self._process.poll() is None

    def send(self, task: dict[str, Any], files: Sequence[int]) -> None:
        """Sends a request."""
        socket.send_fds(self.socket, [json.dumps(task).encode() + b"\n"], list(files))

    def answer(self, deadline: float) -> dict[str, Any]:
        """The next line that it says.

        Raises:
            SandboxError: there is none until the deadline, or it is none.
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
        """Ends it: without its socket it ends its program and itself."""
        self._end()

    def kill(self) -> None:
        """Ends it at once."""
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


class _GuardError(SandboxError):
    """A guard could not be put up in the fork."""


# -- Programs under way -----------------------------------------------------------------------------------------------


@dataclass(eq=False)
class _Run:
    warden: _Warden
    outputs: dict[int, bytearray] = field(default_factory=dict)  # by file descriptor: standard output, errors, channel
    is_too_long: bool = False
    has_been_stopped: bool = False
    answer: dict[str, Any] | None = None

    def stop(self) -> None:
        if self.answer is None and not self.has_been_stopped:
            self.has_been_stopped = True
            with contextlib.suppress(OSError):
                self.warden.socket.send(STOP)


class _Runs:
    """Programs that run at the same time, and what they write."""

    def __init__(
        self, wardens: Sequence[_Warden], programs: Sequence[Program], limits: SandboxLimits, paths: list[str]
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
        """Waits for the end of all.

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
            ):  # looks at least once, if it was stopped
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
        """Reads what has been written; returns whether there may be more."""
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
            raise _GuardError(str(answer["problem"])[:300])
        *channel, stdout, stderr = run.outputs.values()
        verdict = "output" if run.is_too_long and answer["verdict"] in ("stopped", "ended") else answer["verdict"]
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
    """File descriptor of an anonymous file with a text, at its beginning, which nobody can change any more."""
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


def signal_name(status: int) -> str:
    """`exit status 1`, or the name of the signal."""
    if status >= 0:
        return f"exit status {status}"
    with contextlib.suppress(ValueError):
        return signal.Signals(-status).name
    return f"signal {-status}"
