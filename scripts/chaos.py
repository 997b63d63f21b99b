"""Kills and disturbs a tiny training run at random points, resumes it, and checks what must hold.

python scripts/chaos.py --minutes 10 [--seed 0] [--steps 60] [--folder runs/chaos]

One run at a time, of `--steps` steps with `schedule: fixed_lag`; every fault hits the trainer's process at a random
moment: kill -9, SIGTERM, or SIGSTOP with SIGCONT a while later. After a kill the run is resumed from its newest whole
checkpoint. When it is through, this must hold: every group was trained on exactly once, in order; no token was older
than the bound; the final parameters are those of a run without faults, bit for bit. Then the next run begins.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lit_async_rl.assets import asset
from lit_async_rl.callbacks import RolloutTape, SaveOnSigterm, WeightSync
from lit_async_rl.checkpoint_io import AtomicCheckpointIO
from lit_async_rl.data import RolloutDataModule
from lit_async_rl.embedded_engine import EmbeddedEngine
from lit_async_rl.engine import SamplingParams
from lit_async_rl.module import PolicyModule
from lit_async_rl.rewards import share_correct
from lit_async_rl.tape import Tape
from lit_async_rl.tasks import SortDigits

LAG, GROUPS = 2, 2
STALL_S = 300.0  # longest that one process may take before it counts as hung


def newest_checkpoint(folder: Path) -> str | None:
    """The one with the most steps; `last.ckpt` comes from SIGTERM."""
    found = sorted(folder.glob("checkpoints/*.ckpt"), key=lambda path: path.stat().st_mtime_ns)
    return str(found[-1]) if found else None


def num_steps(folder: Path) -> int:
    """Steps on the tape, with those that were undone: grows with every step."""
    return len([path for path in folder.glob("tape/*") if path.suffix in (".arrow", ".undone")])


def train(folder: Path, steps: int) -> None:
    """The run that is disturbed; goes on where it was."""
    torch.set_num_threads(1)
    model = asset("sort_policy")
    data = RolloutDataModule(
        model,
        SortDigits(8, size=1000),
        share_correct,
        engine=EmbeddedEngine(in_flight_weight_updates=False),
        schedule="fixed_lag",
        max_staleness=LAG,
        groups_per_step=GROUPS,
        group_size=4,
        sampling=SamplingParams(max_tokens=10),
    )
    module = PolicyModule(model, learning_rate=1e-3)
    keep = ModelCheckpoint(folder / "checkpoints", "{step}", every_n_train_steps=3, save_top_k=-1)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=steps,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        plugins=[AtomicCheckpointIO()],
        callbacks=[WeightSync(), RolloutTape(str(folder / "tape")), SaveOnSigterm(), keep],
    )
    trainer.fit(module, datamodule=data, ckpt_path=newest_checkpoint(folder))
    if trainer.global_step == steps:
        weights = b"".join(p.detach().numpy().tobytes() for p in module.policy.parameters())
        (folder / "digest").write_text(hashlib.sha256(weights).hexdigest())


def start(folder: Path, steps: int) -> subprocess.Popen[bytes]:
    """The run, in a process of its own."""
    command = [sys.executable, __file__, "--train", str(folder), "--steps", str(steps)]
    with (folder / "log").open("ab") as log:
        return subprocess.Popen(command, stdout=log, stderr=log, env=os.environ | {"OMP_NUM_THREADS": "1"})


def disturb(
    folder: Path, process: subprocess.Popen[bytes], chance: random.Random, counts: dict[str, int], deadline: float
) -> None:
    """One fault at a random moment, after a step or (one in ten) anywhere, unless the run ends or time is up before."""
    before, began = num_steps(folder), time.monotonic()
    wait_for = before if chance.random() < 0.1 else before + 1
    while num_steps(folder) < wait_for and process.poll() is None:
        assert time.monotonic() - began < STALL_S, f"no step in {STALL_S:g} s: {folder}/log"
        time.sleep(0.02)
    time.sleep(chance.uniform(0.0, 2.0))
    if process.poll() is not None or time.monotonic() > deadline:
        return
    fault = chance.choice(["kill -9", "kill -9", "kill -9", "SIGTERM", "SIGSTOP"])
    counts[fault] = counts.get(fault, 0) + 1
    if fault == "SIGSTOP":
        process.send_signal(signal.SIGSTOP)
        time.sleep(chance.uniform(0.1, 3.0))
        process.send_signal(signal.SIGCONT)
        return
    process.send_signal(signal.SIGKILL if fault == "kill -9" else signal.SIGTERM)
    process.wait(STALL_S)


def check(folder: Path, steps: int, expected: str) -> None:
    """What must hold for a run that is through."""
    tape = list(Tape(folder / "tape").steps())
    assert [step.step for step in tape] == list(range(steps)), "a step is missing, or there twice"
    groups = [group.index for step in tape for group in step.groups]
    assert groups == list(range(steps * GROUPS)), "a group was trained on twice, or never"
    for step in tape:
        oldest = min(v for group in step.groups for rollout in group.rollouts for v in rollout.versions)
        assert step.version - oldest == min(step.step, LAG), f"step {step.step}: the lag is {step.version - oldest}"
    assert (folder / "digest").read_text() == expected, "the final parameters differ from the run without faults"


def complete(folder: Path, steps: int, chance: random.Random | None, counts: dict[str, int], deadline: float) -> None:
    """Runs until it is through; faults end at the deadline."""
    folder.mkdir(parents=True)
    while not (folder / "digest").exists():
        process = start(folder, steps)
        try:
            while process.poll() is None:
                if chance is not None and time.monotonic() < deadline:
                    disturb(folder, process, chance, counts, deadline)
                else:
                    process.wait(STALL_S)
        finally:
            process.kill()
        assert process.returncode in (0, -9, -15), f"{folder}/log says why the run ended with {process.returncode}"


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0, help="faults are injected for so long")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--folder", default="runs/chaos", help="must not exist")
    parser.add_argument("--train", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.train:
        train(Path(arguments.train), arguments.steps)
        return
    base, chance, counts = Path(arguments.folder), random.Random(arguments.seed), dict[str, int]()
    complete(base / "unbroken", arguments.steps, None, counts, 0.0)
    expected = (base / "unbroken/digest").read_text()
    check(base / "unbroken", arguments.steps, expected)
    deadline, num_runs = time.monotonic() + 60 * arguments.minutes, 0
    while time.monotonic() < deadline:
        complete(base / f"run{num_runs}", arguments.steps, chance, counts, deadline)
        check(base / f"run{num_runs}", arguments.steps, expected)
        shutil.rmtree(base / f"run{num_runs}")
        num_runs += 1
        print(f"{num_runs} runs, faults so far: {counts}; all that must hold does", flush=True)


if __name__ == "__main__":
    main()
