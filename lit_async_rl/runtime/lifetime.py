"""Lifetime of child processes. Imports the standard library only, because every vLLM worker imports it."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Sequence
from typing import NoReturn

PR_SET_PDEATHSIG = 1  # sys/prctl.h
PR_SET_CHILD_SUBREAPER = 36
CANNOT_START = 127  # as a shell has it
END_S = 3.0  # in which killed processes are gone


def die_with_parent(parent: int) -> bool:
    """Makes the kernel kill this process, also after an `exec`, as soon as its parent ends, even by SIGKILL.

    For the kernel the parent is the thread that has started it: use `guarded` where that may end earlier. Linux only;
    has no effect elsewhere.

    Returns:
        Whether the parent is still alive.
    """
    return _signal_at_end_of(parent, signal.SIGKILL)


def _end_with_parent(parent: int, end: Callable[[], NoReturn]) -> bool:
    """Calls `end` as soon as the parent ends, whatever becomes of the thread that has started this process.

    The handler of the kernel's signal, which is late while a library holds the interpreter, looks whose child this is.
    Only for the main thread. Linux only, with the same result as `die_with_parent`.
    """

    def look(*_: object) -> None:
        if os.getppid() != parent:
            end()

    signal.signal(signal.SIGURG, look)
    return _signal_at_end_of(parent, signal.SIGURG)


def _signal_at_end_of(parent: int, number: signal.Signals) -> bool:
    if not sys.platform.startswith("linux"):
        return True
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)
    return os.getppid() == parent  # it may have ended before


def kill_group(pid: int) -> None:
    """Kills the group that a process leads, with children that outlive it; ignores one that is gone."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


# -- a command that leaves no process behind --------------------------------------------------------------------------


def guarded(command: Sequence[str]) -> list[str]:
    """The command under a guard: a process that starts it, waits for it, and ends all that it has started.

    The guard ends as the command has ended. It ends the command at SIGTERM, and when this process ends, even by
    SIGKILL. On Linux that includes processes that have left the command's group; elsewhere it is the group alone, and
    the guard does not notice the end of this process.
    """
    return [sys.executable, "-I", "-S", os.path.abspath(__file__), str(os.getpid()), *command]


def _guard(parent: int, command: list[str]) -> NoReturn:
    """Program of the guard, see `guarded`."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)  # orphans become children of this process
    guard = os.getpid()
    child = 0

    def end(*_: object) -> NoReturn:
        _end_children(child)
        os._exit(1)

    signal.signal(signal.SIGTERM, end)
    if not _end_with_parent(parent, end):
        os._exit(1)
    child = os.fork()
    if not child:
        os.setsid()  # signals to its process group must not reach the guard
        if die_with_parent(guard):
            try:
                os.execvp(command[0], command)
            except OSError as error:
                print(f"{command[0]}: {error}", file=sys.stderr, flush=True)
        os._exit(CANNOT_START)
    status = 0
    ended = 0
    while ended != child:
        ended, status = os.waitpid(-1, 0)
    _end_children(child)
    code = os.waitstatus_to_exitcode(status)
    if code >= 0:
        os._exit(code)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the same signal ends the guard, which leaves no core
    with contextlib.suppress(OSError):  # SIGKILL has no handler
        signal.signal(-code, signal.SIG_DFL)
    os.kill(guard, -code)
    os._exit(1)


def _end_children(child: int) -> None:
    """Kills and reaps a child's group, and on Linux all descendants, as orphans become children of this process."""
    if child:
        kill_group(child)
    deadline = time.monotonic() + END_S
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError), open(f"/proc/self/task/{os.getpid()}/children") as file:
            for pid in file.read().split():
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(int(pid), signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(0.001)


if __name__ == "__main__":
    _guard(int(sys.argv[1]), sys.argv[2:])
