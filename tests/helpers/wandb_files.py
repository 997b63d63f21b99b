"""Files of offline W&B runs, once they are whole."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lit_async_rl.training.wandb_runs import read_records


def whole_records(file: Path) -> list[Any]:
    """The records of a run that has been finished: W&B's service writes the last ones after `finish` has returned."""
    deadline = time.monotonic() + 60
    while True:
        records = list(read_records(file))
        if any(record.WhichOneof("record_type") == "exit" for record in records):
            return records
        assert time.monotonic() < deadline, f"{file} has no end"
        time.sleep(0.1)


def records_of(folder: Path) -> Iterator[Any]:
    """Records of the finished runs in a folder, in order."""
    for file in sorted(folder.rglob("*.wandb")):
        yield from whole_records(file)
