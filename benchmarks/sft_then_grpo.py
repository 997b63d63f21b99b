"""Two stages from one start: supervised fine-tuning, then GRPO.

    OMP_NUM_THREADS=1 python benchmarks/sft_then_grpo.py --output docs/measurements/sft_then_grpo.json
    OMP_NUM_THREADS=1 python benchmarks/sft_then_grpo.py --recipe smollm2 --seeds 3 \
        --output docs/measurements/sft_then_grpo_smollm2.json

`sort` is the quick start's task from random weights, by `configs/warm_start.yaml` and `quickstart.yaml`. `smollm2` is
mental arithmetic, by `configs/smollm2_sft.yaml` and `smollm2.yaml`, beside GRPO alone. Started again, it goes on with
the stages that are missing.
"""

from __future__ import annotations

import argparse
import csv
import json
import resource
import statistics
import subprocess
import time
from pathlib import Path
from typing import Any

from common.measurement import measurement, write_measurement

CONFIGS = {"sort": ("warm_start", "quickstart"), "smollm2": ("smollm2_sft", "smollm2")}
LEARNED = {"sort": "model", "smollm2": "adapter"}  # what the first stage writes
UNITS = {
    "sort": "held-out accuracy after SFT and GRPO from random weights",
    "smollm2": "held-out accuracy after SFT and GRPO, less that of GRPO alone",
}


def run_stage(folder: Path, command: str, config: str, seed: int, flags: list[str]) -> dict[str, Any]:
    """Held-out accuracies by step, seconds, and those of the processors; of a stage that has run, as it was."""
    result = folder / "result.json"
    if not result.exists():
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        began = time.monotonic()
        words = ["--config", f"configs/{config}.yaml", "--seed_everything", str(seed), "--data.seed", str(seed), *flags]
        for name, value in (("save_dir", folder.parent), ("name", folder.name), ("version", "run")):
            words += [f"--trainer.logger.{name}", str(value)]
        subprocess.run(["lit-async-rl", command, *words], check=True)
        wall_s = time.monotonic() - began
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        with (folder / "run" / "metrics.csv").open() as file:
            rows = [row for row in csv.DictReader(file) if row["val/pass@1"]]
        found = {
            "accuracy": {row["step"]: float(row["val/pass@1"]) for row in rows},
            "wall_s": wall_s,
            "processor_s": used.ru_utime + used.ru_stime - before.ru_utime - before.ru_stime,
        }
        result.write_text(json.dumps(found))
    stage: dict[str, Any] = json.loads(result.read_text())
    return stage


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", choices=list(CONFIGS), default="sort")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--folder", type=Path, default=Path("runs/sft_then_grpo"))
    parser.add_argument("--output", type=Path)
    parser.add_argument("--machine", default="two cores, float32")
    args = parser.parse_args()
    sft, grpo = CONFIGS[args.recipe]
    adapter = [] if args.recipe == "sort" else ["--model.lora.continue_adapter", "true"]
    rows = []
    drawn: list[dict[str, Any]] = []
    for seed in range(args.seeds):
        folder = args.folder / args.recipe / str(seed)
        learned = str(folder / "sft" / "run" / LEARNED[args.recipe])
        stages = {
            "sft": run_stage(folder / "sft", "sft", sft, seed, []),
            "grpo": run_stage(folder / "grpo", "train", grpo, seed, ["--model.model", learned, *adapter]),
        }
        seconds = [round(sum(stage[name] for stage in stages.values())) for name in ("wall_s", "processor_s")]
        curves = [[round(value, 3) for value in stage["accuracy"].values()] for stage in stages.values()]
        row = [seed, curves[0][0], curves[0][-1], curves[1][-1], *seconds]
        if args.recipe == "smollm2":
            alone = run_stage(folder / "alone", "train", grpo, seed, [])
            values = [round(value, 3) for value in alone["accuracy"].values()]
            row += [values[-1], round(alone["processor_s"])]
            stages["alone"] = alone
        rows.append(row)
        drawn.append(stages)
        print(*row, flush=True)
    if args.output:
        columns = ["seed", "before", "after SFT", "after GRPO", "wall time, s", "processor time, s"]
        gains = [row[3] for row in rows]
        if args.recipe == "smollm2":
            columns += ["GRPO alone", "its processor time, s"]
            gains = [row[3] - row[6] for row in rows]
        found = measurement(
            args.output.stem,
            round(statistics.mean(gains), 3),
            f"{UNITS[args.recipe]}, mean of {len(rows)} seeds",
            columns=columns,
            rows=rows,
            command=f"python benchmarks/sft_then_grpo.py --recipe {args.recipe} --seeds {args.seeds}",
            machine=args.machine,
            interval=[round(min(gains), 3), round(max(gains), 3)],
        )
        curves = {name: mean_curve([stages[name]["accuracy"] for stages in drawn]) for name in drawn[0]}
        write_measurement(args.output, found | {"curves": curves})


def mean_curve(accuracies: list[dict[str, float]]) -> list[list[float]]:
    """[step, accuracy], mean over seeds."""
    means = {step: statistics.mean(values[step] for values in accuracies) for step in accuracies[0]}
    return [[int(step), round(value, 4)] for step, value in means.items()]


if __name__ == "__main__":
    main()
