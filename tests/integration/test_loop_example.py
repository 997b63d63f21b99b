"""`examples/loop.py`: the loop without Lightning learns, keeps the bound, ends, and computes what a run computes."""

import ast
import os
import runpy
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from groups import group

from lit_async_rl.corrections.weights import CurrentProximal
from lit_async_rl.data.collate import collate_step
from lit_async_rl.models.loading import load_policy
from lit_async_rl.models.policy import CausalPolicy
from lit_async_rl.training.objective import Objective

ROOT = Path(__file__).parents[2]
LOOP = ROOT / "examples" / "loop.py"
NUM_STEPS = 20


def record(line: str) -> dict[str, float]:
    """The numbers of a printed step, by name."""
    words = line.split()
    return {name: float(value) for name, value in zip(words[::2], words[1::2], strict=True)}


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


@pytest.mark.slow
def test_it_learns_within_the_bound_where_lightning_is_not_installed_and_ctrl_c_ends_it(tmp_path):
    for name in ("lightning", "pytorch_lightning"):
        (tmp_path / f"{name}.py").write_text(f"raise ImportError('{name} is not installed')\n")
    search_path = os.pathsep.join([str(tmp_path), str(ROOT)])
    environment = {**os.environ, "PYTHONPATH": search_path, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(LOOP), "--steps", "1000000"]
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    process = subprocess.Popen(command, cwd=tmp_path, env=environment, **pipes)
    try:
        lines = [process.stdout.readline() for _ in range(NUM_STEPS)]
        process.send_signal(signal.SIGINT)
        rest, errors = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == 0, errors
    assert not errors
    *more, last = rest.splitlines()
    steps = [record(line) for line in [*lines, *more]]
    assert last == f"interrupted after {len(steps)} steps"
    assert [step["version"] for step in steps] == list(range(len(steps)))
    assert all(step["max_staleness"] <= 4 for step in steps)
    assert max(step["mean_staleness"] for step in steps) > 1, "sampling never ran ahead"
    rewards = [step["reward"] for step in steps[:NUM_STEPS]]
    assert mean(rewards[-5:]) > mean(rewards[:5]) + 0.2, rewards


@pytest.mark.slow
def test_it_ends_by_itself_and_leaves_no_thread():
    before = set(threading.enumerate())
    steps = runpy.run_path(str(LOOP))["main"](steps=2)
    assert [(step.step, step.version) for step in steps] == [(0, 0), (1, 1)]
    left = [thread.name for thread in set(threading.enumerate()) - before]
    assert not [name for name in left if name == "producer" or name.startswith("reward-")]


def test_its_loss_is_that_of_a_run():
    loop = runpy.run_path(str(LOOP))
    groups = [group([0.0, 1.0, 0.0], [3, 5, 2], index=0), group([1.0, 1.0, 0.0], [1, 4, 6], index=1)]
    (batch,) = collate_step(
        groups,
        advantage=loop["ADVANTAGE"],
        aggregation=loop["AGGREGATION"],
        num_micro_batches=1,
        pad_token_id=0,
        temperature=0.7,
    )
    policy = CausalPolicy(load_policy(loop["rl"].asset("sort_policy")))
    objective = Objective(loop["LOSS"], CurrentProximal(), loop["CORRECTION"], None, 0.0, 0.0)
    expected, _ = objective(policy, None, batch, version=3)
    wanted = torch.autograd.grad(expected, list(policy.parameters()))
    found = loop["step_loss"](policy, batch, version=3)
    assert found == expected != 0
    for one, other in zip(torch.autograd.grad(found, list(policy.parameters())), wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_it_is_one_short_file_without_lightning():
    text = LOOP.read_text()
    assert len(text.splitlines()) <= 150
    names = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            names.add(node.module)
        if isinstance(node, ast.Attribute):
            names.add(node.attr)
    assert not [name for name in names if "lightning" in name]
    assert not names & {"Trainer", "PolicyModule", "RolloutDataModule", "fit"}
