"""Can a collapse be predicted from the signals of training? A logistic rule, fitted on some runs, tested on others.

    python -m benchmarks.staleness.predictor

It reads the steps of runs of the staleness benchmark (`READ`, of `docs/results/*.parquet`). What counts as a collapse,
and which runs fit the rule and which test it, was written down and committed before anything was fitted. It was changed
once: the noise of few rewards is no collapse, as runs of a language model showed.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from scipy.optimize import minimize
from torchmetrics.functional.classification import binary_auroc

from benchmarks.common.measurement import measurement, write_measurement
from benchmarks.staleness.first_grid import synchronous_language_model
from benchmarks.staleness.statistics import per_cell, synchronous, synchronous_gain
from benchmarks.staleness.table import read_table
from lit_async_rl.stabilizers.collapse import CollapseForecast, GainWatch, StepHealth

TABLES = Path("docs/results")
RUN = ["source", "regime", "method", "lag", "learning_rate_scale", "seed"]

# -- What is predicted -------------------------------------------------------------------------------------------------

HORIZON = 20  # "collapses within the next 20 steps", as `GainWatch` says it

# The target of runs to come, written down and committed before any of them: that a run is *harmed*. Of the alarms that
# were false by the collapse alone, nearly all were of runs that are. A run is harmed if it loses a third of its gain on
# the way (more than noise, as `GainWatch` counts it) or ends below `HARMED` of the synchronous gain; it is *sound* if
# it keeps `SOUND` of that and never lost a third. What is in between is neither. An alarm is in time before the third
# is lost, and in a run that only ends low before its end.

HARMED = 0.9
SOUND = 0.95


class ThirdWatch(GainWatch):
    """Finds the loss of a third of the gain."""

    COLLAPSE = 1 / 3


# -- Who fits and who tests --------------------------------------------------------------------------------------------

FIT_REGIME = "heavy_tails"
FIT_LOSSES = (
    *("uncorrected", "ppo_clip", "decoupled_ppo", "cispo", "gspo"),
    *("token_tis", "sequence_tis", "opob", "vcpo", "m2po"),
)
# Tested on: the other losses and stabilizers of this regime; other tasks and lags (`length_bias`, `mixed_lag`,
# `very_stale`); engines that differ from the trainer (`mismatch`); large batches and rates (`aligned_gradients`); a
# policy of another size (`quickstart_constant`).


# Tables that are read. They are named, since each new one has runs of the losses that fit the rule: it would change the
# rule, or repeat it. Runs of the controller, which acts on the forecast, are no tests of it.
READ = (
    *("results", "equal_tuning", "mismatch", "very_stale", "smollm2", "smollm2_long"),
    *("gac", "gac_half", "gac_search", "blend", "blend_quarter"),
)


def tables() -> list[Path]:
    """Files of the tables that are read."""
    return [TABLES / f"{name}.parquet" for name in sorted(READ)]


def read_steps() -> pd.DataFrame:
    """The steps of all runs, in order; the last row of a run has only an accuracy and is left out."""
    steps = pd.concat([pd.read_parquet(path).assign(source=path.stem) for path in tables()], ignore_index=True)
    return steps[steps.reward.notna()].sort_values([*RUN, "step"], ignore_index=True)


def collapse_step(rewards: Iterable[float]) -> int | None:
    """First step at which the mean reward of ten steps has lost half of its gain; None if it never does."""
    watch = GainWatch()
    for step, reward in enumerate(rewards):
        watch.observe(reward)
        if watch.is_collapse:
            return step
    return None


def is_fitted(steps: pd.DataFrame) -> pd.Series:
    """Which rows are of runs that fit the rule; all others test it."""
    return (steps.regime == FIT_REGIME) & steps.method.isin(FIT_LOSSES)


# -- The rule ----------------------------------------------------------------------------------------------------------
#
# Chosen on the runs that fit it, each loss predicted by a rule fitted without it: of 18 signals and their combinations
# these two were best (area under the ROC 0.954; the effective sample size alone 0.942; all of them 0.954).

FALSE_ALARMS = 0.025  # share of the healthy runs that fit the rule of which the threshold lets an alarm be raised
RIDGE = 1e-6


@dataclass(frozen=True)
class Run:
    """Steps of one run before its collapse: signals [T, 2], whether it is near (T), and when it is (None: never)."""

    regime: str
    method: str
    signals: np.ndarray
    is_near: np.ndarray
    collapse: int | None


def runs_of(steps: pd.DataFrame) -> list[Run]:
    """The runs, with the signals that `CollapseForecast` takes from each of their steps."""
    runs = []
    for key, rows in steps.groupby(RUN):
        collapse = collapse_step(rows.reward)
        end = len(rows) if collapse is None else collapse
        forecast = CollapseForecast()
        signals = np.full((end, 2), np.nan)
        for step, (ess_ratio, grad_norm) in enumerate(zip(rows.ess_ratio[:end], rows.grad_norm[:end], strict=True)):
            if forecast.observe(StepHealth(ess_ratio=ess_ratio, grad_norm=grad_norm)) is not None:
                signals[step] = forecast.signals
        is_near = np.zeros(end, dtype=bool)
        if collapse is not None:
            is_near[max(0, collapse - HORIZON) :] = True
        seen = ~np.isnan(signals[:, 0])
        first = int(seen.argmax()) if seen.any() else end
        run = Run(
            regime=key[1],
            method=key[2],
            signals=signals[first:],
            is_near=is_near[first:],
            collapse=None if collapse is None else collapse - first,
        )
        runs.append(run)
    return [run for run in runs if len(run.signals)]


def fit(runs: list[Run]) -> np.ndarray:
    """Weights of the two signals and the constant that maximise the likelihood of `is_near`."""
    x = np.concatenate([run.signals for run in runs])
    x = np.column_stack([x, np.ones(len(x))])
    y = np.concatenate([run.is_near for run in runs])

    def loss(weights: np.ndarray) -> float:
        z = x @ weights
        return float(np.mean(np.logaddexp(0.0, z) - y * z) + RIDGE * np.mean(weights[:2] ** 2))

    return minimize(loss, np.zeros(3)).x


def odds(run: Run, weights: np.ndarray) -> np.ndarray:
    """Logarithm of the odds of a collapse within the horizon, at each step."""
    return run.signals @ weights[:2] + weights[2]


def threshold(runs: list[Run], weights: np.ndarray) -> float:
    """Odds that only `FALSE_ALARMS` of the healthy runs ever exceed."""
    highest = [odds(run, weights).max() for run in runs if run.collapse is None]
    return float(np.quantile(highest, 1 - FALSE_ALARMS))


def scores(runs: list[Run], weights: np.ndarray, limit: float) -> dict[str, float | int | None]:
    """Area under the ROC over steps, false alarms over healthy runs, alarms before a collapse and their lead in steps.

    A collapse without an alarm has a lead of 0 in the median.
    """
    z = torch.tensor(np.concatenate([odds(run, weights) for run in runs]))
    y = torch.tensor(np.concatenate([run.is_near for run in runs]))
    first = [np.flatnonzero(odds(run, weights) > limit) for run in runs]
    healthy = [len(alarms) > 0 for run, alarms in zip(runs, first, strict=True) if run.collapse is None]
    leads = [
        run.collapse - alarms[0] if len(alarms) else 0
        for run, alarms in zip(runs, first, strict=True)
        if run.collapse is not None
    ]
    return {
        "runs": len(runs),
        "collapses": len(leads),
        "auroc": round(float(binary_auroc(z, y.int())), 4) if y.any() else None,
        "healthy_runs": len(healthy),
        "false_alarms": int(sum(healthy)),
        "predicted": int(sum(lead > 0 for lead in leads)),
        "lead_median": float(np.median(leads)) if leads else None,
    }


# -- Harmed runs -------------------------------------------------------------------------------------------------------


def shares_kept() -> pd.Series:
    """Share of the synchronous gain that each run keeps, by `RUN`; the reference is of the same kind of device."""
    runs = pd.concat(
        [per_cell(read_table(path)).assign(source=path.stem) for path in tables()],
        ignore_index=True,
    )
    gains = {}
    for (source, regime, device), own in runs.groupby(["source", "regime", "device"]):
        reference = synchronous(own, str(regime))
        if reference.empty and regime == "smollm2":
            reference = synchronous_language_model(str(device))
        if len(reference):
            gains[source, regime, device] = synchronous_gain(reference)
    of_regime = {(regime, device): gain for (_, regime, device), gain in gains.items()}
    keys = zip(runs["source"], runs["regime"], runs["device"], strict=True)
    full = np.array([gains.get(key, of_regime[key[1:]]) for key in keys])
    return runs.assign(share=(runs["final"] - runs["start"]) / full).set_index(RUN)["share"]


def fates(steps: pd.DataFrame, weights: np.ndarray, limit: float) -> pd.DataFrame:
    """One row for each run: `share` of the gain kept, and the steps of the alarm and the lost third; nan if never."""
    shares = shares_kept()
    rows = []
    for key, own in steps.groupby(RUN):
        forecast = CollapseForecast()
        watch = ThirdWatch()
        alarm = lost = math.nan
        for step, (ess_ratio, grad_norm, reward) in enumerate(
            zip(own.ess_ratio, own.grad_norm, own.reward, strict=True)
        ):
            if forecast.observe(StepHealth(ess_ratio=ess_ratio, grad_norm=grad_norm)) is not None:
                is_alarm = float(np.dot(weights, [*forecast.signals, 1.0])) > limit
                alarm = step if is_alarm and math.isnan(alarm) else alarm
            watch.observe(reward)
            lost = step if watch.is_collapse and math.isnan(lost) else lost
        at = (*key[:4], round(key[4], 6), key[5])
        rows.append({"regime": key[1], "share": shares[at], "alarm": alarm, "lost": lost})
    return pd.DataFrame(rows)


def judged(runs: pd.DataFrame) -> dict[str, float | int | None]:
    """Precision, recall and lead of the alarms as signs of harm."""
    is_harmed = (runs["share"] < HARMED) | runs["lost"].notna()
    is_sound = (runs["share"] >= SOUND) & ~is_harmed
    has_alarm = runs["alarm"].notna()
    in_time = has_alarm & ~(runs["alarm"] >= runs["lost"])
    counted = has_alarm & (is_harmed | is_sound)
    lead = (runs["lost"] - runs["alarm"])[in_time]
    return {
        "runs": len(runs),
        "harmed": int(is_harmed.sum()),
        "sound": int(is_sound.sum()),
        "alarms": int(has_alarm.sum()),
        "of_harmed": int((has_alarm & is_harmed).sum()),
        "of_sound": int((has_alarm & is_sound).sum()),
        "precision": round(float((counted & is_harmed).sum() / counted.sum()), 2) if counted.any() else None,
        "recall": round(float((in_time & is_harmed).sum() / is_harmed.sum()), 2) if is_harmed.any() else None,
        "lead_median": float(lead.median()) if lead.notna().any() else None,
    }


def harm(steps: pd.DataFrame, weights: np.ndarray, limit: float, command: str) -> dict[str, Any]:
    """Measurement of the rule in use against the target of runs to come, on the runs that there are."""
    runs = fates(steps[~is_fitted(steps)], weights, limit)
    rows = [[regime, *judged(own).values()] for regime, own in runs.groupby("regime")]
    whole = judged(runs)
    random = np.random.default_rng(0)
    drawn = [judged(runs.iloc[random.integers(len(runs), size=len(runs))])["recall"] for _ in range(500)]
    columns = ["runs of", "runs", "harmed", "sound", "alarms", "of harmed runs", "of sound runs", "precision", "recall"]
    return measurement(
        "forecast_of_harm",
        float(whole["recall"] or 0.0),
        "share of the harmed runs with an alarm in time, retrospective",
        columns=[*columns, "median lead to the lost third, steps"],
        rows=[*rows, ["all that were not fitted", *whole.values()]],
        interval=[round(float(limit), 2) for limit in np.quantile(drawn, [0.025, 0.975])],
        command=command,
        machine="tables of the staleness benchmark, whose runs came before this target",
    )


# -- What it is worth --------------------------------------------------------------------------------------------------


def interval_of_auroc(runs: list[Run], weights: np.ndarray, samples: int = 500) -> list[float]:
    """95 % interval of the area under the ROC, over runs drawn again with replacement: steps of a run are not apart."""
    random = np.random.default_rng(0)
    values = []
    for _ in range(samples):
        drawn = [runs[number] for number in random.integers(len(runs), size=len(runs))]
        values.append(scores(drawn, weights, 0.0)["auroc"])
    return [round(float(limit), 3) for limit in np.quantile([value for value in values if value], [0.025, 0.975])]


def main() -> None:
    """Fits the rule again, and prints or writes what the one in use is worth."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path, metavar="FOLDER", help="of the measurements, docs/measurements")
    args = parser.parse_args()
    steps = read_steps()
    fitted = runs_of(steps[is_fitted(steps)])
    weights = fit(fitted)
    print("fitted:", weights.round(2).tolist(), "threshold:", round(threshold(fitted, weights), 2))
    weights = np.array([*CollapseForecast.WEIGHTS, CollapseForecast.CONSTANT])
    tested = runs_of(steps[~is_fitted(steps)])
    rows = [["fitted: heavy_tails, ten losses", *scores(fitted, weights, CollapseForecast.LIMIT).values()]]
    for regime in sorted({run.regime for run in tested}):
        of_it = [run for run in tested if run.regime == regime]
        name = f"{regime}, 19 other methods" if regime == FIT_REGIME else regime
        rows.append([name, *scores(of_it, weights, CollapseForecast.LIMIT).values()])
    whole = scores(tested, weights, CollapseForecast.LIMIT)
    rows.append(["all that were not fitted", *whole.values()])
    for row in rows:
        print(*row, sep="  ")
    if args.write:
        command = "python -m benchmarks.staleness.predictor --write docs/measurements"
        columns = ["runs of", "runs", "collapses", "area under the ROC", "runs without one", "alarms in these"]
        columns += ["alarms before the collapse", "median lead, steps"]
        found = measurement(
            "collapse_forecast",
            whole["auroc"],
            "area under the ROC, over the steps of runs that were not fitted",
            columns=columns,
            rows=rows,
            interval=interval_of_auroc(tested, weights),
            command=command,
            machine="tables of the staleness benchmark",
        )
        write_measurement(args.write / "collapse_forecast.json", found)
        harmed = harm(steps, weights, CollapseForecast.LIMIT, command=command)
        write_measurement(args.write / "forecast_of_harm.json", harmed)


if __name__ == "__main__":
    main()
