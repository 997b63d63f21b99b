"""Draws learning curves from the CSV logs of runs.

    python scripts/plot_runs.py --runs runs/quickstart/version_* --out curves.png

    python scripts/plot_runs.py --runs runs/real_model/*/seed_* --panels val/pass@1 policy/entropy --out a.png

Runs whose folders differ only in the last name (`version_*`) are seeds of one line: thin lines are runs, the thick one
is their median.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt
import pandas as pd

PANELS = {
    "val/pass@1": "held-out accuracy (one sample)",
    "reward/mean": "training reward",
    "sample/staleness_mean": "staleness (versions)",
    "importance/ess_ratio": "effective sample size / rollouts",
}
TITLES = PANELS | {
    "reward/mean_sampled": "training reward, before groups are dropped",
    "policy/entropy": "entropy (nats)",
}


def read(folder: Path, column: str) -> pd.Series:
    """One column, indexed by optimizer step."""
    table = pd.read_csv(folder / "metrics.csv")
    if column not in table:
        raise SystemExit(f"{folder / 'metrics.csv'} has no column {column!r}")
    values = table[["step", column]].dropna().drop_duplicates("step", keep="last").set_index("step")[column]
    return values.rolling(5, min_periods=1).mean() if len(values) > 30 else values


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", nargs="+", type=Path, required=True, help="folders that hold metrics.csv")
    parser.add_argument("--out", type=Path, required=True, help="picture to write")
    parser.add_argument("--panels", nargs="+", default=list(PANELS), choices=list(TITLES), metavar="METRIC")
    args = parser.parse_args()
    lines: dict[str, list[Path]] = {}
    for run in args.runs:
        if not (run / "metrics.csv").is_file():
            raise SystemExit(f"{run} holds no metrics.csv")
        lines.setdefault(run.parent.name, []).append(run)
    columns = min(2, len(args.panels))
    rows = math.ceil(len(args.panels) / columns)
    size = 8.3, 3.4 * rows + 0.6
    figure, axes = plt.subplots(rows, columns, figsize=size, layout="constrained", squeeze=False)
    for axis in axes.flat[len(args.panels) :]:
        axis.set_visible(False)
    for axis, column in zip(axes.flat, args.panels, strict=False):
        for number, (name, runs) in enumerate(lines.items()):
            seeds = pd.DataFrame({str(run): read(run, column) for run in runs})
            axis.plot(seeds.index, seeds, color=f"C{number}", alpha=0.3, linewidth=0.8)
            label = f"{name.replace('_', ' ')}, {len(runs)} run{'s' * (len(runs) > 1)}"
            axis.plot(seeds.index, seeds.median(axis=1), color=f"C{number}", linewidth=2, label=label)
        axis.set_title(TITLES[column], fontsize=13)
        axis.set_xlabel("optimizer step", fontsize=12)
        axis.tick_params(labelsize=12)
        axis.grid(alpha=0.3)
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=2, fontsize=12)
    axes[0, 0].set_ylim(0, 1)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(args.out, dpi=110)
    print(f"wrote {args.out}")


if __name__ == "__main__":
    main()
