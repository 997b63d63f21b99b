"""Calls that may never return: in a process of their own, which can be killed.

A thread cannot be stopped, and one power of huge integers inside a library holds the interpreter's lock, so that every
other thread stands still, the one with the clock included. Here the child sets an alarm before each call; the operating
system ends it when the alarm rings, whatever it is doing and whether or not its parent still lives.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import pickle
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from typing import IO, Any

from lit_async_rl.errors import InvariantError


class IsolatedFunction:
    """A function that runs in a child process, one for each thread that calls it, started when first needed.

    Args:
        make: a function of a module, by its name `package.module:make`; it is called once in the child, without a time
            limit, and returns what is then called with picklable arguments. Imports belong there.
        timeout_s: longest that a call may take.
        arguments: what `make` is called with.

    Raises:
        ValueError: the time limit is not positive.
    """

    def __init__(self, make: str, timeout_s: float, *arguments: str) -> None:
        if timeout_s <= 0:
            raise ValueError(f"timeout_s must be positive, got {timeout_s}")
        self.make, self.timeout_s, self.arguments = make, timeout_s, arguments
        self._local = threading.local()

    def __call__(self, *args: Any) -> Any:
        """The function's value.

        Raises:
            TimeoutError: the call took too long, or its process was killed, for example for the memory it used.
            RuntimeError: the child could not be started or ended by itself.
            Exception: what the function raised.
        """
        child: _Child | None = getattr(self._local, "child", None)
        if child is None:
            child = self._local.child = _Child(self.make, self.timeout_s, self.arguments)
        try:
            return child.call(args)
        except (TimeoutError, RuntimeError):
            del self._local.child
            raise


class _Child:
    def __init__(self, make: str, timeout_s: float, arguments: tuple[str, ...]) -> None:
        self.make = make
        self.process = subprocess.Popen(
            [sys.executable, "-m", "lit_async_rl.utils.isolation", make, str(timeout_s), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
            start_new_session=True,  # Ctrl-C is for the parent
        )
        if self.process.stdin is None:
            raise InvariantError("a child without a pipe")
        if self.process.stdout is None:
            raise InvariantError("a child without a pipe")
        self._requests, self._replies = self.process.stdin, self.process.stdout
        self.close = weakref.finalize(self, _close, self._requests, self._replies, self.process)
        self._receive()

    def call(self, args: tuple[Any, ...]) -> Any:
        with contextlib.suppress(BrokenPipeError):  # it has died meanwhile: `_receive` says how
            pickle.dump(args, self._requests)
            self._requests.flush()
        value, error = self._receive()
        if error is not None:
            raise error
        return value

    def _receive(self) -> Any:
        try:
            return pickle.load(self._replies)
        except (EOFError, pickle.UnpicklingError):  # nothing, or only the beginning
            self.close()
        code = self.process.returncode
        if code < 0:
            raise TimeoutError(f"{self.make}: the process was ended by {signal.Signals(-code).name}")
        raise RuntimeError(f"{self.make}: the process ended with exit code {code}; its message is above")


def _close(requests: IO[bytes], replies: IO[bytes], process: subprocess.Popen[bytes]) -> None:
    """A child whose input has ended ends, at the latest when its alarm rings."""
    with contextlib.suppress(BrokenPipeError):
        requests.close()
    replies.close()
    process.wait()


def _serve(make: str, timeout_s: float, *arguments: str) -> None:
    """The child's loop."""
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints is no reply
    module, _, name = make.partition(":")
    function: Callable[..., Any] = getattr(importlib.import_module(module), name)(*arguments)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # to die, without Python's help
    pickle.dump((None, None), replies)
    replies.flush()
    while True:
        try:
            args = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        signal.setitimer(signal.ITIMER_REAL, timeout_s)
        reply: tuple[Any, Exception | None]
        try:
            reply = (function(*args), None)
        except Exception as error:
            reply = (None, error)
        signal.setitimer(signal.ITIMER_REAL, 0)
        pickle.dump(reply, replies)
        replies.flush()


if __name__ == "__main__":
    _serve(sys.argv[1], float(sys.argv[2]), *sys.argv[3:])
