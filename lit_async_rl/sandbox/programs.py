"""Forks of the warden: a Python program, a command, or a program with tests.

Behind all guards; the program may take over this process.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import gc
import json
import linecache
import os
import signal
import socket
import sys
import threading
import types
from collections.abc import Sequence
from typing import Any, NoReturn

from lit_async_rl.sandbox import functions, tests
from lit_async_rl.sandbox.interpreter import MAIN, execute

SOURCE = 3  # file descriptors of a program; it starts with the first three only, or with CHANNEL
CHANNEL = 4
RULES = 5
PROBLEM = 6
NUM_INHERITED = 64
PATHS = "/usr/local/bin:/usr/bin:/bin"


def use_files(files: Sequence[int], rules: int | None, problem: int) -> None:
    """Moves the file descriptors of a request to their places, and closes all others.

    Args:
        files: input, output, errors, source, and for calls or tests a channel.
        rules: Landlock rules.
        problem: pipe that becomes `PROBLEM`.
    """
    wanted = [*zip(files, (0, 1, 2, SOURCE, CHANNEL), strict=False), (problem, PROBLEM)]
    if rules is not None:
        wanted.append((rules, RULES))
    # out of the way first: one may occupy the place of another
    moved = [(fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, NUM_INHERITED), place) for file, place in wanted]
    os.closerange(0, NUM_INHERITED)
    for high, place in moved:
        os.dup2(high, place, inheritable=place <= 2)
        os.close(high)


def run(task: dict[str, Any]) -> NoReturn:
    """Runs a program, and ends the process with its exit status."""
    with os.fdopen(SOURCE, "rb") as file:
        source = file.read()
    _open_streams()
    if task["kind"] == "command":
        _execute(task, source)
    status = 1
    try:
        if task["kind"] == "python":
            status = run_python(source, task)
        elif task["kind"] == "calls":
            status = functions.call_functions(json.loads(source), socket.socket(fileno=CHANNEL))
        elif task["kind"] == "tests":
            status = _run_tests(json.loads(source))
    finally:
        _end(status)


def _run_tests(doc: dict[str, Any]) -> int:
    """Program and tests in one process: the verdict goes to the channel, with a mark unknown to the program."""
    with socket.socket(fileno=CHANNEL) as channel:
        mark = doc.pop("mark")
        result = tests.run_tests(doc)
        channel.sendall(json.dumps(result | {"mark": mark}).encode())
    return 0


def _open_streams() -> None:
    sys.stdin = open(0, encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115  for the program
    sys.stdout = open(1, "w", encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", encoding="utf-8", errors="replace", closefd=False, buffering=1)  # noqa: SIM115
    sys.__stdin__ = sys.stdin  # type: ignore[misc]
    sys.__stdout__ = sys.stdout  # type: ignore[misc]
    sys.__stderr__ = sys.stderr  # type: ignore[misc]


def _execute(task: dict[str, Any], source: bytes) -> NoReturn:
    with open(task["file"], "wb") as file:
        file.write(source)
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them
        signal.signal(number, signal.SIG_DFL)
    os.execve("/bin/sh", ["sh", "-c", task["command"]], environment(task))


def environment(task: dict[str, Any]) -> dict[str, str]:
    """The complete environment of a program."""
    home = os.getcwd()
    paths = ":".join([PATHS, *task["paths"]])
    return {"PATH": paths, "HOME": home, "TMPDIR": home, "LANG": "C.UTF-8", "PYTHONHASHSEED": "0"}


def run_python(source: bytes, task: dict[str, Any]) -> int:
    """Runs a program as `python main.py` does; returns its exit status."""
    os.environ.clear()
    os.environ.update(environment(task))
    text = source.decode("utf-8", errors="replace")
    main = types.ModuleType("__main__")
    main.__dict__["__file__"] = MAIN
    sys.modules["__main__"] = main
    sys.argv = [MAIN]
    sys.path.insert(0, os.getcwd())
    linecache.cache[MAIN] = (len(text), None, text.splitlines(keepends=True), MAIN)
    status = execute(text, main.__dict__, task["shows_last"])
    with contextlib.suppress(BaseException):
        threading._shutdown()  # type: ignore[attr-defined]
    with contextlib.suppress(BaseException):
        atexit._run_exitfuncs()
    return status


def _end(status: int) -> NoReturn:
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except BaseException:
            status = status or 120
    gc.disable()
    os._exit(status)
