"""Digests of checkpoints, written with the file and verified before its content is used.

A checkpoint file is a zip archive, and its digest is the archive's comment: one file, renamed atomically, so a crash
cannot leave file and digest inconsistent, and other readers of zip archives (`torch.load`) ignore it. The digest is
XXH3 (128 bits) of the archive without the comment. It detects damage; it is not a signature.
"""

from __future__ import annotations

import logging
import os
import pickle
import re
import struct
import warnings
import zipfile
from pathlib import Path
from typing import Any, BinaryIO

import torch
import xxhash

from lit_async_rl.errors import describe

MARK = b"lit-async-rl xxh3:"
COMMENT = len(MARK) + 32  # bytes
END = b"PK\5\6"  # of an archive; 22 bytes with the comment's length at the end
CHUNK = 1 << 24
log = logging.getLogger(__name__)
_checked: dict[str, tuple[int, int, int]] = {}  # inode, size and time of files that were read whole by this process


class DigestWriter:
    """Binary file writer that computes a digest of what it writes.

    Args:
        file: opened for writing, and empty.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._hash = file, xxhash.xxh3_128()

    def write(self, data: Any) -> int:
        self._hash.update(data)
        self._file.write(data)
        return memoryview(data).nbytes

    def flush(self) -> None:
        self._file.flush()

    def finish_archive(self) -> None:
        """Writes the digest as the comment of the zip archive."""
        self._file.seek(-2, os.SEEK_END)  # the length of its comment, 0 so far
        self._file.write(struct.pack("<H", COMMENT) + MARK + self._hash.hexdigest().encode())


def check_file(file: Path, where: str) -> None:
    """Refuses a checkpoint file that is damaged, not a checkpoint, or would execute code when loaded.

    Each file is read once; further calls for the same file are free.

    Args:
        file: exists.
        where: prefix of messages.

    Raises:
        ValueError: the file is refused; says why.
    """
    status = file.stat()
    seen = status.st_ino, status.st_size, status.st_mtime_ns
    if _checked.get(str(file)) == seen:
        return
    with file.open("rb") as opened:
        _check_digest(opened, where)
    check_content(read_safely(file, where), where, ("state_dict", "version", "updated", "random_state"))
    _checked[str(file)] = seen


def _check_digest(file: BinaryIO, where: str) -> None:
    damaged = f"{where} is damaged: its bytes do not have the digest that was saved with them. Use another checkpoint"
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - COMMENT - 22))
    tail = file.read()
    if len(tail) < COMMENT + 22 or (MARK not in tail and not tail.startswith(END)):
        end = tail.rfind(END)
        is_cut = end >= 0 and int.from_bytes(tail[end + 20 : end + 22], "little") != len(tail) - end - 22
        if is_cut or not zipfile.is_zipfile(file):
            raise ValueError(f"{where} is not a complete checkpoint: it is truncated, or another kind of file")
        log.warning("%s has no digest (saved elsewhere, or by an earlier version): damage would not be noticed", where)
        return
    length = struct.pack("<H", COMMENT)
    if not tail.startswith(END) or tail[20:22] != length or not tail[22:].startswith(MARK):
        raise ValueError(damaged)
    digest = xxhash.xxh3_128()
    file.seek(0)
    left = size - COMMENT - 2
    while left:
        if not (chunk := file.read(min(CHUNK, left))):
            break
        digest.update(chunk)
        left -= len(chunk)
    digest.update(b"\0\0")
    if digest.hexdigest().encode() != tail[-32:]:
        raise ValueError(damaged)


def check_content(checkpoint: Any, where: str, needed: tuple[str, ...]) -> None:
    """Refuses content that a `PolicyModule` did not save.

    Raises:
        ValueError: a required key is missing.
    """
    if not isinstance(checkpoint, dict) or any(name not in checkpoint for name in needed):
        found = sorted(map(str, checkpoint))[:8] if isinstance(checkpoint, dict) else type(checkpoint).__name__
        raise ValueError(f"{where} is not a checkpoint of a PolicyModule: it lacks one of {needed}, and holds {found}")


def read_safely(file: Path, where: str) -> Any:
    """Content of a `torch.save` file on the meta device (no tensor values), without warnings; never executes code.

    Raises:
        ValueError: the file cannot be read without executing code, or not at all.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return read_in_thread(file, where)


def read_in_thread(file: Path, where: str) -> Any:
    """As `read_safely`, for any thread: leaves the filters of warnings, which all threads share, as they are."""
    try:
        return torch.load(file, map_location="meta", weights_only=True)
    except pickle.UnpicklingError as error:
        if found := re.search(r"(?i)unsupported global:? (?:GLOBAL )?(\S+)", str(error)):
            raise ValueError(f"{where} holds code, which is never executed: {found[1]}") from None
        raise ValueError(f"{where} cannot be read: it is damaged, or no checkpoint") from None
    except Exception as error:  # a damaged archive raises all kinds of errors
        raise ValueError(f"{where} cannot be read: {describe(error)}") from None
