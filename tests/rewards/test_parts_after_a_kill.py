"""A run with three rewards that is killed goes on with the same parts, and its parts stand in report and W&B."""

import csv
import os
import time
from pathlib import Path

import pytest
import torch
import yaml
from launch import finish, start

import lit_async_rl as rl
from lit_async_rl.replay.tape import Tape
from lit_async_rl.report import write_report
from lit_async_rl.training.wandb_runs import read_records

ROOT = Path(__file__).parents[2]
REWARDS = {
    "answer": "lit_async_rl.exact_match",
    "digits": "lit_async_rl.share_correct",
    "number": "lit_async_rl.last_number",
}
LIMIT_S = 120.0


def configuration(folder: Path, max_steps: int) -> Path:
    """As a user would write it."""
    prompts = {"class_path": "SortDigits", "init_args": {"num_digits": 4, "size": 1000}}
    data = dict(prompts=prompts, reward=REWARDS, advantage="GDPO", admission="FixedLag", max_staleness=2)
    data |= dict(groups_per_step=4, group_size=4, sampling={"max_tokens": 6})
    csv_log = {"class_path": "CSVLog", "init_args": {"save_dir": str(folder), "name": "run"}}
    wandb = {"class_path": "WandbLogger", "init_args": {"save_dir": str(folder), "offline": True}}
    tape = {"class_path": "RolloutTape", "init_args": {"folder": str(folder / "tape")}}
    kept = {"class_path": "ModelCheckpoint"}
    kept["init_args"] = dict(dirpath=str(folder / "kept"), every_n_train_steps=2, save_top_k=-1, save_last=True)
    trainer = dict(accelerator="cpu", devices=1, max_steps=max_steps, enable_progress_bar=False)
    trainer |= {"logger": [csv_log, wandb], "callbacks+": [tape, kept]}
    model = dict(model=rl.asset("small_sort_policy"), learning_rate=1e-3)
    defaults = dict.fromkeys(["checkpoint", "timeline", "engine_check", "gradients", "save_on_sigterm"])
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(dict(seed_everything=0, model=model, data=data, trainer=trainer, defaults=defaults)))
    return path


def parts_of(folder: Path) -> dict[int, list]:
    steps = Tape(str(folder / "tape")).steps()
    return {step.step: [one.reward_parts for group in step.groups for one in group.rollouts] for step in steps}


@pytest.mark.slow
def test_a_killed_run_goes_on_with_the_same_parts_to_the_bit(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.chdir(tmp_path)
    script = ROOT / "scripts/train.py"
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    for folder in (whole, killed):
        folder.mkdir()
    steps = 24
    runs = start(script, ["--config", str(configuration(whole, steps))], 1)
    said = finish(runs, LIMIT_S)
    assert runs[0].returncode == 0, said

    config = configuration(killed, steps)
    (run,) = start(script, ["--config", str(config)], 1)
    deadline = time.monotonic() + LIMIT_S
    last = killed / "kept" / "last.ckpt"
    while not last.is_file():
        assert time.monotonic() < deadline, run.communicate(1.0)
        assert run.returncode is None, run.communicate(1.0)
        time.sleep(0.01)
    run.kill()
    run.communicate(30.0)
    assert run.returncode == -9
    reached = torch.load(os.path.realpath(last), weights_only=True)["global_step"]
    assert 0 < reached < steps

    runs = start(script, ["--config", str(config), "--ckpt_path", str(last)], 1)
    said = finish(runs, LIMIT_S)
    assert runs[0].returncode == 0, said
    expected = parts_of(whole)
    assert len(expected) == steps
    assert parts_of(killed) == expected
    assert all(set(parts) == set(REWARDS) for rows in expected.values() for parts in rows)
    weights = [torch.load(folder / "kept" / "last.ckpt", weights_only=True)["state_dict"] for folder in (whole, killed)]
    assert all(torch.equal(one, other) for one, other in zip(*(w.values() for w in weights), strict=True))

    names = {f"reward/part/{name}" for name in REWARDS}
    (table,) = (whole / "run").rglob("metrics.csv")
    with table.open() as file:
        assert names <= set(next(csv.DictReader(file)))
    report = write_report(table.parent, out=tmp_path / "report.html").read_text()
    assert all(name in report for name in names)
    in_wandb = set()
    for file in whole.rglob("*.wandb"):
        for record in read_records(file):
            if record.WhichOneof("record_type") == "history":
                in_wandb |= {"/".join(item.nested_key) or item.key for item in record.history.item}
    assert names <= in_wandb
