"""Overlap of slow environments: multi-turn episodes whose environment sleeps, with the real producer and event loop.

Engine and trainer have the same amount of work ("balanced"); the environment's delay is a multiple of a turn's
generation. A lower bound is

    step >= max(train, generate, (train + max(generate, episode)) / (max_staleness + 1)),

where `episode` is one episode's own time, all turns and responses in sequence: at most (max_staleness + 1) rounds of
episodes are open at a time. A cell is the measured seconds of a step, with that bound in brackets; without overlap a
step would take train + generate + all responses of the step / concurrent episodes.

    python benchmarks/performance/environments.py --output environments.json
"""

from __future__ import annotations

import argparse
import json
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.common.simulated_run import SimulatedRun, Sleeping
from lit_async_rl.simulation.latency import Constant, Latency, LogNormal

NUM_SLOTS = 8
GROUPS = 8
GROUP_SIZE = 4


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--max_staleness", type=int, nargs="+", default=[0, 1, 2, 4, 8])
    parser.add_argument("--sleeps", type=float, nargs="+", default=[0.0, 1.0, 4.0, 16.0], help="in turns' times")
    parser.add_argument("--train_s", type=float, default=0.4, help="seconds of a training step")
    parser.add_argument("--num_turns", type=int, default=4)
    parser.add_argument("--num_steps", type=int, default=24)
    parser.add_argument("--at_once", type=int, default=5, help="cells that run at the same time")
    parser.add_argument("--output", type=Path, default=Path("environments.json"))
    args = parser.parse_args()
    turn_s = args.train_s * NUM_SLOTS / (GROUPS * GROUP_SIZE * args.num_turns)

    def measure(cell: tuple[str, float, int]) -> float:
        kind, sleep, bound = cell
        mean_s = max(1e-6, sleep * turn_s)
        latency: Latency = Constant(mean_s) if kind == "constant" else LogNormal(mean_s, 1.0)
        run = SimulatedRun(
            latency=Constant(turn_s),
            environment=Sleeping(latency, args.num_turns),
            max_staleness=bound,
            train_s=args.train_s,
            num_slots=NUM_SLOTS,
            groups_per_step=GROUPS,
            group_size=GROUP_SIZE,
            num_steps=args.num_steps,
        )
        return run.measure().wall_s / (args.num_steps - run.warmup_steps)

    cells = [(kind, s, b) for kind in ("constant", "log-normal 1") for s in args.sleeps for b in args.max_staleness]
    with ThreadPoolExecutor(args.at_once) as pool:
        measured = dict(zip(cells, pool.map(measure, cells), strict=True))
    print(f"{'max_staleness':>22}" + "".join(f"{bound:>16}" for bound in args.max_staleness))
    results = []
    for kind, sleep in dict.fromkeys((kind, sleep) for kind, sleep, _ in cells):
        line = f"{kind:>14} {sleep:5g} x"
        for bound in args.max_staleness:
            episode_s = args.num_turns * (1 + sleep) * turn_s
            least = max(args.train_s, (args.train_s + max(args.train_s, episode_s)) / (bound + 1))
            line += f"{measured[kind, sleep, bound]:.3f} ({least:.3f})".rjust(16)
            cell = {"latency": kind, "sleep": sleep, "max_staleness": bound}
            results.append(cell | {"step_s": measured[kind, sleep, bound], "bound_s": least})
        print(line)
    args.output.write_text(json.dumps({"settings": {**vars(args), "output": None}, "results": results}, indent=1))


if __name__ == "__main__":
    main()
