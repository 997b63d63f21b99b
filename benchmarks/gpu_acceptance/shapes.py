"""Speed and memory of real shapes with random weights: all in one process, since a start from a cold disk takes long.

Neither depends on what the weights are. Each shape and kind of training is a part of its own, written as it is done.
"""

from __future__ import annotations

import gc
import tempfile
import time
from typing import Any

import torch
from measuring import Parts, batch_of, mismatch, num_parameters, requests, require, step_of, timed
from torch import nn
from transformers import PreTrainedConfig

import lit_async_rl as rl
from benchmarks.common.real_shapes import built, llama32, qwen3, qwen25, tiny
from lit_async_rl.lab.memory import StepShape, training_memory
from lit_async_rl.models.compilation import compile_blocks
from lit_async_rl.models.lora import LoRA, add_lora
from lit_async_rl.models.policy import CausalPolicy
from lit_async_rl.training.module import CHECKPOINTING


def shapes() -> dict[str, PreTrainedConfig]:
    """Configurations by name."""
    sizes = ("0.5B", "1.5B", "7B")
    return {f"Qwen2.5-{size}": qwen25(size) for size in sizes} | {"Qwen3-0.6B": qwen3(), "Llama-3.2-1B": llama32()}


LORA_ALONE = ("Qwen2.5-7B",)  # all weights, gradients and moments take 122 GB
COMPILED = ("Qwen2.5-0.5B",)  # compiling takes longer than everything else that is done with a shape


def trained(config: PreTrainedConfig, device: str, lora: LoRA | None, compiled: bool) -> dict[str, float]:
    """Tokens a second of a training step, and its largest memory beside what was counted without compiled blocks."""
    width = 512 if device == "cuda" else 32
    shape = StepShape(
        rows=16 if device == "cuda" else 4,
        prompt_tokens=width // 4,
        completion_tokens=width - width // 4,
        gradient_checkpointing=True,
        lora=lora,
    )
    lm = built(config, device, torch.float32).train()
    lm.gradient_checkpointing_enable(gradient_checkpointing_kwargs=CHECKPOINTING)
    module: nn.Module = lm if lora is None else add_lora(lm, lora).to(device)
    policy = CausalPolicy(module, shape.logprob_chunk_tokens)
    if compiled:
        compile_blocks(policy.causal_lm)
    batch = batch_of(config.vocab_size, shape.rows, prompt=shape.prompt_tokens, new=shape.completion_tokens)
    batch = tuple(values.to(device) for values in batch)
    optimizer = torch.optim.AdamW([p for p in policy.parameters() if p.requires_grad], lr=1e-6, fused=True)

    def step() -> None:
        step_of(policy, batch, torch.bfloat16)
        optimizer.step()

    seconds = timed(step, device)
    tokens = batch[0].numel()
    # forward and backward; the second forward pass of checkpointing is no useful work, nor are gradients of the frozen
    flops = (6 if lora is None else 4) * num_parameters(lm) * tokens
    found = {"tokens_per_s": tokens / seconds, "tflops_bfloat16": flops / seconds / 1e12}
    counted = training_memory(config, shape).peak
    found["memory_counted_gb"] = counted / 1e9
    if device == "cuda":
        found["memory_gb"] = torch.cuda.max_memory_allocated() / 1e9
        found["memory_error"] = counted / torch.cuda.max_memory_allocated() - 1
    return found


def sampled(config: PreTrainedConfig, device: str, graphs: bool) -> dict[str, float]:
    """Tokens a second of the embedded engine in bfloat16 by rows, of prefill, and the time of a publication."""
    lm = built(config, device, torch.bfloat16).eval()
    found: dict[str, float] = {}
    prompt, new = (128, 256) if device == "cuda" else (8, 12)
    few = (4,) if graphs else (4, 8)  # a process of its own takes seconds to start
    for rows in (32, 128, 512) if device == "cuda" else few:
        engine = own_engine(lm, device, num_slots=rows, graphs=graphs)
        try:
            asked = requests(lm, rows // 4, 4, prompt=prompt, new=new)
            if not found:
                error = mismatch(lm, asked, engine.run(asked))
                require(error < 0.5, f"log-probabilities differ by {error:.2g}")
                found["max_error"] = error
            seconds = timed(lambda engine=engine, asked=asked: engine.run(asked), device, repeats=2)
            found[f"tokens_per_s_{rows}"] = rows * new / seconds
            if rows == 32 or device == "cpu":
                long = requests(lm, rows, 1, prompt=4 * prompt, new=1)
                prefill_s = timed(lambda engine=engine, long=long: engine.run(long), device, repeats=1)
                found["prefill_tokens_per_s"] = rows * 4 * prompt / prefill_s
                began = time.perf_counter()
                engine.load_weights(1, lm.named_parameters())
                engine.run(requests(lm, 1, 1, prompt=2, new=1))
                found["publication_s"] = time.perf_counter() - began
        finally:
            engine.close()
    return found


def own_engine(lm: Any, device: str, num_slots: int, graphs: bool) -> rl.EmbeddedEngine:
    """An engine with its own copy of the weights, and a stream of its own; steps are recorded on a GPU only."""
    engine = rl.EmbeddedEngine(
        num_slots=num_slots,
        device=device,
        dtype="bfloat16",
        self_check=False,
        own_process=graphs,  # which graphs need, so that it is in their price
        cuda_graphs=graphs and device == "cuda",
    )
    with tempfile.TemporaryDirectory() as folder:
        lm.config.save_pretrained(folder)
        engine.setup(folder)
    engine.load_weights(0, lm.named_parameters())
    return engine


def measure(device: str, parts: Parts) -> None:
    """All shapes: training of all weights and of adapters, sampling with and without recorded steps."""
    for name, config in shapes().items():
        config = config if device == "cuda" else tiny(config)
        kinds: dict[str, tuple[LoRA | None, bool]] = {
            "all weights": (None, False),
            "LoRA": (LoRA(rank=32), False),
            "all weights, compiled": (None, True),
        }
        for kind, (lora, compiled) in kinds.items():
            if (lora is None and name in LORA_ALONE) or (compiled and name not in COMPILED):
                continue
            parts.do(
                f"{name}, {kind}",
                lambda config=config, lora=lora, compiled=compiled: trained(config, device, lora, compiled=compiled),
            )
            freed(device)
        for kind, graphs in (("sampling", False), ("sampling, CUDA graphs", True)):
            parts.do(f"{name}, {kind}", lambda config=config, graphs=graphs: sampled(config, device, graphs))
            freed(device)


def freed(device: str) -> None:
    """Ends what the last part held, so that the next one's peak is its own."""
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
