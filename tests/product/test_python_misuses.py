"""The Python API with the mistakes that people make: an exception, soon, whose message names the setting."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
import yaml

MISTAKES = yaml.safe_load((Path(__file__).parent / "python_misuses.yaml").read_text())
PRELUDE = """
import lightning.pytorch as pl
import lit_async_rl as rl
MODEL = rl.asset("small_sort_policy")
ROWS = [{"prompt": f"{n}=", "answer": str(n)} for n in range(10, 30)]
def reward(prompt, completion):
    return float(len(completion))
SMALL = dict(groups_per_step=2, group_size=2, sampling=rl.SamplingParams(max_tokens=4))
CPU = dict(accelerator="cpu", devices=1, enable_progress_bar=False)
def fit(**changes):
    given = dict(model=MODEL, prompts=ROWS, reward=reward, max_steps=1) | SMALL | CPU | changes
    return rl.fit(given.pop("model"), given.pop("prompts"), given.pop("reward"), **given)
def data(**changes):
    return rl.RolloutDataModule(**(dict(prompts=ROWS, reward=reward) | SMALL | changes))
def module():
    return rl.PolicyModule(MODEL)
def trainer(**changes):
    return rl.Trainer(**(dict(max_steps=1) | CPU | changes))
def plain(**changes):
    return pl.Trainer(**(dict(max_steps=1, logger=False, enable_checkpointing=False) | CPU | changes))
"""


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda one: one["call"][:70])
@pytest.mark.timeout(180)
def test_a_mistake_in_python_is_named(mistake, process, tmp_path):
    (tmp_path / "here").mkdir()
    done = process.run([], tmp_path / "here", code=PRELUDE + mistake["call"], limit_s=60.0)
    assert not done.timed_out, done.said
    assert done.status == 1, done.said
    *_, last = (line for line in done.said.splitlines() if re.match(r"[\w.]+(Error|Exception)\b", line))
    assert mistake["says"] in last
    assert mistake.get("may_leave") or not os.listdir(tmp_path / "here"), "refused, and left something behind"
