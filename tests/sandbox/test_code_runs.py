"""Runs whose reward is a program's, and the benchmark with hostile programs."""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path

import pytest
from sandboxes import LIMITS, levels

import lit_async_rl as rl
from lit_async_rl.cli.app import main

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))
from benchmarks.rewards.code import make_jobs, measure  # noqa: E402

pytestmark = pytest.mark.skipif(not levels("limits"), reason="needs Linux or macOS")
# The completion is a "program" that is printed: right if the policy has sorted the digits
PRINTED = {"language": "text", "languages": {"text": "cat main.txt"}, "extract": "whole"}
ROWS = [{"prompt": f"{n}=", "inputs": [""], "outputs": ["".join(sorted(str(n)))]} for n in range(10, 42)]
SMALL = dict(groups_per_step=4, group_size=4, sampling={"max_tokens": 4})
CPU = dict(accelerator="cpu", devices=1, enable_progress_bar=False)


def logged(folder):
    with next(folder.rglob("metrics.csv")).open() as file:
        rows = list(csv.DictReader(file))
    return {name: [float(row[name]) for row in rows if row.get(name)] for name in rows[-1]}


@pytest.mark.slow
def test_a_run_with_two_rewards(tmp_path):
    code = rl.CodeReward(**PRINTED, limits=LIMITS, allow_unsandboxed=not levels())
    reward = rl.CombinedReward({"code": code, "short": lambda prompt, completion: float(len(completion) < 4)})
    trainer = rl.fit(
        rl.asset("small_sort_policy"),
        ROWS,
        reward,
        max_steps=2,
        scoring=rl.Scoring(workers=3),
        logger=rl.CSVLog(str(tmp_path)),
        **SMALL,
        **CPU,
    )
    assert trainer.global_step == 2
    found = logged(tmp_path)
    assert len(found["reward/part/code"]) == 2
    assert all(0.0 <= share <= 1.0 and (16 * share).is_integer() for share in found["reward/part/code"])
    assert found["code/num_programs"][-1] >= 32
    assert found["code/num_right"][-1] + found["code/num_wrong"][-1] == found["code/num_programs"][-1]


@pytest.mark.slow
def test_the_configuration_trains_two_steps(tmp_path, monkeypatch):
    """`configs/code_reward.yaml` with another policy and prompts, which need no network."""
    monkeypatch.chdir(ROOT)
    rows = tmp_path / "problems.jsonl"
    rows.write_text("".join(json.dumps(row | {"test_list": ["assert f() == 1"]}) + "\n" for row in ROWS))
    policy = str(rl.asset("small_sort_policy"))
    # what both classes have stays as the configuration says, unless it is given
    settings = {"path": str(rows), "answer_field": None, "as_chat": False, "template": "{prompt}"}
    prompts = {"class_path": "JsonlPrompts", "init_args": settings}
    overlay = {
        "model": {"model": policy, "gradient_checkpointing": False},
        "data": {
            "prompts": prompts,
            "validation": {"prompts": prompts},
            "groups_per_step": 4,
            "group_size": 4,
            "micro_batches_per_step": 1,
            "sampling": {"max_tokens": 4},
            "engine": {"class_path": "EmbeddedEngine"},
        },
        "trainer": {"accelerator": "cpu", "precision": "32-true", "max_steps": 2, "val_check_interval": 2},
    }
    (tmp_path / "overlay.yaml").write_text(json.dumps(overlay))
    flags = ["--config", "configs/code_reward.yaml", "--config", str(tmp_path / "overlay.yaml")]
    flags += ["--trainer.logger.init_args.save_dir", str(tmp_path), "--num_threads", "1"]
    if not levels():
        flags += ["--data.reward.init_args.allow_unsandboxed", "true"]
    main(flags)
    found = logged(tmp_path)
    assert found["code/num_no_code"][-1] >= 32  # digits have no code block: counted, and worth nothing
    assert found["reward/mean"] == [0.0, 0.0]


def test_tests_of_a_problem_stand_in_its_prompt(tmp_path):
    rows = tmp_path / "problems.jsonl"
    rows.write_text(json.dumps({"prompt": "Double.", "test_list": ["assert f(1) == 2", "assert f(2) == 4"]}))
    made = rl.JsonlPrompts(str(rows), answer_field=None, template="{prompt}\n{test_list}")[0]
    assert made.text == "Double.\nassert f(1) == 2\nassert f(2) == 4"
    rows.write_text(json.dumps({"prompt": "Double.", "test_list": [1, {}]}))
    with pytest.raises(ValueError, match="must be text or a number"):
        rl.JsonlPrompts(str(rows), answer_field=None, template="{prompt}\n{test_list}")


@pytest.mark.slow
def test_hostile_programs_among_many_small_ones():
    """The short form of `benchmarks/rewards/code.py`."""
    assert sum(one[2] for one in make_jobs(300, 6)) > 100
    found = measure(number=300, hostile=6, workers=2, allow_unsandboxed=not levels())
    assert found["num_wrong"] == 0
    assert found["level"] in levels("limits")
    assert found["cost_ms"] < 25.0
