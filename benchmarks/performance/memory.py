"""Bytes per parameter of a training run with the default callbacks, and what they amount to for 7 billion parameters.

    python benchmarks/performance/memory.py --model models/smollm2 --out memory.json
    python benchmarks/performance/memory.py --table memory.json --write docs/measurements/memory.json

Runs in float32 on the CPU, each in a process of its own: full fine-tuning, LoRA, and full fine-tuning with an allocator
that returns freed memory to the system at once, and with one whose threads share a heap. Sizes are counted on the
tensors. Peaks are the process's own (VmHWM of Linux, reset before each phase), less what it has after its imports; the
engine decodes during all of them. Pauses are processor time of the trainer's thread.
"""

from __future__ import annotations

import argparse
import json
import os
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
from torch.autograd.graph import saved_tensors_hooks

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import lit_async_rl as rl
from benchmarks.common.measurement import measurement, write_measurement

TARGET = 7e9
NUM_STEPS = 4
PARTS = {  # with variables of the environment
    "full": {},
    "lora": {},
    "returned": {"MALLOC_MMAP_THRESHOLD_": "65536"},
    "shared": {"MALLOC_ARENA_MAX": "1"},
}
ROWS = {
    "weights": "master weights",
    "gradients": "gradients",
    "moments": "Adam moments",
    "engine": "engine copy",
    "monitor": "kept by GradientMonitor",
    "states": "all of these",
    "activations": "activations that the backward pass needs",
    "formula": "16 bytes + engine copy + activations",
    "load_peak": "peak while the model is loaded",
    "pass_peak": "peak of forward and backward passes",
    "shared_peak": "the same with `MALLOC_ARENA_MAX=1`: threads share a heap",
    "returned_peak": "the same with `MALLOC_MMAP_THRESHOLD_=65536`: no freed memory is kept",
    "update_peak": "peak of optimizer step and publication",
    "save_peak": "peak while a checkpoint is taken and written",
    "checkpoint": "checkpoints on disk (one step)",
    "lora_checkpoint": "the same with LoRA, rank 16",
}


class Probe(Callback):
    """Counts the bytes of tensors, and times saving."""

    def __init__(self, before: int) -> None:
        self.found: dict[str, float] = {}
        self._before = before  # bytes of the process that do not count
        self._saved: dict[int, int] = {}  # bytes by address
        self._hooks = saved_tensors_hooks(self._save, lambda tensor: tensor)

    def ends(self, phase: str) -> None:
        """The memory used at most since the last call belongs to this phase."""
        status = Path("/proc/self/status").read_text()
        peak = int(status.partition("VmHWM:")[2].split()[0]) * 1024 - self._before
        Path("/proc/self/clear_refs").write_text("5")  # resets it to what is in use now
        self.found[f"{phase}_peak"] = max(peak, self.found.get(f"{phase}_peak", 0))

    def _save(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        self._saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    def on_train_batch_start(self, *_: Any) -> None:
        if "load_peak" not in self.found:
            self.ends("load")
        self._saved.clear()
        self._hooks.__enter__()

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: torch.Tensor) -> None:
        self._hooks.__exit__()
        own = {p.untyped_storage().data_ptr() for p in pl_module.parameters()}
        size = sum(size for place, size in self._saved.items() if place not in own)
        self.found["activations"] = max(size, self.found.get("activations", 0))

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        self.ends("pass")
        self.found["gradients"] = sum(p.grad.nbytes for p in pl_module.parameters() if p.grad is not None)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        lm = trainer.datamodule.engine.engine.slots.lm
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
    """Four steps, and a checkpoint after the last."""
    before = rss()
    folder = Path(tempfile.mkdtemp())
    probe = Probe(before)
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
        max_steps=NUM_STEPS,
        callbacks=[probe],
        enable_progress_bar=False,
        default_root_dir=str(folder),
        logger=rl.CSVLog(str(folder)),
    )
    saver = next(c for c in trainer.callbacks if isinstance(c, ModelCheckpoint))
    saver.dirpath = str(folder / "checkpoints")
    saver._every_n_train_steps = NUM_STEPS
    pauses: list[tuple[float, float]] = []
    save = saver.on_train_batch_end

    def timed(*args: Any) -> None:
        probe.ends("update")
        began = time.thread_time(), time.monotonic()
        save(*args)
        pauses.append((time.thread_time() - began[0], time.monotonic() - began[1]))

    saver.on_train_batch_end = timed  # type: ignore[method-assign]
    module = rl.PolicyModule(model, packing=rl.PrefixTreePacking(), learning_rate=1e-5, **settings)
    data = rl.RolloutDataModule(
        prompts=prompts,
        reward=lambda prompt, completion: len(completion) % 3,
        groups_per_step=2,
        sampling=rl.SamplingParams(max_tokens=16),
        engine=rl.EmbeddedEngine(num_slots=16),
    )
    trainer.fit(module, data)
    probe.ends("save")
    files = [file for file in (folder / "checkpoints").iterdir() if not file.is_symlink()]
    return probe.found | {
        "checkpoint": sum(file.stat().st_size for file in files),
        "pause_cpu_s": max(cpu for cpu, _ in pauses),
        "pause_s": max(wall for _, wall in pauses),
    }


def table(found: dict[str, Any], commit: str, date: str) -> dict[str, Any]:
    """The measurement file."""
    full = found["full"] | {"lora_checkpoint": found["lora"]["checkpoint"]}
    full["states"] = sum(full[name] for name in ("weights", "gradients", "moments", "engine", "monitor"))
    number = full["num_parameters"]
    rows = []
    full["formula"] = 16 * number + full["engine"] + full["activations"]
    full |= {f"{part}_peak": found[part]["pass_peak"] for part in ("returned", "shared")}
    for name, text in ROWS.items():
        per = full[name] / number
        size = per * TARGET if per > 0.1 else full[name]  # small ones do not grow with the model
        rows.append([text, round(per, 2), round(size / 1e9, 1)])
    pause = full["pause_cpu_s"]
    rows.append(["saving pauses training, CPU s", round(pause, 2), round(pause * TARGET / number, 1)])
    return measurement(
        "memory",
        round(max(full["pass_peak"], full["update_peak"]) / number, 2),
        "bytes of memory per parameter, at most, in a step without a checkpoint",
        columns=["", "bytes/parameter", "7B, GB"],
        rows=rows,
        command="python benchmarks/performance/memory.py --model models/smollm2 --out memory.json",
        machine="one thread of a shared machine; SmolLM2-135M, float32, 2 prompts x 8 completions of 16 tokens",
        commit=commit,
        date=date,
    )


def in_process(part: str, model: str) -> dict[str, float]:
    """One of `PARTS`, measured in a process of its own."""
    command = [sys.executable, __file__, "--part", part, "--model", model]
    environment = os.environ | PARTS[part]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1800)
    if done.returncode:
        sys.exit(done.stderr)
    found: dict[str, float] = json.loads(done.stdout.rpartition("RESULT ")[2].splitlines()[0])
    return found


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="models/smollm2")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--part", choices=list(PARTS), help="measure this in this process, and print")
    parser.add_argument("--table", type=Path)
    parser.add_argument("--write", type=Path)
    parser.add_argument("--commit", default="")
    parser.add_argument("--date", default="")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.table:
        write_measurement(args.write, table(json.loads(args.table.read_text()), args.commit, args.date))
    elif args.part:
        print("RESULT", json.dumps(measure(args.model, lora=args.part == "lora")))
    else:
        args.out.write_text(json.dumps({part: in_process(part, args.model) for part in PARTS}, indent=1) + "\n")


if __name__ == "__main__":
    main()
