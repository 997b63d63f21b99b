"""A child process that answers: its start, the messages to and from it, the reason of its end, and its end.

    child = Child([sys.executable, "-m", "package.program"], name="grader")  # here
    fields, blob = child.ask("grade", deadline=time.monotonic() + 5.0, fields={"text": "2"})

    parent = Channel.of_parent()  # in the program
    fields, blob = parent.receive()

A message has the lengths of a JSON object and of bytes, and then both; reading one runs no code. The parent may pickle
into these bytes for a program that it trusts; it unpickles nothing that comes back. The connection is the program's
standard input, so that its output is never taken for a message.

Each process leads a session: it has a group to kill, and Ctrl-C in the terminal is for its parent alone. One thread,
which lasts as long as this process, starts them all, because the kernel ends a process with the thread that has started
it (see `lifetime.die_with_parent`). Imports the standard library only, as the programs do that import it.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import itertools
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from lit_async_rl.runtime.lifetime import guarded, kill_group
from lit_async_rl.runtime.threads import ThreadPool, start_thread

if TYPE_CHECKING:
    import asyncio

POLL_INTERVAL_S = 0.1  # until the end of a process is noticed while another one holds its connection open
REAP_TIMEOUT_S = 5.0
START_TIMEOUT_S = 60.0  # of the system's own part, without the program's
READ_BYTES = 2**20
STDERR = 2
Message = tuple[dict[str, Any], bytes]
T = TypeVar("T")


class ChildEnded(RuntimeError):
    """The process has ended, or has closed its connection."""


class InvalidMessage(ValueError):
    """A process has sent something other than a message, too much, or the answer to another question."""


# -- Messages ----------------------------------------------------------------------------------------------------------


_SIZES = struct.Struct(">QQ")  # bytes of the JSON, and of what stands beside it


def packed(fields: Mapping[str, Any], blob: bytes = b"") -> bytes:
    """A message as it is sent."""
    text = json.dumps(fields).encode()
    return _SIZES.pack(len(text), len(blob)) + text + blob


def _sizes(header: bytes, max_bytes: int | None) -> tuple[int, int]:
    num_text, num_blob = _SIZES.unpack(header)
    if max_bytes is not None and num_text + num_blob > max_bytes:
        raise InvalidMessage(f"more than {max_bytes} bytes")
    return num_text, num_blob


def _unpacked(text: bytes, blob: bytes) -> Message:
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidMessage(str(error)) from error
    if not isinstance(fields, dict):
        raise InvalidMessage("no object")
    return fields, blob


class Channel:
    """One end of a connection to another process. Any thread may send, one receives.

    Args:
        end: connected stream socket.
        max_bytes: limit of a received message; None sets none.
        has_ended: whether the other process has ended, which the connection does not show while a third one holds it
            open; None waits for the connection alone.
    """

    def __init__(
        self, end: socket.socket, max_bytes: int | None = None, has_ended: Callable[[], bool] | None = None
    ) -> None:
        self._socket = end
        self._max_bytes = max_bytes
        self._has_ended = has_ended
        self._sending = threading.Lock()

    @classmethod
    def of_parent(cls) -> Channel:
        """Connection to the process that has started this one as a `Child`; standard input is empty afterwards."""
        end = socket.socket(fileno=os.dup(0))
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.close(null)
        return cls(end)

    def send(self, fields: Mapping[str, Any], blob: bytes = b"", deadline: float | None = None) -> None:
        """Sends a message.

        Raises:
            OSError: the other process has ended, or the connection was closed.
            TimeoutError: it was not read by the deadline, a time of `time.monotonic`.
        """
        rest = memoryview(packed(fields, blob))
        with self._sending:
            while rest:
                self._wait(select.POLLOUT, deadline)
                with contextlib.suppress(BlockingIOError):
                    rest = rest[self._socket.send(rest, socket.MSG_DONTWAIT) :]

    def receive(self, deadline: float | None = None) -> Message | None:
        """Waits for the next message; None after the last.

        Raises:
            InvalidMessage: it is none, or too long; nothing more can be received, nor after the next.
            TimeoutError: it was not there by the deadline, a time of `time.monotonic`.
        """
        try:
            num_text, num_blob = _sizes(self._read(_SIZES.size, deadline), self._max_bytes)
            text = self._read(num_text, deadline)
            blob = self._read(num_blob, deadline)
        except ConnectionError:
            return None
        return _unpacked(text, blob)

    def _read(self, num_bytes: int, deadline: float | None) -> bytes:
        data = bytearray()
        while len(data) < num_bytes:
            self._wait(select.POLLIN, deadline)
            try:
                part = self._socket.recv(min(num_bytes - len(data), READ_BYTES), socket.MSG_DONTWAIT)
            except BlockingIOError:
                continue
            except OSError as error:  # it was closed meanwhile
                raise ConnectionResetError(str(error)) from None
            if not part:
                raise ConnectionResetError("the other process has ended")
            data += part
        return bytes(data)

    def _wait(self, event: int, deadline: float | None) -> None:
        """Waits until the socket is ready.

        Not a `Wait`: the time of another process goes on while this one is stopped.

        Raises:
            ConnectionError: the other process has ended, or the connection was closed.
            TimeoutError: the deadline has passed.
        """
        while True:
            poll = select.poll()
            try:
                poll.register(self._socket, event)
            except ValueError:
                raise ConnectionAbortedError("the connection was closed") from None
            # before the last poll, which may still find its message
            has_ended = self._has_ended is not None and self._has_ended()
            if poll.poll(self._pause_ms(has_ended, deadline)):
                return
            if has_ended:
                raise ConnectionResetError("the other process has ended")
            if deadline is not None and time.monotonic() >= deadline:
                raise TimeoutError("no message by the deadline")

    def _pause_ms(self, has_ended: bool, deadline: float | None) -> float | None:
        if has_ended:
            return 0.0
        if deadline is None:
            return None if self._has_ended is None else 1000.0 * POLL_INTERVAL_S
        return 1000.0 * max(0.0, min(deadline - time.monotonic(), POLL_INTERVAL_S))

    def close(self) -> None:
        """Ends the connection; `receive` then gives None at both ends."""
        with contextlib.suppress(OSError):  # the other end was first
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


async def receive_from(reader: asyncio.StreamReader, max_bytes: int) -> Message | None:
    """As `Channel.receive`, without a deadline, for a connection in an event loop.

    Raises:
        InvalidMessage: it is none, or too long.
    """
    try:
        num_text, num_blob = _sizes(await reader.readexactly(_SIZES.size), max_bytes)
        text = await reader.readexactly(num_text)
        blob = await reader.readexactly(num_blob)
    except (EOFError, ConnectionError):
        return None
    return _unpacked(text, blob)


# -- The process -------------------------------------------------------------------------------------------------------


_STARTER = ThreadPool(1, name="process-starter")  # its thread lasts: children that ask for it end with a thread
# a child has no thread, and maybe a lock
os.register_at_fork(after_in_child=partial(_STARTER.__init__, 1, name="process-starter"))  # type: ignore[misc]


def start_process(make: Callable[[], T]) -> T:
    """Calls `make` in the thread that starts processes, and returns or raises what it does.

    Raises:
        ChildEnded: it took longer than `START_TIMEOUT_S`.
    """
    try:
        return _STARTER.submit(make).result(START_TIMEOUT_S)
    except concurrent.futures.TimeoutError:
        raise ChildEnded(f"the operating system started no process within {START_TIMEOUT_S:g} s") from None


def environment() -> dict[str, str]:
    """This process's environment, for another that imports what this one can."""
    return os.environ | {"PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}


class Child:
    """A process that answers. It ends with `end`, with this object, and when this process exits.

    Args:
        command: program and arguments; it calls `Channel.of_parent`.
        name: for messages.
        max_bytes: limit of a message from it; None sets none.
        is_guarded: whether all processes that it has started end with it, also those that have left its group, and it
            with this process, however that ends; see `lifetime.guarded`.
        stdout: file descriptor for its output; None is that of this process.
        cwd: its working folder; None is that of this process.

    Attributes:
        name: as given.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        name: str,
        max_bytes: int | None = None,
        is_guarded: bool = False,
        stdout: int | None = STDERR,
        cwd: str | os.PathLike[str] | None = None,
    ) -> None:
        self.name = name
        self._socket, theirs = socket.socketpair()
        with theirs:
            process = start_process(
                lambda: subprocess.Popen(
                    guarded(command) if is_guarded else command,
                    stdin=theirs.fileno(),
                    stdout=stdout,
                    env=environment(),
                    cwd=cwd,
                    start_new_session=True,
                )
            )
        self._process = process
        self._channel = Channel(self._socket, max_bytes, has_ended=lambda: _status(process) is not None)
        self._is_guarded = is_guarded
        self._numbers = itertools.count(1)
        self._finalizer = weakref.finalize(self, _end, process, self._channel, os.getpid(), is_guarded, 0.0)

    @property
    def pid(self) -> int:
        """Process id; of the guard if it has one."""
        return self._process.pid

    def ask(self, kind: str, deadline: float, fields: Mapping[str, Any] | None = None, blob: bytes = b"") -> Message:
        """Sends a question and waits for its answer; one thread at a time asks, and nobody else receives.

        Raises:
            TimeoutError: it was not there by the deadline, a time of `time.monotonic`.
            ChildEnded: the process has ended, or has closed its connection.
            InvalidMessage: the process has sent something else.
        """
        number = next(self._numbers)
        with contextlib.suppress(ConnectionError):  # it has ended, as `answer` will say
            self._channel.send({"kind": kind, "call": number, **(fields or {})}, blob, deadline)
        return self.answer(number, deadline)

    def answer(self, number: int, deadline: float) -> Message:
        """Waits for the message with this `call`, 0 without a question; raises as `ask`."""
        try:
            message = self._channel.receive(deadline)
        except InvalidMessage as error:
            raise InvalidMessage(f"an invalid reply to request {number}: {error}") from error
        if message is None:
            raise ChildEnded(f"{self.name}: its process has ended")
        call = message[0].get("call")
        if type(call) is not int or call != number:
            raise InvalidMessage(f"an invalid reply to request {number}")
        return message

    def send(self, fields: Mapping[str, Any], blob: bytes = b"") -> None:
        """Sends a message; raises as `Channel.send`."""
        self._channel.send(fields, blob)

    def listen(self, take: Callable[[Message | None], None], thread: str) -> None:
        """Starts a thread of this name that passes each message to `take`, and None after the last."""
        start_thread(_listen, self._channel, take, name=thread)

    async def streams(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """The connection in the running event loop, in place of `ask` and `listen`."""
        import asyncio  # here, because most programs that import this module have no event loop

        return await asyncio.open_connection(sock=self._socket)

    def status(self, timeout_s: float = 0.0) -> int | None:
        """Exit status, or the negative number of the signal that ended it; None if it runs after so many seconds."""
        deadline = time.monotonic() + timeout_s
        while (status := _status(self._process)) is None and time.monotonic() < deadline:
            time.sleep(0.01)
        return status

    def terminate(self) -> None:
        """Sends SIGTERM, at which a guard ends all that it guards; `end` waits for it."""
        if _status(self._process) is None:
            self._process.terminate()

    def end(self, patience_s: float = 0.0) -> None:
        """Ends the process, and its group unless it ends by itself, and reaps it. Safe to call twice.

        Args:
            patience_s: time to end by itself, as it finds its connection closed.
        """
        self._finalizer.detach()
        _end(self._process, self._channel, os.getpid(), is_guarded=self._is_guarded, patience_s=patience_s)


def _listen(channel: Channel, take: Callable[[Message | None], None]) -> None:
    while (message := channel.receive()) is not None:
        take(message)
    take(None)


def _status(process: subprocess.Popen[bytes]) -> int | None:
    """Status of an ended process, left unreaped where possible, so that nobody gets the group's number."""
    if process.returncode is not None or not hasattr(os, "waitid"):  # macOS has none
        return process.poll()
    try:
        ended = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return process.poll()
    if ended is None:
        return None
    return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status


def _end(process: subprocess.Popen[bytes], channel: Channel, owner: int, is_guarded: bool, patience_s: float) -> None:
    if os.getpid() != owner:  # a fork of the process that has started it
        return
    channel.close()
    if is_guarded and process.poll() is None:
        process.terminate()
        patience_s = REAP_TIMEOUT_S  # for the guard to end all others
    if patience_s:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(patience_s)
    if process.returncode is None:
        kill_group(process.pid)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(REAP_TIMEOUT_S)


def end_reason(status: int) -> str:
    """The signal that has ended a process, as `SIGKILL`, or its `status 3`."""
    if status >= 0:
        return f"status {status}"
    try:
        return signal.Signals(-status).name
    except ValueError:  # a real-time signal
        return f"signal {-status}"
