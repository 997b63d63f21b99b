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

    Linux only; has no effect elsewhere.

    Args:
        parent: process id of the parent.

    Returns:
        Whether the parent is still alive.
    """
    if not sys.platform.startswith("linux"):
        return True
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    return os.getppid() == parent


def kill_group(pid: int) -> None:
    """Kills the process group of a process that leads one, with children that outlive it; ignores one that is gone."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
