"""One run of TRL's SFTTrainer, timed; started by `benchmarks/performance/trl_sft.py` in TRL's own environment."""

from __future__ import annotations

import argparse
import json
import resource
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import TrainerCallback
from trl import SFTConfig, SFTTrainer


class Clock(TrainerCallback):
    """Loss and processor seconds of each step."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.seconds: list[float] = []
        self._last = 0.0

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        self._last = time.process_time()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        now = time.process_time()
        self.seconds.append(now - self._last)
        self._last = now

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if "loss" in logs:
            self.losses.append(float(logs["loss"]))


class Exact(SFTTrainer):
    """Logs the loss with all its digits, of which transformers keeps four."""

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        if "loss" in logs and self.parts:
            logs["loss"] = float(sum(self.parts))
        self.parts: list[float] = []
        super().log(logs, *args, **kwargs)

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        loss = super().training_step(*args, **kwargs)
        self.parts = [*getattr(self, "parts", []), float(loss)]
        return loss


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--settings", type=json.loads, required=True)
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    s = args.settings
    torch.set_num_threads(1)
    records = [json.loads(line) for line in Path(s["records"]).read_text().splitlines()]
    config = SFTConfig(
        output_dir="trl",
        max_steps=s["steps"],
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        gradient_checkpointing=False,
        learning_rate=1e-5,
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        bf16=False,
        use_cpu=True,
        max_length=None,
        model_init_kwargs={"dtype": "float32"},
    )
    trainer = Exact(model=s["model"], args=config, train_dataset=Dataset.from_list(records))
    clock = Clock()
    trainer.add_callback(clock)
    trainer.train()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    losses = clock.losses[: s["steps"]]
    args.output.write_text(json.dumps(dict(losses=losses, processor_s=clock.seconds, memory_gb=peak)))


if __name__ == "__main__":
    main()
