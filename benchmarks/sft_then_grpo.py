"""The quick start's task from random weights: supervised fine-tuning on flawed answers, then GRPO.

    OMP_NUM_THREADS=1 python benchmarks/sft_then_grpo.py --seeds 5 --output docs/measurements/sft_then_grpo.json

Each seed runs `lit-async-rl sft --config configs/warm_start.yaml`, and `lit-async-rl train --config
configs/quickstart.yaml` from the model that it has written. Started again, it goes on with the seeds that are missing.
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

from common.measurement import measurement, write_measurement

STAGES = {"sft": "warm_start", "train": "quickstart"}


def run_stage(command: str, seed: int, folder: Path, flags: list[str]) -> dict[str, float]:
    """Held-out accuracy before and after a stage, its seconds, and those of its processors."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    began = time.monotonic()
    logger = ["--trainer.logger.save_dir", str(folder), "--trainer.logger.name", command]
    words = ["--config", f"configs/{STAGES[command]}.yaml", "--seed_everything", str(seed), "--data.seed", str(seed)]
    subprocess.run(["lit-async-rl", command, *words, *logger, "--trainer.logger.version", "run", *flags], check=True)
    wall_s = time.monotonic() - began
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    with (folder / command / "run" / "metrics.csv").open() as file:
        accuracy = [float(row["val/pass@1"]) for row in csv.DictReader(file) if row["val/pass@1"]]
    processor_s = used.ru_utime + used.ru_stime - before.ru_utime - before.ru_stime
    return dict(before=accuracy[0], after=accuracy[-1], wall_s=wall_s, processor_s=processor_s)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--folder", type=Path, default=Path("runs/sft_then_grpo"))
    parser.add_argument("--output", type=Path)
    parser.add_argument("--machine", default="two cores, float32")
    args = parser.parse_args()
    rows = []
    for seed in range(args.seeds):
        result = args.folder / f"{seed}.json"
        if not result.exists():
            folder = args.folder / str(seed)
            tuned = run_stage("sft", seed, folder, flags=[])
            trained = run_stage("train", seed, folder, flags=["--model.model", str(folder / "sft" / "run" / "model")])
            result.write_text(json.dumps({"sft": tuned, "train": trained}))
        found = json.loads(result.read_text())
        seconds = {name: sum(stage[name] for stage in found.values()) for name in ("wall_s", "processor_s")}
        accuracy = [found["sft"]["before"], found["sft"]["after"], found["train"]["after"]]
        rows.append([seed, *(round(one, 3) for one in accuracy), *(round(one) for one in seconds.values())])
        print(*rows[-1], flush=True)
    held_out = [row[3] for row in rows]
    if args.output:
        found = measurement(
            args.output.stem,
            round(statistics.mean(held_out), 3),
            f"held-out accuracy after SFT and GRPO from random weights, mean of {len(rows)} seeds",
            columns=["seed", "random weights", "after SFT", "after GRPO", "wall time, s", "processor time, s"],
            rows=rows,
            command=f"python benchmarks/sft_then_grpo.py --seeds {args.seeds}",
            machine=args.machine,
            interval=[min(held_out), max(held_out)],
        )
        write_measurement(args.output, found)


if __name__ == "__main__":
    main()
