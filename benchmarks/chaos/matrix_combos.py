"""Settings of the runs of `kill_matrix.py`, a covering design of them, and the configuration file of one run."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import yaml

LAG, GROUPS, GROUP_SIZE = 2, 4, 4
ROLLOUT_TIMEOUT_S, RANK_TIMEOUT_S = 60.0, 30.0
REPLAY_STALENESS = 6
FACTORS: dict[str, tuple[Any, ...]] = {
    "trigger": ("steps", "last", "time", "validation", "metric", "epoch", "exception"),
    "micro_batches": (1, 2, 4),
    "ranks": (1, 2),
    "weight_sync_steps": (1, 3),
    "source": ("whole steps", "streamed", "replay buffer"),
    "schedule": ("fixed_lag", "free", "adaptive"),
    "evaluation": (False, True),
}


@dataclass(frozen=True)
class Combo:
    """One row of the matrix."""

    trigger: str = "steps"
    micro_batches: int = 1
    ranks: int = 1
    weight_sync_steps: int = 1
    source: str = "whole steps"
    schedule: str = "fixed_lag"
    evaluation: bool = False

    @property
    def is_exact(self) -> bool:
        """Whether the result must be bitwise independent of kills."""
        return self.schedule == "fixed_lag"

    def __str__(self) -> str:
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return ", ".join(f"{name}={value}" for name, value in values.items())


def covering(seed: int, tries: int = 40) -> list[Combo]:
    """Few combinations in which all pairs of settings occur: under `fixed_lag`, and each with every schedule."""
    chance = random.Random(seed)
    missing = set(_required())
    chosen: list[Combo] = []
    while missing:
        candidates = _random(chance, tries)
        best = max(candidates, key=lambda combo: (sum(_has(combo, pair) for pair in missing), -combo.ranks))
        covered = {pair for pair in missing if _has(best, pair)}
        chosen += [best] if covered else []
        missing -= covered
    return chosen


def _random(chance: random.Random, number: int) -> list[Combo]:
    return [Combo(**{name: chance.choice(values) for name, values in FACTORS.items()}) for _ in range(number)]


Settings = tuple[tuple[str, Any], ...]


def _required() -> list[Settings]:
    pairs = itertools.combinations(FACTORS.items(), 2)
    of_values = (((a, x), (b, y)) for (a, xs), (b, ys) in pairs for x in xs for y in ys)
    return [pair if "schedule" in dict(pair) else (*pair, ("schedule", "fixed_lag")) for pair in of_values]


def _has(combo: Combo, settings: Settings) -> bool:
    return all(getattr(combo, name) == value for name, value in settings)


def write_config(combo: Combo, folder: Path, steps: int) -> Path:
    """A configuration file as a user would write it."""
    path = folder / "combo.yaml"
    path.write_text(yaml.safe_dump(_config(combo, folder, steps), sort_keys=False))
    return path


def _config(combo: Combo, folder: Path, steps: int) -> dict[str, Any]:
    data: dict[str, Any] = {
        "admission": "FixedLag" if combo.is_exact else "Bounded",
        "max_staleness": LAG,
        "groups_per_step": GROUPS,
        "group_size": GROUP_SIZE,
        "micro_batches_per_step": combo.micro_batches,
        "weight_sync_steps": combo.weight_sync_steps,
        "intake": {"stream_groups": combo.source == "streamed"},
        "limits": {"rollout_timeout_s": ROLLOUT_TIMEOUT_S, "rank_timeout_s": RANK_TIMEOUT_S},
    }
    if combo.source == "replay buffer":
        data["replay"] = {"fresh_fraction": 0.5, "max_staleness": REPLAY_STALENESS}
    trainer: dict[str, Any] = {"max_steps": steps, "devices": combo.ranks}
    if combo.ranks > 1:
        trainer["strategy"] = {"class_path": "lightning.pytorch.strategies.DDPStrategy"}
    validates = combo.trigger in ("validation", "metric")
    if validates:
        data["validation"] = {"prompts": _prompts(8)}
        trainer |= {"val_check_interval": 2 * combo.micro_batches, "check_val_every_n_epoch": None}
    if combo.trigger == "epoch":
        trainer["limit_train_batches"] = 3 * combo.micro_batches
    trainer["logger"] = _part("lit_async_rl.training.trackers.CSVLog", save_dir=str(folder), name="log")
    trainer["callbacks"] = [
        _part("lightning.pytorch.callbacks.ModelCheckpoint", dirpath=str(folder / "checkpoints"), **_when(combo)),
        _part("RolloutTape", folder=str(folder / "tape")),
        _part("matrix_probe.Journal", folder=str(folder / "journal")),
    ]
    if combo.evaluation:
        trainer["callbacks"].append(_part("Evaluation", datasets={"sort": _prompts(8)}, every_n_steps=3))
    if combo.schedule == "adaptive":
        trainer["callbacks"].append(_part("AdaptiveStaleness", target_ess_ratio=0.9, band=0.01, smoothing=0.2))
    return {"data": data, "trainer": trainer}


def _when(combo: Combo) -> dict[str, Any]:
    """Triggers and retention of `ModelCheckpoint`."""
    return {
        "steps": dict(every_n_train_steps=2, save_top_k=-1, filename="{step}"),
        "last": dict(every_n_train_steps=3, save_last=True),
        "time": dict(train_time_interval="0:00:00.15", save_top_k=-1),
        "validation": dict(every_n_epochs=1, save_on_train_epoch_end=False, save_top_k=-1, filename="{step}"),
        "metric": dict(every_n_train_steps=2, monitor="val/reward", mode="max", save_top_k=2, save_last="link"),
        "epoch": dict(every_n_epochs=1, save_on_train_epoch_end=True, save_top_k=-1),
        "exception": dict(every_n_train_steps=4, save_on_exception=True, save_top_k=-1, filename="{step}"),
    }[combo.trigger]


def _prompts(size: int) -> dict[str, Any]:
    return _part("lit_async_rl.tasks.SortDigits", num_digits=4, size=size, split="held_out")


def _part(class_path: str, **init_args: Any) -> dict[str, Any]:
    return {"class_path": class_path, "init_args": init_args}
