"""Parameters after five steps of every kind of run: equal before and after a change that should change nothing.

    OMP_NUM_THREADS=1 python benchmarks/same_parameters.py before.json
    OMP_NUM_THREADS=1 python benchmarks/same_parameters.py after.json --same-as before.json

Each run is one of the command line, in a process of its own: the quick start in small, synchronous or with `FixedLag`,
which makes asynchronous runs reproducible; those of environments and agents sample one row at a time, because episodes
share the engine as time has it. Runs of vLLM need its environment, those of several ranks or of Ray half a minute.
SHA-256 digests of the parameters are comparable on one machine with one version of torch. Started again, it goes on;
the runs lie beside the file. `--resume-from`, a checkpoint of another commit's run `fixed_lag`, adds a resume of it.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import torch

ROOT = Path(__file__).parents[1]
TIMEOUT_S = 900.0  # of a run, on a busy machine
SMALL = [
    *("--trainer.max_steps", "5", "--trainer.val_check_interval", "null", "--data.validation.prompts", "null"),
    *("--data.groups_per_step", "4", "--data.group_size", "4", "--trainer.enable_progress_bar", "false"),
]
FIXED_LAG = ["--data.admission", "FixedLag", "--data.max_staleness", "2"]
WHOLE = ["--data.engine.init_args.in_flight_weight_updates", "false"]  # completions of one version, for FixedLag
SYNCHRONOUS = ["--data.max_staleness", "0"]
QUICK_START = ["--config", "configs/quickstart.yaml"]
PLAIN = [*QUICK_START, "--config", "configs/stabilizers/plain.yaml"]
ONE_ROW = ["--data.engine.init_args.engine.init_args.num_slots", "1"]
TWO_RANKS = ["--trainer.accelerator", "cpu", "--trainer.devices", "2"]
RAY = '{"class_path": "RayCluster", "init_args": {"trainer_ranks": 1, "engines": {"replicas": 1}}}'
TAPE = '[{"class_path": "lit_async_rl.callbacks.RolloutTape", "init_args": {"folder": "{out}/tape"}}]'
REPLAY = '{"class_path": "FromTape", "init_args": {"folder": "{out}/tape"}}'

RUNS: dict[str, list[str]] = {
    "synchronous": [*QUICK_START, *SYNCHRONOUS],
    "fixed_lag": [*QUICK_START, *FIXED_LAG],
    "plain": [*PLAIN, *FIXED_LAG],
    "two_micro_batches": [*QUICK_START, *FIXED_LAG, "--data.micro_batches_per_step", "2"],
    "vcpo": [*QUICK_START, "--config", "configs/stabilizers/vcpo.yaml", "--model.packing", "null", *FIXED_LAG],
    "own_process": [*QUICK_START, "--config", "configs/own_process.yaml", *WHOLE, *FIXED_LAG],
    "lora": [*QUICK_START, "--config", "configs/lora.yaml", *FIXED_LAG],
    "environment": ["--config", "configs/calculator.yaml", *SYNCHRONOUS, *ONE_ROW],
    "agent": ["--config", "configs/agent_calculator.yaml", *SYNCHRONOUS, *ONE_ROW],
    "ddp": [*QUICK_START, "--config", "configs/strategies/ddp.yaml", *TWO_RANKS, *FIXED_LAG],
    "fsdp2": [
        *(*PLAIN, "--config", "configs/strategies/fsdp2.yaml", *TWO_RANKS, *FIXED_LAG),
        *("--trainer.strategy.init_args.data_parallel_size", "2", "--model.sharding.compute_dtype", "float32"),
    ],
    "tape_recorded": [*QUICK_START, *FIXED_LAG, "--trainer.callbacks+", TAPE],
    "tape_replayed": [*QUICK_START, "--data.admission", REPLAY],
    "ray": [*QUICK_START, *FIXED_LAG, "--cluster", RAY],
    "vllm": [*QUICK_START, "--config", "configs/vllm_cpu.yaml", *WHOLE, *FIXED_LAG],
}


def parameters_digest(checkpoint: Path) -> str:
    """SHA-256 of names, types, shapes and values of a checkpoint's parameters."""
    digest = hashlib.sha256()
    state = torch.load(checkpoint, map_location="cpu", weights_only=True)["state_dict"]
    for name, value in sorted(state.items()):
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        digest.update(value.contiguous().view(torch.uint8).numpy().tobytes() if value.numel() else b"")
    return digest.hexdigest()


def run(name: str, arguments: list[str], out: Path) -> str:
    """Trains in a process of its own, and returns the digest of the last checkpoint.

    Raises:
        RuntimeError: the command failed; has its last lines.
    """
    folder = out / name
    words = [word.replace("{out}", str(out)) for word in arguments]
    words += ["--trainer.logger.init_args.save_dir", str(folder)]
    done = subprocess.run(
        [sys.executable, "scripts/train.py", *words],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    found = sorted(folder.rglob("last.ckpt"))
    if done.returncode or not found:
        raise RuntimeError(f"{name} ended with {done.returncode}: {' '.join(done.stderr.splitlines()[-5:])}")
    return parameters_digest(found[-1])


def different(found: Mapping[str, str], before: Mapping[str, str]) -> list[str]:
    """Names of runs that both have, with other parameters."""
    return [name for name in found if name in before and found[name] != before[name]]


def main() -> None:
    """Runs what the file does not have yet, compares, and exits with 1 where parameters differ."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("--same-as", type=Path, help="digests of another commit, of this machine")
    parser.add_argument("--only", nargs="*", help="names of runs; default: all that the environment can do")
    parser.add_argument("--resume-from", type=Path, help="checkpoint after five steps of fixed_lag")
    args = parser.parse_args()
    found = json.loads(args.output.read_text()) if args.output.exists() else {}
    runs = {name: [*arguments, *SMALL] for name, arguments in RUNS.items()}
    if args.resume_from is not None:
        runs["resumed"] = [*runs["fixed_lag"], "--ckpt_path", str(args.resume_from), "--trainer.max_steps", "10"]
    if importlib.util.find_spec("vllm") is None:
        del runs["vllm"]
    if importlib.util.find_spec("ray") is None:
        del runs["ray"]
    for name, arguments in runs.items():
        if name in found or (args.only and name not in args.only):
            continue
        found[name] = run(name, arguments, args.output.with_suffix(".runs").absolute())
        print(f"{name:<18} {found[name]}", flush=True)
        args.output.write_text(json.dumps(found, indent=1) + "\n")
    if found.get("tape_recorded") != found.get("tape_replayed"):
        sys.exit("tape_replayed has other parameters than tape_recorded")
    if args.same_as is not None:
        others = different(found, json.loads(args.same_as.read_text()))
        if others:
            sys.exit(f"other parameters than in {args.same_as}: {', '.join(others)}")


if __name__ == "__main__":
    main()
