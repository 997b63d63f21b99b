"""A callback for the soak: writes down what each step of a rank has trained on."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import lightning.pytorch as pl


class TrainedGroups(pl.Callback):
    """One line of JSON for each optimizer step, in the folder `TRAINED_GROUPS` names, in a file for each rank."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._path = Path(os.environ["TRAINED_GROUPS"]) / f"groups_{trainer.global_rank}.jsonl"
        self._step = self._resumed = trainer.global_step
        self._is_first = True
        if self._path.exists() and not self._path.read_text().endswith("\n"):
            with self._path.open("a") as file:
                file.write("\n")  # of a line that a kill has cut

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == self._step:
            return
        self._step = trainer.global_step
        groups = trainer.datamodule.last_step_groups
        oldest = min((min(rollout.versions) for group in groups for rollout in group.rollouts), default=None)
        version = pl_module.stabilizer_signals["version"]
        line = {
            "rank": trainer.global_rank,
            "step": self._step,
            "resumed": self._resumed,
            "is_first": self._is_first,
            "groups": [group.index for group in groups],
            "lag": 0 if oldest is None else version - oldest,
            "bound": trainer.datamodule.max_staleness,
        }
        self._is_first = False
        with self._path.open("a") as file:
            file.write(json.dumps(line) + "\n")
