"""Configuration files on a command line, and its other words."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

NAME = re.compile(r"^(--config=|-c=?(?=.))")  # in the same word as its file


def config_files(args: Sequence[str]) -> Iterator[Path]:
    """Files of `--config` on a command line, in their order."""
    for *_, file in _divided(args)[0]:
        yield Path(NAME.sub("", file)).expanduser()


def files_first(args: Sequence[str]) -> list[str]:
    """The words of a command line, those of `--config` in front: flags override files wherever they stand."""
    files, flags = _divided(args)
    return [word for words in files for word in words] + flags


def _divided(args: Sequence[str]) -> tuple[list[list[str]], list[str]]:
    """`--config FILE`, `--config=FILE` and the like, each as its words, and all other words."""
    files: list[list[str]] = []
    flags: list[str] = []
    left = list(args)
    while left:
        word = left.pop(0)
        if word in ("--config", "-c") and left:
            files.append([word, left.pop(0)])
        elif NAME.match(word):
            files.append([word])
        else:
            flags.append(word)
    return files, flags
