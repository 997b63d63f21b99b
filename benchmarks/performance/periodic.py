"""Wall time of a step of Periodic Asynchrony (arXiv:2511.18871), against the synchronous one and against its bound.

The trainer, its threads and its data path are the real ones; the engine is simulated (slots that are occupied for given
times), and each micro-batch sleeps. Weights move between steps only. With constant latencies the paper's time model is

    synchronous   T_gen + T_train
    periodic      max(T_gen, T_train) + fill + drain

where fill is the time to the first group, drain that of training on the last micro-batch.

    python benchmarks/performance/periodic.py
"""

from __future__ import annotations

import argparse
import logging
import statistics
import time
from typing import Any

import lightning.pytorch as pl

from lit_async_rl.assets import asset
from lit_async_rl.callbacks import WeightSync
from lit_async_rl.data.module import RolloutDataModule
from lit_async_rl.engines.base import SamplingParams
from lit_async_rl.rewards.functions import no_reward
from lit_async_rl.simulation.engine import SimulatedEngine
from lit_async_rl.simulation.latency import Constant
from lit_async_rl.tasks import SortDigits
from lit_async_rl.training.module import PolicyModule


class SlowTraining(pl.Callback):
    """Makes each micro-batch last `micro_batch_s`, and records times."""

    def __init__(self, micro_batch_s: float) -> None:
        self.micro_batch_s = micro_batch_s
        self.steps: list[float] = []
        self._began = self._step_began = 0.0

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._step_began = time.monotonic()

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, index: int) -> None:
        self._began = time.monotonic()

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Sleeps for the rest; runs after the publication."""
        time.sleep(max(0.0, self.micro_batch_s - (time.monotonic() - self._began)))
        if (batch_idx + 1) % trainer.accumulate_grad_batches == 0:
            self.steps.append(time.monotonic() - self._step_began)
            self._step_began = time.monotonic()


def step_s(args: argparse.Namespace, train_s: float, stream: bool) -> float:
    """Median seconds of a step, without the first."""
    slow = SlowTraining(train_s / args.groups_per_step)
    data = RolloutDataModule(
        model=asset("sort_policy"),
        prompts=SortDigits(8, size=1000),
        reward=no_reward,
        engine=SimulatedEngine(Constant(args.latency_s), num_slots=args.num_slots),
        max_staleness=0,
        stream_groups=stream,
        groups_per_step=args.groups_per_step,
        group_size=args.group_size,
        micro_batches_per_step=args.groups_per_step,
        sampling=SamplingParams(max_tokens=4),
    )
    trainer = pl.Trainer(
        accelerator="cpu",
        max_steps=args.num_steps,
        accumulate_grad_batches=args.groups_per_step,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[slow, WeightSync()],
    )
    trainer.fit(PolicyModule(asset("sort_policy")), datamodule=data)
    return statistics.median(slow.steps[1:])


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train_s", type=float, nargs="+", default=[0.8, 1.6, 3.2], help="seconds of training a step")
    parser.add_argument("--latency_s", type=float, default=0.4, help="seconds of a sample")
    parser.add_argument("--num_slots", type=int, default=8)
    parser.add_argument("--groups_per_step", type=int, default=8)
    parser.add_argument("--group_size", type=int, default=4)
    parser.add_argument("--num_steps", type=int, default=5)
    args = parser.parse_args()
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    waves = -(-args.groups_per_step * args.group_size // args.num_slots)
    generate_s = waves * args.latency_s
    fill = -(-args.group_size // args.num_slots) * args.latency_s
    print(f"T_gen {generate_s:.2f} s, fill {fill:.2f} s")
    print(f"{'T_train':>8}{'drain':>8}{'synchronous':>14}{'periodic':>10}{'bound':>8}{'periodic / bound':>18}")
    for train_s in args.train_s:
        drain = train_s / args.groups_per_step
        bound = max(generate_s, train_s) + fill + drain
        before = step_s(args, train_s, stream=False)
        after = step_s(args, train_s, stream=True)
        print(f"{train_s:>8.2f}{drain:>8.2f}{before:>14.2f}{after:>10.2f}{bound:>8.2f}{after / bound:>18.3f}")


if __name__ == "__main__":
    main()
