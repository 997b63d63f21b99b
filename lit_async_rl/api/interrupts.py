"""Ctrl-C during training: the first saves and ends cleanly, the second ends at once."""

from __future__ import annotations

import builtins
import os
import signal
import sys
import threading
from types import TracebackType
from typing import Any

from lit_async_rl.callbacks import SaveOnSigterm

CTRL_C_STATUS = 130  # of shells, 128 + SIGINT
_NOTICE = b"Ctrl-C: training ends after this step and saves a checkpoint; once more ends it at once\n"


class CtrlC:
    """Context in which the first Ctrl-C acts like SIGTERM, and the second ends the process at once.

    There is thus one way to stop cleanly, on one rank or several. Before training, when SIGTERM has no handler, Ctrl-C
    is an ordinary `KeyboardInterrupt`. After Ctrl-C the context exits with `SystemExit(130)`; in an interactive session
    (a notebook, say), which that would end, with `KeyboardInterrupt`.

    Attributes:
        was_pressed: whether Ctrl-C was received.
    """

    def __init__(self) -> None:
        self.was_pressed = False
        self._before: Any = None

    def __enter__(self) -> CtrlC:
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGINT, self._press)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)
        SaveOnSigterm.signal_name = "SIGTERM"
        if self.was_pressed and (error is None or isinstance(error, SystemExit | KeyboardInterrupt)):
            raise (KeyboardInterrupt if is_interactive() else SystemExit(CTRL_C_STATUS)) from None

    def _press(self, *_: Any) -> None:
        if self.was_pressed:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
        self.was_pressed = True
        SaveOnSigterm.signal_name = "Ctrl-C"
        if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            raise KeyboardInterrupt
        if os.environ.get("LOCAL_RANK", "0") == "0":
            os.write(2, _NOTICE)  # `print` may be what was interrupted
        signal.raise_signal(signal.SIGTERM)


def is_interactive() -> bool:
    """Whether Python reads what a person types, in a terminal or a notebook."""
    return hasattr(sys, "ps1") or hasattr(builtins, "__IPYTHON__")
