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
from collections.abc import Container, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

log = logging.getLogger(__name__)
_held: dict[Path, tuple[FileLock, int]] = {}  # and how many owners there are in this process
_guard = threading.Lock()


class FolderLock:
    """Lock of a folder among processes, until `release`; several owners within one process share it.

    Args:
        folder: exists, and can be written to.
        what: the setting that names it, for the message.
        beside: the lock lies beside the folder where that can be written to, because others want the folder empty.

    Raises:
        OSError: another process holds the lock; says which one.
    """

    def __init__(self, folder: str | Path, what: str, beside: bool = False) -> None:
        self._path: Path | None = lock_path(Path(folder).resolve(), beside)
        with _guard:
            lock, owners = _held.get(self._path, (None, 0))
            _held[self._path] = (lock or _acquire(self._path, f"{what} {str(folder)!r}"), owners + 1)

    def release(self) -> None:
        """Releases the lock. Safe to call twice."""
        with _guard:
            if self._path is None:
                return
            lock, owners = _held.pop(self._path)
            if owners > 1:
                _held[self._path] = (lock, owners - 1)
            else:
                _owner_file(self._path).unlink(missing_ok=True)
                lock.release()
            self._path = None


def lock_path(folder: Path, beside: bool = False) -> Path:
    """File of a folder's lock. It stays when the lock is released: deleting one that others may wait for breaks it."""
    if beside and os.access(folder.parent, os.W_OK):
        return folder.with_name(f".{folder.name}.run.lock")
    return folder / ".run.lock"


@contextmanager
def locked(folders: Iterable[tuple[str, Path]], beside: Container[str] = ()) -> Iterator[None]:
    """Exclusive use of several folders, each with the setting that names it; see `FolderLock` for those `beside`."""
    with ExitStack() as stack:
        for what, folder in folders:
            stack.callback(FolderLock(folder, what, what in beside).release)
            remove_stale_parts(folder)
        yield


def _acquire(path: Path, what: str) -> FileLock:
    lock = FileLock(path, thread_local=False)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise OSError(f"{what} is in use by {_owner(path)}: two runs would mix their files") from None
    about = {"pid": os.getpid(), "host": socket.gethostname(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}
    with contextlib.suppress(OSError):  # a full disk; the lock holds without it
        _owner_file(path).write_text(json.dumps(about))
    return lock


def _owner_file(path: Path) -> Path:
    return path.with_suffix(".json")


def _owner(path: Path) -> str:
    try:
        about = json.loads(_owner_file(path).read_text())
        return f"process {about['pid']} on {about['host']} since {about['since']}"
    except (OSError, ValueError, KeyError, TypeError):
        return "another process"


def part_name(target: Path) -> Path:
    """Temporary name beside `target` while this process writes it; contains host and process id."""
    return target.with_name(f".{target.name}.{socket.gethostname()}-{os.getpid()}.part")


def remove_stale_parts(folder: Path) -> None:
    """Removes what processes of this machine that are gone left half written: files and folders of `part_name`.

    A folder that takes the place of another is renamed in two steps. If the process was killed between them, so that
    there is no folder of that name, the new one takes its place now, or the old one comes back.
    """
    ours = re.compile(rf"\.(.+)\.(?:{re.escape(socket.gethostname())}-)?(\d+)(\.old)?\.part")
    for path in sorted(folder.glob(".*.part"), key=lambda path: path.name.endswith(".old.part")):  # new ones first
        match = ours.fullmatch(path.name)
        if match is None or _is_alive(int(match[2])):
            continue
        target = folder / match[1]
        with contextlib.suppress(OSError):
            if not target.exists() and (match[3] or _is_whole(path)):
                path.rename(target)
                log.warning("recovered %s, which a run that was killed had not renamed yet", target)
                continue
            shutil.rmtree(path) if path.is_dir() else path.unlink()
            log.warning("removed %s, which a run that was killed left half written", path)


def _is_whole(path: Path) -> bool:
    """Whether a folder has its manifest, which is written last."""
    try:
        return bool(json.loads((path / "manifest.json").read_text()))
    except (OSError, ValueError):
        return False


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:  # another process holds it
        return True
    return True
