"""Held-out accuracy at the end of the quick start with each overlay that a laptop can run, and without.

    python benchmarks/configurations.py --seeds 0 1 2 --num_processes 2 --out runs/configurations

An overlay must not end below plain GRPO by more than two standard errors: the command then fails.
Runs are ordinary commands, in processes of their own; an interrupted grid is resumed, finished runs are not repeated.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import os
import statistics
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.common.grid import Grid
from benchmarks.common.process import RESULT, csv_logger, recorded
from lit_async_rl.runtime.lifetime import die_with_parent

CONFIGS = Path("configs")
HELD_OUT = 512  # problems of the quick start's validation
TWO_RANKS = ("--trainer.accelerator", "cpu", "--trainer.devices", "2", "--data.groups_per_step", "32")
ELSEWHERE = {  # overlays of the quick start that are not measured here, and why
    "vllm_cpu": "needs vLLM: docs/engines.md",
    "strategies/fsdp2_tp": "four processes",
    "systems/sampo": "an overlay of calculator.yaml",
    "systems/oapl": "another learning problem: offline regression, see docs/comparison.md",
}
FSDP2_SIZES = ("--trainer.strategy.init_args.data_parallel_size", "2")
RECIPE = "quickstart"  # the quick start as it is, and without its recipe
PLAIN = "stabilizers/plain"


@dataclass(frozen=True)
class Cell:
    """One run: the quick start with an overlay (`quickstart`: without)."""

    overlay: str
    seed: int
    steps: int

    @property
    def folder(self) -> Path:
        """Folder of its results, relative to the grid's."""
        return Path(self.overlay.replace("/", "-"), f"seed={self.seed}")

    def arguments(self) -> list[str]:
        """Arguments of `scripts/train.py`."""
        overlay = [] if self.overlay == RECIPE else ["--config", str(CONFIGS / f"{self.overlay}.yaml")]
        more = TWO_RANKS if self.overlay.startswith("strategies/") else ()
        more += FSDP2_SIZES if self.overlay == "strategies/fsdp2" else ()
        seeds = ["--seed_everything", str(self.seed), "--data.seed", str(self.seed)]
        steps = ["--trainer.max_steps", str(self.steps)]
        return ["--config", str(CONFIGS / "quickstart.yaml"), *overlay, *more, *seeds, *steps]


def overlays() -> list[str]:
    """Names of the overlays of the quick start in `configs/`, the quick start itself first."""
    files = [CONFIGS / f"{name}.yaml" for name in ("quickstart_sync", "own_process", "lora")]
    files += [
        file for part in ("stabilizers", "systems", "strategies") for file in sorted((CONFIGS / part).glob("*.yaml"))
    ]
    names = [str(file.relative_to(CONFIGS).with_suffix("")) for file in files]
    return [RECIPE, *(name for name in names if name not in ELSEWHERE)]


def run_cell(cell: Cell, out: Path) -> None:
    """Trains in a process of its own, and keeps first and last held-out accuracy."""
    folder = out / cell.folder
    with recorded(folder, cell.arguments()) as result:
        quiet = [*csv_logger(folder), "--trainer.enable_progress_bar", "false", "--defaults.checkpoint", "null"]
        command = [sys.executable, "scripts/train.py", *cell.arguments(), *quiet]
        cell_process = os.getpid()
        done = subprocess.run(  # a run whose cell is killed, because it takes too long or the grid ends, ends with it
            command, stdin=subprocess.DEVNULL, check=False, preexec_fn=lambda: die_with_parent(cell_process)
        )
        if done.returncode:
            raise RuntimeError(f"exit status {done.returncode}: see log.txt")
        with (folder / "metrics.csv").open(newline="") as file:
            found = [row for row in csv.DictReader(file) if row.get("val/pass@1")]
        result["held_out"] = [float(row["val/pass@1"]) for row in found]


def table(cells: Iterable[Cell], out: Path) -> tuple[list[list[str]], list[str]]:
    """Rows (overlay, seeds, accuracy, difference, standard error, seconds), and overlays that broke or are below."""
    results: dict[str, list[tuple[float, float]]] = {}
    broken: list[str] = []
    for cell in cells:
        found = json.loads((out / cell.folder / RESULT).read_text())
        if found["error"] or not found.get("held_out"):
            broken.append(f"{cell.overlay} seed {cell.seed}: {found['error'] or 'no held-out accuracy'}")
        else:
            results.setdefault(cell.overlay, []).append((found["held_out"][-1], found["wall_s"]))
    plain = _summary(results.get(PLAIN, []))
    rows = []
    for overlay, found in results.items():
        mean, error, seconds = _summary(found)
        difference = mean - plain[0]
        uncertain = math.hypot(error, plain[1])
        is_below = overlay != PLAIN and difference < -2 * uncertain
        rows.append(
            [overlay, str(len(found)), f"{mean:.3f}", f"{difference:+.3f}", f"{uncertain:.3f}", f"{seconds:.0f}"]
        )
        if is_below:
            broken.append(
                f"{overlay} ends {-difference:.3f} below the plain run, {-difference / uncertain:.1f} standard errors"
            )
    return rows, broken


def _summary(found: list[tuple[float, float]]) -> tuple[float, float, float]:
    """Mean accuracy, its standard error (of seeds, at least that of the held-out problems), mean seconds."""
    if not found:
        return math.nan, math.nan, math.nan
    values = [accuracy for accuracy, _ in found]
    mean = statistics.fmean(values)
    of_problems = math.sqrt(max(mean * (1 - mean), 1e-4) / HELD_OUT / len(values))
    of_seeds = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0
    return mean, max(of_problems, of_seeds), statistics.fmean(seconds for _, seconds in found)


def main() -> None:
    """Command line; exits with status 1 if an overlay broke or ended below."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=225)
    parser.add_argument("--only", nargs="+", help="overlays by name, such as stabilizers/vcpo; two are added")
    parser.add_argument("--num_processes", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("runs/configurations"))
    args = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if unknown := set(args.only or ()) - set(overlays()):
        sys.exit(f"error: --only {sorted(unknown)}: there are {', '.join(overlays())}")
    names = list(dict.fromkeys([RECIPE, PLAIN, *args.only])) if args.only else overlays()
    cells = [Cell(name, seed, args.steps) for seed in args.seeds for name in names]
    Grid(run_cell, args.out, args.num_processes, cell_timeout_s=1800.0).run(cells)
    rows, broken = table(cells, args.out)
    head = ["overlay", "seeds", "held-out accuracy", "less plain", "standard error", "seconds"]
    lines = [" | ".join(row) for row in (head, ["---"] * len(head), *rows)]
    print("\n".join(f"| {line} |" for line in lines))
    (args.out / "table.json").write_text(json.dumps({"columns": head, "rows": rows}, indent=1))
    if broken:
        sys.exit("\n".join(broken))


if __name__ == "__main__":
    main()
