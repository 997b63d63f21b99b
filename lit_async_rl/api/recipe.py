"""The correction of stale data that `fit` makes unless told otherwise."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from lit_async_rl.baselines.optimal import Norms, OptimalBaseline
from lit_async_rl.callbacks import ESSLearningRate
from lit_async_rl.corrections import SequenceTruncatedIS
from lit_async_rl.corrections.proximal import CurrentProximal
from lit_async_rl.data.module import RolloutDataModule
from lit_async_rl.losses import Reinforce
from lit_async_rl.losses.aggregation import SequenceMean

PARTS = ("loss", "proximal", "correction", "baseline", "advantage", "aggregation")
RECIPES = ("vcpo", None)
MAX_STALENESS: int = inspect.signature(RolloutDataModule).parameters["max_staleness"].default


def with_recipe(recipe: str | None, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of `fit` with VCPO's parts (arXiv:2602.17616), where data may be stale and no part of it is given.

    The gradient norms of the optimal baseline are `SCORE` norms, which need no pass of their own. The same as
    `configs/stabilizers/vcpo_score.yaml`.

    Args:
        recipe: `"vcpo"`; None leaves the settings as they are.
        settings: of module, data and Trainer.

    Raises:
        ValueError: there is no such recipe.
    """
    if recipe not in RECIPES:
        raise ValueError(f"fit: recipe must be 'vcpo' or None (plain GRPO), got {recipe!r}")
    is_fresh = settings.get("max_staleness", MAX_STALENESS) == 0
    is_alone = settings.get("group_size") == 1  # refused by its own name, not by that of the recipe's baseline
    if recipe is None or is_fresh or is_alone or any(settings.get(part) is not None for part in PARTS):
        return dict(settings)
    defaults = {"ess_learning_rate": ESSLearningRate(power=0.5), **(settings.get("defaults") or {})}
    parts = dict(
        loss=Reinforce(),
        proximal=CurrentProximal(),
        correction=SequenceTruncatedIS(cap=8.0),
        baseline=OptimalBaseline(norms=Norms.SCORE),
        aggregation=SequenceMean(),
    )
    return {**settings, **parts, "defaults": defaults}
