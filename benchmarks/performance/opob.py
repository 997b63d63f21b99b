"""Cost of the off-policy optimal baseline as a share of the training step: ghost norms, or a pass per trajectory.

Runs alternate; shares are ratios of medians.

    python benchmarks/performance/opob.py --output opob.json

Generation is excluded, which makes the shares larger than in a real run.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import tempfile
import time
from pathlib import Path

import lightning.pytorch as pl
import torch
from transformers import LlamaConfig

from lit_async_rl.assets import asset
from lit_async_rl.baselines.optimal import Norms, OptimalBaseline
from lit_async_rl.corrections import SequenceTruncatedIS
from lit_async_rl.corrections.weights import CurrentProximal
from lit_async_rl.losses import Reinforce
from lit_async_rl.training.module import PolicyModule
from lit_async_rl.types import RolloutBatch


def make_batch(rows: int, prompt: int, completion: int, group_size: int = 8) -> RolloutBatch:
    """A batch of random tokens and rewards."""
    shape = (rows, prompt + completion)
    mask = torch.zeros(shape, dtype=torch.bool)
    mask[:, prompt:] = True
    return RolloutBatch(
        input_ids=torch.randint(2, 90, shape),
        attention_mask=torch.ones(shape, dtype=torch.bool),
        loss_mask=mask,
        behavior_logprobs=torch.where(mask, -1.0, 0.0),
        versions=torch.zeros(shape, dtype=torch.long),
        advantages=torch.where(mask, 1.0, 0.0),
        token_weights=mask.float() / mask.sum(),
        rewards=torch.rand(rows),
        group_index=torch.arange(rows) // group_size,
    )


@functools.cache
def make_large() -> str:
    """Configuration of a Llama with 110M parameters."""
    folder = tempfile.mkdtemp()
    config = LlamaConfig(
        vocab_size=32_000,
        hidden_size=768,
        intermediate_size=2048,
        num_hidden_layers=12,
        num_attention_heads=12,
        tie_word_embeddings=True,
        pad_token_id=0,
    )
    config.save_pretrained(folder)
    return folder


def step_s(module: PolicyModule, batch: RolloutBatch, optimizer: torch.optim.Optimizer) -> float:
    """Processor seconds of one forward, backward and optimizer step, in one thread."""
    began = time.process_time()
    optimizer.zero_grad()
    module.training_step(batch, 0).backward()
    optimizer.step()
    return time.process_time() - began


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    variants = {"plain": None, "ghost": OptimalBaseline(), "per_trajectory": OptimalBaseline(Norms.PER_TRAJECTORY)}
    table: dict[str, dict[str, float]] = {}
    shapes = [(False, 8, 9, 9), (False, 64, 9, 9), (False, 256, 9, 9), (False, 8, 32, 96), (False, 32, 32, 96)]
    for large, rows, prompt, completion in [*shapes, (True, 8, 32, 96)]:
        batch = make_batch(rows, prompt, completion)
        ready = {}
        for name, baseline in variants.items():
            if name == "per_trajectory" and rows > 64:
                continue
            module = PolicyModule(
                make_large() if large else asset("sort_policy"),
                Reinforce(),
                CurrentProximal(),
                correction=SequenceTruncatedIS(cap=8.0),
                baseline=baseline,
                learning_rate=1e-6,
                random_init=large,
            )
            module.trainer = pl.Trainer(accelerator="cpu", logger=False)
            ready[name] = (module, module.configure_optimizers())
        seconds: dict[str, list[float]] = {name: [] for name in ready}
        for turn in range(args.repeats + 1):
            for name, (module, optimizer) in ready.items():
                taken = step_s(module, batch, optimizer)
                if turn:  # the first warms up
                    seconds[name].append(taken)
        medians = {name: statistics.median(values) for name, values in seconds.items()}
        key = f"{'110M, ' if large else ''}{rows} x ({prompt} + {completion})"
        table[key] = {name: median / medians["plain"] - 1 for name, median in medians.items() if name != "plain"}
        shares = ", ".join(f"{name} +{share:.0%}" for name, share in table[key].items())
        print(f"{key:22} tokens: {shares} of a step of {medians['plain'] * 1e3:.1f} ms", flush=True)
    if args.output is not None:
        args.output.write_text(json.dumps(table, indent=2) + "\n")


if __name__ == "__main__":
    main()
