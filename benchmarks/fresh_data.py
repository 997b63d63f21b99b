"""Random combinations of sampling, loss, correction, packing, micro-batches, precision and engine, on fresh data.

    OMP_NUM_THREADS=1 python benchmarks/fresh_data.py --number 500 --output runs/fresh_data.jsonl

In each short run `FreshDataMonitor` must find that fresh data have importance ratios of mean 1, or the run must be
refused at the start by the name of a setting. One line of JSON for each combination; started again, it goes on.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections import Counter
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1] / "tests" / part) for part in ("helpers", "callbacks")]


def main() -> None:
    """Runs the combinations that are not in the file yet, and prints how many held, were refused or broke."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--number", type=int, default=500)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--output", type=Path, default=Path("runs/fresh_data.jsonl"))
    args = parser.parse_args()
    from test_fresh_data import combinations, try_combination

    logging.getLogger("lit_async_rl").setLevel(logging.ERROR)
    args.output.parent.mkdir(parents=True, exist_ok=True)
    results = [json.loads(line) for line in args.output.read_text().splitlines()] if args.output.exists() else []
    for index, chosen in enumerate(combinations(args.number, args.seed)):
        if index < len(results):
            continue
        try:
            result = try_combination(chosen)
        except Exception as error:  # each is a finding
            result = f"broken: {type(error).__name__}: {error}"[:500]
        results.append({"index": index, "result": result, **chosen})
        with args.output.open("a") as file:
            file.write(json.dumps(results[-1]) + "\n")
    for result, count in Counter(row["result"] for row in results).most_common():
        print(f"{count:4} {result}")


if __name__ == "__main__":
    main()
