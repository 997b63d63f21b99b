"""The checks. Each takes a device, asserts what must hold, and returns numbers; `Skip` says why it cannot run there.

    python benchmarks/gpu_acceptance/checks.py NAME DEVICE [FILE]

prints one line of JSON. FILE keeps the results of finished parts, for the next run of a check that was interrupted.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import one_card
import shapes
import torch
from measuring import Parts, Skip, batch_of, mismatch, model, real_model, requests, require, step_of, timed
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import PreTrainedModel
from vllm_checks import ipc, nccl, sleep, vllm, vllm_0_5b, vllm_1_5b, vllm_delta

from lit_async_rl.assets import asset
from lit_async_rl.engines.embedded.engine import EmbeddedEngine
from lit_async_rl.models.packing import PrefixTreePacking
from lit_async_rl.models.policy import CausalPolicy
from lit_async_rl.runtime.lifetime import die_with_parent

ROOT = Path(__file__).parents[2]


def machine(device: str) -> dict[str, float]:
    """Peaks of matrix products, of each precision, and of copying, which later checks are compared with."""
    size = 8192 if device == "cuda" else 1024
    found = {}
    for name in ("float32", "tf32", "bfloat16"):
        if name == "tf32" and device == "cpu":
            continue
        torch.set_float32_matmul_precision("high" if name == "tf32" else "highest")
        a = torch.randn(size, size, device=device, dtype=torch.bfloat16 if name == "bfloat16" else torch.float32)
        b = torch.randn_like(a)
        c = torch.empty_like(a)
        found[f"matmul_tflops_{name}"] = 2 * size**3 / timed(partial(torch.mm, a, b, out=c), device) / 1e12
    torch.set_float32_matmul_precision("highest")
    found["copy_gb_s"] = 2 * a.nbytes / timed(lambda: c.copy_(a), device) / 1e9
    if device == "cuda":
        found["memory_gb"] = torch.cuda.get_device_properties(0).total_memory / 1e9
    return found


def embedded(device: str) -> dict[str, float]:
    """The embedded engine samples what a forward pass says."""
    lm = model(device)
    asked = requests(lm, 8, 8, prompt=24, new=64)
    engine = EmbeddedEngine.from_module(lm, num_slots=64)
    error = mismatch(lm, asked, engine.run(asked))
    require(error < 1e-3, f"log-probabilities differ by {error:.2g}")
    seconds = timed(lambda: engine.run(asked), device, repeats=1)
    tokens = 64 * 64
    flops = 2 * sum(p.numel() for p in lm.parameters()) * tokens
    return {"tokens_per_s": tokens / seconds, "error": error, "tflops_float32": flops / seconds / 1e12}


def _rows(lm: PreTrainedModel, groups: int, prompt: int, new: int) -> tuple[torch.Tensor, ...]:
    """Rows of groups of eight that share a prompt, on the model's device."""
    return tuple(values.to(lm.device) for values in batch_of(lm.config.vocab_size, 8 * groups, prompt, new))


def packing(device: str) -> dict[str, float]:
    """Shared-prompt packing, with FlexAttention on a GPU, gives the log-probabilities of plain rows, and is faster."""
    kind = "flex_attention" if device == "cuda" else "sdpa"
    plain = model(device)
    packed = model(device, attn_implementation=kind)
    batch = _rows(plain, 4, prompt=256 if device == "cuda" else 64, new=64)
    rows = CausalPolicy(plain)
    shared = CausalPolicy(packed, packing=PrefixTreePacking())
    error = (step_of(rows, batch) - step_of(shared, batch))[batch[1]].abs().max().item()
    require(error < 1e-3, f"log-probabilities differ by {error:.2g}")
    rows_s = timed(lambda: step_of(rows, batch), device)
    shared_s = timed(lambda: step_of(shared, batch), device)
    flops = 6 * sum(p.numel() for p in plain.parameters()) * batch[0].numel()
    return {"speedup": rows_s / shared_s, "error": error, "tflops_float32": flops / rows_s / 1e12}


def _branches(lm: PreTrainedModel, sizes: tuple[int, int, int]) -> tuple[torch.Tensor, ...]:
    """Rows of an agent: two groups of four episodes, of four branches each; a token trains in the first of its rows."""
    generator = torch.Generator().manual_seed(3)
    prompt, shared, own = sizes
    parts = [
        torch.randint(2, lm.config.vocab_size, (*shape, size), generator=generator).expand(2, 4, 4, -1)
        for shape, size in (((2, 1, 1), prompt), ((2, 4, 1), shared), ((2, 4, 4), own))
    ]
    ids = torch.cat(parts, -1).flatten(0, 2).to(lm.device)
    mask = torch.zeros(2, 4, 4, prompt + shared + own, dtype=torch.bool)
    mask[..., prompt + shared :] = True
    mask[:, :, 0, prompt:] = True
    return ids, mask.flatten(0, 2).to(lm.device), torch.arange(2, device=lm.device).repeat_interleave(16)


def trees(device: str) -> dict[str, float]:
    """Prefix trees of branches have the log-probabilities and gradients of plain rows, in each attention."""
    plain = model(device)
    batch = _branches(plain, (256, 96, 48) if device == "cuda" else (48, 24, 12))
    rows = CausalPolicy(plain)
    found = {}
    expected = step_of(rows, batch)
    gradient = torch.cat([p.grad.flatten() for p in plain.parameters() if p.grad is not None])
    rows_s = timed(lambda: step_of(rows, batch), device)
    for kind in ("flex_attention", "sdpa") if device == "cuda" else ("sdpa",):
        packed = model(device, attn_implementation=kind)
        policy = CausalPolicy(packed, packing=PrefixTreePacking())
        error = (step_of(policy, batch) - expected)[batch[1]].abs().max().item()
        require(error < 1e-3, f"{kind}: log-probabilities differ by {error:.2g}")
        other = torch.cat([p.grad.flatten() for p in packed.parameters() if p.grad is not None])
        relative = ((other - gradient).norm() / gradient.norm()).item()
        require(relative < 1e-3, f"{kind}: gradients differ by {relative:.2g} of their norm")
        seconds = timed(lambda policy=policy: step_of(policy, batch), device)
        found |= {f"speedup_{kind}": rows_s / seconds, f"error_{kind}": error, f"gradient_{kind}": relative}
    return found


def bfloat16(device: str) -> dict[str, float]:
    """A step with weights in float32 and products in bfloat16 stays close to one in float32."""
    lm = model(device)
    policy = CausalPolicy(lm)
    batch = _rows(lm, 4, prompt=64, new=64)
    exact = step_of(policy, batch)
    rounded = step_of(policy, batch, torch.bfloat16)
    error = (exact - rounded)[batch[1]].abs().mean().item()
    require(error < 0.05, f"log-probabilities differ by {error:.2g} on average")
    require(all(p.grad is not None and p.grad.isfinite().all().item() for p in lm.parameters()), "a bad gradient")
    seconds = timed(lambda: step_of(policy, batch, torch.bfloat16), device)
    flops = 6 * sum(p.numel() for p in lm.parameters()) * batch[0].numel()
    return {"tokens_per_s": batch[0].numel() / seconds, "mean_error": error, "tflops_bfloat16": flops / seconds / 1e12}


def compiled(device: str) -> dict[str, float]:
    """`torch.compile` of the model gives the same log-probabilities."""
    if device == "cpu" and shutil.which("g++") is None:
        raise Skip("torch.compile needs g++ on a CPU")
    lm = model(device)
    policy = CausalPolicy(lm)
    batch = _rows(lm, 2, prompt=32, new=32)
    plain = step_of(policy, batch)
    began = time.perf_counter()
    lm.base_model.compile()  # which the policy calls
    error = (step_of(policy, batch) - plain)[batch[1]].abs().max().item()
    compile_s = time.perf_counter() - began
    require(torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0, "nothing was compiled")
    require(error < 1e-3, f"log-probabilities differ by {error:.2g}")
    return {"compile_s": compile_s, "error": error, "step_s": timed(lambda: step_of(policy, batch), device)}


def _train(*arguments: str, config: str = "configs/quickstart.yaml") -> None:
    """The command line, for three steps."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "scripts/train.py", "--config", config, *arguments]
        command += ["--trainer.max_steps", "3", "--trainer.logger.init_args.save_dir", folder]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)
    last = (done.stderr.strip() or done.stdout.strip() or "no message").splitlines()[-1]
    require(done.returncode == 0, f"{' '.join(arguments)}: {last[:200]}")


def training(device: str) -> dict[str, float]:
    """The quick start, on this device."""
    began = time.perf_counter()
    _train("--trainer.accelerator", "gpu" if device == "cuda" else "cpu", "--trainer.devices", "1")
    return {"seconds": time.perf_counter() - began}


def fsdp2(device: str) -> dict[str, float]:
    """The same under FSDP2, with one process."""
    began = time.perf_counter()
    overlay = ["--config", "configs/strategies/fsdp2.yaml", "--model.gradient_checkpointing", "false"]
    overlay += ["--trainer.strategy.init_args.data_parallel_size", "1", "--trainer.devices", "1"]
    _train(*overlay, "--trainer.accelerator", "gpu" if device == "cuda" else "cpu")
    return {"seconds": time.perf_counter() - began}


MIN_SAVED = 0.1  # of the time of sampling and training one after the other


def overlap(device: str) -> dict[str, float]:
    """Sampling and training at once take less than one after the other: on a GPU, streams of their own.

    On one core of a CPU nothing can be saved, and nothing is required.
    """
    trained = real_model(device, "0.5B")
    engine = EmbeddedEngine(num_slots=64, device=device, dtype="bfloat16", max_model_len=256)
    with tempfile.TemporaryDirectory() as folder:
        trained.save_pretrained(folder)
        engine.setup(folder)
    engine.load_weights(0, trained.named_parameters())
    asked = (
        requests(trained, 8, 8, prompt=24, new=96) if device == "cuda" else requests(trained, 2, 4, prompt=24, new=24)
    )
    policy = CausalPolicy(trained)
    batch = _rows(trained, 4, prompt=128, new=128) if device == "cuda" else _rows(trained, 2, prompt=32, new=32)

    def train() -> None:
        for _ in range(4):
            step_of(policy, batch, torch.bfloat16)

    def both() -> None:
        other = threading.Thread(target=lambda: engine.run(asked))
        other.start()
        train()
        other.join(200)

    apart = timed(lambda: engine.run(asked), device) + timed(train, device)
    together = timed(both, device)
    saved = 1 - together / apart
    require(saved > MIN_SAVED or device == "cpu", f"sampling and training at once save {saved:.0%} of the time")
    return {"apart_s": apart, "together_s": together, "saved": saved}


def flash_attention(device: str) -> dict[str, float]:
    """Attention of training by FlashAttention: torch's kernel, and that of flash-attn where it is installed."""
    if device == "cpu":
        raise Skip("FlashAttention has no kernel for CPUs")
    kinds = {"sdpa": "sdpa"}
    if importlib.util.find_spec("flash_attn") is not None:
        kinds["flash_attn"] = "flash_attention_2"
    expected = None
    found = {}
    for name, kind in kinds.items():
        lm = real_model(device, "0.5B", attn_implementation=kind)
        policy = CausalPolicy(lm, chunk_tokens=2048)
        batch = _rows(lm, 2, prompt=256, new=1792)
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):  # an error if another kernel would be needed
            logprobs = step_of(policy, batch, torch.bfloat16)
            seconds = timed(partial(step_of, policy, batch, torch.bfloat16), device)
        expected = logprobs if expected is None else expected
        error = (logprobs - expected)[batch[1]].abs().mean().item()
        require(error < 0.05, f"{kind}: log-probabilities differ by {error:.2g} on average")
        found |= {f"{name}_tokens_per_s": batch[0].numel() / seconds}
    return found


def smollm2(device: str) -> dict[str, float]:
    """Four steps of SmolLM2 in bfloat16, where its files are."""
    if not (ROOT / "models/smollm2/model.safetensors").exists():
        raise Skip("needs models/smollm2: lit-async-rl fetch smollm2 --out models/smollm2")
    if device == "cpu":
        raise Skip("takes minutes on a CPU")
    began = time.perf_counter()
    _train("--trainer.accelerator", "gpu", "--trainer.precision", "bf16-mixed", config="configs/smollm2.yaml")
    return {"seconds": time.perf_counter() - began}


class Check(NamedTuple):
    """A check, and for how long it may run; `has_parts` goes on where an interrupted run of it ended."""

    work: Callable[..., Any]
    limit_s: float
    has_parts: bool = False


# The first are worth most: a quarter of an hour on a card may end anywhere.
CHECKS: dict[str, Check] = {
    "machine": Check(machine, 60),
    "training": Check(training, 120),
    "reproducible": Check(one_card.reproducible, 120),
    "embedded": Check(embedded, 60),
    "smollm2": Check(smollm2, 120),
    "overlap": Check(overlap, 90),
    "shapes": Check(shapes.measure, 300, has_parts=True),
    "asynchrony": Check(one_card.asynchrony, 240, has_parts=True),
    "generate": Check(one_card.generate, 180, has_parts=True),
    "lengths": Check(one_card.lengths, 120),
    "profiles": Check(one_card.profiles, 90, has_parts=True),
    "trees": Check(trees, 120),
    "long_trees": Check(one_card.long_trees, 150, has_parts=True),
    "packing": Check(packing, 90),
    "bfloat16": Check(bfloat16, 60),
    "compiled": Check(compiled, 180),
    "flash_attention": Check(flash_attention, 120),
    "fsdp2": Check(fsdp2, 180),
    "vllm": Check(vllm, 240),
    "vllm_delta": Check(vllm_delta, 240),
    "sleep": Check(sleep, 240),
    "ipc": Check(ipc, 240),
    "nccl": Check(nccl, 240),
    "vllm_0_5b": Check(vllm_0_5b, 240),
    "vllm_1_5b": Check(vllm_1_5b, 240),
}


def main() -> None:
    """Runs one check and prints its result as JSON."""
    die_with_parent(os.getppid())  # which may be killed: the next run goes on, and must be alone
    name, device, *files = sys.argv[1:]
    check = CHECKS[name]
    parts = Parts(Path(files[0]) if files else None, name)
    result: dict[str, Any] = {"ok": False, "skipped": False, "numbers": {}, "note": ""}
    try:
        if device == "cuda" and not torch.cuda.is_available():
            raise RuntimeError("torch sees no GPU: use --device cpu for a rehearsal")
        if device == "cpu":
            torch.set_num_threads(1)
        asset("sort_policy")
        found = check.work(device, parts) if check.has_parts else check.work(device)
        numbers = parts.numbers() if check.has_parts else found
        result |= {"ok": True, "numbers": {key: float(value) for key, value in numbers.items()}}
    except Skip as reason:
        result |= {"skipped": True, "note": str(reason)}
    except Exception as error:
        result["note"] = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    print("\n" + json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
