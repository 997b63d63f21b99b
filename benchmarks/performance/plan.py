"""Predictions of `lit-async-rl plan` against the real producer, admission and threads around an engine that sleeps.

    python benchmarks/performance/plan.py --write docs/measurements/plan.json

Each row: seconds of an optimizer step as predicted in virtual time, and as measured over the same number of steps.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.common.measurement import measurement, write_measurement
from benchmarks.common.simulated_run import SimulatedRun
from lit_async_rl.simulation.latency import CutLogNormal
from lit_async_rl.simulation.plan import DEVICES, ModelSize, StepCost, cost_by_formula, predict, splits

SEEDS = (0, 1)
SPLITS = ((1, 1), (2, 1), (1, 2))
BOUNDS = (0, 1, 4)
COST = StepCost(train_s=0.4, sample_s=0.3, num_slots=16, groups_per_step=8, group_size=4, longest=6.0)


def measured_step_s(trainer_devices: int, replicas: int, max_staleness: int, seed: int) -> float:
    """Seconds of a step with real threads."""
    run = SimulatedRun(
        latency=CutLogNormal(COST.sample_s, COST.spread, longest_s=COST.longest * COST.sample_s),
        max_staleness=max_staleness,
        train_s=COST.training_s(trainer_devices),
        num_slots=COST.num_slots * replicas,
        groups_per_step=COST.groups_per_step,
        group_size=COST.group_size,
        num_steps=32,
        warmup_steps=8,
        seed=seed,
    )
    return run.measure().wall_s / 24


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path)
    parser.add_argument("--machine", default="two cores", help="and what else ran on it")
    args = parser.parse_args()
    rows: list[list[object]] = []
    errors = []
    for trainer_devices, replicas in SPLITS:
        for bound in BOUNDS:
            found = predict(
                COST, trainer_devices=trainer_devices, replicas=replicas, max_staleness=bound, num_steps=200
            )
            real = [measured_step_s(trainer_devices, replicas, max_staleness=bound, seed=seed) for seed in SEEDS]
            error = found.step_s / statistics.fmean(real) - 1
            errors.append(abs(error))
            rows.append(
                [
                    trainer_devices,
                    replicas,
                    bound,
                    f"{found.step_s:.3f}",
                    f"{statistics.fmean(real):.3f}",
                    f"{error:+.1%}",
                ]
            )
            print(*rows[-1], flush=True)
    began = time.process_time()
    size = ModelSize(parameters=7_000_000_000, cache_bytes=57344)
    large = cost_by_formula(
        size,
        DEVICES["h100"],
        prompt_tokens=256,
        completion_tokens=2000,
        max_tokens=8000,
        num_slots=64,
        groups_per_step=1024,
        group_size=16,
    )
    found = splits(large, devices=3000, max_staleness=4)
    replicas = max(prediction.replicas for prediction in found)
    cpu_s = time.process_time() - began
    print(
        f"{replicas} replicas of 64 slots, 16384 samples a step, {len(found)} splits: {cpu_s:.1f} s of processor time"
    )
    if args.write is not None:
        rows.append(
            [3000 - replicas, replicas, 4, f"{found[0].step_s:.3f}", "not measured", f"{cpu_s:.1f} s to predict"]
        )
        columns = ["trainer devices", "engines", "max_staleness", "predicted s", "measured s", "difference"]
        write_measurement(
            args.write,
            measurement(
                "plan",
                value=round(max(errors), 3),
                unit="largest difference of a predicted step from the measured one, as a share",
                command="python benchmarks/performance/plan.py",
                columns=columns,
                rows=rows,
                machine=args.machine,
            ),
        )


if __name__ == "__main__":
    main()
