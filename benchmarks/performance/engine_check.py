"""Processor time that the default callback `EngineCheck` takes in the quick start, which checks every version.

python benchmarks/performance/engine_check.py --num_steps 40 --seeds 0 1 2
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from typing import Any

import torch

from lit_async_rl.callbacks import EngineCheck
from lit_async_rl.cli.app import AsyncRLCLI

HOOKS = ("on_train_batch_start", "on_before_optimizer_step", "on_train_batch_end")


class Timed(EngineCheck):
    """Counts the processor seconds of its own hooks."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds = 0.0
        self.errors: list[float] = []
        for name in HOOKS:
            setattr(self, name, self._timed(getattr(self, name)))

    def _timed(self, hook: Any) -> Any:
        def call(*args: Any) -> None:
            self.errors += [value for name, value in self._pending_metrics.items() if name == "engine/logprob_error"]
            began = time.thread_time()
            hook(*args)
            self.seconds += time.thread_time() - began

        return call


def measure(seed: int, num_steps: int) -> dict[str, float]:
    """One run: shares of the processor time, and the largest mean error of a check."""
    with tempfile.TemporaryDirectory() as folder:
        flags = (
            f"--seed_everything {seed} --trainer.max_steps {num_steps} --trainer.logger.init_args.save_dir {folder} "
        )
        flags += "--data.validation.prompts null --trainer.val_check_interval null --trainer.enable_progress_bar false "
        flags += "--trainer.enable_checkpointing false --defaults.engine_check null"
        cli = AsyncRLCLI(["--config", "configs/quickstart.yaml", *flags.split()])
        check = Timed()
        cli.trainer.callbacks.append(check)
        began = time.thread_time(), time.process_time()
        cli.trainer.fit(cli.model, datamodule=cli.datamodule)
        thread = time.thread_time() - began[0]
        process = time.process_time() - began[1]
    return {
        "share_of_trainer_thread": check.seconds / thread,
        "share_of_process": check.seconds / process,
        "num_checks": check.num_checks,
        "largest_error": max(check.errors),
    }


def main() -> None:
    """Prints the runs and their mean."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num_steps", type=int, default=40)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    runs = [measure(seed, arguments.num_steps) for seed in arguments.seeds]
    for run in runs:
        print(json.dumps(run))
    print("mean", json.dumps({name: statistics.mean(run[name] for run in runs) for name in runs[0]}))


if __name__ == "__main__":
    main()
