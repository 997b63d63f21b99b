"""Process of one run: an empty folder, its output in `log.txt`, and its result, written last."""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lightning.pytorch.utilities.exceptions import SIGTERMException

from lit_async_rl.utils.device_memory import is_out_of_memory

RESULT = "result.json"
FULL = "out_of_memory.json"  # what it is called where the machine had no room: no result, the run may be tried again


@contextmanager
def recorded(folder: Path, arguments: list[str], *, continues: bool = False) -> Iterator[dict[str, Any]]:
    """Empties the folder, and writes `result.json` last: a folder without it is of a run that did not finish.

    Everything printed goes to `log.txt`. A run that `continues` from a checkpoint keeps its folder, and its `wall_s` is
    that of the last part. A run that fails (with a non-finite loss, say) has finished: its error is the
    result, unless the machine or its GPU was full (`out_of_memory.json`). Yields the result, to add to.
    """
    if not continues:
        shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    log = (folder / "log.txt").open("a", buffering=1)
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
    sys.stdout = sys.stderr = log
    began = time.monotonic()
    result: dict[str, Any] = {"command": ["scripts/train.py", *arguments], "error": None}
    name = RESULT
    try:
        yield result
    except SIGTERMException:  # a SystemExit, too; ended from outside, it has not finished
        raise
    except (Exception, SystemExit) as error:  # the parser exits
        result["error"] = f"{type(error).__name__}: {error}"
        name = FULL if is_out_of_memory(error) else RESULT
    result["wall_s"] = time.monotonic() - began
    write_result(folder, result, name)


def csv_logger(folder: Path) -> list[str]:
    """Arguments that log into this folder."""
    settings = {"save_dir": str(folder), "name": "", "version": "", "flush_logs_every_n_steps": 50}
    return ["--trainer.logger", json.dumps({"class_path": "CSVLog", "init_args": settings})]


def write_result(folder: Path, result: dict[str, Any], name: str = RESULT) -> None:
    """Writes a result atomically."""
    part = folder / f"{name}.part"
    part.write_text(json.dumps(result, indent=1))
    part.replace(folder / name)
