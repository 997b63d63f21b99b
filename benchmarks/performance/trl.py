"""Trained tokens per second of this trainer and of TRL's GRPOTrainer: same model, prompts, lengths, optimizer, threads.

TRL needs an environment of its own:

    python -m venv /tmp/trl && /tmp/trl/bin/pip install torch==2.13.0 trl==1.16.0 transformers==5.19.0
    OMP_NUM_THREADS=1 python benchmarks/performance/trl.py --trl_python /tmp/trl/bin/python --output trl.json

All processes live at the same time and take turns of a few steps each (`workers/segments.py`), so that what else the
machine does hits all alike; ratios are medians over rounds. Three workloads: `equal`, the quick start (all completions
are 9 tokens long), `mixed`, an untrained model of the same shape whose completions end at random (geometric, 33
tokens in the mean, at most 128), and `smollm2`, a real chat model (`make smollm2`) with prompts of 40 to 100 tokens and
completions that it ends itself, at most 64; each system takes 4 to 6 GB there, so it is run by itself:

    OMP_NUM_THREADS=1 python benchmarks/performance/trl.py --workloads smollm2 --systems trl 0 2 --rounds 3 \
        --write docs/measurements/trl_smollm2.json

Where other programs use the cores, wall time says little about two threads that need two of them. The table therefore
also counts trained tokens by CPU seconds of the critical path: of all threads where phases follow each other, of the
busier of the two threads where they overlap. An idle machine's wall time comes close to it. `tok/all cpu` counts the
seconds of all threads.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from trl_tables import COLUMNS, NAMES, TRL, as_measurement, summarize
from trl_workloads import WORKLOADS, make_model, make_prompts

from benchmarks.common.measurement import write_measurement

WORKERS = Path(__file__).resolve().parent / "workers"
ROOT = Path(__file__).resolve().parents[2]
TURN_TIMEOUT_S = 1200.0


def our_arguments(args: argparse.Namespace, workload: dict[str, Any], model: str, folder: Path) -> list[str]:
    """The quick start's configuration without validation and checkpoints; all monitors stay on."""
    source = {"path": str(folder.parent / "prompts.jsonl"), "answer_field": None}
    flags = {
        "--config": str(ROOT / "configs/quickstart.yaml"),
        "--num_threads": args.num_threads,
        "--model.model": model,
        "--model.learning_rate": args.learning_rate,
        "--model.scheduler": "null",
        "--model.loss": "PPOClip",  # GRPO, as TRL's
        **dict.fromkeys(("--model.proximal", "--model.correction", "--model.baseline"), "null"),
        "--defaults.ess_learning_rate": "null",
        "--data.aggregation": "TokenMean",
        "--data.validation.prompts": "null",
        "--data.prompts": json.dumps({"class_path": "JsonlPrompts", "init_args": source}),
        "--data.reward": "our_run.odd_length",
        "--data.groups_per_step": workload["groups"],
        "--data.group_size": args.group_size,
        "--data.sampling.max_tokens": workload["max_tokens"],
        "--data.engine": "EmbeddedEngine",
        "--data.engine.num_slots": workload["groups"] * args.group_size,
        "--data.engine.num_threads": args.num_threads,
        "--trainer.logger.init_args.save_dir": str(folder),
        "--trainer.enable_progress_bar": "false",
        "--trainer.enable_checkpointing": "false",
    }
    return [str(part) for flag in flags.items() for part in flag] + workload["ours"]


def start(args: argparse.Namespace, name: str, workload: dict[str, Any], model: str, folder: Path) -> subprocess.Popen:
    """Starts a worker, which runs until its first stop."""
    rounds = {
        "warmup": workload.get("warmup", 3),
        "steps": workload["steps"],
        "num_segments": args.rounds,
        "output": f"{folder}/{name}.json",
    }
    max_steps = rounds["warmup"] + rounds["steps"] * rounds["num_segments"]
    num_threads = args.num_threads * (2 if name == "trl2" else 1)
    if name in TRL:
        command = [args.trl_python, str(WORKERS / "trl_run.py")]
        settings: dict[str, Any] = {
            "model": model,
            "folder": f"{folder}/{name}_output",
            "prompts": [json.loads(line)["prompt"] for line in (folder / "prompts.jsonl").open()],
            "groups_per_step": workload["groups"],
            "group_size": args.group_size,
            "max_tokens": workload["max_tokens"],
            "learning_rate": args.learning_rate,
            "num_threads": num_threads,
            "max_steps": max_steps,
        }
    else:
        command = [sys.executable, str(WORKERS / "our_run.py")]
        arguments = our_arguments(args, workload, model, folder=folder / name)
        arguments += ["--data.max_staleness", name, "--trainer.max_steps", str(max_steps)]
        settings = {"arguments": arguments}
    command += ["--settings", json.dumps({**settings, "segments": rounds})]
    paths = [str(WORKERS), str(ROOT / "benchmarks/common" if name in TRL else ROOT)]
    environment = {**os.environ, "OMP_NUM_THREADS": str(num_threads), "PYTHONPATH": ":".join(paths)}
    with (folder / f"{name}.log").open("w") as log:
        return subprocess.Popen(command, env=environment, stdout=log, stderr=log)


def wait_for_stop(worker: subprocess.Popen, log: Path) -> None:
    """Waits until the worker has stopped itself, or has exited successfully."""
    deadline = time.monotonic() + TURN_TIMEOUT_S
    while time.monotonic() < deadline:
        pid, status = os.waitpid(worker.pid, os.WNOHANG | os.WUNTRACED)
        if pid and os.WIFSTOPPED(status):
            return
        if pid:
            worker.returncode = os.waitstatus_to_exitcode(status)
            if worker.returncode:
                raise RuntimeError(f"worker failed with {worker.returncode}:\n{log.read_text()[-3000:]}")
            return
        time.sleep(0.01)
    raise TimeoutError(f"a turn took longer than {TURN_TIMEOUT_S:g} s:\n{log.read_text()[-3000:]}")


def take_turns(args: argparse.Namespace, workload: dict[str, Any], model: str, folder: Path) -> dict[str, Any]:
    """Runs segments of all systems in turn."""
    workers: dict[str, subprocess.Popen] = {}
    try:
        for name in args.systems:
            workers[name] = start(args, name, workload, model=model, folder=folder)
            wait_for_stop(workers[name], folder / f"{name}.log")
        for n in range(args.rounds):
            for name in args.systems[n % len(args.systems) :] + args.systems[: n % len(args.systems)]:
                workers[name].send_signal(signal.SIGCONT)
                wait_for_stop(workers[name], folder / f"{name}.log")
    finally:
        for worker in workers.values():
            if worker.poll() is None:
                worker.kill()
                worker.wait()
    return {name: json.loads((folder / f"{name}.json").read_text()) for name in args.systems}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trl_python", default="/tmp/trl/bin/python", help="Python of TRL's environment")
    parser.add_argument("--workloads", nargs="+", choices=list(WORKLOADS), default=["equal", "mixed"])
    parser.add_argument("--systems", nargs="+", choices=list(NAMES), default=["trl", "trl2", "0", "1", "4"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--smollm2", default="models/smollm2", help="folder of that model")
    parser.add_argument("--group_size", type=int, default=8)
    parser.add_argument("--num_prompts", type=int, default=4096)
    parser.add_argument("--learning_rate", type=float, default=1e-6, help="small: lengths stay what they are")
    parser.add_argument("--num_threads", type=int, default=1, help="torch threads of TRL, of trainer and of engine")
    parser.add_argument("--output", type=Path, default=Path("trl.json"))
    parser.add_argument("--write", type=Path, default=None, help="measurement file of the last workload")
    args = parser.parse_args()
    results: dict[str, Any] = {}
    for name in args.workloads:
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary)
            model = make_model(name, folder / "model", args.smollm2)
            lines = [json.dumps({"prompt": text}) + "\n" for text in make_prompts(name, model, args.num_prompts)]
            (folder / "prompts.jsonl").write_text("".join(lines))
            segments = take_turns(args, WORKLOADS[name], model, folder=folder)
        base = segments["trl"] if "trl" in segments else next(iter(segments.values()))
        results[name] = {system: summarize(system, found, base) for system, found in segments.items()}
        print(f"\n{name:16}" + "".join(f"{title:>12}" for title in COLUMNS.values()))
        for system, row in results[name].items():
            print(f"{NAMES[system]:16}" + "".join(f"{row[key]:12.{2 * ('ratio' in key)}f}" for key in COLUMNS))
        results[name]["segments"] = segments
    settings = {key: str(value) for key, value in vars(args).items()}
    args.output.write_text(json.dumps({"settings": settings, "results": results}, indent=1))
    if args.write:
        name = args.workloads[-1]
        write_measurement(args.write, as_measurement(args.write.stem, name, results[name], args.rounds))


if __name__ == "__main__":
    main()
