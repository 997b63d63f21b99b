"""Runs of Weights & Biases: group and tags, best values, steps repeated by a resumed run, and the sync command.

A resumed run repeats steps after its checkpoint. `metrics.csv` sets their earlier rows aside, but W&B keeps both.
Metrics in a W&B run's transaction log (`wandb/*run-*-ID/run-ID.wandb`) are therefore not logged again.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import Logger, WandbLogger

STEP = "trainer/global_step"  # Lightning's name of the step
BEST_METRICS = re.compile(
    r"reward/mean|(val|eval)/(.+/)?(reward|pass@\d+)|lm_eval/.+/(acc|acc_norm|exact_match|pass@\d+)(,.+)?"
)
MAX_GROUP_CHARS = 128
UNGROUPED_SETTINGS = ("seed_everything", "num_threads", "ckpt_path", "logger", "max_steps", "max_time", "max_epochs")
Metrics = Mapping[str, Any]


def label_run(logger: WandbLogger, name: str, settings: Mapping[str, Any], tags: Sequence[str]) -> None:
    """Puts a run into a group with runs that differ only in the seed, before it begins.

    Arguments of the logger and the variables `WANDB_RUN_GROUP`, `WANDB_JOB_TYPE` and `WANDB_TAGS` take precedence.

    Args:
        logger: logger of the run.
        name: first part of the group's name; a fingerprint of the settings is added.
        settings: settings by section of the command line; `UNGROUPED_SETTINGS` do not affect the group.
        tags: tags of the run.
    """
    group_settings = json.dumps(_without_ungrouped(settings), sort_keys=True, default=str)
    fingerprint = hashlib.sha256(group_settings.encode()).hexdigest()[:6]
    labels: dict[str, tuple[str, Any]] = {
        "group": ("WANDB_RUN_GROUP", f"{name[: MAX_GROUP_CHARS - 7]}-{fingerprint}"),
        "job_type": ("WANDB_JOB_TYPE", "train"),
        "tags": ("WANDB_TAGS", [tag[:64] for tag in tags]),
    }
    for key, (variable, value) in labels.items():
        if logger._wandb_init.get(key) is None and not os.environ.get(variable):
            logger._wandb_init[key] = value


def _without_ungrouped(settings: Mapping[str, Any]) -> dict[str, Any]:
    kept = {key: value for key, value in settings.items() if key not in UNGROUPED_SETTINGS}
    return {key: _without_ungrouped(value) if isinstance(value, Mapping) else value for key, value in kept.items()}


# -- Best values, and each step logged once ---------------------------------------------------------------------------


def prepare_logging(logger: WandbLogger, folder: Path | None = None, run_id: str = "") -> None:
    """Keeps the largest reward and accuracy in the run's summary, and logs each value of a step once.

    In a sweep, the summary keeps the last value, which W&B's search compares.

    Args:
        logger: logger that has not logged yet.
        folder: folder with the `wandb/` of the resumed run; None for a new run.
        run_id: id of the resumed run.
    """
    known = defaultdict(set, {} if folder is None else logged_metrics(folder, run_id))
    is_sweep = bool(os.environ.get("WANDB_SWEEP_ID"))
    prefix = f"{logger._prefix}{logger.LOGGER_JOIN_CHAR}" if logger._prefix else ""
    defined: set[str] = set()
    log = partial(type(logger).log_metrics, logger)

    def log_once(metrics: Metrics, step: int | None = None) -> None:
        logged: set[str] = set() if step is None else known[step]
        new = {name: value for name, value in metrics.items() if prefix + name not in logged}
        for name in () if is_sweep else new.keys() - defined:
            defined.add(name)
            if BEST_METRICS.fullmatch(name):
                logger.experiment.define_metric(prefix + name, step_metric=STEP, step_sync=True, summary="max")
        if new.keys() - {"epoch"}:
            log(new, step=step)
            # the validation of a last step is logged when it ends, and again when the run does
            logged |= {prefix + name for name in new.keys() - {"epoch"}}

    logger.log_metrics = log_once  # type: ignore[method-assign]


def logged_metrics(folder: Path, run_id: str) -> dict[int, set[str]]:
    """Names of the metrics that a run has logged, by step.

    Args:
        folder: folder with the `wandb/` of the run.
        run_id: W&B's id of the run.
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


LOG_HEADER_BYTES = 7
LOG_BLOCK_BYTES = 2**15
FRAGMENT_HEADER_BYTES = 7  # checksum (4), length (2) and kind (1)
WHOLE_RECORD = 1
LAST_FRAGMENT = 4


def read_records(file: Path) -> Iterator[Any]:
    """The records of a transaction log, as protocol buffers, up to one that a crash cut off.

    The format is a header followed by LevelDB's log: blocks of 32 KiB with fragments of records.
    """
    from google.protobuf.message import DecodeError
    from wandb.proto import wandb_internal_pb2

    data = file.read_bytes()
    position = LOG_HEADER_BYTES
    record = b""
    while position + FRAGMENT_HEADER_BYTES <= len(data):
        rest_of_block = LOG_BLOCK_BYTES - position % LOG_BLOCK_BYTES
        if rest_of_block < FRAGMENT_HEADER_BYTES:  # padding
            position += rest_of_block
            continue
        length = int.from_bytes(data[position + 4 : position + 6], "little")
        kind = data[position + 6]
        position += FRAGMENT_HEADER_BYTES
        record += data[position : position + length]
        position += length
        if kind in (WHOLE_RECORD, LAST_FRAGMENT):
            try:
                yield wandb_internal_pb2.Record.FromString(record)  # type: ignore[attr-defined]
            except DecodeError:
                return
            record = b""


# -- After an offline run ---------------------------------------------------------------------------------------------


def sync_command(loggers: Sequence[Logger]) -> str | None:
    """Command that uploads an offline run, including its part before a resume; None if no run is offline."""
    folders: list[str] = []
    for logger in loggers:
        run = logger._experiment if isinstance(logger, WandbLogger) else None
        if run is None or not getattr(run, "offline", False):
            continue
        run_folder = Path(run.dir).parent  # `run.dir` is its subfolder `files`
        folders += [os.path.relpath(folder) for folder in sorted(run_folder.parent.glob(f"offline-run-*-{run.id}"))]
    if not folders:
        return None
    append = ["--append"] if len(folders) > 1 and _sync_appends() else []
    return shlex.join(["wandb", "sync", *append, *folders])


def _sync_appends() -> bool:
    """Whether this version of W&B has `sync --append`; newer versions (0.31) always append."""
    from wandb.cli.cli import cli

    return any(option.name == "append" for option in cli.commands["sync"].params)
