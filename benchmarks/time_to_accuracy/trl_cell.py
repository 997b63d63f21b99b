"""TRL's GRPOTrainer on a workload, with this trainer's model, prompts, schedule and evaluation.

    python -m venv /tmp/trl && /tmp/trl/bin/pip install torch==2.13.0 trl==1.16.0 transformers==5.19.0 peft

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
from lightning.pytorch.accelerators import CPUAccelerator
from safetensors.torch import load_file

from benchmarks.time_to_accuracy.slow_reward import SlowReward
from benchmarks.time_to_accuracy.snapshots import Snapshot
from lit_async_rl.cli.app import AsyncRLCLI
from lit_async_rl.losses import PPOClip
from lit_async_rl.losses.aggregation import TokenMean
from lit_async_rl.rewards import exact_match
from lit_async_rl.runtime.lifetime import die_with_parent
from lit_async_rl.training.module import PolicyModule

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
        trained = [name for name, parameter in cli.model.named_parameters() if parameter.requires_grad]
        kept = {name: state[name] for name in trained}
        found.append(Snapshot(int(row["step"]), float(row["wall_s"]), int(float(row["tokens"])), state=kept))
    shutil.rmtree(work)
    return found, [float(row["load"]) for row in rows]


def settings_of(cli: AsyncRLCLI, every_n_steps: int, seed: int) -> dict[str, Any]:
    """Settings for TRL, which trains on a step in one piece: micro-batches do not change the mean over tokens.

    Raises:
        ValueError: the run's settings are none that TRL has.
    """
    model = cli.model
    data = cli.datamodule
    objective = cli.model.objective
    slow = isinstance(data.reward, SlowReward)
    same = type(objective.loss) is PPOClip and type(data.aggregation) is TokenMean
    if not same or not (slow or data.reward is exact_match) or objective.correction or objective.baseline:
        raise ValueError("TRL is compared with PPOClip, TokenMean, exact_match or SlowReward and nothing else")
    num_steps = cli.trainer.max_steps
    prompts = [data.prompts[n] for n in range(min(NUM_PROMPTS, len(data.prompts)))]
    rates = [model.scheduler.rate(model.learning_rate, step, num_steps) for step in range(num_steps)]
    momenta = [model.scheduler.momentum(step, num_steps) for step in range(num_steps)]
    return {
        "model": model.model,
        "prompts": [list(prompt.messages) if prompt.messages else prompt.text for prompt in prompts],
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
        "lora": lora_of(model),
        "bf16": cli.trainer.precision == "bf16-mixed",
        "use_cpu": isinstance(cli.trainer.accelerator, CPUAccelerator),
        "reward": "last_number" if slow else "exact_match",
        "latency": data.reward.settings() if slow else None,
        "seed": seed,
    }


def lora_of(model: PolicyModule) -> dict[str, Any] | None:
    """The adapters' settings, as peft has them; None if all weights are trained."""
    found = getattr(model.policy.lm, "peft_config", None)
    if not found:
        return None
    one = next(iter(found.values()))
    modules = one.target_modules if isinstance(one.target_modules, str) else sorted(one.target_modules)
    return {"r": one.r, "lora_alpha": one.lora_alpha, "lora_dropout": one.lora_dropout, "target_modules": modules}


def as_metrics(steps: pd.DataFrame) -> pd.DataFrame:
    """TRL's steps under the names of this trainer's metrics: it generates, then trains, and publishes nothing."""
    seconds = steps["wall_s"].diff().fillna(steps["wall_s"])
    waited = steps[["generation_s", "reward_s"]]
    generation, rewards = (waited.diff().fillna(waited)[name] for name in waited)
    return pd.DataFrame(
        {
            "step": steps["step"],
            "bench/wall_s": steps["wall_s"],
            "bench/cpu_s": steps["cpu_s"],
            "bench/tokens": steps["tokens"],
            "perf/step_s": seconds,
            "perf/rollout_wait_s": generation + rewards,
            "perf/weight_sync_s": 0.0,
            "perf/engine_idle_share": 1.0 - generation / seconds,
            "sample/staleness_mean": 0.0,
            "sample/staleness_max": 0.0,
        }
    )
