"""Calls that may hang or run untrusted code, in child processes that are killed on timeout.

A thread cannot be stopped, and a single big-integer power inside a library can hold the GIL, which stops all other
threads, timers included. The parent does not trust the child: it waits for a reply until a deadline, never for the end
of a connection, which a process forked by the child may keep open, and then kills the child's process group. Replies
are JSON with the number of their request, see `process.py`. Pebble and loky, which also kill workers, unpickle results:
a crafted one would run code in the parent.

Requests, which come from the parent, are pickled, because rewards get arbitrary values in `Prompt.metadata`; only the
child unpickles them.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import pickle
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from lit_async_rl.runtime.lifetime import die_with_parent
from lit_async_rl.runtime.process import Channel, Child, ChildEnded, InvalidMessage, end_reason
from lit_async_rl.utils.checks import check_range
from lit_async_rl.utils.elsewhere import Rebuildable

START_TIMEOUT_S = 300.0  # imports of the child
EXIT_TIMEOUT_S = 1.0  # from the end of the child's connection to the end of the child
MAX_REPLY_BYTES = 2**24
MAX_MESSAGE_CHARS = 1000
_MODULE = __name__


class IsolatedCallError(RuntimeError):
    """The function raised, or returned a value that JSON cannot represent; names the function."""


class IsolatedFunction(Rebuildable):
    """Function executed in a child process; each calling thread has its own, from its first call on.

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
            RuntimeError: the child did not start, exited, or sent an invalid reply.
        """
        request = pickle.dumps(args)
        child: Child | None = getattr(self._local, "child", None)
        if child is None:
            child = self._start()
        self._local.child = None  # one that fails is not asked again
        with _killed_on_error(child, self.timeout_s):
            reply, _ = child.ask("call", time.monotonic() + self.timeout_s, blob=request)
        self._local.child = child
        if "error" in reply:
            raise IsolatedCallError(f"{child.name}: {str(reply['error'])[:MAX_MESSAGE_CHARS]}")
        return reply.get("value")

    def _start(self) -> Child:
        command = self._command
        child = Child(
            [sys.executable, "-m", _MODULE, str(os.getpid()), *command],
            name=command[-1] if len(command) > 3 else command[0],
            max_bytes=MAX_REPLY_BYTES,
        )
        with _killed_on_error(child, START_TIMEOUT_S):
            child.answer(0, time.monotonic() + START_TIMEOUT_S)
        return child


@contextlib.contextmanager
def _killed_on_error(child: Child, timeout_s: float) -> Iterator[None]:
    """Context of a call; kills the child if there is no answer.

    Raises:
        TimeoutError, RuntimeError: why there is none.
    """
    try:
        yield
    except TimeoutError:
        child.end()
        raise TimeoutError(f"{child.name} did not return within {timeout_s:g} s; its process was killed") from None
    except InvalidMessage as error:
        child.end()
        raise RuntimeError(f"{child.name}: the process sent {error}") from None
    except ChildEnded:
        status = child.status(EXIT_TIMEOUT_S)
        child.end()
        if status is None:
            raise RuntimeError(f"{child.name}: the process closed its pipe, and was killed") from None
        if status < 0:
            raise TimeoutError(f"{child.name}: the process was ended by {end_reason(status)}") from None
        raise RuntimeError(f"{child.name}: the process ended with exit code {status}; its message is above") from None


# -- the child --------------------------------------------------------------------------------------------------------


def _serve(parent: int, make: str, timeout_s: float, max_memory: int, *arguments: str) -> None:
    """Runs the request loop of the child."""
    if not die_with_parent(parent):  # the parent may be killed while a call hangs
        return
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    trainer = Channel.of_parent()
    module, _, name = make.partition(":")
    function: Callable[..., Any] = getattr(importlib.import_module(module), name)(*arguments)
    if max_memory:
        _limit_memory(max_memory)
    trainer.send({"call": 0, "value": None})
    while (message := trainer.receive()) is not None:
        fields, request = message
        number = fields["call"]
        args = pickle.loads(request)
        signal.setitimer(signal.ITIMER_REAL, timeout_s + 1.0)  # in case the parent no longer kills this process
        try:
            reply = {"call": number, "value": function(*args)}
            json.dumps(reply)
        except Exception as error:
            reply = {"call": number, "error": f"{type(error).__name__}: {error}"[:MAX_MESSAGE_CHARS]}
        signal.setitimer(signal.ITIMER_REAL, 0)
        trainer.send(reply)


def _limit_memory(num_bytes: int) -> None:
    """Limits the address space beyond its present use. Linux; other kernels ignore it."""
    import resource

    with open("/proc/self/statm") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + num_bytes, used + num_bytes))


if __name__ == "__main__":
    _serve(int(sys.argv[1]), sys.argv[2], float(sys.argv[3]), int(sys.argv[4]), *sys.argv[5:])
