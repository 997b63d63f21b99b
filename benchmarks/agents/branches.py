"""Does an agent with branches learn the same on prefix trees as on separate rows? Pairs of runs, one for each seed.

The run on separate rows samples and records its rollouts; the run on trees trains on this tape. Two runs that sample
are not comparable: an agent's calls meet in the engine as time has it, so that even two equal runs end up to 0.1 apart.

    python benchmarks/agents/branches.py --seeds 0 1 2 3 4 --out results/agent_branches
    python benchmarks/agents/branches.py --seeds 0 1 2 3 4 --out results/agent_branches \
        --output docs/measurements/agent_branches.json

The agent has a system prompt of 512 tokens, asks the policy for the successors of four digits in one conversation, and
then for one more in each of four branches of it. Its reward is the share of correct answers. Groups are of eight
episodes, so a group is a tree of three levels with 32 leaves. The policy has two layers, and is made first: it imitates
answers of which three in ten are predecessors.

`first gradient` and `last weights` are norms of differences between the two ways, divided by the norm of one of them:
of the gradients in the first step, and of the weights in the end less those of the start.

Resumable: runs with a result are skipped.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import statistics
import string
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import lightning.pytorch as pl
import torch
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer

import lit_async_rl as rl
from benchmarks.common.measurement import measurement, write_measurement
from lit_async_rl.problem import Prompt
from lit_async_rl.runtime.files import replacing
from lit_async_rl.training.trackers import CSVLog

SYSTEM = "".join(random.Random(0).choices(string.ascii_lowercase + " ", k=512))
NUM_SHARED = 4
NUM_BRANCHES = 4
MICRO_BATCHES = 2
RIGHT = 0.7  # of the answers that the policy imitates
WAYS: Mapping[str, Any] = {"rows": None, "trees": rl.PrefixTreePacking()}
LAST = 2  # validations whose mean is the accuracy at the end


def question(digit: int) -> str:
    """Asks for the digit after this one."""
    return f"plus one: {digit}="


class Agent:
    """Asks four times in one conversation, and then in four branches of it; reward: share of correct answers."""

    async def __call__(self, prompt: Prompt, client: Any) -> float:
        chance = random.Random(prompt.text)
        messages: list[Any] = [{"role": "system", "content": SYSTEM}]
        shared = [await self._ask(client, messages, chance.randrange(10)) for _ in range(NUM_SHARED)]
        digits = [chance.randrange(10) for _ in range(NUM_BRANCHES)]
        found = await asyncio.gather(*(self._ask(client, list(messages), digit) for digit in digits))
        return statistics.fmean(shared + found)

    async def _ask(self, client: Any, messages: list[Any], digit: int) -> bool:
        messages.append({"role": "user", "content": question(digit)})
        response = await client.chat.completions.create(model="policy", messages=messages)
        message = response.choices[0].message
        messages.append(message)
        return bool(message.content == str((digit + 1) % 10))


def make_policy(folder: Path, steps: int) -> None:
    """Writes a policy that answers with the next digit or the one before, by imitation."""
    start = rl.asset("small_sort_policy")
    tokenizer = AutoTokenizer.from_pretrained(start)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(start, max_position_embeddings=1024)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: min(1, n / 20) * (1 - n / steps))
    chance = random.Random(0)
    begin = tokenizer.encode(SYSTEM, add_special_tokens=False)
    for step in range(steps):
        rows = []
        labels = []
        for _ in range(16):
            row = list(begin)
            label = [-100] * len(row)
            for _ in range(12):
                digit = chance.randrange(10)
                given = tokenizer.encode(question(digit), add_special_tokens=False)
                text = str((digit + (1 if chance.random() < RIGHT else -1)) % 10)
                answer = [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id]
                row += given + answer
                label += [-100] * len(given) + answer
            rows.append(row)
            labels.append(label)
        logits = model(torch.tensor(rows)).logits[:, :-1]
        loss = cross_entropy(logits.flatten(0, 1), torch.tensor(labels)[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if step % 20 == 0:
            print(f"imitation, step {step}: {loss.item():.3f} nats a token", flush=True)
    model.save_pretrained(folder)
    tokenizer.model_max_length = model.config.max_position_embeddings
    tokenizer.save_pretrained(folder)


class Recorder(pl.Callback):
    """Held-out rewards by optimizer step, the gradient of the first step, and what training adds to the weights."""

    def __init__(self) -> None:
        self.rewards: dict[int, float] = {}
        self.gradient: torch.Tensor | None = None
        self.learned = torch.zeros(())

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.learned = -_weights(pl_module)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.learned += _weights(pl_module)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not trainer.sanity_checking:
            self.rewards[trainer.global_step] = float(trainer.callback_metrics["val/reward"])

    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Any) -> None:
        if self.gradient is None:
            gradients = [p.grad.flatten() for p in pl_module.parameters() if p.grad is not None]
            self.gradient = torch.cat(gradients).clone()


def _weights(module: pl.LightningModule) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in module.parameters()])


def run(way: str, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """Trains one seed in one way."""
    recorder = Recorder()
    log = CSVLog(options.out / f"{way}{seed}", name="")
    tape = str(options.out / f"tape{seed}")
    is_recorded = way == "rows"
    engine = rl.AgentEngine(rl.EmbeddedEngine(seed=seed), Agent(), chat_template="calculator_chat.jinja")
    chance = random.Random(seed)
    prompts = [{"prompt": str(chance.randrange(10**9)), "answer": ""} for _ in range(10_000)]
    held_out = [{"prompt": str(10**9 + n), "answer": ""} for n in range(options.held_out)]
    began = time.process_time()
    trainer = rl.fit(
        str(options.out / "policy"),
        prompts,
        recipe=None,
        engine=engine,
        packing=WAYS[way],
        max_steps=options.steps,
        max_staleness=0,
        groups_per_step=4,
        group_size=8,
        micro_batches_per_step=MICRO_BATCHES,
        learning_rate=options.learning_rate,
        sampling={"max_tokens": 4},
        validation=rl.Validation(prompts=held_out, batch_size=options.held_out),
        val_check_interval=MICRO_BATCHES * options.steps // 4,
        check_val_every_n_epoch=None,
        callbacks=[recorder, *([rl.RolloutTape(tape)] if is_recorded else [])],
        admission=None if is_recorded else rl.FromTape(tape),
        accelerator="cpu",
        seed=seed,
        logger=log,
    )
    if trainer.global_step < options.steps:
        raise SystemExit(f"{way}, seed {seed}: stopped after {trainer.global_step} steps")
    torch.save([recorder.gradient, recorder.learned], options.out / f"{way}{seed}.pt")
    return {
        "seconds": time.process_time() - began,
        "held_out": {str(step): value for step, value in recorder.rewards.items()},
        **engine.metrics(),
    }


def at_end(found: Mapping[str, Any]) -> float:
    """Mean of the last held-out rewards."""
    values = [value for _, value in sorted(found["held_out"].items(), key=lambda item: int(item[0]))]
    return statistics.fmean(values[-LAST:])


def differences_of(folder: Path, seed: int) -> list[float]:
    """Of the first gradient, and of what was learned, relative."""
    rows, trees = (torch.load(folder / f"{way}{seed}.pt", weights_only=True) for way in WAYS)
    return [float((a - b).norm() / a.norm()) for a, b in zip(rows, trees, strict=True)]


def summary(
    found: Mapping[str, Mapping[str, Any]], seeds: Sequence[int], options: argparse.Namespace
) -> dict[str, Any]:
    """The measurement of finished pairs."""
    rows = []
    differences = []
    for seed in seeds:
        ends = {way: at_end(found[f"{way}{seed}"]) for way in WAYS}
        start = found[f"rows{seed}"]["held_out"]
        differences.append(ends["trees"] - ends["rows"])
        apart = [f"{value:.1g}" for value in differences_of(options.out, seed)]
        rows.append([seed, round(min(start.values()), 3), *(round(end, 3) for end in ends.values()), *apart])
    mean = statistics.fmean(differences)
    spread = 2.776 * statistics.stdev(differences) / math.sqrt(len(seeds))  # Student's t of five pairs
    return measurement(
        "agent_branches",
        round(mean, 3),
        "held-out reward at the end on prefix trees minus that on separate rows, mean of the pairs",
        columns=["seed", "lowest held-out reward", "last, rows", "last, trees", "first gradient", "last weights"],
        rows=rows,
        command=f"python benchmarks/agents/branches.py --seeds {' '.join(map(str, seeds))} --steps {options.steps} "
        "--output docs/measurements/agent_branches.json",
        machine=f"{options.machine}; the interval is 95 % of the mean of the pairs",
        interval=[round(mean - spread, 3), round(mean + spread, 3)],
        runs=dict(found),
    )


def main() -> None:
    """Runs the pairs that have no result, one process each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--held_out", type=int, default=48, help="held-out episodes")
    parser.add_argument("--learning_rate", type=float, default=1e-3)
    parser.add_argument("--imitation", type=int, default=200, help="steps in which the policy is made")
    parser.add_argument("--out", type=Path, default=Path("results/agent_branches"))
    parser.add_argument("--output", type=Path, help="file of the measurement")
    parser.add_argument("--machine", default="one thread of two shared cores")
    parser.add_argument("--one", nargs=2, metavar=("WAY", "SEED"), help="this run, in this process")
    options = parser.parse_args()
    torch.set_num_threads(1)
    options.out.mkdir(parents=True, exist_ok=True)
    if options.one is not None:
        way, seed = options.one
        result = run(way, int(seed), options)
        with replacing(options.out / f"{way}{seed}.json") as file:
            file.write(json.dumps(result, indent=1).encode())
        return
    if not (options.out / "policy" / "config.json").exists():
        make_policy(options.out / "policy", options.imitation)
    found = {}
    for seed in options.seeds:
        for way in WAYS:
            path = options.out / f"{way}{seed}.json"
            if not path.exists():
                shared = ("steps", "held_out", "learning_rate", "out")
                settings = [part for name in shared for part in (f"--{name}", str(getattr(options, name)))]
                subprocess.run([sys.executable, __file__, "--one", way, str(seed), *settings], check=True)
            found[f"{way}{seed}"] = json.loads(path.read_text())
            print(f"{way}, seed {seed}: held-out reward {found[f'{way}{seed}']['held_out']}", flush=True)
    if options.output is not None:
        write_measurement(options.output, summary(found, options.seeds, options))


if __name__ == "__main__":
    main()
