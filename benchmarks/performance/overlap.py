"""Overlap efficiency of the asynchronous loop, independent of hardware: by `max_staleness` and tail of the latency.

The engine is simulated (slots occupied for given times), the trainer sleeps; producer, admission, scoring and threads
are real. Both sides have the same amount of work ("balanced"), where overlap is hardest.

    python benchmarks/performance/overlap.py --output overlap.json

A cell is (T_gen + T_train - W) / min(T_gen, T_train): 1 is the optimum W = max(T_gen, T_train), 0 is no overlap. The
value in brackets is the optimum for these latencies within the bound, computed without threads or scheduler: its
distance from 1 is the cost of the bound, the distance between the two is our overhead.
"""

from __future__ import annotations

import argparse
import json
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.common.simulated_run import SimulatedRun
from lit_async_rl.simulation.latency import Constant, Latency, LogNormal, Pareto, Stragglers


def latencies(mean_s: float) -> dict[str, Latency]:
    """Latencies of equal mean, from no tail to a heavy one."""
    return {
        "constant": Constant(mean_s),
        "log-normal 0.5": LogNormal(mean_s, 0.5),
        "log-normal 1": LogNormal(mean_s, 1.0),
        "log-normal 1.5": LogNormal(mean_s, 1.5),
        "Pareto 2.5": Pareto(mean_s, 2.5),
        "Pareto 1.5": Pareto(mean_s, 1.5),
        "2% take 10 x": Stragglers(mean_s, 0.02, 10.0),
    }


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--max_staleness", type=int, nargs="+", default=[0, 1, 2, 4, 8])
    parser.add_argument("--train_s", type=float, default=0.4, help="seconds of a training step")
    parser.add_argument("--num_steps", type=int, default=30)
    parser.add_argument("--num_slots", type=int, default=8, help="of the engine, which samples 8 groups of 4 a step")
    parser.add_argument("--at_once", type=int, default=7, help="cells that run at the same time")
    parser.add_argument("--output", type=Path, default=Path("overlap.json"))
    args = parser.parse_args()
    mean_s = args.train_s * args.num_slots / 32
    runs = {
        (name, bound): SimulatedRun(
            latency=latency,
            max_staleness=bound,
            train_s=args.train_s,
            num_slots=args.num_slots,
            num_steps=args.num_steps,
        )
        for name, latency in latencies(mean_s).items()
        for bound in args.max_staleness
    }
    with ThreadPoolExecutor(args.at_once) as pool:
        measured = dict(zip(runs, pool.map(SimulatedRun.measure, runs.values()), strict=True))
    print(f"{'max_staleness':>14}" + "".join(f"{bound:>18}" for bound in args.max_staleness))
    results = []
    for name in latencies(mean_s):
        line = f"{name:>14}"
        for bound in args.max_staleness:
            found = measured[name, bound].overlap_efficiency
            ideal = runs[name, bound].ideal().overlap_efficiency
            line += f"{found:.3f} ({ideal:.3f})".rjust(18)
            results.append({"latency": name, "max_staleness": bound, "efficiency": found, "ideal": ideal})
        print(line)
    args.output.write_text(json.dumps({"settings": {**vars(args), "output": None}, "results": results}, indent=1))


if __name__ == "__main__":
    main()
