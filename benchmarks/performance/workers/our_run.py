"""One run of this trainer through its command line, timed; started by `benchmarks/performance/trl.py`."""

from __future__ import annotations

import argparse
import json
from typing import Any

import lightning.pytorch as pl
from segments import Segments

from lit_async_rl.callbacks import WeightSync
from lit_async_rl.cli.app import AsyncRLCLI
from lit_async_rl.problem import Prompt


def odd_length(prompt: Prompt, completion: str) -> float:
    """Reward with no cost that any model can obtain."""
    return float(len(completion) % 2)


class StepClock(pl.Callback):
    """Ends a segment after each step; runs after all other callbacks."""

    def __init__(self, segments: dict[str, Any]) -> None:
        self.segments = Segments(**segments, read=self.totals)
        self.tokens = 0
        self._step = 0
        self._trainer: pl.Trainer | None = None

    def totals(self) -> dict[str, float]:
        """Totals so far; the engine's thread is the only other one that computes."""
        assert self._trainer is not None
        stats = self._trainer.datamodule.stats()  # type: ignore[attr-defined]
        syncs = [c.total_s for c in self._trainer.callbacks if isinstance(c, WeightSync)]  # type: ignore[attr-defined]
        return {
            "tokens": float(self.tokens),
            "wait_s": stats.wait_s,
            "sync_s": sum(syncs),
        }

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
        if trainer.global_step > self._step:
            self._step = trainer.global_step
            self._trainer = trainer
            groups = trainer.datamodule.last_step_groups  # type: ignore[attr-defined]
            self.tokens += sum(group.num_tokens for group in groups)
            self.segments.end_of_step()


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--settings", type=json.loads, required=True)
    s = parser.parse_args().settings
    cli = AsyncRLCLI(s["arguments"])
    cli.trainer.callbacks.append(StepClock(s["segments"]))
    cli.trainer.fit(cli.model, cli.datamodule)


if __name__ == "__main__":
    main()
