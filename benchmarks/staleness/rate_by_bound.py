"""Which learning rate fits a staleness bound? A rule by loss and correction, fitted on some runs, tested on others.

    python -m benchmarks.staleness.rate_by_bound

It reads the runs of the staleness benchmark (`docs/results/*.parquet`) that were made at several rates. Which of them
fit the rule, which test it and how it is scored was written down and committed before anything was fitted; what had been
read of the runs that test it is what docs/results.md said of them (the table of the language model among it).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from benchmarks.staleness.statistics import per_cell
from benchmarks.staleness.table import CELL, read_table

TABLES = Path("docs/results")
KEPT = 0.95  # share of the gain of the best rate that a named rate has to keep

# -- Who fits and who tests --------------------------------------------------------------------------------------------

FIT_REGIME = "heavy_tails"
FIT_LOSSES = (
    *("uncorrected", "ppo_clip", "decoupled_ppo", "cispo", "gspo"),
    *("token_tis", "sequence_tis", "opob", "vcpo", "m2po"),
)
# Tested on: the other losses of this regime, and all regimes that have runs at several rates: `mixed_lag`, `very_stale`,
# `quickstart_constant` (a policy of another size), `smollm2` (a language model). `length_bias`, `aligned_gradients` and
# `mismatch` were run at one rate and test nothing.
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

    def share_kept(self, scale: float) -> float:
        """Gain at a multiple of the rate over that at the best one that was run."""
        return self.gain(scale) / max(self.gains.values())


def read_sweeps() -> list[Sweep]:
    """All losses, lags and regimes that were run at several rates."""
    table = pd.concat([read_table(path) for path in sorted(TABLES.glob("*.parquet"))], ignore_index=True)
    acts = table["method"].str.split("+").map(lambda parts: bool(set(parts) & set(CHANGES_THE_RATE)))
    table = table[(table["lag"] > 0) & ~acts]
    runs = per_cell(table.drop_duplicates([*CELL, "step"], keep="last"))
    sweeps = []
    for (regime, method, lag), found in runs.groupby(["regime", "method", "lag"]):
        by_rate = found.assign(gain=found["final"] - found["start"]).groupby("learning_rate_scale")
        gains = {float(scale): float(gain) for scale, gain in by_rate["gain"].mean().items()}
        if len(gains) > 1 and max(gains.values()) > 0:
            ess_ratio = float(by_rate["ess_ratio"].mean().get(1.0, np.nan))
            sweeps.append(Sweep(str(regime), str(method), int(lag), gains=gains, ess_ratio=ess_ratio))
    return sweeps


def main() -> None:
    """Lists the sweeps that fit the rule."""
    for sweep in read_sweeps():
        if sweep.is_fitted:
            gains = {scale: round(gain, 3) for scale, gain in sweep.gains.items()}
            print(sweep.method, sweep.lag, gains, round(sweep.ess_ratio, 3), sep="\t")


if __name__ == "__main__":
    main()
