"""Runs in which the reward falls after some prompts, so that `StalenessController` rolls back; also on two ranks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from flow import barrier_engine, make_data, make_module

import lit_async_rl as rl
from lit_async_rl.advantages.group import Raw
from lit_async_rl.callbacks import WeightSync
from lit_async_rl.losses import Reinforce
from lit_async_rl.stabilizers.collapse import GainWatch

LAG = 2
GOOD_GROUPS = 12
STEPS = 8


def reward(prompt: Any, completion: str) -> float:
    """High for the first prompts of the run, and low for all others."""
    return 1.0 if int(prompt.answer) < GOOD_GROUPS else -0.2


def quick_watch() -> GainWatch:
    """A watch that compares the last two versions."""

    class Quick(GainWatch):
        WINDOW = 2
        NUM_ERRORS = 0.0

    return Quick()


class Trained(pl.Callback):
    """The versions that sampled the tokens of each step, and whether its loss was corrected."""

    def __init__(self) -> None:
        self.versions: list[set[int]] = []
        self.is_corrected: list[bool] = []

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.versions.append(set(batch.versions[batch.loss_mask].tolist()))
        self.is_corrected.append(pl_module.objective.correction is not None)


def controlled(
    max_steps: int = STEPS,
    ckpt_path: Path | None = None,
    others: Sequence[pl.Callback] = (),
    trainer: dict[str, Any] | None = None,
    **data: Any,
) -> tuple[rl.StalenessController, Trained, Any, Any]:
    """The controller, what was trained on, module and data of such a run."""
    controller = rl.StalenessController(min_staleness=None, copy_every_n_steps=STEPS)
    controller.gain = quick_watch()
    settings: dict[str, Any] = dict(
        prompts=[{"prompt": f"{n + 100:08d}=", "answer": str(n)} for n in range(400)],
        shuffle=False,
        reward=reward,
        groups_per_step=2,
        group_size=2,
        max_staleness=LAG,
        advantage=Raw(),
    )
    if "tape" not in data:
        settings |= dict(schedule="fixed_lag", engine=barrier_engine())
    rollouts = make_data(**(settings | data))
    module = make_module(loss=Reinforce(), learning_rate=1e-4)
    trained = Trained()
    runner = pl.Trainer(
        **dict(
            accelerator="cpu",
            devices=1,
            max_steps=max_steps,
            logger=False,
            enable_checkpointing=bool(others),
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=[controller, trained, WeightSync(), *others],
        )
        | (trainer or {})
    )
    runner.fit(module, datamodule=rollouts, ckpt_path=ckpt_path)
    return controller, trained, module, rollouts
