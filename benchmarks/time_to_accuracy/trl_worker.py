"""One run of TRL's GRPOTrainer with snapshots of the policy; started by `trl_cell.py` in TRL's own environment."""

from __future__ import annotations

import csv
import json
import os
import random
import re
import sys
import time
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from transformers import TrainerCallback
from trl_trainer import TimedTrainer, make_trainer

Row = dict[str, float]


class Recorder(TrainerCallback):
    """Times of all steps, and copies of the policy, which are written when the run has ended."""

    def __init__(self, trainer: TimedTrainer, settings: dict[str, Any]) -> None:
        self.trainer = trainer
        self.settings = settings
        self.rows: list[Row] = []
        self.snapshots: list[tuple[Row, dict[str, Any]]] = []
        self.began = self.cpu = 0.0

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        self.began = time.monotonic()
        self.cpu = time.process_time()
        self.keep(self.now(0))

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if momenta := self.settings["momenta"]:
            for group in self.trainer.optimizer.param_groups:
                beta1 = momenta[min(state.global_step, len(momenta) - 1)]
                group["betas"] = (beta1, group["betas"][1])

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        row = self.now(state.global_step)
        step = state.global_step
        self.rows.append(row)
        if step % self.settings["every_n_steps"] == 0 or step == self.settings["max_steps"]:
            self.keep(row)

    def now(self, step: int) -> Row:
        """Totals since training began."""
        times = {"wall_s": time.monotonic() - self.began, "cpu_s": time.process_time() - self.cpu}
        return {"step": step, **times, **self.trainer.totals(), "load": os.getloadavg()[0]}

    def keep(self, row: Row) -> None:
        """Copies the policy."""
        trained = ((name, one) for name, one in self.trainer.model.named_parameters() if one.requires_grad)
        state = {name: one.detach().to("cpu", copy=True) for name, one in trained}
        self.snapshots.append((row, state))

    def write(self, folder: Path) -> None:
        """Writes a row for each step, and for each snapshot with its weights."""
        for name, rows in (("steps", self.rows), ("snapshots", [row for row, _ in self.snapshots])):
            with (folder / f"{name}.csv").open("w", newline="") as file:
                table = csv.DictWriter(file, list(rows[0]))
                table.writeheader()
                table.writerows(rows)
        for row, state in self.snapshots:
            save_file(state, folder / f"{row['step']}.safetensors")


def exact_match(completions: list[str], answer: list[str], **_: Any) -> list[float]:
    """Same as `lit_async_rl.rewards.exact_match`."""
    return [float(text.strip() == right.strip()) for text, right in zip(completions, answer, strict=True)]


class LastNumber:
    """`lit_async_rl.rewards.last_number` for whole numbers, of a batch whose completions are scored side by side.

    Args:
        latency: log-normal seconds of one completion (`mu`, `sigma`, `seed`); None: no time at all.
    """

    __name__ = "last_number"

    def __init__(self, latency: dict[str, float] | None) -> None:
        self.latency = latency
        self.rng = random.Random(latency["seed"] if latency else 0)

    def __call__(self, completions: list[list[dict[str, str]]], answer: list[str], **_: Any) -> list[float]:
        if self.latency:
            mu = self.latency["mu"]
            time.sleep(max(self.rng.lognormvariate(mu, self.latency["sigma"]) for _ in completions))
        texts = [turns[-1]["content"].replace(",", "") for turns in completions]
        numbers = [re.findall(r"(?:(?<!\S)-)?\d+(?:\.\d+)?", text) for text in texts]
        return [float(bool(n) and float(n[-1]) == float(right)) for n, right in zip(numbers, answer, strict=True)]


def main() -> None:
    """The only argument is a JSON file of settings."""
    settings = json.loads(Path(sys.argv[1]).read_text())
    columns = {"prompt": settings["prompts"], "answer": settings["answers"]}
    reward = LastNumber(settings["latency"]) if settings["reward"] == "last_number" else exact_match
    trainer = make_trainer(settings, columns, reward)
    recorder = Recorder(trainer, settings)
    trainer.add_callback(recorder)
    trainer.train()
    recorder.write(Path(settings["folder"]))


if __name__ == "__main__":
    main()
