"""Temporary folders of weights, and removal of those left behind by killed runs.

A run holds the lock of its folders (`flock`, released by the kernel when the process ends). A lock that can be acquired
therefore belongs to a dead run, on whatever machine or in whatever container it ran.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import shutil
import tempfile
import threading
import uuid
from pathlib import Path

from filelock import FileLock, Timeout

PREFIX = "lit_async_rl_weights_"
SHARED_MEMORY = "/dev/shm"
log = logging.getLogger(__name__)


def folder_with_room(num_bytes: int, copies: int = 1) -> str:
    """Parent of the folders of weights for processes on this machine: memory, if `copies` of `num_bytes` fit.

    Otherwise, with a warning, the system's temporary folder, which is also that of systems without such memory.
    """
    folder = tempfile.gettempdir()
    if not Path(SHARED_MEMORY).is_dir():
        return folder
    free = shutil.disk_usage(SHARED_MEMORY).free
    if free >= copies * num_bytes:
        return SHARED_MEMORY
    log.warning(
        "%s has %.2f GiB free, and one copy of the weights takes %.2f: they go through files in %s, which is slower. "
        "For containers there is --shm-size=%dg (docker run), or a volume of medium Memory (Kubernetes)",
        *(SHARED_MEMORY, free / 2**30, num_bytes / 2**30, folder, math.ceil(2 * num_bytes / 2**30)),
    )
    return folder


class WeightFolders:
    """Creates the folders of one transfer, one per update.

    Args:
        parent: created if missing; None is the system's temporary folder.
    """

    def __init__(self, parent: str | None) -> None:
        self.parent = parent
        self._lock: FileLock | None = None
        self._is_changing = threading.Lock()  # several threads may close an engine at once
        self._name = ""
        self._numbers = itertools.count()

    def make(self) -> Path:
        """Creates a folder readable by servers of other users; the first call removes those of dead runs."""
        parent = Path(tempfile.gettempdir() if self.parent is None else self.parent)
        with self._is_changing:
            if self._lock is None:
                parent.mkdir(parents=True, exist_ok=True)
                delete_abandoned(parent)
                self._name = PREFIX + uuid.uuid4().hex[:12]
                self._lock = FileLock(_lock_of(parent, self._name), thread_local=False)
                self._lock.acquire(timeout=0)
            folder = parent / f"{self._name}_{next(self._numbers)}"
        folder.mkdir()
        folder.chmod(0o755)
        return folder

    def close(self) -> None:
        """Releases the lock; the caller removes the folders. Safe to call twice, also from two threads at once."""
        with self._is_changing:
            if self._lock is not None:
                Path(self._lock.lock_file).unlink(missing_ok=True)  # before others can take it
                self._lock.release()
                self._lock = None


def _lock_of(parent: Path, name: str) -> Path:
    return parent / f".{name}.lock"


def delete_abandoned(parent: Path) -> list[Path]:
    """Removes and returns the folders of dead runs. Without file locking nothing is removed."""
    deleted = []
    for path in sorted(parent.glob(f".{PREFIX}*.lock")):
        lock = FileLock(path, thread_local=False)
        # a live run has it; another user's; gone meanwhile
        with contextlib.suppress(Timeout, OSError), lock.acquire(timeout=0):
            for folder in parent.glob(f"{path.name.removeprefix('.').removesuffix('.lock')}_*"):
                shutil.rmtree(folder, ignore_errors=True)
                deleted.append(folder)
            path.unlink(missing_ok=True)
    if deleted:
        log.warning("deleted weights of runs that were killed: %s", ", ".join(map(str, deleted)))
    return deleted
