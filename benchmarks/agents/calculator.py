"""Does an agent learn the calculator task at a staleness of 4? One run for each seed.

    python benchmarks/agents/calculator.py --seeds 0 1 2 --out results/agent_calculator
    python benchmarks/agents/calculator.py --seeds 0 1 2 --out results/agent_calculator \
        --output docs/measurements/agent_calculator.json

The agent is written against `openai.AsyncOpenAI`, and is given such a client of the endpoint, or with `--in_process`
the client in the process, which samples the same in less time. It plays through messages and a tool, in up to three
turns, with one branch (a second attempt from the question) and one side call (a title, which does not train). Its
reward is the mean over both attempts, and so is the held-out reward: the accuracy of one attempt, sampled at
temperature 1. The held-out accuracy is the share of sums for which both attempts are right.

The engine is the embedded one, or with `--engine` two replicas of it on Ray, or vLLM (in an environment that has it):

    .venv-vllm/bin/python benchmarks/agents/calculator.py --engine vllm --seeds 0 --steps 20 --out results/agent_vllm

Resumable: seeds with a result are skipped.
"""

from __future__ import annotations

import argparse
import csv
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import lightning.pytorch as pl

import lit_async_rl as rl
from benchmarks.common.measurement import measurement, write_measurement
from lit_async_rl.agents.calculator_agent import CalculatorAgent
from lit_async_rl.problem import Prompt
from lit_async_rl.runtime.files import replacing
from lit_async_rl.training.trackers import CSVLog

OLDEST = "sample/staleness_max"
LAST_STEPS = 3  # evaluations whose mean is the accuracy at the end
ENGINES: Mapping[str, Callable[[int], rl.RolloutEngine]] = {
    "embedded": lambda seed: rl.EmbeddedEngine(seed=seed),
    "ray": lambda seed: rl.RayEngine(rl.EmbeddedEngine(seed=seed), replicas=2, num_cpus=0.5),
    "vllm": lambda seed: rl.VLLMEngine(seed=seed, max_num_seqs=256, kv_cache_memory_gb=0.25),
}


class Agent(CalculatorAgent):
    """Two attempts at a sum, and a title."""

    async def __call__(self, prompt: Prompt, client: Any) -> float:
        first = await super().__call__(prompt, client)
        title = [{"role": "system", "content": "title"}, {"role": "user", "content": prompt.text}]
        await client.chat.completions.create(messages=title, model="policy", max_tokens=4)
        second = await super().__call__(prompt, client)  # from the same message: a branch
        return (first + second) / 2


class HeldOut(pl.Callback):
    """Held-out rewards of each validation, by optimizer step."""

    def __init__(self) -> None:
        self.rewards: dict[int, float] = {}
        self.accuracy: dict[int, float] = {}

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not trainer.sanity_checking:
            self.rewards[trainer.global_step] = float(trainer.callback_metrics["val/reward"])
            self.accuracy[trainer.global_step] = float(trainer.callback_metrics["val/pass@1"])


def run(seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """Trains one seed."""
    steps: int = options.steps
    held_out = HeldOut()
    log = CSVLog(options.out / f"seed{seed}", name="")
    engine = rl.AgentEngine(
        ENGINES[options.engine](seed),
        Agent(),
        clients=None if options.in_process else rl.EndpointClients(),
        parser=rl.CalculatorParser(),
        chat_template="calculator_chat.jinja",
    )
    began = time.monotonic()
    trainer = rl.fit(
        rl.asset("calculator_policy"),
        rl.Addition(num_digits=3, size=100_000, seed=seed),
        recipe=None,
        engine=engine,
        max_steps=steps,
        max_staleness=4,
        groups_per_step=16,
        group_size=8,
        learning_rate=2.5e-4,
        sampling={"max_tokens": 12},
        validation=rl.Validation(
            prompts=rl.Addition(num_digits=3, size=256, split="held_out"), batch_size=256, success_reward=1.0
        ),
        val_check_interval=10,
        check_val_every_n_epoch=None,
        callbacks=[held_out],
        accelerator="cpu",
        seed=seed,
        logger=log,
    )
    if trainer.global_step < steps:
        raise SystemExit(f"seed {seed} was stopped after {trainer.global_step} steps, and has no result")
    rewards = held_out.rewards
    with Path(log.log_dir, "metrics.csv").open(newline="") as file:
        ages = [float(row[OLDEST]) for row in csv.DictReader(file) if row.get(OLDEST)]
    return {
        "client": "in the process" if options.in_process else "`openai`",
        "engine": options.engine,
        "seed": seed,
        "steps": trainer.global_step,
        "seconds": time.monotonic() - began,
        "held_out_reward": {str(step): value for step, value in rewards.items()},
        "held_out_accuracy": {str(step): value for step, value in held_out.accuracy.items()},
        "steps_to_0.9": next((step for step, value in sorted(rewards.items()) if value >= 0.9), None),
        "max_staleness": max(ages),
        **engine.metrics(),
    }


def summary(results: Sequence[Mapping[str, Any]], options: argparse.Namespace) -> dict[str, Any]:
    """The measurement of finished seeds."""
    rows = []
    ends = []
    for found in results:
        rewards = [value for _, value in sorted(found["held_out_reward"].items(), key=lambda item: int(item[0]))]
        ends.append(statistics.fmean(rewards[-LAST_STEPS:]))
        drift = sum(found[f"agent/drift_{kind}"] for kind in ("template", "tokens", "other"))
        row = [
            found["client"],
            found["seed"],
            rewards[0],
            ends[-1],
            found["steps_to_0.9"] or "not reached",
            found["max_staleness"],
        ]
        rows.append([*(round(one, 3) if isinstance(one, float) else one for one in row), drift])
    return measurement(
        "agent_calculator",
        round(statistics.fmean(ends), 3),
        f"held-out reward of an agent after {options.steps} steps, mean of the last {LAST_STEPS} evaluations and of "
        "the seeds",
        columns=[
            "client",
            "seed",
            "at the start",
            "at the end",
            "0.9 at step",
            "oldest token, versions",
            "drift",
        ],
        rows=rows,
        command=f"python benchmarks/agents/calculator.py --steps {options.steps} "
        f"--seeds {' '.join(str(found['seed']) for found in results)}",
        machine=f"{options.machine}; the interval is the range over seeds",
        interval=[round(min(ends), 3), round(max(ends), 3)],
    )


def main() -> None:
    """Runs the seeds that have no result, one process each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--out", type=Path, default=Path("results/agent_calculator"))
    parser.add_argument("--in_process", action="store_true", help="the client in the process")
    parser.add_argument("--engine", choices=list(ENGINES), default="embedded")
    parser.add_argument("--output", type=Path, help="file of the measurement")
    parser.add_argument("--machine", default="two cores")
    parser.add_argument("--one", type=int, help="this seed, in this process")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    if options.one is not None:
        found = run(options.one, options)
        with replacing(options.out / f"seed{options.one}.json") as file:
            file.write(json.dumps(found, indent=1).encode())
        return
    results = []
    for seed in options.seeds:
        path = options.out / f"seed{seed}.json"
        if not path.exists():
            arguments = ["--one", str(seed), "--steps", str(options.steps), "--out", str(options.out)]
            arguments += ["--engine", options.engine, *(["--in_process"] if options.in_process else [])]
            subprocess.run([sys.executable, __file__, *arguments], check=True)
        found = json.loads(path.read_text())
        results.append(found)
        print(f"seed {seed}: held-out reward {found['held_out_reward']}")
    if options.output is not None:
        write_measurement(options.output, summary(results, options))


if __name__ == "__main__":
    main()
