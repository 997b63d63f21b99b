"""The warden of a sandbox: a process that forks for every program and ends all processes left by it.

| who | waits for | woken by |
|---|---|---|
| warden | a request; the end of its program | the trainer (its end included); the kernel, the program's deadline |
| program | anything | the warden kills it at its deadline |

The warden reads limits but no program: sources, inputs and outputs pass through files and pipes between trainer and
fork, so that the next fork's memory inherits nothing of them.

A request is a line of JSON with file descriptors, an answer a line of JSON. Closing the socket ends the warden, and
everything in its pid namespace.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import resource
import select
import signal
import site
import socket
import sys
import time
from typing import Any, NoReturn

from lit_async_rl.sandbox import kernel, programs, room
from lit_async_rl.sandbox.room import Room

MAX_REQUEST_BYTES = 2**16
FIRST_USAGE_CHECK_S = 0.02  # after the start of a program; shorter ones are never checked
USAGE_CHECK_INTERVAL_S = 0.02  # between checks of memory and number of processes
STOP = b"K"  # sent by the trainer to end the running program
NUM_FILES = 5  # input, output, errors, source, and for tests and calls a channel
MAX_OPEN_FILES = 64
END_S = 10.0  # for killed processes to be gone; the kernel may free their memory slowly
CORE_BYTES = 1  # no core file, nor a dump piped to a program: the kernel takes 1 for a recursive dump
WORST_OOM_SCORE = "1000"  # first choice of the kernel's out-of-memory killer


class Warden:
    """Serves requests on the socket to the trainer, one after the other; `settings` are of `Sandbox`."""

    def __init__(self, control: socket.socket, settings: dict[str, Any], place: Room) -> None:
        self._control = control
        self._settings = settings
        self._room = place
        self._guards = list(place.guards)
        self._filter = kernel.seccomp_filter(shares_ids=not place.has_own_ids) if sys.platform == "linux" else None
        self._landlock = 0
        self._rules: int | None = None

    def serve(self) -> None:
        """Answers requests until the trainer closes the socket."""
        self._prepare()
        self._say({"guards": self._guards})
        while (request := self._next()) is not None:
            files, task = request
            answer = self._run(task, files)
            for file in files:
                os.close(file)
            self._say(answer)
            self._room.clear()  # a failure ends the warden, and the trainer starts another
            self._make_rules()

    def _prepare(self) -> None:
        """Imports common modules, and tests the guards in a fork."""
        site.setquit()  # programs have `exit` and `quit`, which Python defines for scripts
        for name in self._settings["preload"]:
            importlib.import_module(name)
        if sys.platform == "linux":
            kernel.prctl(kernel.PR_SET_DUMPABLE, 0)  # nobody reads the memory of process 1
            self._landlock = kernel.landlock_version()
            self._make_rules()
            if self._rules is not None and self._works(lambda: kernel.restrict_self(self._rules or 0)):
                self._guards.append(f"Landlock {self._landlock}")
            else:
                self._landlock = 0
                self._rules = None
            code = self._filter
            if code is not None and self._works(lambda: kernel.install_filter(code)):
                self._guards.append("seccomp")
            else:
                self._filter = None
        gc.collect()
        gc.freeze()  # collections in forks would copy shared memory

    def _make_rules(self) -> None:
        """Rebuilds the Landlock rules, which refer to folders, not paths: the scratch folder is new."""
        if self._rules is not None:
            os.close(self._rules)
            self._rules = None
        if self._landlock:
            place = self._room
            readable = [*room.SYSTEM_FOLDERS, *room.SYSTEM_FILES, *self._settings["readable"], "/etc/passwd"]
            if place.has_own_ids:
                readable.append("/proc")
            writable = [place.scratch, *(f"/dev/{name}" for name in room.DEVICES)]
            self._rules = kernel.landlock_rules(self._landlock, readable, writable)

    @staticmethod
    def _works(guard: Any) -> bool:
        pid = os.fork()
        if not pid:
            status = 1
            with contextlib.suppress(BaseException):
                kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
                guard()
                status = 0
            os._exit(status)
        return os.waitpid(pid, 0)[1] == 0

    # -- requests and answers -----------------------------------------------------------------------------------------

    def _next(self) -> tuple[list[int], dict[str, Any]] | None:
        """The next request; None at the end."""
        data = b""
        files: list[int] = []
        while not data.endswith(b"\n"):
            more, received, _, _ = socket.recv_fds(self._control, MAX_REQUEST_BYTES, NUM_FILES)
            files += received
            if not more or len(data) > MAX_REQUEST_BYTES:
                return None
            data = (data + more).lstrip(STOP)  # meant for a program that had already ended
        task: dict[str, Any] = json.loads(data)
        return files, task

    def _say(self, answer: dict[str, Any]) -> None:
        self._control.sendall(json.dumps(answer).encode() + b"\n")

    # -- one program --------------------------------------------------------------------------------------------------

    def _run(self, task: dict[str, Any], files: list[int]) -> dict[str, Any]:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        began = time.monotonic()
        problems, problem = os.pipe()  # of the guards; closed in the fork before the program runs
        pid = os.fork()
        if not pid:
            self._become(task, files, problem)
        os.close(problem)
        verdict, status = self._watch(pid, began, task)
        seconds = time.monotonic() - began
        self._end_all(pid)
        with os.fdopen(problems, "rb") as file:
            found = file.read().decode(errors="replace")
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        return {"status": status, "verdict": verdict, "wall_s": seconds, "cpu_s": cpu_s, "problem": found}

    def _watch(self, pid: int, began: float, task: dict[str, Any]) -> tuple[str, int]:
        """Waits until a program ends or must be ended."""
        limits = task["limits"]
        deadline = began + limits["wall_s"]
        look = began + FIRST_USAGE_CHECK_S
        poll = select.poll()
        poll.register(self._control.fileno(), select.POLLIN)
        ends = os.pidfd_open(pid) if hasattr(os, "pidfd_open") else None
        if ends is not None:
            poll.register(ends, select.POLLIN)
        try:
            while True:
                now = time.monotonic()
                pause_s = max(0.0, min(deadline, look) - now)
                ready = {file for file, _ in poll.poll(1000 * (pause_s if ends is not None else min(pause_s, 0.003)))}
                if (status := _ended(pid)) is not None:
                    return "ended", status
                if self._control.fileno() in ready:  # the trainer no longer needs it, or has ended
                    if not self._control.recv(1):
                        self._end_all(pid)
                        os._exit(0)
                    return "stopped", 0
                now = time.monotonic()
                if now >= deadline:
                    return "time", 0
                if now >= look:
                    look = now + USAGE_CHECK_INTERVAL_S
                    if excess := self._excess(pid, limits):
                        return excess, 0
        finally:
            if ends is not None:
                os.close(ends)

    def _members(self, pid: int) -> list[int]:
        """Processes of the program."""
        if not self._room.has_processes_shown:
            return [pid]
        mine = os.getpid()
        found = [int(name) for name in os.listdir("/proc") if name.isdigit() and int(name) != mine]
        return found if self._room.has_own_ids else [one for one in found if _group(one) == pid]

    def _excess(self, pid: int, limits: dict[str, Any]) -> str | None:
        """Limit that a program's processes exceed together; None without one."""
        members = self._members(pid)
        if len(members) > limits["processes"]:
            return "processes"
        if not self._room.has_processes_shown:
            return None
        most = limits["memory_bytes"]
        if sum(map(_bytes_in, members)) > most and sum(map(_own_bytes, members)) > most:
            return "memory"
        return None

    def _end_all(self, pid: int | None = None) -> None:
        """Ends all processes left by the program.

        Raises:
            TimeoutError: a killed process remains.
        """
        deadline = time.monotonic() + END_S
        while True:
            if self._room.has_own_ids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(-1, signal.SIGKILL)  # all of the pid namespace except its process 1, this one
            else:
                for one in {*([] if pid is None else [pid]), *_children()}:
                    with contextlib.suppress(ProcessLookupError, PermissionError):
                        os.killpg(one, signal.SIGKILL)
                    with contextlib.suppress(ProcessLookupError, PermissionError):
                        os.kill(one, signal.SIGKILL)
            try:
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
            except ChildProcessError:
                return
            if time.monotonic() > deadline:
                raise TimeoutError("a killed process did not end")
            time.sleep(0.0005)

    # -- in the fork --------------------------------------------------------------------------------------------------

    def _become(self, task: dict[str, Any], files: list[int], problem: int) -> NoReturn:
        """Turns this fork into the program; never returns."""
        try:
            os.setpgid(0, 0)
            programs.use_files(files, self._rules, problem)
            limits = task["limits"]
            with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
                file.write(WORST_OOM_SCORE)
            os.chdir(self._room.scratch)
            os.umask(0o022)
            if sys.platform == "linux":
                kernel.drop_possible_privileges()
            if self._room.user is not None:
                os.setgroups([])
                os.setresgid(self._room.user, self._room.user, self._room.user)
                os.setresuid(self._room.user, self._room.user, self._room.user)
            self._set_limits(limits, is_command=task["kind"] == "command")
            if sys.platform == "linux":
                kernel.drop_privileges()
                if self._rules is not None:
                    kernel.restrict_self(programs.RULES)
                    os.close(programs.RULES)
                if self._filter is not None:
                    kernel.install_filter(self._filter)
                kernel.prctl(kernel.PR_SET_DUMPABLE, 1)  # the warden must be able to read its memory use
        except BaseException as error:
            os.write(programs.PROBLEM, f"{type(error).__name__}: {error}".encode())
            os._exit(1)
        os.close(programs.PROBLEM)
        programs.run(task)

    def _set_limits(self, limits: dict[str, Any], is_command: bool) -> None:
        kernel.limit("CORE", CORE_BYTES)
        kernel.limit("CPU", limits["cpu_s"])
        kernel.limit("FSIZE", limits["file_bytes"])
        kernel.limit("NOFILE", MAX_OPEN_FILES)
        kernel.limit("MEMLOCK", 0)
        kernel.limit("MSGQUEUE", 0)
        kernel.limit("SIGPENDING", 1024)
        if self._room.level != "limits":  # there it would count all processes of the user; `_excess` counts these
            kernel.limit("NPROC", limits["processes"])
        # Writable memory. The address space is no measure: some interpreters reserve more than they ever use.
        # A command replaces the data that it has inherited.
        kernel.limit("DATA", limits["memory_bytes"] + (0 if is_command else _bytes_in("self", column=5)))
        if not self._room.has_processes_shown and not is_command:
            kernel.limit("AS", limits["memory_bytes"] + 2**30)


def _ended(pid: int) -> int | None:
    """Exit status of a child, or the negative number of its signal; None while it runs."""
    if not hasattr(os, "waitid"):  # macOS
        found, status = os.waitpid(pid, os.WNOHANG)
        return os.waitstatus_to_exitcode(status) if found else None
    # left as a zombie until all others are dead, so that its process group keeps its number
    ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    if ended is None:
        return None
    return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status


def _bytes_in(pid: int | str, column: int = 1) -> int:
    """Memory of a process by a column of `/proc/PID/statm`: 1 is what is resident, 5 its data."""
    try:
        with open(f"/proc/{pid}/statm") as file:
            return int(file.read().split()[column]) * resource.getpagesize()
    except (OSError, LookupError, ValueError):
        return 0


def _own_bytes(pid: int) -> int:
    """Memory of a process, including its part of shared memory."""
    with contextlib.suppress(OSError, StopIteration), open(f"/proc/{pid}/smaps_rollup") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith("Pss:")) * 1024
    return _bytes_in(pid)


def _group(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return int(file.read().rpartition(")")[2].split()[2])
    except (OSError, LookupError, ValueError):
        return 0


def _children() -> list[int]:
    try:
        with open(f"/proc/self/task/{os.getpid()}/children") as file:
            return [int(word) for word in file.read().split()]
    except OSError:
        return []


def main() -> None:
    """Entry point: `settings` as JSON in the first argument, the control socket in the second."""
    settings = json.loads(sys.argv[1])
    control = socket.socket(fileno=int(sys.argv[2]))
    control.setblocking(True)
    if settings["level"] == "namespace":  # at level `limits` the end of the socket ends its programs and then it
        kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != settings["parent"]:
            return
    sys.path[:] = [path for path in sys.path if path] + settings["python_path"]
    for one in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(one, signal.SIG_DFL)
    try:
        place = room.build(settings)
    except (OSError, AttributeError) as error:
        control.sendall(json.dumps({"error": str(error)}).encode() + b"\n")
        return
    if place is None:
        return
    os.chdir(place.scratch)
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        Warden(control, settings, place).serve()
    os._exit(0)
