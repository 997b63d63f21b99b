"""Random runs, each resumed with one thing changed: settings as of `tests/helpers/random_resumes.py`.

    OMP_NUM_THREADS=1 python benchmarks/resumes.py --number 300 --output runs/resumes.jsonl

Loss, correction, advantage, kind of reward, filter, environment or agent, admission, bound, precision, packing, replay
and ranks are drawn, and what changes before the run goes on: a value that the reward reads from somewhere, a filter,
another setting, or nothing. Each run must hold, or be refused by the name of a setting. It holds if fresh data have
importance ratios of mean 1 (`FreshDataMonitor`), no token is older than the bound, all rewards that train are those
that the present settings give, and groups are kept where nothing changes them. One line of JSON for each; started
again, it goes on.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import tempfile
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "helpers"))

TIMEOUT_S = 300.0  # of a run of several ranks


def on_ranks(chosen: dict[str, Any]) -> str:
    """The result of a run of several ranks, each in a process of its own."""
    from launch import launch

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "run.json")
        file.write_text(json.dumps(chosen))
        script = Path(__file__).parents[1] / "tests" / "helpers" / "random_resumes.py"
        launch(script, [str(file)], num_processes=chosen["ranks"], timeout_s=TIMEOUT_S)
        return Path(folder, "result").read_text()


def main() -> None:
    """Runs what is not in the file yet, and prints how many held, were refused or broke."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--number", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--output", type=Path, default=Path("runs/resumes.jsonl"))
    args = parser.parse_args()
    from random_resumes import chosen_runs, try_run

    logging.getLogger("lit_async_rl").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore")
    args.output.parent.mkdir(parents=True, exist_ok=True)
    results = [json.loads(line) for line in args.output.read_text().splitlines()] if args.output.exists() else []
    for index, chosen in enumerate(chosen_runs(args.number, args.seed)):
        if index < len(results):
            continue
        try:
            result = try_run(chosen) if chosen["ranks"] == 1 else on_ranks(chosen)
        except Exception as error:  # each is a finding
            result = f"broken: {type(error).__name__}: {error}"[:2000]
        results.append({"index": index, "result": result, **chosen})
        with args.output.open("a") as file:
            file.write(json.dumps(results[-1]) + "\n")
    for result, count in Counter(row["result"].partition(":")[0] for row in results).most_common():
        print(f"{count:4} {result}")
    broken = [f"{row['index']}: {row['result']}" for row in results if row["result"].startswith("broken")]
    if broken:
        sys.exit("\n".join(broken))


if __name__ == "__main__":
    main()
