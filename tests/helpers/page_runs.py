"""Two steps of training with a configuration that a page shows, by the command, and what a run must not write."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml
from markdown_blocks import ROOT, blocks_of
from preloaded import Preloaded

TIMEOUT_S = 240.0
DIGITS = {"prompts": {"class_path": "SortDigits", "init_args": {"size": 2, "split": "held_out"}}}


def shown(page: Path, folder: Path, name: str) -> Path:
    """The page's Python as files, and its first configuration that names a class."""
    for block in blocks_of(page):
        if block.language == "python" and block.module:
            (folder / f"{block.module}.py").write_text(block.code)
    path = folder / "shown.yaml"
    path.write_text(next(block.code for block in blocks_of(page) if block.language == "yaml" and name in block.code))
    return path


def train(
    folder: Path,
    config: Path,
    *flags: str,
    policy: str = "sort_policy",
    validation: dict[str, Any] | None = DIGITS,
    process: Preloaded | None = None,
    **variables: str,
) -> Path:
    """Two steps of the quick start with a configuration of the page, by the command; the folder of its runs.

    A preloaded process takes the place of a new one.
    """
    small = folder / "small.yaml"
    data: dict[str, Any] = {"groups_per_step": 2, "group_size": 2, "aggregation": "TokenMean"}
    data["validation"] = validation or {"prompts": None}
    model = {"loss": "PPOClip", "proximal": None, "correction": None, "baseline": None, "scheduler": None}
    model["model"] = str(ROOT / "lit_async_rl" / "assets" / policy)
    trainer = {"max_steps": 2, "val_check_interval": 2 if validation else None, "enable_progress_bar": False}
    small.write_text(yaml.safe_dump({"data": data, "model": model, "trainer": trainer}))
    configs = [ROOT / "configs" / "quickstart.yaml", small, config]
    words = [word for path in configs for word in ("--config", str(path))]
    words += ["--trainer.logger.save_dir", str(folder / "runs"), "--trainer.logger.version", "0", *flags]
    paths = {"PYTHONPATH": os.pathsep.join([str(ROOT), str(folder)])}
    paths["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    if process is not None:
        done = process.run(["train", *words], folder, environment=paths | variables, limit_s=TIMEOUT_S)
        status = done.status
        said = done.said
    else:
        command = [sys.executable, str(ROOT / "scripts" / "train.py"), *words]
        environment = os.environ | paths | variables
        ended = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S)
        status = ended.returncode
        said = ended.stdout + ended.stderr
    (folder / "said.txt").write_text(said)
    assert status == 0, said[-6000:]
    return folder / "runs"


def metrics_of(runs: Path) -> dict[str, list[float]]:
    """The values of each metric that a run has logged."""
    lines = [line.split(",") for line in next(runs.rglob("metrics.csv")).read_text().splitlines()]
    columns = zip(*lines, strict=True)
    return {name: [float(value) for value in values if value] for name, *values in columns}


def check_that_no_file_has(secrets: set[str], folder: Path, *, but: Path | None = None) -> None:
    """Looks through all that a run has written, `said.txt` with its output included, apart from one folder."""
    written = [path for path in folder.rglob("*") if path.is_file() and (but is None or but not in path.parents)]
    assert {path.suffix for path in written} >= {".yaml", ".ckpt", ".csv", ".txt"}
    for path in written:
        data = path.read_bytes()
        assert not any(secret.encode() in data for secret in secrets), f"{path} has a key"
