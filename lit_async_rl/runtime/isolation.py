"""Calls that may hang or run untrusted code, in child processes that are killed on timeout.

A thread cannot be stopped, and a single big-integer power inside a library can hold the GIL, which stops every other
thread, timers included. The parent does not trust the child: it waits for a reply until a deadline, never for the end
of a pipe (a process forked by the child may keep it open), then kills the child's process group. Replies are lines of
JSON with the number of their request. Pebble and loky, which also kill workers, unpickle their results: a crafted
return value would run code in the parent.

Requests are pickled, because rewards get arbitrary values in `Prompt.metadata`; only the child unpickles them, and they
come from its parent.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import json
import os
import pickle
import select
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, BinaryIO, NoReturn

from lit_async_rl.runtime.processes import die_with_parent, kill_group
from lit_async_rl.utils.checks import check_range
from lit_async_rl.utils.elsewhere import Rebuildable

START_TIMEOUT_S = 300.0  # imports of the child
POLL_INTERVAL_S = 0.1  # longest time until a dead child is noticed while another process holds its pipe open
EXIT_TIMEOUT_S = 1.0  # from the end of the child's pipe to the end of the child
REAP_TIMEOUT_S = 5.0
MAX_REPLY_BYTES = 2**24
MAX_MESSAGE_CHARS = 1000
_MODULE = __name__


class IsolatedCallError(RuntimeError):
    """The isolated function raised, or returned a value that JSON cannot represent; names the function."""


class IsolatedFunction(Rebuildable):
    """Function executed in a child process; each calling thread has its own, started on the first call.

    Args:
        make: factory, given as `package.module:make`; called once in the child, within `START_TIMEOUT_S`. It returns a
            function from picklable arguments to JSON values (tuples become lists). Imports belong in the factory.
        timeout_s: timeout of a call.
        arguments: arguments of `make`.
        max_memory_gb: memory in GB that the child may allocate after `make`; None sets no limit.

    Raises:
        ValueError: a limit is not positive.
    """

    def __init__(self, make: str, timeout_s: float, *arguments: str, max_memory_gb: float | None = None) -> None:
        check_range("IsolatedFunction", "positive", timeout_s=timeout_s, max_memory_gb=max_memory_gb)
        self.timeout_s = timeout_s
        memory = 0 if max_memory_gb is None else int(max_memory_gb * 2**30)
        self._command = [make, str(timeout_s), str(memory), *arguments]
        self._local = threading.local()

    def __call__(self, *args: Any) -> Any:
        """Calls the function.

        Raises:
            TimeoutError: the call timed out, or its process was killed, for example for its memory use.
            IsolatedCallError: the function raised, or its value cannot be sent.
            RuntimeError: the child could not be started, exited, or sent an invalid reply.
        """
        request = pickle.dumps(args)
        child: _Child | None = getattr(self._local, "child", None)
        if child is None:
            child = self._local.child = _Child(self._command)
        try:
            reply = child.call(request, self.timeout_s)
        except (TimeoutError, RuntimeError):
            del self._local.child
            raise
        if "error" in reply:
            raise IsolatedCallError(f"{child.name}: {str(reply['error'])[:MAX_MESSAGE_CHARS]}")
        return reply.get("value")


class _Child:
    def __init__(self, command: list[str]) -> None:
        self.name = command[-1] if len(command) > 3 else command[0]
        self._process = subprocess.Popen(
            [sys.executable, "-m", _MODULE, str(os.getpid()), *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
            start_new_session=True,  # a process group to kill, without the parent's Ctrl-C
        )
        if self._process.stdin is None or self._process.stdout is None:
            raise RuntimeError(f"{self.name}: no pipe to the child")
        self._requests = self._process.stdin.fileno()
        self._replies = self._process.stdout.fileno()
        os.set_blocking(self._requests, False)
        os.set_blocking(self._replies, False)
        self._numbers = itertools.count(1)
        self._end = weakref.finalize(self, _kill, self._process)
        self._receive(0, time.monotonic() + START_TIMEOUT_S, START_TIMEOUT_S)

    def call(self, request: bytes, timeout_s: float) -> dict[str, Any]:
        number = next(self._numbers)
        deadline = time.monotonic() + timeout_s
        rest = memoryview(number.to_bytes(8, "big") + len(request).to_bytes(8, "big") + request)
        with contextlib.suppress(BrokenPipeError):  # the child has died: `_receive` raises the reason
            while rest:
                self._wait(self._requests, select.POLLOUT, deadline, timeout_s=timeout_s)
                with contextlib.suppress(BlockingIOError):
                    rest = rest[os.write(self._requests, rest) :]
        return self._receive(number, deadline, timeout_s)

    def _receive(self, number: int, deadline: float, timeout_s: float) -> dict[str, Any]:
        """The reply to request `number`.

        Raises:
            TimeoutError, RuntimeError: no valid reply; the child was killed.
        """
        data = bytearray()
        while not data.endswith(b"\n"):
            self._wait(self._replies, select.POLLIN, deadline, timeout_s=timeout_s)
            with contextlib.suppress(BlockingIOError):
                data += (chunk := os.read(self._replies, 65536))
                if not chunk:
                    self._fail()
            if len(data) > MAX_REPLY_BYTES:
                break
        try:
            reply = json.loads(data)
            is_reply = isinstance(reply, dict) and type(reply.get("id")) is int and reply["id"] == number
        except (ValueError, RecursionError):
            is_reply = False
        if not is_reply:
            self._end()
            raise RuntimeError(f"{self.name}: the process sent an invalid reply to request {number}")
        return dict(reply)

    def _wait(self, pipe: int, event: int, deadline: float, timeout_s: float) -> None:
        """Waits until the pipe is ready.

        Not a `Wait`: its end kills the child, whose time goes on while this process is stopped.

        Raises:
            TimeoutError, RuntimeError: the deadline passed, or the child died.
        """
        poll = select.poll()
        poll.register(pipe, event)
        while True:
            is_dead = _is_dead(self._process)  # before the last poll of the pipe, which may still have its reply
            left = deadline - time.monotonic()
            if poll.poll(1000 * max(0.0, 0.0 if is_dead else min(left, POLL_INTERVAL_S))):
                return
            if is_dead:
                self._fail()
            if left <= 0:
                self._end()
                raise TimeoutError(f"{self.name} did not return within {timeout_s:g} s; its process was killed")

    def _fail(self) -> NoReturn:
        """Raises the reason why the child's pipe was closed."""
        deadline = time.monotonic() + EXIT_TIMEOUT_S
        while not (is_dead := _is_dead(self._process)) and time.monotonic() < deadline:
            time.sleep(0.01)
        self._end()
        code = self._process.returncode
        if not is_dead or code is None:
            raise RuntimeError(f"{self.name}: the process closed its pipe, and was killed")
        if code < 0:
            raise TimeoutError(f"{self.name}: the process was ended by {signal.Signals(-code).name}")
        raise RuntimeError(f"{self.name}: the process ended with exit code {code}; its message is above")


def _is_dead(process: subprocess.Popen[bytes]) -> bool:
    """Whether a child has ended; does not reap it where possible, so that its group id is not reused."""
    if not hasattr(os, "waitid"):  # macOS
        return process.poll() is not None
    try:
        return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:
        return True


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kills a child with its process group; does not wait for processes that left the group."""
    kill_group(process.pid)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(REAP_TIMEOUT_S)
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()


# -- the child --------------------------------------------------------------------------------------------------------


def _serve(parent: int, make: str, timeout_s: float, max_memory: int, *arguments: str) -> None:
    """Runs the request loop of the child."""
    if not die_with_parent(parent):  # the parent may be killed while a call hangs
        return
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    requests = os.fdopen(os.dup(0), "rb")
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)  # output of libraries goes to stderr: stdout is for replies
    module, _, name = make.partition(":")
    function: Callable[..., Any] = getattr(importlib.import_module(module), name)(*arguments)
    if max_memory:
        _limit_memory(max_memory)
    _reply(replies, dict(id=0, value=None))
    while header := requests.read(16):
        number = int.from_bytes(header[:8], "big")
        length = int.from_bytes(header[8:], "big")
        args = pickle.loads(requests.read(length))
        signal.setitimer(signal.ITIMER_REAL, timeout_s + 1.0)  # in case the parent no longer kills this process
        try:
            reply = dict(id=number, value=function(*args))
            json.dumps(reply)
        except Exception as error:
            reply = dict(id=number, error=f"{type(error).__name__}: {error}"[:MAX_MESSAGE_CHARS])
        signal.setitimer(signal.ITIMER_REAL, 0)
        _reply(replies, reply)


def _reply(replies: BinaryIO, reply: dict[str, Any]) -> None:
    replies.write(json.dumps(reply).encode() + b"\n")
    replies.flush()


def _limit_memory(num_bytes: int) -> None:
    """Limits the address space beyond what is already used. Linux; ignored by other kernels."""
    import resource

    with open("/proc/self/statm") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + num_bytes, used + num_bytes))


if __name__ == "__main__":
    _serve(int(sys.argv[1]), sys.argv[2], float(sys.argv[3]), int(sys.argv[4]), *sys.argv[5:])
