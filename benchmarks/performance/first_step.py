"""Processor time from Enter to the first line, to the short help, and to the first optimizer step of the quick start.

    python benchmarks/performance/first_step.py --out docs/measurements/first_step.json
    python benchmarks/performance/first_step.py --trl trl_env/bin/trl --litgpt litgpt_env/bin/litgpt

Each round measures everything once, in turn, and `python -c 'import torch, lightning, transformers'` beside it: the
difference is what this package adds. Processor time counts all threads and child processes, and hardly depends on what
else runs. TRL's and LitGPT's commands are measured beside ours where they are given, in environments with the same
torch (`pip install torch==2.13.0`, then `trl==1.16.0 transformers==5.19.0` in one and `litgpt==0.5.13` in another);
TRL's first step is that of its GRPO command on the quick start's model, prompts, reward and size of a step, without a
validation. LitGPT has no reinforcement learning.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.common.measurement import ROOT, measurement, write_measurement

BARE = [sys.executable, "-c", "import torch, lightning, transformers"]
TRAIN = [sys.executable, "scripts/train.py"]
QUICK_START = [*TRAIN, "--config", "configs/quickstart.yaml"]
LIMIT_S = 600.0
NAMES = {
    "bare": "`python -c 'import torch, lightning, transformers'`",
    "line": "first line of `python scripts/train.py --config configs/quickstart.yaml`",
    "help": "`python scripts/train.py --help`",
    "step": "first optimizer step of the quick start, after its validation",
    "above": "of that, above the bare import",
    "trl help": "`trl grpo --help`",
    "trl step": "first optimizer step of `trl grpo`, without a validation",
    "litgpt help": "`litgpt finetune_full --help`",
}
TRL_FLAGS = [
    *("--model_name_or_path", str(ROOT / "lit_async_rl/assets/sort_policy"), "--dataset_name", "data"),
    *("--reward_funcs", "my_rewards.exact", "--output_dir", "out", "--max_steps", "1", "--logging_steps", "1"),
    *("--per_device_train_batch_size", "256", "--num_generations", "8", "--max_completion_length", "12"),
    *("--learning_rate", "1.1e-4", "--bf16", "false", "--use_cpu", "true", "--report_to", "none"),
    *("--save_strategy", "no", "--disable_tqdm", "true"),
]
TRL_REWARD = """
def exact(completions, answer, **columns):
    return [float(completion == one) for completion, one in zip(completions, answer)]
"""


def until_the_end(command: list[str]) -> float:
    """Processor seconds of a command."""
    process = start(command, subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise RuntimeError(f"{command} ended with {process.returncode}")
    return usage.ru_utime + usage.ru_stime


def until_a_line(command: list[str], begin: str, folder: str | None = None) -> float:
    """Processor seconds of a command and its children until it prints a line that begins so; it is ended then."""
    process = start(command, subprocess.PIPE, folder)
    deadline = time.monotonic() + LIMIT_S
    try:
        for line in process.stdout:
            if line.startswith(begin):
                return processor_s(psutil.Process(process.pid))
            if time.monotonic() > deadline:
                break
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    raise RuntimeError(f"{command} printed no line {begin!r}")


def processor_s(process: psutil.Process) -> float:
    """Processor seconds of a process, of its children, and of those that have ended."""
    times = process.cpu_times()
    ended = times.children_user + times.children_system
    return times.user + times.system + ended + sum(processor_s(child) for child in process.children())


def start(command: list[str], output: int, folder: str | None = None) -> subprocess.Popen[str]:
    """Starts a command in the repository, or in a folder, with one thread."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    environment["PYTHONPATH"] = folder or str(ROOT)
    errors = subprocess.STDOUT if output == subprocess.PIPE else output
    return subprocess.Popen(
        command,
        cwd=folder or ROOT,
        env=environment,
        stdout=output,
        stderr=errors,
        text=True,
        start_new_session=True,
    )


def write_trl_folder(folder: Path) -> None:
    """Prompts and reward of the quick start, as TRL's command reads them."""
    digits = ["".join(random.choices("0123456789", k=8)) for _ in range(2048)]
    rows = [json.dumps({"prompt": f"{one}=", "answer": "".join(sorted(one))}) for one in digits]
    (folder / "data").mkdir()
    (folder / "data/train.jsonl").write_text("\n".join(rows) + "\n")
    (folder / "my_rewards.py").write_text(TRL_REWARD)


def one_round(folder: str, trl: str | None, litgpt: str | None) -> dict[str, float]:
    """Seconds of each, by name."""
    found = {"bare": until_the_end(BARE), "help": until_the_end([*TRAIN, "--help"])}
    logs = ["--trainer.logger.init_args.save_dir", folder]
    found["line"] = until_a_line([*QUICK_START, *logs], "loading ")
    found["step"] = until_a_line([*QUICK_START, *logs], "step 1/")
    found["above"] = found["step"] - found["bare"]
    if trl is not None:
        found["trl help"] = until_the_end([trl, "grpo", "--help"])
        found["trl step"] = until_a_line([trl, "grpo", *TRL_FLAGS], "{'loss'", folder)
    if litgpt is not None:
        found["litgpt help"] = until_the_end([litgpt, "finetune_full", "--help"])
    return found


def main() -> None:
    """Measures, and writes the file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=ROOT / "docs/measurements/first_step.json")
    parser.add_argument("--machine", default="two cores")
    parser.add_argument("--trl", help="TRL's command")
    parser.add_argument("--litgpt", help="LitGPT's command")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        write_trl_folder(Path(folder))
        one_round(folder, arguments.trl, arguments.litgpt)  # reads all files once
        rounds = [one_round(folder, arguments.trl, arguments.litgpt) for _ in range(arguments.rounds)]
    given = {"--trl trl": arguments.trl, "--litgpt litgpt": arguments.litgpt}
    peers = [flag for flag, command in given.items() if command is not None]
    rows = []
    for key, name in NAMES.items():
        if key not in rounds[0]:
            continue
        seconds = sorted(one[key] for one in rounds)
        rows.append([name, f"{statistics.median(seconds):.2f} s", f"{seconds[0]:.2f} to {seconds[-1]:.2f}"])
        print(" | ".join(rows[-1]))
    above = sorted(one["above"] for one in rounds)
    found = measurement(
        "first_step",
        value=round(statistics.median(above), 2),
        unit="s of processor time to the first optimizer step of the quick start, above the bare import",
        columns=["what", "processor time, median", f"of {arguments.rounds} rounds"],
        rows=rows,
        command=" ".join([f"python benchmarks/performance/first_step.py --rounds {arguments.rounds}", *peers]),
        machine=f"{arguments.machine}; the interval is the range over rounds",
        interval=[round(above[0], 2), round(above[-1], 2)],
    )
    write_measurement(arguments.out, found)


if __name__ == "__main__":
    main()
