"""Exclusive use of a run's folder: a lock between processes that the kernel releases when its owner dies."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import shutil
import socket
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

log = logging.getLogger(__name__)
_held: dict[Path, tuple[FileLock, int]] = {}  # and how many owners there are in this process
_guard = threading.Lock()


class FolderLock:
    """Lock of a folder among processes, until `release`; several owners within one process share it.

    Args:
        folder: exists and is writable.
        what: setting that names it, for messages.

    Raises:
        OSError: another process holds the lock; says which one.
    """

    def __init__(self, folder: str | Path, what: str) -> None:
        self._folder: Path | None = Path(folder).resolve()
        with _guard:
            lock, owners = _held.get(self._folder, (None, 0))
            _held[self._folder] = (lock or _acquire(self._folder, what), owners + 1)

    def release(self) -> None:
        """Releases the lock. Safe to call twice."""
        with _guard:
            if self._folder is None:
                return
            lock, owners = _held.pop(self._folder)
            if owners > 1:
                _held[self._folder] = (lock, owners - 1)
            else:
                _owner_file(self._folder).unlink(missing_ok=True)
                lock.release()
            self._folder = None


@contextmanager
def locked(folders: Iterable[tuple[str, Path]]) -> Iterator[None]:
    """Context that locks several folders, each with the setting that names it."""
    with ExitStack() as stack:
        for what, folder in folders:
            stack.callback(FolderLock(folder, what).release)
            remove_stale_parts(folder)
        yield


def _acquire(folder: Path, what: str) -> FileLock:
    lock = FileLock(folder / ".run.lock", thread_local=False)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise OSError(f"{what} {str(folder)!r} is in use by {_owner(folder)}: two runs would mix their files") from None
    about = {"pid": os.getpid(), "host": socket.gethostname(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}
    with contextlib.suppress(OSError):  # a full disk; the lock holds without it
        _owner_file(folder).write_text(json.dumps(about))
    return lock


def _owner_file(folder: Path) -> Path:
    return folder / ".run.json"


def _owner(folder: Path) -> str:
    try:
        about = json.loads(_owner_file(folder).read_text())
        return f"process {about['pid']} on {about['host']} since {about['since']}"
    except (OSError, ValueError, KeyError, TypeError):
        return "another process"


def part_name(target: Path) -> Path:
    """Temporary name beside `target` while this process writes it; contains host and process id."""
    return target.with_name(f".{target.name}.{socket.gethostname()}-{os.getpid()}.part")


def remove_stale_parts(folder: Path) -> None:
    """Removes partial files (see `part_name`) of dead processes of this machine."""
    ours = re.compile(rf"\..+\.(?:{re.escape(socket.gethostname())}-)?(\d+)\.part")
    for path in folder.glob(".*.part"):
        match = ours.fullmatch(path.name)
        if match is None or _is_alive(int(match[1])):
            continue
        with contextlib.suppress(OSError):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
            log.warning("removed %s, which a run that was killed left half written", path)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:  # another process holds it
        return True
    return True
