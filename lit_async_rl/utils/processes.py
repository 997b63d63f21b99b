"""Lifetime of child processes. Imports the standard library only, because every vLLM worker imports it."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1  # sys/prctl.h


def die_with_parent(parent: int) -> bool:
    """Makes the kernel kill this process, also after an `exec`, as soon as its parent ends, even by SIGKILL.

    The kernel means the thread that has started it: see `exit_with_parent` where that may end earlier. Linux only; has
    no effect elsewhere.

    Args:
        parent: process id of the parent.

    Returns:
        Whether the parent is still alive.
    """
    return _signal_at_end_of(parent, signal.SIGKILL)


def exit_with_parent(parent: int) -> bool:
    """Ends this process as soon as its parent ends, whatever becomes of the thread that has started it.

    The kernel's signal is one that does nothing else, and its handler looks whose child this is. It comes late where a
    library holds the interpreter. To be called by the main thread; Linux only, has no effect elsewhere.

    Args:
        parent: process id of the parent.

    Returns:
        Whether the parent is still alive.
    """

    def look(*_: object) -> None:
        if os.getppid() != parent:
            os._exit(1)

    signal.signal(signal.SIGURG, look)
    return _signal_at_end_of(parent, signal.SIGURG)


def _signal_at_end_of(parent: int, number: signal.Signals) -> bool:
    if not sys.platform.startswith("linux"):
        return True
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)
    return os.getppid() == parent  # it may have ended before


def kill_group(pid: int) -> None:
    """Kills the process group of a process that leads one, with children that outlive it; ignores one that is gone."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
