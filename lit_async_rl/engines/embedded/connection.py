"""The trainer's connection to the process of an embedded engine (`child.py`).

| who | waits for | woken by |
|---|---|---|
| `ask` (any thread) | its answer, at most its limit | the reader, `close`, the end of the process |
| `wait_for` (producer's thread) | what reports have brought, at most its timeout | the same |
| the reader | the next message | the process; `close` and its end, which end the reader |
"""

from __future__ import annotations

import builtins
import contextlib
import itertools
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import lit_async_rl
from lit_async_rl import errors
from lit_async_rl.engines.embedded.channel import Channel, Message
from lit_async_rl.errors import EngineError, StalledError

PROGRAM = "from lit_async_rl.engines.embedded.child import main; main()"
CLOSE_S = 5.0
log = logging.getLogger(__name__)


class Connection:
    """Starts the process, which ends with this one or with `close`.

    Args:
        on_report: called by the reader with each report, which `wait_for` then sees.
    """

    def __init__(self, on_report: Callable[[Message], None]) -> None:
        ours, theirs = socket.socketpair()
        paths = [str(Path(lit_async_rl.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
        self._process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
            start_new_session=True,  # Ctrl-C is for the trainer
        )
        theirs.close()
        self._channel, self._on_report = Channel(ours), on_report
        self._numbers, self._answers = itertools.count(), dict[int, Message]()
        self._must_succeed: set[int | None] = {None}  # what has no number, too
        self._error: Exception | None = None
        self._changed = threading.Condition()
        threading.Thread(target=self._read, name="embedded-engine", daemon=True).start()

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid

    def send(self, fields: Mapping[str, Any], tensors: Mapping[str, Tensor] | None = None) -> None:
        """Sends a message.

        Raises:
            EngineError: the process has ended, or its own error.
        """
        if self._error is not None:
            raise self._error
        try:
            self._channel.send(fields, tensors)
        except OSError:
            raise EngineError("the embedded engine's process has ended, or the engine was closed") from None

    def ask(
        self, kind: str, limit_s: float, setting: str, tensors: Mapping[str, Tensor] | None = None, **fields: Any
    ) -> Message:
        """The answer to a message, see `answer`."""
        return self.answer(self.begin(kind, tensors, **fields), kind, limit_s, setting)

    def begin(
        self, kind: str, tensors: Mapping[str, Tensor] | None = None, must_succeed: bool = False, **fields: Any
    ) -> int:
        """Sends a message whose `answer` is to be asked for; `must_succeed`: an error breaks the engine before that."""
        number = next(self._numbers)
        if must_succeed:
            self._must_succeed.add(number)
        self.send({"kind": kind, "call": number, **fields}, tensors)
        return number

    def answer(self, number: int, kind: str, limit_s: float, setting: str) -> Message:
        """The answer to a message that has begun.

        Raises:
            StalledError: there was none within `limit_s`; names the call, `kind`, and the setting behind the limit.
            EngineError: the process has ended. Errors of the engine are raised as they are.
        """
        if not self.wait_for(lambda: number in self._answers, limit_s):
            what = f"{kind}: the embedded engine's process did not answer within {limit_s:g} s"
            raise StalledError(f"{what} (set by {setting})")
        answer = self._answers.pop(number)
        self._must_succeed.discard(number)
        if "error" in answer[0]:
            raise from_json(answer[0]["error"])
        return answer

    def wait_for(self, condition: Callable[[], Any], timeout_s: float) -> bool:
        """Whether the condition came true in time.

        Raises:
            EngineError: the process has ended, or `close` was called. Errors of the engine are raised as they are.
        """
        with self._changed:
            self._changed.wait_for(lambda: condition() or self._error is not None, timeout_s)
            if not condition() and self._error is not None:
                raise self._error
            return bool(condition())

    def _read(self) -> None:
        while (message := self._channel.receive()) is not None:
            fields = message[0]
            with self._changed:
                if fields["kind"] == "report":
                    self._on_report(message)
                elif fields["kind"] == "answer":
                    self._answers[fields["call"]] = message
                if "error" in fields and fields.get("call") in self._must_succeed:
                    self._error = self._error or from_json(fields["error"])
                self._changed.notify_all()
        self._break(EngineError(f"the embedded engine's process ended ({self._end()})"))

    def _break(self, error: Exception) -> None:
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    def _end(self) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = self._process.wait(CLOSE_S)
            return signal.Signals(-code).name if code < 0 else f"status {code}"
        return "it still runs"

    def close(self) -> None:
        """Ends the process and unblocks all waits."""
        self._break(EngineError("the engine was closed"))
        self._channel.close()
        try:
            self._process.wait(CLOSE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def from_json(error: Mapping[str, str]) -> Exception:
    """The error of an engine's process, as the engine would raise it in this one."""
    name, message = error["type"], error["message"]
    if name == "OutOfMemoryError":
        return torch.OutOfMemoryError(message)
    kind = getattr(errors, name, None) or getattr(builtins, name, None)
    if isinstance(kind, type) and issubclass(kind, Exception):
        return kind(message)
    log.error("the embedded engine's process failed:\n%s", error["traceback"])
    return EngineError(f"{name}: {message}")
