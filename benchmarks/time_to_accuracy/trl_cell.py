"""TRL's GRPOTrainer on a workload, with this trainer's model, prompts, schedule and evaluation.

    python -m venv /tmp/trl && /tmp/trl/bin/pip install torch==2.13.0 trl==1.16.0 transformers==5.19.0

TRL has two threads, as this trainer's engine and trainer have together. (It is faster so than with one.)
"""

from __future__ import annotations

import csv
import json
import os
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
from safetensors.torch import load_file

from benchmarks.time_to_accuracy.snapshots import Snapshot
from lit_async_rl.cli.app import AsyncRLCLI
from lit_async_rl.losses import PPOClip
from lit_async_rl.losses.aggregation import TokenMean
from lit_async_rl.rewards import exact_match
from lit_async_rl.utils.processes import die_with_parent

PYTHON = os.environ.get("TRL_PYTHON", "/tmp/trl/bin/python")
COMMON = Path(__file__).parents[1] / "common"
NUM_THREADS = 2
NUM_PROMPTS = 20_000  # of which a run takes as many as it needs, in an order of its own
LM = "policy.lm."  # of a module's weights: those of the Hugging Face model


def run(cli: AsyncRLCLI, every_n_steps: int, seed: int, folder: Path) -> tuple[list[Snapshot], list[float]]:
    """Trains; returns the snapshots, and the load of the machine at each.

    Raises:
        ValueError: the run's settings are none that TRL has.
        FileNotFoundError: TRL's environment is missing.
        RuntimeError: TRL failed.
    """
    if not Path(PYTHON).exists():
        raise FileNotFoundError(f"TRL_PYTHON={PYTHON!r}: no such file; it is the Python of TRL's own environment")
    work = folder / "trl"
    work.mkdir()
    settings = work / "settings.json"
    settings.write_text(json.dumps(settings_of(cli, every_n_steps, seed) | {"folder": str(work)}))
    command = [PYTHON, str(Path(__file__).with_name("trl_worker.py")), str(settings)]
    environment = {**os.environ, "PYTHONPATH": str(COMMON), "OMP_NUM_THREADS": str(NUM_THREADS)}
    ends = partial(die_with_parent, os.getpid())  # a killed cell leaves nobody who writes into its folder
    process = subprocess.run(command, env=environment, stdout=sys.stdout, stderr=sys.stderr, preexec_fn=ends)
    if process.returncode:
        raise RuntimeError(f"TRL failed, see {folder / 'log.txt'}")
    as_metrics(pd.read_csv(work / "steps.csv")).to_csv(folder / "metrics.csv", index=False)
    with (work / "snapshots.csv").open() as file:
        rows = list(csv.DictReader(file))
    found = []
    for row in rows:
        state = {LM + name: tensor for name, tensor in load_file(work / f"{row['step']}.safetensors").items()}
        kept = {name: state[name] for name in cli.model.state_dict()}
        found.append(Snapshot(int(row["step"]), float(row["wall_s"]), int(float(row["tokens"])), state=kept))
    shutil.rmtree(work)
    return found, [float(row["load"]) for row in rows]


def settings_of(cli: AsyncRLCLI, every_n_steps: int, seed: int) -> dict[str, Any]:
    """What TRL's side is told. It trains on a step in one piece: micro-batches do not change the mean over tokens.

    Raises:
        ValueError: the run's settings are none that TRL has.
    """
    model = cli.model
    data = cli.datamodule
    objective = cli.model.objective
    same = type(objective.loss) is PPOClip and type(data.aggregation) is TokenMean and data.reward is exact_match
    if not same or objective.correction or objective.baseline:
        raise ValueError("TRL is compared with PPOClip, TokenMean, exact_match and nothing else")
    num_steps = cli.trainer.max_steps
    prompts = [data.prompts[n] for n in range(min(NUM_PROMPTS, len(data.prompts)))]
    rates = [model.scheduler.rate(model.learning_rate, step, num_steps) for step in range(num_steps)]
    momenta = [model.scheduler.momentum(step, num_steps) for step in range(num_steps)]
    return {
        "model": model.model,
        "prompts": [prompt.text for prompt in prompts],
        "answers": [prompt.answer for prompt in prompts],
        "groups_per_step": data.groups_per_step,
        "group_size": data.group_size,
        "max_tokens": data.sampling.max_tokens,
        "clip": [objective.loss.clip_low, objective.loss.clip_high],
        "learning_rate": model.learning_rate,
        "betas": list(model.betas),
        "rates": rates,
        "momenta": None if momenta[0] is None else momenta,
        "max_grad_norm": cli.trainer.gradient_clip_val,
        "max_steps": num_steps,
        "every_n_steps": every_n_steps,
        "num_threads": NUM_THREADS,
        "seed": seed,
    }


def as_metrics(steps: pd.DataFrame) -> pd.DataFrame:
    """TRL's steps under the names of this trainer's metrics: it generates, then trains, and publishes nothing."""
    seconds = steps["wall_s"].diff().fillna(steps["wall_s"])
    generation = steps["generation_s"].diff().fillna(steps["generation_s"])
    return pd.DataFrame(
        {
            "step": steps["step"],
            "bench/wall_s": steps["wall_s"],
            "bench/cpu_s": steps["cpu_s"],
            "bench/tokens": steps["tokens"],
            "perf/step_s": seconds,
            "perf/rollout_wait_s": generation,
            "perf/weight_sync_s": 0.0,
            "perf/engine_idle_share": 1.0 - generation / seconds,
            "sample/staleness_mean": 0.0,
            "sample/staleness_max": 0.0,
        }
    )
