"""Checkpoint files: a digest that is verified before their content is used, and reading that executes no code."""

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

log = logging.getLogger(__name__)

# A checkpoint file is a zip archive, and its digest is the archive's comment: one file, renamed atomically, so a crash
# cannot leave file and digest inconsistent, and other readers of zip archives (`torch.load`) ignore it. The digest is
# XXH3 (128 bits) of the archive without the comment. It detects damage; it is not a signature.

DIGEST_PREFIX = b"lit-async-rl xxh3:"
COMMENT_BYTES = len(DIGEST_PREFIX) + 32  # bytes
END_OF_ARCHIVE = b"PK\5\6"  # begins the last record of a zip archive: 22 bytes, ending with the comment's length
CHUNK_BYTES = 1 << 24
OF_POLICY = ("version", "updated", "random_state")  # keys of a checkpoint of a `PolicyModule`, beside Lightning's
# inode, size and time of change of verified files by path, and the keys of their content
_verified_files: dict[str, tuple[tuple[int, int, int], Any]] = {}


class DigestWriter:
    """Writer for an empty binary file; computes a digest of all bytes written."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._hash = xxhash.xxh3_128()

    def write(self, data: Any) -> int:
        self._hash.update(data)
        self._file.write(data)
        return memoryview(data).nbytes

    def flush(self) -> None:
        self._file.flush()

    def finish_archive(self) -> None:
        """Writes the digest as the comment of the zip archive."""
        self._file.seek(-2, os.SEEK_END)  # the length of the comment, 0 so far
        self._file.write(struct.pack("<H", COMMENT_BYTES) + DIGEST_PREFIX + self._hash.hexdigest().encode())


def check_file(file: Path, where: str, is_of_policy: bool = True) -> None:
    """Refuses a checkpoint file that is damaged, not a checkpoint, or would execute code when loaded.

    With `is_of_policy`, a `PolicyModule` must have saved it. Each file is read once per process; further calls for it
    are free. `where` is the prefix of messages.

    Raises:
        ValueError: the file is refused; gives the reason.
    """
    status = file.stat()
    identity = status.st_ino, status.st_size, status.st_mtime_ns
    known, keys = _verified_files.get(str(file), (None, None))
    if known != identity:
        with file.open("rb") as opened:
            _check_digest(opened, where)
        content = read_safely(file, where)
        keys = dict.fromkeys(content) if isinstance(content, dict) else type(content)
        _verified_files[str(file)] = (identity, keys)
    if is_of_policy:
        check_content(keys, where, ("state_dict", *OF_POLICY))


def _check_digest(file: BinaryIO, where: str) -> None:
    damaged = f"{where} is damaged: its bytes do not match the digest that was saved with them. Use another checkpoint"
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - COMMENT_BYTES - 22))
    tail = file.read()
    if len(tail) < COMMENT_BYTES + 22 or (DIGEST_PREFIX not in tail and not tail.startswith(END_OF_ARCHIVE)):
        end = tail.rfind(END_OF_ARCHIVE)
        is_cut = end >= 0 and int.from_bytes(tail[end + 20 : end + 22], "little") != len(tail) - end - 22
        if is_cut or not zipfile.is_zipfile(file):
            raise ValueError(f"{where} is not a complete checkpoint: it is truncated, or another kind of file")
        log.warning(
            "%s has no digest, so damage to it cannot be detected: another program or an earlier version of "
            "lit-async-rl saved this checkpoint",
            where,
        )
        return
    length = struct.pack("<H", COMMENT_BYTES)
    if not tail.startswith(END_OF_ARCHIVE) or tail[20:22] != length or not tail[22:].startswith(DIGEST_PREFIX):
        raise ValueError(damaged)
    digest = xxhash.xxh3_128()
    file.seek(0)
    remaining = size - COMMENT_BYTES - 2
    while remaining:
        if not (chunk := file.read(min(CHUNK_BYTES, remaining))):
            break
        digest.update(chunk)
        remaining -= len(chunk)
    digest.update(b"\0\0")  # the comment's length when the digest was computed
    if digest.hexdigest().encode() != tail[-32:]:
        raise ValueError(damaged)


def check_content(checkpoint: Any, where: str, needed: tuple[str, ...]) -> None:
    """Refuses content that was not saved by a `PolicyModule`.

    Raises:
        ValueError: a required key is missing.
    """
    if not isinstance(checkpoint, dict) or any(name not in checkpoint for name in needed):
        kind = checkpoint if isinstance(checkpoint, type) else type(checkpoint)
        found = sorted(map(str, checkpoint))[:8] if isinstance(checkpoint, dict) else kind.__name__
        raise ValueError(
            f"{where} is not a checkpoint of a PolicyModule: it must have all of the keys {needed}, but has {found}"
        )


def read_safely(file: Path, where: str, *, with_values: bool = False) -> Any:
    """Content of a `torch.save` file, without warnings; never executes code.

    Args:
        file: to read.
        where: of messages.
        with_values: False puts tensors on the meta device; True maps the file into memory, so that values are read
            when they are used.

    Raises:
        ValueError: the file is damaged, or cannot be read without executing code.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return read_in_thread(file, where, with_values=with_values)


def read_in_thread(file: Path, where: str, *, with_values: bool = False) -> Any:
    """As `read_safely`, for any thread: does not change the filters of warnings, which all threads share."""
    device = "cpu" if with_values else "meta"
    try:
        return torch.load(file, map_location=device, weights_only=True, mmap=with_values)
    except pickle.UnpicklingError as error:
        if match := re.search(r"(?i)unsupported global:? (?:GLOBAL )?(\S+)", str(error)):
            raise ValueError(
                f"{where} is refused, because it contains code (which was not executed): {match[1]}"
            ) from None
        raise ValueError(f"{where} cannot be read: it is damaged, or not a checkpoint") from None
    except Exception as error:  # a damaged archive raises all kinds of errors
        raise ValueError(f"{where} cannot be read: {describe(error)}") from None
