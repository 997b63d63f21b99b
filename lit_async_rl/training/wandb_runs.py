"""Runs of Weights & Biases: their group and tags, best values, steps that a resumed run repeats, and the sync command.

W&B appends what a resumed run logs, while `metrics.csv` sets the rows after the checkpoint aside. What a W&B run of
this folder has logged is read from its transaction log (`wandb/*run-*-ID/run-ID.wandb`), and logged once.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import struct
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import Logger, WandbLogger

STEP = "trainer/global_step"  # under which Lightning logs the step
BEST_METRICS = re.compile(
    r"reward/mean|(val|eval)/(.+/)?(reward|pass@\d+)|lm_eval/.+/(acc|acc_norm|exact_match|pass@\d+)(,.+)?"
)
MAX_GROUP_CHARS = 128
NO_SEEDS = ("seed_everything", "num_threads", "ckpt_path", "logger", "max_steps", "max_time", "max_epochs")
Metrics = Mapping[str, Any]


def label_run(logger: WandbLogger, name: str, settings: Mapping[str, Any], tags: Sequence[str]) -> None:
    """Groups a run that has not begun with those that differ in the seed only.

    What the logger was made with, and the variables `WANDB_RUN_GROUP`, `WANDB_JOB_TYPE` and `WANDB_TAGS`, stay.

    Args:
        logger: of the run.
        name: what the group is called, before a fingerprint of the settings.
        settings: by section of the command line; seed, logger and length of the run make no difference.
        tags: of the run.
    """
    kept = json.dumps(_without(settings), sort_keys=True, default=str)
    fingerprint = hashlib.sha256(kept.encode()).hexdigest()[:6]
    labels: dict[str, Any] = {
        "group": f"{name[: MAX_GROUP_CHARS - 7]}-{fingerprint}",
        "job_type": "train",
        "tags": [tag[:64] for tag in tags],
    }
    variables = {"group": "WANDB_RUN_GROUP", "job_type": "WANDB_JOB_TYPE", "tags": "WANDB_TAGS"}
    for key, value in labels.items():
        if logger._wandb_init.get(key) is None and not os.environ.get(variables[key]):
            logger._wandb_init[key] = value


def _without(settings: Mapping[str, Any]) -> dict[str, Any]:
    kept = {key: value for key, value in settings.items() if key not in NO_SEEDS}
    return {key: _without(value) if isinstance(value, Mapping) else value for key, value in kept.items()}


# -- Best values, and steps once --------------------------------------------------------------------------------------


def prepare_logging(logger: WandbLogger, folder: Path | None = None, run_id: str = "") -> None:
    """Lets a logger keep the largest reward and accuracy in the run's summary, and log each value of a step once.

    In a sweep the summary keeps the last value, which is what W&B's search compares.

    Args:
        logger: that has not logged yet.
        folder: where the run that goes on has its `wandb/`; None is a new run.
        run_id: of the run that goes on.
    """
    known = {} if folder is None else logged_metrics(folder, run_id)
    is_sweep = bool(os.environ.get("WANDB_SWEEP_ID"))
    prefix = f"{logger._prefix}{logger.LOGGER_JOIN_CHAR}" if logger._prefix else ""
    defined: set[str] = set()
    log = partial(type(logger).log_metrics, logger)

    def log_once(metrics: Metrics, step: int | None = None) -> None:
        logged = () if step is None else known.get(step, ())
        new = {name: value for name, value in metrics.items() if prefix + name not in logged}
        for name in () if is_sweep else new.keys() - defined:
            defined.add(name)
            if BEST_METRICS.fullmatch(name):
                logger.experiment.define_metric(prefix + name, step_metric=STEP, step_sync=True, summary="max")
        if new.keys() - {"epoch"}:
            log(new, step=step)

    logger.log_metrics = log_once  # type: ignore[method-assign]


def logged_metrics(folder: Path, run_id: str) -> dict[int, set[str]]:
    """Names of the metrics that a run has logged, by step.

    Args:
        folder: with `wandb/`.
        run_id: of W&B.
    """
    names: dict[int, set[str]] = defaultdict(set)
    for file in sorted(folder.glob(f"wandb/*run-*-{run_id}/run-{run_id}.wandb")):
        for record in read_records(file):
            if record.WhichOneof("record_type") != "history":
                continue
            row = {(item.nested_key[0] if item.nested_key else item.key): item for item in record.history.item}
            if STEP in row:
                names[int(float(row[STEP].value_json))] |= {name for name in row if name[0] != "_" and name != STEP}
    return dict(names)


def read_records(file: Path) -> Iterator[Any]:
    """The records of a transaction log, as protocol buffers; it ends where a crash cut it off.

    The format is LevelDB's log (blocks of 32 KiB, pieces with a checksum of 4 bytes, a length of 2 and a kind of 1)
    behind a header of 7 bytes.
    """
    from google.protobuf.message import DecodeError
    from wandb.proto import wandb_internal_pb2

    data = file.read_bytes()
    place = 7
    pieces = b""
    while place + 7 <= len(data):
        if 2**15 - place % 2**15 < 7:  # too short for a piece
            place += 2**15 - place % 2**15
            continue
        length, kind = struct.unpack_from("<HB", data, place + 4)
        pieces += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # all of a record, or its last piece
            try:
                yield wandb_internal_pb2.Record.FromString(pieces)  # type: ignore[attr-defined]
            except DecodeError:
                return
            pieces = b""


# -- After an offline run ---------------------------------------------------------------------------------------------


def sync_command(loggers: Sequence[Logger]) -> str | None:
    """The command that uploads an offline run, with what the run before a resume left; None without such a run."""
    folders: list[str] = []
    for logger in loggers:
        run = logger._experiment if isinstance(logger, WandbLogger) else None
        if run is None or not getattr(run, "offline", False):
            continue
        present = Path(run.dir).parent  # the files of a run lie in `files/` of its folder
        folders += [os.path.relpath(folder) for folder in sorted(present.parent.glob(f"offline-run-*-{run.id}"))]
    if not folders:
        return None
    append = ["--append"] if len(folders) > 1 and _sync_appends() else []
    return shlex.join(["wandb", "sync", *append, *folders])


def _sync_appends() -> bool:
    """Whether this version of W&B has `sync --append`; newer ones (0.31) add to a run without being told."""
    from wandb.cli.cli import cli

    return any(option.name == "append" for option in cli.commands["sync"].params)
