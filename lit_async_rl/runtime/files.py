"""A run's relative paths, folder locks, atomic file replacement, and full disks."""

from __future__ import annotations

import contextlib
import errno
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
from typing import BinaryIO

from filelock import FileLock, Timeout

# -- Relative paths of a run: of the folder in which it began, also after user code has called `os.chdir` -------------


_began_in: str | None = None  # None outside of a run


def begin_here() -> None:
    """Fixes the current working folder as the base of `absolute`, until `return_to_begin`."""
    global _began_in
    _began_in = os.getcwd()


def return_to_begin() -> None:
    """Undoes `begin_here`, and restores a working folder that user code has changed."""
    global _began_in
    began_in = _began_in
    _began_in = None
    if began_in is not None and not _is_here(began_in):
        log.warning(
            "a reward, environment or callback changed the working directory: the directory is reset to %s", began_in
        )
        os.chdir(began_in)


def absolute(path: str | Path) -> Path:
    """A path of the run for later use, whatever the working folder is by then."""
    return Path(_began_in or os.getcwd(), path)


def expanded(model: str | os.PathLike[str]) -> str:
    """Name of a model, or its folder, with `~` expanded.

    Raises:
        ValueError: it is neither.
    """
    if not isinstance(model, str | os.PathLike):
        raise ValueError(f"model.model must be the name or folder of a model, got {model!r:.100}")
    return os.path.expanduser(model)


def located(model: str) -> str:
    """Name of a model, or its folder; absolute if user code has changed the working folder."""
    if not model or _began_in is None or _is_here(_began_in) or not absolute(model).is_dir():
        return model
    return str(absolute(model))


def _is_here(folder: str) -> bool:
    try:
        return os.getcwd() == folder
    except OSError:  # it was removed
        return False


# -- Exclusive use of a run's folder: a lock between processes that the kernel releases when its owner dies -----------


log = logging.getLogger(__name__)
_held: dict[Path, tuple[FileLock, int]] = {}  # lock and number of its owners in this process, by lock file
_held_guard = threading.Lock()  # owners may lock and release in different threads


class FolderLock:
    """Holds a folder's lock between processes until `release`; several owners within one process share it.

    Args:
        folder: an existing, writable folder.
        what: setting that names the folder, for the message.
        beside: put the lock file next to the folder if possible, for programs that expect an empty folder.

    Raises:
        OSError: another process holds the lock; names that process.
    """

    def __init__(self, folder: str | Path, what: str, beside: bool = False) -> None:
        self._path: Path | None = lock_path(Path(folder).resolve(), beside)
        with _held_guard:
            lock, owners = _held.get(self._path, (None, 0))
            _held[self._path] = (lock or _acquire(self._path, f"{what} {str(folder)!r}"), owners + 1)

    def release(self) -> None:
        """Releases the lock. Safe to call twice."""
        with _held_guard:
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
    """Lock file of a folder. Never deleted, because a process that has just opened it would lock a deleted file."""
    if beside and os.access(folder.parent, os.W_OK):
        return folder.with_name(f".{folder.name}.run.lock")
    return folder / ".run.lock"


@contextmanager
def locked(folders: Iterable[tuple[str, Path]], beside: Container[str] = ()) -> Iterator[None]:
    """Context of exclusive use of several folders.

    Args:
        folders: pairs of setting and folder.
        beside: settings with a lock file next to their folder, see `FolderLock`.
    """
    with ExitStack() as stack:
        for what, folder in folders:
            stack.callback(FolderLock(folder, what, what in beside).release)
            remove_stale_parts(folder)
        yield


def _acquire(path: Path, what: str) -> FileLock:
    lock = FileLock(path, thread_local=False)  # released by any thread of this process
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise OSError(f"{what} is in use by {_owner(path)}: two runs would mix their files") from None
    about = {"pid": os.getpid(), "host": socket.gethostname(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}
    with contextlib.suppress(OSError):  # full disk; the file is for messages only
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
    """Temporary name next to `target` while this process writes it; contains host and process id."""
    return target.with_name(f".{target.name}.{socket.gethostname()}-{os.getpid()}.part")


def remove_stale_parts(folder: Path) -> None:
    """Removes partial files and folders (`part_name`) of processes of this machine that have ended.

    Replacing a folder takes two renames. If the process was killed between them, the target does not exist: a complete
    new folder is then moved into place, and otherwise the old one is restored.
    """
    part = re.compile(rf"\.(.+)\.(?:{re.escape(socket.gethostname())}-)?(\d+)(\.old)?\.part")
    # new folders before old ones, which are restored only if no new one was moved into place
    for path in sorted(folder.glob(".*.part"), key=lambda path: path.name.endswith(".old.part")):
        match = part.fullmatch(path.name)
        if match is None or _is_alive(int(match[2])):
            continue
        target = folder / match[1]
        with contextlib.suppress(OSError):
            if not target.exists() and (match[3] or _has_manifest(path)):
                path.rename(target)
                log.warning("recovered the folder %s: a run was killed while it replaced this folder", target)
                continue
            shutil.rmtree(path) if path.is_dir() else path.unlink()
            log.warning("removed %s, which a killed run had left half-written", path)


def _has_manifest(path: Path) -> bool:
    """Whether a folder is complete: its manifest is written last."""
    try:
        return bool(json.loads((path / "manifest.json").read_text()))
    except (OSError, ValueError):
        return False


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:  # it exists, and belongs to another user
        return True
    return True


DISK_FULL_ERRNOS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def is_disk_full(error: BaseException) -> bool:
    """Whether an error was caused by a full disk or an exceeded quota."""
    cause: BaseException | None = error
    while cause is not None:
        number = cause.errno if isinstance(cause, OSError) else _errno_in(str(cause))
        if number in DISK_FULL_ERRNOS:
            return True
        cause = cause.__context__
    return False


def _errno_in(message: str) -> int | None:
    """Number in an I/O error of Rust, as safetensors raises it."""
    found = re.search(r"\(os error (\d+)\)", message)
    return int(found[1]) if found else None


@contextmanager
def replacing(target: Path) -> Iterator[BinaryIO]:
    """Context of a file that atomically replaces `target` on success, and is removed after an error."""
    part = part_name(target)
    try:
        with part.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())  # before the rename: a power loss could leave an empty file under the final name
        move_into_place(part, target)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def duplicate(source: Path, target: Path, link: bool) -> None:
    """Makes `target` a duplicate of the file or folder `source`, which may be deleted afterwards.

    Args:
        source: an existing file or folder.
        target: its path; an existing file is replaced atomically, an existing folder by two renames.
        link: use hard links, which take no space, where the file system has them. Only for files that are no longer
            written to: both names refer to the same data.

    Raises:
        OSError: the duplicate could not be made; `target` is unchanged.
    """
    part = part_name(target)
    copy = _link_or_copy if link else shutil.copy2
    try:
        if source.is_dir():
            shutil.copytree(source, part, copy_function=copy)
        else:
            copy(source, part)
        move_into_place(part, target)
    finally:  # the part remains after an error, and if it and the target link the same file: rename(2) does nothing
        if part.is_dir():
            shutil.rmtree(part)
        part.unlink(missing_ok=True)


def _link_or_copy(source: str | Path, target: str | Path) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def move_into_place(part: Path, target: Path) -> None:
    """Renames a finished file, link or folder to `target`, where it replaces a file, link or folder.

    After a crash between the two renames of a folder, `remove_stale_parts` completes them.
    """
    old = part.with_suffix(".old.part")
    if target.is_dir() and not target.is_symlink():
        target.rename(old)
    elif part.is_dir() and not part.is_symlink():  # a resumed run may save sharded where it saved one file before
        target.unlink(missing_ok=True)
    part.replace(target)
    sync_folder(target.parent)  # the renames must be on disk before the old folder is removed
    shutil.rmtree(old, ignore_errors=True)


@contextmanager
def tolerate_full_disk(what: str) -> Iterator[None]:
    """Context that turns a full disk into a warning; other errors are raised."""
    try:
        yield
    except OSError as error:
        if not is_disk_full(error):
            raise
        log.warning("%s was not written: the disk is full", what)


@contextmanager
def naming_full_disk(what: str) -> Iterator[None]:
    """Context of a library that writes files, whose errors on a full disk do not name the file.

    Raises:
        OSError: the disk is full; the message names `what`.
    """
    try:
        yield
    except Exception as error:
        if not is_disk_full(error):
            raise
        raise OSError(errno.ENOSPC, f"{what} was not written: the disk is full") from error


def append(path: Path, text: str) -> None:
    """Appends text to a file; after an error the file is unchanged.

    Raises:
        OSError: the text cannot be written.
    """
    data = text.encode()
    with path.open("ab", buffering=0) as file:  # unbuffered: a partial write shows here instead of at the end
        size = file.tell()
        try:
            if file.write(data) < len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        except OSError:
            file.truncate(size)
            raise


def check_writable(folder: Path, what: str) -> None:
    """Creates a folder, and a temporary file in it, so that an unwritable one fails at the start of a run.

    Raises:
        OSError: the folder is not writable; names the setting `what`.
    """
    probe = folder / f".{os.getpid()}.probe"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise type(error)(error.errno, f"{what} cannot be written to: {error.strerror}", str(folder)) from None


def sync_folder(folder: Path) -> None:
    """Flushes a folder to disk, so that renames in it survive a power loss, where the file system can do that."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS):
            raise
    finally:
        os.close(handle)
