"""The command that resumes a run."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path


def resume_command(checkpoint: str, args: Sequence[str] | None = None) -> str:
    """The command line that began this run, with `--ckpt_path`.

    Args:
        checkpoint: to go on from.
        args: of the command; None is `sys.argv`.
    """
    given = list(sys.argv[1:] if args is None else args)
    kept = []
    while given:
        word = given.pop(0)
        if word == "--ckpt_path":
            del given[:1]
        elif not word.startswith("--ckpt_path="):
            kept.append(word)
    script = sys.argv[0]
    program = ["python", script] if script.endswith(".py") else [Path(script).name, "train"]
    return shlex.join([*program, *kept, "--ckpt_path", checkpoint])
