"""One run of TRL's GRPOTrainer, timed; started by `benchmarks/performance/trl.py` in TRL's own environment.

Totals are written by `segments.Segments`: seconds of generation and scoring, and tokens trained on.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

from segments import Segments
from transformers import TrainerCallback
from trl_trainer import make_trainer


class StepClock(TrainerCallback):
    """Ends a segment after each step."""

    def __init__(self, segments: Segments) -> None:
        self.segments = segments

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.segments.end_of_step()


def odd_length(completions: list[str], **_: Any) -> list[float]:
    """Same as `our_run.odd_length`."""
    return [float(len(completion) % 2) for completion in completions]


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--settings", type=json.loads, required=True)
    s = parser.parse_args().settings
    trainer = make_trainer(s, {"prompt": s["prompts"]}, odd_length)
    trainer.add_callback(StepClock(Segments(**s["segments"], read=trainer.totals)))
    trainer.train()


if __name__ == "__main__":
    main()
