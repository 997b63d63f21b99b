"""SmolLM2-135M-Instruct before and after runs of configs/smollm2.yaml: accuracy, cost, what it says.

    python benchmarks/real_model.py --train asynchronous --seed 0            # one run, then its measurement
    python benchmarks/real_model.py --train synchronous --seed 0 -- --data.max_staleness 0
    python benchmarks/real_model.py --measure runs/smollm2/version_0         # of a run that exists
    python benchmarks/real_model.py --report runs/real_model --write docs/measurements/smollm2.json

A measurement asks every held-out problem once greedily and `SAMPLES` times at temperature 1, in bfloat16. It is written
to `measured.json` in the run's folder; the model before training is asked once, `before.json` beside the runs.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import yaml

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.common.measurement import measurement, write_measurement
from lit_async_rl.engines.base import GenerationRequest, SamplingParams
from lit_async_rl.engines.embedded.engine import EmbeddedEngine
from lit_async_rl.models.loading import load_policy
from lit_async_rl.models.tokenizer import TextCodec
from lit_async_rl.rewards import last_number
from lit_async_rl.runtime.spans import TRAINER, read_trace
from lit_async_rl.tasks import MentalArithmetic

ROOT = Path(__file__).parents[1]
CONFIG = "configs/smollm2.yaml"
RUNS = Path("runs/real_model")
SAMPLES = 4
SHOWN = 12


def train(name: str, seed: int, flags: list[str]) -> Path:
    """Trains in a process of its own; returns the run's folder, which has `cost.json`."""
    began = time.monotonic()
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    folder = RUNS / name / f"seed_{seed}"
    place = ["--trainer.logger.init_args.save_dir", str(RUNS), "--trainer.logger.init_args.name", name]
    version = ["--trainer.logger.init_args.version", folder.name, "--seed_everything", str(seed)]
    command = [sys.executable, "scripts/train.py", "--config", CONFIG, *place, *version, *flags]
    load = os.getloadavg()[0]
    subprocess.run(command, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cost = {
        "cpu_s": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
        "wall_s": time.monotonic() - began,
        "load": [load, os.getloadavg()[0]],
        "peak_bytes": after.ru_maxrss * 1024,
        "flags": flags,
    }
    (folder / "cost.json").write_text(json.dumps(cost, indent=1) + "\n")
    return folder


def ask(model: str, problems: MentalArithmetic) -> dict[str, Any]:
    """Rewards of all problems, greedily and sampled, and what the model says to the first."""
    codec = TextCodec(model)
    engine = EmbeddedEngine.from_module(load_policy(model, dtype="bfloat16"), num_slots=96)
    prompts = [problems[n] for n in range(len(problems))]
    ids = [codec.encode(prompt) for prompt in prompts]
    found: dict[str, Any] = {"model": model, "num_problems": len(prompts)}
    for name, temperature, count in (("greedy", 0.0, 1), ("sampled", 1.0, SAMPLES)):
        sampling = SamplingParams(temperature=temperature, max_tokens=16)
        requests = [
            GenerationRequest(id=n, prompt_ids=i, num_samples=count, sampling=sampling) for n, i in enumerate(ids)
        ]
        texts = [[codec.decode(c.token_ids) for c in answers] for answers in engine.run(requests)]
        found[name] = [
            [last_number(prompt, text) for text in some] for prompt, some in zip(prompts, texts, strict=True)
        ]
        found[f"{name}_texts"] = [[p.messages[0]["content"], t[0]] for p, t in zip(prompts, texts, strict=True)][:SHOWN]
    return found


def held_out(folder: Path) -> MentalArithmetic:
    """Held-out problems of a run."""
    config = yaml.safe_load((folder / "config.yaml").read_text())
    return MentalArithmetic(**config["data"]["validation"]["prompts"]["init_args"])


def measure(folder: Path) -> None:
    """Writes `measured.json` of a run, and `before.json` beside the runs if it is not there."""
    before = RUNS / "before.json"
    if not before.exists():
        model = yaml.safe_load((folder / "config.yaml").read_text())["model"]["model"]
        before.parent.mkdir(parents=True, exist_ok=True)
        before.write_text(json.dumps(ask(model, held_out(folder)), indent=1) + "\n")
    with tempfile.TemporaryDirectory() as scratch:
        checkpoint = str(folder / "checkpoints/last.ckpt")
        flags = ["--config", str(folder / "config.yaml"), "--ckpt_path", checkpoint, "--out", f"{scratch}/after"]
        subprocess.run([sys.executable, "scripts/export.py", *flags], check=True, stdout=subprocess.DEVNULL)
        found = ask(f"{scratch}/after", held_out(folder))
    (folder / "measured.json").write_text(json.dumps(found, indent=1) + "\n")
    print(folder, {name: round(mean(found[name])[0], 3) for name in ("greedy", "sampled")})


def mean(rewards: list[list[float]]) -> tuple[float, float]:
    """Accuracy and its standard error over problems."""
    each = [statistics.fmean(some) for some in rewards]
    return statistics.fmean(each), statistics.stdev(each) / math.sqrt(len(each))


def gain(before: list[list[list[float]]], after: list[list[list[float]]]) -> tuple[float, float]:
    """Mean gain from runs to other runs and its standard error: of problems (paired) and of seeds, as variances."""
    starts, ends = ([[statistics.fmean(some) for some in run] for run in runs] for runs in (before, after))
    pairs = zip(zip(*starts, strict=True), zip(*ends, strict=True), strict=True)
    gains = [statistics.fmean(there) - statistics.fmean(here) for here, there in pairs]
    variance = statistics.variance(gains) / len(gains)
    for runs in (starts, ends):
        if len(runs) > 1:
            variance += statistics.variance([statistics.fmean(run) for run in runs]) / len(runs)
    return statistics.fmean(gains), math.sqrt(variance)


def row(run: Path, before: dict[str, Any]) -> list[str]:
    """A run's line of the table."""
    found, cost = (json.loads((run / name).read_text()) for name in ("measured.json", "cost.json"))
    cells = [f"{run.parent.name.replace('_', ' ')}, {run.name.replace('_', ' ')}", str(found["num_problems"])]
    for name in ("sampled", "greedy"):
        cells.append(f"{mean(before[name])[0]:.3f} → {{:.3f}} ± {{:.3f}}".format(*mean(found[name])))
    load = statistics.fmean(cost["load"])
    spans = parts(run)
    times = [f"{cost['cpu_s']:.0f} s", f"{cost['wall_s'] / 60:.1f} min at load {load:.0f}"]
    return [
        *cells,
        *times,
        f"{spans['publish']['total_s'] / cost['wall_s']:.1%}",
        f"{spans['checkpoint']['longest_s']:.2f} s",
    ]


def parts(run: Path) -> dict[str, dict[str, float]]:
    """Spans of the trainer's thread in the run's timeline: seconds in total and of the longest."""
    found: dict[str, dict[str, float]] = {}
    for event in read_trace(run / "timeline/rank0.json"):
        if event["ph"] == "X" and event["tid"] == TRAINER.tid:
            part = found.setdefault(event["name"], {"total_s": 0.0, "longest_s": 0.0})
            seconds = event["dur"] / 1e6
            part["total_s"] = round(part["total_s"] + seconds, 2)
            part["longest_s"] = round(max(part["longest_s"], seconds), 2)
    return found


def report(folder: Path, commit: str) -> dict[str, Any]:
    """The measurement file of all runs below a folder; runs on other problems have a `before.json` of their own."""
    rows = []
    value = (0.0, 0.0)
    times = {}
    rewards: dict[str, list[dict[str, Any]]] = {}
    for kind in sorted(path for path in folder.iterdir() if path.is_dir()):
        own = kind / "before.json"
        before = json.loads((own if own.exists() else folder / "before.json").read_text())
        runs = sorted(path.parent for path in kind.glob("seed_*/measured.json"))
        rows += [row(run, before) for run in runs]
        times |= {f"{kind.name}/{run.name}": parts(run) for run in runs}
        rewards[kind.name] = [json.loads((run / "measured.json").read_text()) for run in runs]
        if kind.name == "asynchronous" and runs:
            value = gain([before["sampled"]], [run["sampled"] for run in rewards[kind.name]])
    against = {
        f"{kind}, {how}": gain([run[how] for run in rewards["synchronous"]], [run[how] for run in runs])
        for kind, runs in rewards.items()
        for how in ("sampled", "greedy")
        if runs and rewards.get("synchronous") and kind != "synchronous"
    }
    columns = ["run", "held-out problems", "accuracy at temperature 1, ± standard error", "greedy"]
    return measurement(
        "smollm2",
        round(value[0], 3),
        "gain in held-out accuracy at temperature 1",
        columns=[*columns, "processor time", "wall time", "of it publishing", "longest pause of a checkpoint"],
        rows=rows,
        interval=[round(value[0] + side * 1.96 * value[1], 3) for side in (-1, 1)],
        command="python benchmarks/real_model.py --train asynchronous --seed 0",
        machine="two cores (AMX), bfloat16, one thread each for trainer and engine; the load says what else ran",
        commit=commit,
        against_synchronous={kind: [round(number, 4) for number in pair] for kind, pair in against.items()},
        trainer=times,
    )


def with_known(found: dict[str, Any], file: Path) -> dict[str, Any]:
    """The measurement, with what the file says of runs that are not on this machine.

    The headline is that of the asynchronous runs: without one of them here, the file's.
    """
    if not file.exists():
        return found
    known = json.loads(file.read_text())
    rows = {row[0]: row for row in found["table"]["rows"]}
    headline = found if any(name.startswith("asynchronous") for name in rows) else known
    rows = {row[0]: row for row in known["table"]["rows"]} | rows
    table = {"columns": found["table"]["columns"], "rows": [rows[name] for name in sorted(rows)]}
    return {**headline, "table": table, "trainer": known["trainer"] | found["trainer"]}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train", metavar="NAME", help="train a run of this name")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--measure", type=Path, nargs="*", default=[], metavar="RUN")
    parser.add_argument("--report", type=Path, metavar="RUNS")
    parser.add_argument("--write", type=Path, default=ROOT / "docs/measurements/smollm2.json")
    parser.add_argument("--commit", default="", help="of the runs; empty is the one that is checked out")
    parser.add_argument("flags", nargs="*", help="behind `--`: of scripts/train.py")
    args = parser.parse_args()
    torch.set_num_threads(1)
    runs = [train(args.train, args.seed, args.flags)] if args.train else args.measure
    for run in runs:
        measure(run)
    if args.report:
        write_measurement(args.write, with_known(report(args.report, args.commit), args.write))


if __name__ == "__main__":
    main()
