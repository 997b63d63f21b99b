"""Bytes per parameter of a training run with the default callbacks, and what they amount to for 7 billion parameters.

    python benchmarks/performance/memory.py --model models/smollm2 --out after.json
    python benchmarks/performance/memory.py --table before.json after.json --write docs/measurements/memory.json

Runs in float32 on the CPU: full fine-tuning, then LoRA in a process of its own. Sizes are counted on the tensors; the
peak is the process's own (VmHWM), less what it has after its imports. Pauses are processor time of the trainer's
thread.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import lit_async_rl as rl
from benchmarks.common.measurement import measurement, write_measurement

TARGET = 7e9
ROWS = {
    "weights": "master weights",
    "gradients": "gradients",
    "moments": "Adam moments",
    "engine": "engine copy",
    "monitor": "kept by GradientMonitor",
    "states": "all of these",
    "peak": "peak of the process",
    "checkpoint": "checkpoints on disk (one step)",
    "lora_checkpoint": "the same with LoRA, rank 16",
}


class Probe(Callback):
    """Counts the bytes of tensors, and times saving."""

    def __init__(self) -> None:
        self.found: dict[str, float] = {}

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        self.found["gradients"] = sum(p.grad.nbytes for p in pl_module.parameters() if p.grad is not None)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        lm = trainer.datamodule.engine._slots.lm
        self.found["weights"] = sum(p.nbytes for p in pl_module.parameters())
        self.found["num_parameters"] = sum(p.numel() for p in pl_module.parameters())
        self.found["engine"] = sum(p.nbytes for p in lm.parameters())
        states = (value for state in trainer.optimizers[0].state.values() for value in state.values())
        self.found["moments"] = sum(value.nbytes for value in states if isinstance(value, torch.Tensor))
        monitor = next(c for c in trainer.callbacks if isinstance(c, rl.GradientMonitor))
        own = {p.data_ptr() for p in pl_module.parameters()} | {
            p.grad.data_ptr() for p in pl_module.parameters() if p.grad is not None
        }
        self.found["monitor"] = sum(t.nbytes for place, t in tensors_of(monitor).items() if place not in own)


def tensors_of(value: Any, seen: set[int] | None = None) -> dict[int, torch.Tensor]:
    """All tensors that an object holds, by address; parameters' own references are followed, modules are not."""
    seen = set() if seen is None else seen
    if id(value) in seen or isinstance(value, torch.nn.Module | torch.optim.Optimizer):
        return {}
    seen.add(id(value))
    if isinstance(value, torch.Tensor):
        return {value.data_ptr(): value}
    parts: list[Any] = list(value.values()) if hasattr(value, "values") and callable(value.values) else []
    if isinstance(value, list | tuple):
        parts = list(value)
    elif hasattr(value, "__dict__"):
        parts += list(vars(value).values())
    return {place: tensor for part in parts for place, tensor in tensors_of(part, seen).items()}


def rss() -> int:
    """Memory of this process now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def measure(model: str, lora: bool) -> dict[str, float]:
    """Two steps and a checkpoint."""
    before, probe, folder = rss(), Probe(), Path(tempfile.mkdtemp())
    numbers = [(a, b) for a in range(2, 12) for b in range(2, 12)]
    prompts = [
        {
            "prompt": [{"role": "user", "content": f"What is {a} x {b}? Answer with just the number."}],
            "answer": str(a * b),
        }
        for a, b in numbers
    ]
    settings: dict[str, Any] = dict(lora=rl.LoRA(target_modules="all-linear")) if lora else {}
    trainer = rl.Trainer(
        accelerator="cpu",
        max_steps=2,
        callbacks=[probe],
        enable_progress_bar=False,
        default_root_dir=str(folder),
        logger=rl.CSVLog(str(folder)),
    )
    saver = next(c for c in trainer.callbacks if isinstance(c, ModelCheckpoint))
    saver.dirpath, saver._every_n_train_steps = str(folder / "checkpoints"), 2
    pauses: list[tuple[float, float]] = []
    save = saver.on_train_batch_end

    def timed(*args: Any) -> None:
        began = time.thread_time(), time.monotonic()
        save(*args)
        pauses.append((time.thread_time() - began[0], time.monotonic() - began[1]))

    saver.on_train_batch_end = timed  # type: ignore[method-assign]
    module = rl.PolicyModule(model, packing=rl.SharedPromptPacking(), learning_rate=1e-5, **settings)
    data = rl.RolloutDataModule(
        prompts=prompts,
        reward=lambda prompt, completion: len(completion) % 3,
        groups_per_step=2,
        sampling=rl.SamplingParams(max_tokens=16),
        engine=rl.EmbeddedEngine(num_slots=16),
    )
    trainer.fit(module, data)
    files = [file for file in (folder / "checkpoints").iterdir() if not file.is_symlink()]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before
    return probe.found | {
        "peak": peak,
        "checkpoint": sum(file.stat().st_size for file in files),
        "pause_cpu_s": max(cpu for cpu, _ in pauses),
        "pause_s": max(wall for _, wall in pauses),
    }


def table(before: dict[str, Any], after: dict[str, Any], commit: str, date: str) -> dict[str, Any]:
    """The measurement file."""
    for found in (before, after):
        full = found["full"]
        full["states"] = sum(full[name] for name in ("weights", "gradients", "moments", "engine", "monitor"))
        full["lora_checkpoint"] = found["lora"]["checkpoint"]
    number = after["full"]["num_parameters"]
    rows = []
    for name, text in ROWS.items():
        per = [found["full"][name] / number for found in (before, after)]
        sizes = [
            x * TARGET / 1e9 if x > 0.1 else x * number / 1e9 for x in per
        ]  # small ones do not grow with the model
        rows.append([text, *(round(x, 2) for x in per), *(round(x, 1) for x in sizes)])
    for name, text in (("pause_cpu_s", "saving pauses training, CPU s"),):
        per_s = [found["full"][name] for found in (before, after)]
        rows.append([text, *(round(x, 2) for x in per_s), *(round(x * TARGET / number, 1) for x in per_s)])
    full = after["full"]
    return measurement(
        "memory",
        round(full["peak"] / number, 2),
        "bytes of peak memory per parameter",
        ["", "bytes/parameter before", "after", "7B before, GB", "7B after, GB"],
        rows,
        command="python benchmarks/performance/memory.py --model models/smollm2 --out after.json",
        machine="one thread of a shared machine; SmolLM2-135M, float32, 2 prompts x 8 completions of 16 tokens",
        commit=commit,
        date=date,
    )


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="models/smollm2")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--lora", action="store_true", help="measure LoRA in this process, and print")
    parser.add_argument("--table", nargs=2, type=Path)
    parser.add_argument("--write", type=Path)
    parser.add_argument("--commit", default="")
    parser.add_argument("--date", default="")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.table:
        before, after = (json.loads(path.read_text()) for path in args.table)
        write_measurement(args.write, table(before, after, args.commit, args.date))
    elif args.lora:
        print("RESULT", json.dumps(measure(args.model, lora=True)))
    else:
        command = [sys.executable, __file__, "--lora", "--model", args.model]
        done = subprocess.run(command, capture_output=True, text=True, timeout=1800)
        if done.returncode:
            sys.exit(done.stderr)
        lora = json.loads(done.stdout.rpartition("RESULT ")[2].splitlines()[0])
        args.out.write_text(json.dumps({"full": measure(args.model, lora=False), "lora": lora}, indent=1) + "\n")


if __name__ == "__main__":
    main()
