"""Can a collapse be predicted from the signals of training? A logistic rule, fitted on some runs, tested on others.

    python -m benchmarks.staleness.predictor

It reads the steps of all runs of the staleness benchmark (`docs/results/*.parquet`). What counts as a collapse, and
which runs fit the rule and which test it, was written down and committed before anything was fitted.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd

TABLES = Path("docs/results")
RUN = ["source", "regime", "method", "lag", "learning_rate_scale", "seed"]

# -- What is predicted -------------------------------------------------------------------------------------------------

WINDOW = 10  # steps of a mean of rewards
HORIZON = 20  # "collapses within the next 20 steps"
MIN_GAIN = 0.1  # of such a mean over its first value: below it, a run has learned nothing that it could lose
LOST = 0.5  # share of the gain, or without one of the first value, that a collapse loses

# -- Who fits and who tests --------------------------------------------------------------------------------------------

FIT_REGIME = "heavy_tails"
FIT_LOSSES = (
    *("uncorrected", "ppo_clip", "decoupled_ppo", "cispo", "gspo"),
    *("token_tis", "sequence_tis", "opob", "vcpo", "m2po"),
)
# Tested on: the other losses and stabilizers of this regime; other tasks and lags (`length_bias`, `mixed_lag`,
# `very_stale`); engines that differ from the trainer (`mismatch`); large batches and rates (`aligned_gradients`); a
# policy of another size (`quickstart_constant`).


def read_steps() -> pd.DataFrame:
    """The steps of all runs, in order; the last row of a run has only an accuracy and is left out."""
    tables = [pd.read_parquet(path).assign(source=path.stem) for path in sorted(TABLES.glob("*.parquet"))]
    steps = pd.concat([table for table in tables if "step" in table], ignore_index=True)
    return steps[steps.reward.notna()].sort_values([*RUN, "step"], ignore_index=True)


def collapse_step(reward: np.ndarray) -> int | None:
    """First step at which the mean reward of ten steps has lost half of its gain; None if it never does."""
    if len(reward) < WINDOW:
        return None
    means = np.convolve(reward, np.full(WINDOW, 1 / WINDOW), mode="valid")
    best = np.maximum.accumulate(means)
    gain = best - means[0]
    limit = np.where(gain >= MIN_GAIN, best - LOST * gain, (1 - LOST) * means[0])
    below = np.flatnonzero(means < limit)
    return int(below[0]) + WINDOW - 1 if len(below) else None


def is_fitted(steps: pd.DataFrame) -> pd.Series:
    """Which rows are of runs that fit the rule; all others test it."""
    return (steps.regime == FIT_REGIME) & steps.method.isin(FIT_LOSSES)
