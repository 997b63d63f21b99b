"""Runs with `BlendedIS`, whose share is between 0 and 1; also on two ranks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from flow import barrier_engine, fit, make_data, make_module

import lit_async_rl as rl
from lit_async_rl.baselines.optimal import Norms

LAG = 1
STEPS = 6


class Shares(pl.Callback):
    """The share of each step."""

    def __init__(self) -> None:
        self.shares: list[float] = []

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self.shares.append(pl_module.objective.correction.share)


def blended(
    ckpt_path: Path | None = None,
    others: Sequence[pl.Callback] = (),
    trainer: dict[str, Any] | None = None,
    **data: Any,
) -> tuple[rl.EstimatorBlend, list[float], Any]:
    """The callback, the share of each step, and the module."""
    module = make_module(
        loss=rl.Reinforce(),
        proximal=rl.CurrentProximal(),
        correction=rl.BlendedIS(),
        baseline=rl.OptimalBaseline(norms=Norms.SCORE),
        learning_rate=1e-4,
    )
    settings = dict(schedule="fixed_lag", engine=barrier_engine(), max_staleness=LAG)
    callback = rl.EstimatorBlend(min_samples=12.0)  # of 16
    shares = Shares()
    more = dict(enable_checkpointing=bool(others)) | (trainer or {})
    path = None if ckpt_path is None else str(ckpt_path)
    # before the callback, which sets the share of the next step
    given = make_data(**(settings | data))
    fit(module, given, STEPS, callbacks=[shares, callback, *others], ckpt_path=path, **more)
    return callback, shares.shares, module
