"""Cost of the stabilizers: time in their hooks as a share of the training step (forward, backward, optimizer).

Generation is excluded, which makes the shares larger than in a real run. Two models: that of the quick start, with its
step of 256 completions, and a Llama with 110M parameters and a step far smaller than usual, which again makes the
shares larger.

    python benchmarks/performance/stabilizer_overhead.py --output overhead.json
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.profilers import SimpleProfiler
from torch.utils.data import DataLoader
from transformers import LlamaConfig

from lit_async_rl.callbacks import (
    AdaptiveStaleness,
    CollapseAlarm,
    ESSLearningRate,
    GradientAlignmentControl,
    GradientClipping,
    WeightDriftMonitor,
)
from lit_async_rl.training.module import PolicyModule
from lit_async_rl.types import RolloutBatch

QUICKSTART = "lit_async_rl/assets/sort_policy"
STABILIZERS: dict[str, Callable[[], pl.Callback]] = {
    "GradientAlignmentControl": lambda: GradientAlignmentControl(low=0.0, high=1.0),
    "ESSLearningRate": ESSLearningRate,
    "GradientClipping": lambda: GradientClipping(0.01),
    "CollapseAlarm": CollapseAlarm,
    "CollapseAlarm with cosine": lambda: CollapseAlarm(max_cosine=1.0),
    "AdaptiveStaleness": lambda: AdaptiveStaleness(target_ess_ratio=0.0),
    "WeightDriftMonitor": WeightDriftMonitor,
}


class SynchronizingProfiler(SimpleProfiler):
    """Profiler that synchronizes the GPU at both ends of a section."""

    def start(self, action_name: str) -> None:
        _synchronize()
        super().start(action_name)

    def stop(self, action_name: str) -> None:
        _synchronize()
        super().stop(action_name)


class FixedBatches(pl.LightningDataModule):
    """The same random rollouts in every step."""

    def __init__(self, vocab_size: int, rollouts: int, prompt: int, completion: int, steps: int) -> None:
        super().__init__()
        self.max_staleness = 4
        generator = torch.Generator().manual_seed(0)
        shape = (rollouts, prompt + completion)
        mask = torch.zeros(shape, dtype=torch.bool)
        mask[:, prompt:] = True
        self.batches = [
            RolloutBatch(
                input_ids=torch.randint(vocab_size, shape, generator=generator),
                attention_mask=torch.ones(shape, dtype=torch.bool),
                loss_mask=mask,
                behavior_logprobs=torch.full(shape, -2.0),
                versions=torch.zeros(shape, dtype=torch.long),
                advantages=torch.randn(shape, generator=generator),
                token_weights=mask / mask.sum(),
                rewards=torch.rand(rollouts, generator=generator),
                group_index=torch.arange(rollouts) // 8,
            )
        ] * steps

    def set_max_staleness(self, max_staleness: int) -> None:
        """Does nothing."""

    def train_dataloader(self) -> DataLoader[RolloutBatch]:
        """The batches."""
        return DataLoader(self.batches, batch_size=None)  # type: ignore[arg-type]


def measure(model: str, make: Callable[[], pl.Callback], accelerator: str, random_init: bool, **size: int) -> float:
    """Median seconds in the stabilizer's hooks over median seconds of a step, after warm-up steps."""
    pl.seed_everything(0, verbose=False)
    module = PolicyModule(model, random_init=random_init)
    callback = make()
    data = FixedBatches(vocab_size=module.policy.lm.config.vocab_size, **size)
    with tempfile.TemporaryDirectory() as folder:
        profiler = SynchronizingProfiler(folder, filename="profile")
        trainer = pl.Trainer(
            max_epochs=1,
            accelerator=accelerator,
            devices=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            profiler=profiler,
            callbacks=[callback],
        )
        trainer.fit(module, data)
        durations: dict[str, Any] = profiler.recorded_durations
    hooks = [f"[Callback]{callback.state_key}.{hook}" for hook in ("on_before_backward", "on_before_optimizer_step")]
    hooks.append(f"[Callback]{callback.state_key}.on_train_batch_end")
    spent = sum(statistics.median(durations[hook][2:]) for hook in hooks)
    return spent / statistics.median(durations["run_training_batch"][2:])


def main() -> None:
    """Command line; `--output` also writes JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--accelerator", default="cpu")
    parser.add_argument("--models", nargs="+", choices=["quickstart", "110M"], default=["quickstart", "110M"])
    parser.add_argument("--steps", type=int, default=8)
    args = parser.parse_args()
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    shares: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        LlamaConfig(
            vocab_size=32000,
            hidden_size=768,
            intermediate_size=2048,
            num_hidden_layers=12,
            num_attention_heads=12,
            tie_word_embeddings=True,
        ).save_pretrained(folder)
        sizes = {
            "quickstart": (QUICKSTART, False, dict(rollouts=256, prompt=10, completion=10, steps=args.steps * 3)),
            "110M": (folder, True, dict(rollouts=8, prompt=64, completion=64, steps=args.steps)),
        }
        for name, make in STABILIZERS.items():
            shares[name] = {}
            for size in args.models:
                model, random_init, shape = sizes[size]
                shares[name][size] = measure(model, make, args.accelerator, random_init=random_init, **shape)
            each = "   ".join(f"{size} {share:7.2%}" for size, share in shares[name].items())
            print(f"{name:28} {each}", flush=True)
    if args.output is not None:
        args.output.write_text(json.dumps(shares, indent=2) + "\n")


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
