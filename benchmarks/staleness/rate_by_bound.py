"""Which learning rate fits a staleness bound? A rule by loss and correction, fitted on some runs, tested on others.

    python -m benchmarks.staleness.rate_by_bound

It reads the runs of the staleness benchmark (`docs/results/*.parquet`) that were made at several rates. Which of them
fit the rule and which test it was written down and committed before anything was fitted; what had been read of the runs
that test it is what docs/results.md said of them (the table of the language model among it).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from benchmarks.common.measurement import measurement, write_measurement
from benchmarks.staleness.statistics import per_cell
from benchmarks.staleness.suite import find
from benchmarks.staleness.table import CELL, read_table
from lit_async_rl.api.trainer import build
from lit_async_rl.losses import PPOClip
from lit_async_rl.scheduling.bottleneck import MIN_ESS
from lit_async_rl.training.rate_by_bound import LOWEST_FACTOR, WHOLE_RATE_UP_TO, Handling, handling, rate_factor
from lit_async_rl.utils.config_files import load_config

TABLES = Path("docs/results")
KEPT = 0.95  # share of the gain of the best rate that a named rate has to keep

# -- Who fits and who tests --------------------------------------------------------------------------------------------

FIT_REGIME = "heavy_tails"
FIT_LOSSES = (
    *("uncorrected", "ppo_clip", "decoupled_ppo", "cispo", "gspo"),
    *("token_tis", "sequence_tis", "opob", "vcpo", "m2po"),
)
# Tested on: the other losses of this regime, and all other regimes that have runs at several rates: `very_stale`,
# `quickstart_constant` (a policy of another size), `smollm2` (a language model). `length_bias`, `aligned_gradients`,
# `mixed_lag` and `mismatch` were run at one rate and test nothing.
CHANGES_THE_RATE = ("controller", "controller_bound", "no_momentum", "adaptive_staleness", "lower_staleness")


@dataclass(frozen=True)
class Sweep:
    """A loss at one lag, at several rates.

    Attributes:
        gains: mean gain of held-out accuracy over the start, by multiple of the regime's rate; mean over all seeds.
        ess_ratio: effective sample size at the regime's own rate; nan if it was not run.
    """

    regime: str
    method: str
    lag: int
    gains: dict[float, float]
    ess_ratio: float

    @property
    def is_fitted(self) -> bool:
        """Whether it fits the rule; all others test it."""
        return self.regime == FIT_REGIME and self.method in FIT_LOSSES

    def gain(self, scale: float) -> float:
        """Gain at a multiple of the rate: linear in its logarithm between those that were run, constant beyond."""
        scales = sorted(self.gains)
        return float(np.interp(np.log(scale), np.log(scales), [self.gains[one] for one in scales]))

    def has_run(self, scale: float) -> bool:
        """Whether a multiple of the rate lies between those that were run."""
        return min(self.gains) <= scale <= max(self.gains)

    def share_kept(self, scale: float) -> float:
        """Gain at a multiple of the rate over that at the best one that was run."""
        return self.gain(scale) / max(self.gains.values())


def read_sweeps() -> list[Sweep]:
    """All losses, lags and regimes that were run at several rates."""
    # the map's optimizers and batches have rates of their own
    paths = [path for path in sorted(TABLES.glob("*.parquet")) if path.stem != "gac_map"]
    table = pd.concat([read_table(path) for path in paths], ignore_index=True)
    acts = table["method"].str.split("+").map(lambda parts: bool(set(parts) & set(CHANGES_THE_RATE)))
    table = table[(table["lag"] > 0) & ~acts]
    rates = table.groupby(["regime", "method", "lag"])["learning_rate_scale"].transform("nunique")
    runs = per_cell(table[rates > 1].drop_duplicates([*CELL, "step"], keep="last"))
    sweeps = []
    for (regime, method, lag), found in runs.groupby(["regime", "method", "lag"]):
        by_rate = found.assign(gain=found["final"] - found["start"]).groupby("learning_rate_scale")
        gains = {float(scale): float(gain) for scale, gain in by_rate["gain"].mean().items()}
        if len(gains) > 1 and max(gains.values()) > 0:
            ess_ratio = float(by_rate["ess_ratio"].mean().get(1.0, np.nan))
            sweeps.append(Sweep(str(regime), str(method), int(lag), gains=gains, ess_ratio=ess_ratio))
    return sweeps


def handling_of(method: str) -> Handling | None:
    """Treatment of stale data by a method of the benchmark, from its configuration."""
    model = load_config(find("method", method.split("+")[0])).get("model", {})
    loss, correction, baseline = (
        None if model.get(name) is None else build(model[name]) for name in ("loss", "correction", "baseline")
    )
    return handling(loss or PPOClip(), correction, baseline)


# -- Rules -------------------------------------------------------------------------------------------------------------

Rule = Callable[[Sweep], float]
CANDIDATES = (1, 2, 4, 8, 16, 32, 64)  # S_0, powers of two up to the largest lag that fits it
TIE = 0.01  # of the share kept: less is noise, and the larger S_0 changes less


def theory(start: int, lowest: float = 0.0) -> Rule:
    """Half of the rate at twice the lag, from a bound on that is the same for all losses."""
    return lambda sweep: max(lowest, min(1.0, start / sweep.lag))


def by_ess(sweep: Sweep) -> float:
    """The rate that keeps half of the effective sample size, from that at the whole rate: the advisor's."""
    if np.isnan(sweep.ess_ratio) or sweep.ess_ratio >= 1:
        return 1.0
    return float(min(1.0, np.sqrt(np.log(MIN_ESS) / np.log(sweep.ess_ratio))))


def by_handling(sweep: Sweep) -> float:
    """The rule in use."""
    return rate_factor(sweep.lag, handling_of(sweep.method))


def fit(sweeps: list[Sweep], lowest: float) -> tuple[int, dict[int, float]]:
    """S_0 that keeps most of the gain in the mean, the largest within `TIE`; and the mean share kept by each."""
    shares = {
        start: float(np.mean([sweep.share_kept(theory(start, lowest)(sweep)) for sweep in sweeps]))
        for start in CANDIDATES
    }
    best = max(shares.values())
    return max(start for start, share in shares.items() if share >= best - TIE), shares


# -- What it is worth --------------------------------------------------------------------------------------------------

RULES: dict[str, Rule] = {
    "the rule": by_handling,
    "the whole rate": lambda _: 1.0,
    "half at twice the lag from 4": theory(4),
    "effective sample size of one half": by_ess,
}


def scores(sweeps: list[Sweep]) -> list[int | str]:
    """Number of sweeps, and of those in which the rule names a rate between those that were run; scores of all `RULES`.

    A score is the share of the sweeps of which a rule keeps `KEPT`, and in parentheses the mean share that it keeps.
    """
    shares = [np.array([sweep.share_kept(rule(sweep)) for sweep in sweeps]) for rule in RULES.values()]
    num_run = sum(sweep.has_run(by_handling(sweep)) for sweep in sweeps)
    return [len(sweeps), num_run, *(f"{np.mean(one >= KEPT):.2f} ({np.mean(one):.2f})" for one in shares)]


def at_rates_that_were_run(sweeps: list[Sweep]) -> list[Sweep]:
    """The sweeps that test the rule: not fitted, and with the rate that it names between those that were run."""
    return [sweep for sweep in sweeps if not sweep.is_fitted and sweep.has_run(by_handling(sweep))]


def headline(sweeps: list[Sweep], samples: int = 2000) -> tuple[float, list[float]]:
    """Share of the sweeps of which the rule keeps `KEPT`; its 95 % interval, over sweeps drawn with replacement."""
    random = np.random.default_rng(0)
    enough = np.array([sweep.share_kept(by_handling(sweep)) >= KEPT for sweep in sweeps])
    means = [enough[random.integers(len(enough), size=len(enough))].mean() for _ in range(samples)]
    return round(float(enough.mean()), 2), [round(float(limit), 2) for limit in np.quantile(means, [0.025, 0.975])]


def table_rows(sweeps: list[Sweep]) -> list[list[int | str]]:
    """Scores by regime, and of all sweeps that test the rule."""
    fitted = [sweep for sweep in sweeps if sweep.is_fitted]
    tested = [sweep for sweep in sweeps if not sweep.is_fitted]
    rows: list[list[int | str]] = [[f"fitted: {FIT_REGIME}, ten losses", *scores(fitted)]]
    for regime in sorted({sweep.regime for sweep in tested}):
        of_it = [sweep for sweep in tested if sweep.regime == regime]
        name = f"{regime}, other losses" if regime == FIT_REGIME else regime
        rows.append([name, *scores(of_it)])
    return [*rows, ["all that were not fitted, at rates that were run", *scores(at_rates_that_were_run(sweeps))]]


def main() -> None:
    """Fits the starts again, and prints or writes what the rule in use is worth."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path, help="file of the measurement, docs/measurements/rate_by_bound.json")
    parser.add_argument("--sweeps", action="store_true", help="also print every sweep that was not fitted")
    args = parser.parse_args()
    sweeps = read_sweeps()
    fitted = [sweep for sweep in sweeps if sweep.is_fitted]
    for kind in Handling:
        start, shares = fit([sweep for sweep in fitted if handling_of(sweep.method) is kind], LOWEST_FACTOR)
        print(f"{kind.name}: {start}, in use {WHOLE_RATE_UP_TO[kind]}", {one: round(s, 3) for one, s in shares.items()})
    print("one start for all losses:", fit(fitted, 0.0)[0])
    rows = table_rows(sweeps)
    for row in rows:
        print(*row, sep="  ")
    if args.sweeps:
        for sweep in (one for one in sweeps if not one.is_fitted):
            gains = {scale: round(gain, 3) for scale, gain in sweep.gains.items()}
            named = {name: round(rule(sweep), 2) for name, rule in RULES.items()}
            print(sweep.regime, sweep.method, sweep.lag, gains, named, sep="  ")
    if args.write:
        value, interval = headline(at_rates_that_were_run(sweeps))
        found = measurement(
            "rate_by_bound",
            value,
            f"share of the sweeps of the last row of which the rule keeps {KEPT} of the best gain",
            columns=["sweeps of", "sweeps", "of them at rates that were run", *RULES],
            rows=rows,
            interval=interval,
            command="python -m benchmarks.staleness.rate_by_bound --write docs/measurements/rate_by_bound.json",
            machine="tables of the staleness benchmark",
        )
        write_measurement(args.write, found)


if __name__ == "__main__":
    main()
