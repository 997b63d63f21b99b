"""Cost of `RewardHackingMonitor`, and its false alarms in runs without reward hacking.

    python benchmarks/rewards/hacking_monitor.py --out docs/measurements/hacking_monitor.json

Runs the quick start and the calculator, each with several seeds, with the monitor as a callback. Its cost is the
processor time of its hooks, over that of the whole process in the same steps: both of one run, so that what else the
machine does is in neither. Steps before the first are left out.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import lit_async_rl as rl  # noqa: E402
from benchmarks.common.measurement import measurement, write_measurement  # noqa: E402


class Timed(rl.RewardHackingMonitor):
    """The monitor, with its processor time; writes what it found to `out`.

    Args:
        out: file.
    """

    def __init__(self, out: str) -> None:
        super().__init__()
        self._out = Path(out)
        self._own_s = 0.0
        self._num_steps = -1
        self._began_s = 0.0

    def on_train_batch_end(self, *args: Any, **kwargs: Any) -> None:
        began = time.thread_time()
        super().on_train_batch_end(*args, **kwargs)
        self._num_steps += 1
        if self._num_steps:
            self._own_s += time.thread_time() - began
        else:
            self._began_s = time.process_time()

    def on_train_end(self, *args: Any, **kwargs: Any) -> None:
        super().on_train_end(*args, **kwargs)
        found = {
            "own_ms": 1000 * self._own_s / self._num_steps,
            "step_ms": 1000 * (time.process_time() - self._began_s) / self._num_steps,
            "steps": self._num_steps + 1,
            "signs": sorted(self.begun),
        }
        self._out.write_text(json.dumps(found))


def run(config: str, seed: int, max_steps: int) -> dict[str, Any]:
    """One run in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "found.json"
        timed = {"class_path": "benchmarks.rewards.hacking_monitor.Timed", "init_args": {"out": str(out)}}
        monitor = json.dumps([timed])
        logger = json.dumps({"class_path": "CSVLog", "init_args": {"save_dir": folder, "name": "run"}})
        words = [
            f"--config={ROOT / 'configs' / config}",
            f"--seed_everything={seed}",
            f"--trainer.callbacks+={monitor}",
        ]
        words += [f"--trainer.max_steps={max_steps}", f"--trainer.logger={logger}", "--trainer.limit_val_batches=0"]
        command = [sys.executable, "scripts/train.py", *words]
        subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        found: dict[str, Any] = json.loads(out.read_text())
        return found


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--max_steps", type=int, default=150)
    parser.add_argument("--configs", nargs="+", default=["quickstart.yaml", "calculator.yaml"])
    parser.add_argument("--out", type=Path, help="measurement to write")
    given = parser.parse_args()
    rows = []
    shares = []
    for config in given.configs:
        for seed in range(given.seeds):
            found = run(config, seed, given.max_steps)
            share = found["own_ms"] / found["step_ms"]
            shares.append(share)
            signs = ", ".join(found["signs"]) or "none"
            own_ms, step_ms = (f"{found[name]:.1f} ms" for name in ("own_ms", "step_ms"))
            rows.append([config, seed, found["steps"], own_ms, step_ms, f"{share:.2%}", signs])
            print(rows[-1], flush=True)
    if given.out is None:
        return
    found = measurement(
        given.out.stem,
        round(100 * statistics.fmean(shares), 2),
        "% of a step's processor time",
        columns=["run", "seed", "steps", "the monitor, a step", "the whole process, a step", "share", "signs"],
        rows=rows,
        command=f"python benchmarks/rewards/hacking_monitor.py --out {given.out}",
        machine="two cores shared with other programs, processor time; the interval is the range",
        interval=[round(100 * min(shares), 2), round(100 * max(shares), 2)],
    )
    write_measurement(given.out, found)


if __name__ == "__main__":
    main()
