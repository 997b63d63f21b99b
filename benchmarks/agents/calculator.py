"""Does an agent learn the calculator task at a staleness of 4? One run for each seed.

    python benchmarks/agents/calculator.py --seeds 0 1 2 --out results/agent_calculator

The agent plays through messages and a tool, in up to three turns, with one branch (a second attempt from the question)
and one side call (a title, which does not train). Its reward is the mean over both attempts. Accuracy is the share of
held-out sums for which that is 1, sampled at temperature 1.

Resumable: seeds with a result are skipped.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl

import lit_async_rl as rl
from lit_async_rl.tasks.calculator_agent import ADD, CalculatorAgent
from lit_async_rl.types import Prompt
from lit_async_rl.utils.files import replacing


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


def run(seed: int, steps: int, out: Path) -> dict[str, Any]:
    """Trains one seed."""
    held_out = HeldOut()
    engine = rl.AgentEngine(
        rl.EmbeddedEngine(seed=seed), Agent(), parser=rl.CalculatorParser(), chat_template="calculator_chat.jinja"
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
        validation=rl.Validation(prompts=rl.Addition(num_digits=3, size=256, split="held_out"), batch_size=256),
        scoring={"success_reward": 1.0},
        val_check_interval=10,
        check_val_every_n_epoch=None,
        callbacks=[held_out],
        accelerator="cpu",
        seed=seed,
        default_root_dir=str(out / f"seed{seed}"),
    )
    rewards = held_out.rewards
    return {
        "seed": seed,
        "steps": trainer.global_step,
        "seconds": time.monotonic() - began,
        "held_out_reward": {str(step): value for step, value in rewards.items()},
        "held_out_accuracy": {str(step): value for step, value in held_out.accuracy.items()},
        "steps_to_0.9": next((step for step, value in sorted(rewards.items()) if value >= 0.9), None),
        "tool": ADD["function"]["name"],
        **engine.metrics(),
    }


def main() -> None:
    """Runs the seeds that have no result, one process each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--out", type=Path, default=Path("results/agent_calculator"))
    parser.add_argument("--one", type=int, help="this seed, in this process")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    if options.one is not None:
        found = run(options.one, options.steps, options.out)
        with replacing(options.out / f"seed{options.one}.json") as file:
            file.write(json.dumps(found, indent=1).encode())
        return
    for seed in options.seeds:
        path = options.out / f"seed{seed}.json"
        if not path.exists():
            arguments = ["--one", str(seed), "--steps", str(options.steps), "--out", str(options.out)]
            subprocess.run([sys.executable, __file__, *arguments], check=True)
        found = json.loads(path.read_text())
        print(f"seed {seed}: held-out reward {found['held_out_reward']}")


if __name__ == "__main__":
    main()
