"""Tokens per second of several ranks are those of all of them."""

import csv
from pathlib import Path

import pytest
from launch import launch

from lit_async_rl.replay.tape import Tape

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_the_tokens_of_all_ranks_count(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    flags = ["--config", "configs/quickstart.yaml", "--config", "configs/strategies/ddp.yaml"]
    flags += ["--trainer.devices", "2", "--trainer.accelerator", "cpu", "--trainer.max_steps", "3"]
    flags += ["--data.groups_per_step", "4", "--data.group_size", "2", "--data.validation.prompts", "null"]
    flags += ["--trainer.callbacks+", "RolloutTape", "--trainer.callbacks.folder", str(tmp_path / "tape")]
    flags += ["--trainer.logger.init_args.save_dir", str(tmp_path)]
    launch(ROOT / "scripts/train.py", flags, 2, timeout_s=180)
    with (tmp_path / "quickstart/version_0/metrics.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["perf/tokens_per_s"]]
    found = [float(row["perf/tokens_per_s"]) * float(row["perf/step_s"]) for row in rows]
    expected = [sum(group.num_tokens for group in step.groups) for step in Tape(tmp_path / "tape").steps()]
    assert found == pytest.approx(expected, rel=1e-3)
