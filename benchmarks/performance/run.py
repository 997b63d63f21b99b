"""Runs all measurements of docs/when_async_pays.md#throughput: prints tables and writes `benchmarks.json`.

    python -m venv /tmp/trl && /tmp/trl/bin/pip install torch==2.13.0 trl==1.16.0 transformers==5.19.0
    OMP_NUM_THREADS=1 python benchmarks/performance/run.py --trl_python /tmp/trl/bin/python --out runs/benchmarks

Takes about ten minutes on two idle cores. Without TRL's environment that part is skipped.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).parent
PARTS: dict[str, list[str]] = {
    "trl": [],  # synchronous, `max_staleness` 1 and 4, TRL: tokens per second and times of the phases
    "engine": ["--models", "0.6M", "5M", "--repeats", "3", "--num_batches", "4"],  # generation alone
    "roof": [],  # training step, decoding and copy of weights against the machine's limit
    "overlap": [],  # with a simulated engine, against the analytic optimum
    "packing": ["--repeats", "3"],  # what shared prompts save
    "logprob_memory": ["--tokens", "256", "1024"],
    "stabilizer_overhead": ["--models", "quickstart"],
}
PART_TIMEOUT_S = 1200.0


def run_part(name: str, flags: list[str], out: Path) -> float:
    """Runs a part, which prints its table; returns its seconds.

    Raises:
        subprocess.SubprocessError: it failed, or exceeded `PART_TIMEOUT_S`.
    """
    print(f"\n== {name}: benchmarks/{name}.py {' '.join(flags)}", flush=True)
    began = time.monotonic()
    paths = [str(HERE.parent), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, str(HERE / f"{name}.py"), *flags, "--output", str(out / f"{name}.json")]
    subprocess.run(command, env=environment, check=True, timeout=PART_TIMEOUT_S)
    return time.monotonic() - began


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--trl_python", type=Path, default=Path("/tmp/trl/bin/python"))
    parser.add_argument("--out", type=Path, default=Path("runs/benchmarks"))
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    parts = args.parts
    if "trl" in parts and not args.trl_python.exists():
        print(f"--trl_python={args.trl_python} does not exist: no comparison with TRL (see --help)")
        parts = [name for name in parts if name != "trl"]
    flags = {**PARTS, "trl": ["--trl_python", str(args.trl_python)]}
    seconds = {name: run_part(name, flags[name], args.out) for name in parts}
    results = {name: json.loads((args.out / f"{name}.json").read_text()) for name in parts}
    (args.out / "benchmarks.json").write_text(json.dumps({"seconds": seconds, **results}, indent=1))
    each = ", ".join(f"{name} {took:.0f}" for name, took in seconds.items())
    print(f"\n{sum(seconds.values()) / 60:.1f} minutes ({each} seconds); {args.out / 'benchmarks.json'}")


if __name__ == "__main__":
    main()
