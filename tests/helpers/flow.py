"""Shared by the flow tests: the shipped policy, small steps, a real Trainer."""

from __future__ import annotations

import logging
from typing import Any

import lightning.pytorch as pl
import torch

from lit_async_rl.assets import asset
from lit_async_rl.callbacks import WeightSync
from lit_async_rl.data.module import RolloutDataModule
from lit_async_rl.data.settings import Limits, Scoring, Validation
from lit_async_rl.engines.base import SamplingParams
from lit_async_rl.engines.embedded.engine import EmbeddedEngine
from lit_async_rl.rewards.functions import exact_match
from lit_async_rl.scheduling.admission import Bounded, FixedLag, FromTape
from lit_async_rl.tasks import SortDigits
from lit_async_rl.training.module import PolicyModule

MODEL = asset("sort_policy")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


SCORING = {"reward_workers": "workers", "reward_timeout_s": "timeout_s", "reward_tries": "tries"}
SCORING |= {"reward_success": "success_reward"}
SHORT = SCORING | {"val_prompts": "prompts", "num_val_samples": "num_samples", "val_sampling": "sampling"}
NAMES = {
    "admission": {"async_ratio", "redundant_groups"},
    "scoring": {*SCORING, "resume_rewards", "special_tokens"},
    "validation": {"val_prompts", "num_val_samples", "val_sampling", "success_reward"},
    "limits": {"rollout_timeout_s", "rank_timeout_s", "engine_restarts"},
}


def make_data(**changes: Any) -> RolloutDataModule:
    """Four groups of four a step; settings of its parts may be given flat."""
    settings: dict[str, Any] = dict(
        model=MODEL,
        prompts=SortDigits(8, size=100),
        reward=exact_match,
        groups_per_step=4,
        group_size=4,
        sampling=SamplingParams(max_tokens=10),
        rollout_timeout_s=30.0,
    )
    settings |= changes
    if "tape" in settings:
        settings["admission"] = FromTape(settings.pop("tape"))
    if "schedule" in settings:
        settings["admission"] = {"free": Bounded, "fixed_lag": FixedLag}[settings.pop("schedule")]()
    if given := {name: settings.pop(name) for name in NAMES["admission"].intersection(settings)}:
        settings["admission"] = Bounded(**given)
    for part, kind in {"scoring": Scoring, "validation": Validation, "limits": Limits}.items():
        given = {name: settings.pop(name) for name in NAMES[part].intersection(settings)}
        settings[part] = kind(**{SHORT.get(name, name): value for name, value in given.items()})
    return RolloutDataModule(**settings)


def make_module(**changes: Any) -> PolicyModule:
    """A learning rate at which five steps visibly change the policy."""
    rate: dict[str, Any] = {} if "optimizer" in changes else {"learning_rate": 1e-3}
    return PolicyModule(**(dict(model=MODEL, **rate) | changes))


def fit(
    module: PolicyModule,
    data: RolloutDataModule,
    max_steps: int,
    callbacks: list[pl.Callback] | None = None,
    ckpt_path: str | None = None,
    **trainer: Any,
) -> pl.Trainer:
    """Trains on the CPU without logs or files."""
    settings: dict[str, Any] = dict(
        accelerator="cpu",
        devices=1,
        max_steps=max_steps,
        accumulate_grad_batches=data.micro_batches_per_step,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[WeightSync(), *(callbacks or [])],
    )
    runner = pl.Trainer(**(settings | trainer))
    runner.fit(module, datamodule=data, ckpt_path=ckpt_path)
    return runner


def parameters(module: PolicyModule) -> torch.Tensor:
    """All weights in one vector."""
    return torch.cat([p.detach().flatten() for p in module.policy.parameters()])


def barrier_engine(**changes: Any) -> EmbeddedEngine:
    """An engine whose completions come from one version each."""
    return EmbeddedEngine(in_flight_weight_updates=False, **changes)
