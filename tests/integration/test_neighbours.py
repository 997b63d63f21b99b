"""The parts beside the core: without any of them the quick start trains to the same parameters.

Which of them may import which is import-linter's (`make layers`); `lab` imports some others. A sweep leaves out each
alone.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
NEIGHBOURS = ("agents", "judges", "lab", "ray", "report", "sandbox", "simulation", "vllm")
TRAIN = [
    *("train", "--config", str(ROOT / "configs/quickstart.yaml"), "--data.max_staleness", "0"),
    *("--trainer.max_steps", "2", "--data.groups_per_step", "4", "--data.group_size", "4"),
    *("--data.validation.prompts", "null", "--trainer.enable_progress_bar", "false"),
]
RUN_ALL = """
import os, sys
import jsonargparse, lightning.pytorch, omegaconf, rich, torch, torchmetrics, transformers, wandb
from lightning.pytorch import cli, loggers

words = sys.argv[1:]
for tree in words.pop(0).split(os.pathsep):
    if (child := os.fork()) == 0:
        os.chdir(tree)
        output = os.open("said", os.O_WRONLY | os.O_CREAT)
        os.dup2(output, 1)
        os.dup2(output, 2)
        sys.path.insert(0, tree)
        from lit_async_rl.cli.console import main
        main(words)
        os._exit(0)  # without the exit handlers of the process that this one was forked from
    os.waitpid(child, 0)
"""


def without(names: tuple[str, ...], tree: Path) -> Path:
    """The package in a folder of its own, without some of its folders."""

    def left_out(folder: str, entries: list[str]) -> list[str]:
        is_top = Path(folder) == ROOT / "lit_async_rl"
        return [entry for entry in entries if is_top and entry in names]

    shutil.copytree(ROOT / "lit_async_rl", tree / "lit_async_rl", ignore=left_out)
    return tree


def digest(tree: Path) -> str:
    """SHA-256 of the parameters of the run in a folder."""
    (path,) = tree.rglob("last.ckpt")
    state = torch.load(path, weights_only=True)["state_dict"]
    return hashlib.sha256(b"".join(state[name].numpy().tobytes() for name in sorted(state))).hexdigest()


@pytest.mark.timeout(660)
@pytest.mark.parametrize(
    "left_out",
    [
        pytest.param([NEIGHBOURS, ("simulation",), ("vllm",)], marks=pytest.mark.slow, id="all"),
        pytest.param([(name,) for name in NEIGHBOURS], marks=pytest.mark.sweep, id="each"),
    ],
)
def test_a_run_needs_no_neighbour(left_out, tmp_path):
    trees = {names: without(names, tmp_path / "-".join(["without", *names])) for names in [(), *left_out]}
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": ""}
    command = [sys.executable, "-c", RUN_ALL, os.pathsep.join(map(str, trees.values())), *TRAIN]
    subprocess.run(command, env=environment, check=True, timeout=600)
    for names in left_out:
        said = (trees[names] / "said").read_text()
        assert "Traceback" not in said, said
        assert digest(trees[names]) == digest(trees[()]), said
        assert not any((trees[names] / "lit_async_rl" / name).exists() for name in names)
