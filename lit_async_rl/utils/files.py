"""Atomic file replacement, and handling of full disks."""

from __future__ import annotations

import errno
import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from lit_async_rl.utils.folder_lock import part_name

log = logging.getLogger(__name__)
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def is_disk_full(error: BaseException) -> bool:
    """Whether an error was caused by a full disk or an exceeded quota."""
    behind: BaseException | None = error
    while behind is not None:
        if isinstance(behind, OSError) and behind.errno in FULL:
            return True
        behind = behind.__context__
    return False


@contextmanager
def replacing(target: Path) -> Iterator[BinaryIO]:
    """Context of a file that atomically replaces `target` on success; removed after an error."""
    part = part_name(target)
    try:
        with part.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        _take_place(part, target)
        sync_folder(target.parent)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def duplicate(source: Path, target: Path, link: bool) -> None:
    """Makes `target` a duplicate of the file or folder `source`, which outlives it; replaces what was there.

    Args:
        source: exists.
        target: takes the place of a file atomically, and of a folder by two renames.
        link: use hard links, which take no space, where the file system has them. Only for files that nothing writes
            into any more: the duplicate would change, too.

    Raises:
        OSError: the duplicate could not be made; what was there stays.
    """
    part = part_name(target)
    copy = _link_or_copy if link else shutil.copy2
    try:
        if source.is_dir():
            shutil.copytree(source, part, copy_function=copy)
        else:
            copy(source, part)
        _take_place(part, target)
    finally:  # after an error, and where both were links to the same file already: renaming does nothing then
        if part.is_dir():
            shutil.rmtree(part)
        part.unlink(missing_ok=True)


def _link_or_copy(source: str | Path, target: str | Path) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def _take_place(part: Path, target: Path) -> None:
    """Renames, also onto a folder: the sharded checkpoint of a run that is resumed under another strategy."""
    if part.is_dir() and target.is_file():
        target.unlink()
    if not target.is_dir() or target.is_symlink():
        part.replace(target)
        return
    old = part.with_suffix(".old.part")  # recovered after a crash by `remove_stale_parts`
    target.rename(old)
    part.rename(target)
    shutil.rmtree(old)


@contextmanager
def tolerate_full_disk(what: str) -> Iterator[None]:
    """Context that turns a full disk into a warning; other errors are raised."""
    try:
        yield
    except OSError as error:
        if not is_disk_full(error):
            raise
        log.warning("%s was not written: the disk is full", what)


def append(path: Path, text: str) -> None:
    """Appends text to a file: all of it, or nothing.

    Raises:
        OSError: it cannot be written.
    """
    data = text.encode()
    with path.open("ab", buffering=0) as file:
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
        OSError: the folder is not writable; names the setting.
    """
    probe = folder / f".{os.getpid()}.probe"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise type(error)(error.errno, f"{what} cannot be written to: {error.strerror}", str(folder)) from None


def sync_folder(folder: Path) -> None:
    """Flushes a folder to disk, so that renames in it survive a loss of power."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
