"""Roofline of each phase: model FLOPs and bytes against the machine's measured matmul rate and memory bandwidth.

    OMP_NUM_THREADS=1 python benchmarks/performance/roof.py --output runs/roof.json  # the shipped policy's shape
    python benchmarks/performance/roof.py --device cuda --dtype bfloat16 --models 0.5B 1.5B --rows 64 --completion 512

On the CPU seconds are processor time of one thread, so that other programs count little; on CUDA they are wall time.
The limit of a phase is the larger of FLOPs / rate and bytes / bandwidth; 100 % is out of reach if small matrices,
softmax, norms and sampling take time of their own.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from engine import own_engine
from transformers import LlamaConfig, LlamaForCausalLM

from lit_async_rl.engines.base import GenerationRequest, SamplingParams
from lit_async_rl.models.policy import CausalPolicy

# The shapes of the shipped policy, one of ten times its size, SmolLM2-135M, Qwen2.5-0.5B and -1.5B; random weights.
_QWEN = {"num_key_value_heads": 2, "vocab_size": 151_936}
MODELS: dict[str, dict[str, int]] = {
    "0.5M": dict(hidden_size=128, intermediate_size=256, num_hidden_layers=3, num_attention_heads=4, vocab_size=98),
    "5M": dict(hidden_size=256, intermediate_size=704, num_hidden_layers=6, num_attention_heads=8, vocab_size=512),
    "135M": dict(
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        vocab_size=49_152,
    ),
    "0.5B": _QWEN | dict(hidden_size=896, intermediate_size=4864, num_hidden_layers=24, num_attention_heads=14),
    "1.5B": _QWEN | dict(hidden_size=1536, intermediate_size=8960, num_hidden_layers=28, num_attention_heads=12),
}


@dataclass(frozen=True)
class Work:
    """Minimum FLOPs and bytes of a phase."""

    flops: float
    num_bytes: float


@dataclass(frozen=True)
class Shape:
    """Sizes for the counts below: matmul parameters of the body and of the head."""

    body: int
    head: int
    layers: int
    width: int  # of all query heads
    kv_width: int  # of keys, or of values
    item: int  # bytes of a number

    @classmethod
    def of(cls, lm: LlamaForCausalLM) -> Shape:
        """Counts the parameters of a model."""
        c = lm.config
        head_dim = c.hidden_size // c.num_attention_heads
        body = sum(p.numel() for p in lm.model.layers.parameters())
        kv_width = head_dim * c.num_key_value_heads
        head = c.hidden_size * c.vocab_size
        return cls(body, head, c.num_hidden_layers, width=c.hidden_size, kv_width=kv_width, item=lm.dtype.itemsize)

    def training(self, rows: int, prompt: int, completion: int) -> Work:
        """Forward and backward pass: three times the forward's 2 FLOPs per weight and token, causal attention."""
        length = prompt + completion
        attention = 2 * self.layers * self.width * length * length * rows  # scores and values, half of them masked
        forward = 2 * self.body * rows * length + 2 * self.head * rows * completion + attention
        return Work(3 * forward, 3 * self.item * (self.body + self.head))

    def products(self, rows: int) -> Work:
        """Matrix products of one decode step, without attention."""
        size = self.body + self.head
        return Work(2.0 * rows * size, float(self.item * size))

    def decoding(self, rows: int, prompt: int, completion: int) -> Work:
        """Prompts, and all decode steps: each reads the weights once, and the KV cache of every row once."""
        flops = 2.0 * self.body * rows * prompt
        num_bytes = float(self.item * self.body)
        for position in range(prompt, prompt + completion):
            flops += rows * (2 * self.body + 2 * self.head + 4 * self.layers * self.width * position)
            num_bytes += self.item * (self.body + self.head + 2 * rows * self.layers * self.kv_width * position)
        return Work(flops, num_bytes)


def clock(device: str) -> float:
    """Processor time on a CPU; wall time after a synchronization on CUDA."""
    if device == "cuda":
        torch.cuda.synchronize()
        return time.perf_counter()
    return time.process_time()


def median_s(run: Callable[[], object], device: str, repeats: int = 5) -> float:
    """Median seconds, after a warm-up."""
    run()
    seconds = []
    for _ in range(repeats):
        began = clock(device)
        run()
        seconds.append(clock(device) - began)
    return statistics.median(seconds)


def probe(device: str, dtype: torch.dtype) -> tuple[float, float]:
    """FLOP/s of a large matmul, bytes/s of a copy larger than the caches."""
    size = 8192 if device == "cuda" else 1024
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    rate = 2 * size**3 / median_s(lambda: a @ b, device)
    source = torch.zeros(2**29 if device == "cuda" else 2**26, device=device)
    target = torch.empty_like(source)
    return rate, 2 * source.nbytes / median_s(lambda: target.copy_(source), device)


def measure(lm: LlamaForCausalLM, args: argparse.Namespace) -> dict[str, tuple[float, Work]]:
    """Seconds and minimum work of each phase."""
    shape = Shape.of(lm)
    policy = CausalPolicy(lm)
    sizes = (args.rows, args.prompt, args.completion)
    ids = torch.randint(3, 90, (args.rows, args.prompt + args.completion), device=args.device)
    mask = torch.zeros_like(ids, dtype=torch.bool)
    mask[:, args.prompt :] = True

    def train() -> None:
        policy(ids, mask).logprobs.sum().backward()

    engine = own_engine(lm, args.rows, args)
    sampling = SamplingParams(max_tokens=args.completion)
    prompts = ids[:, : args.prompt].tolist()
    requests = [
        GenerationRequest(id=n, prompt_ids=tuple(prompt), num_samples=1, sampling=sampling)
        for n, prompt in enumerate(prompts)
    ]
    copy = [torch.empty_like(p) for p in lm.parameters()]

    def publish() -> None:
        for target, source in zip(copy, lm.parameters(), strict=True):
            target.copy_(source.detach())

    linears = [p.detach() for p in lm.parameters() if p.dim() == 2]  # the embedding is the head, too
    inputs = {p.shape[1]: torch.randn(args.rows, p.shape[1]).to(p) for p in linears}

    def multiply() -> None:
        for weight in linears:
            F.linear(inputs[weight.shape[1]], weight)

    num_bytes = 2 * sum(p.nbytes for p in copy)
    generate = partial(engine.run, requests)
    return {
        "training pass": (median_s(train, args.device, args.repeats), shape.training(*sizes)),
        "prompts and decoding": (
            median_s(generate, args.device, args.repeats),
            shape.decoding(*sizes),
        ),
        "products of one token alone": (median_s(multiply, args.device), shape.products(args.rows)),
        "copy of weights": (median_s(publish, args.device), Work(0.0, num_bytes)),
    }


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=["0.5M", "5M"])
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--prompt", type=int, default=16)
    parser.add_argument("--completion", type=int, default=48)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--num_threads", type=int, default=1)
    parser.add_argument("--output", type=Path, default=Path("runs/roof.json"))
    args = parser.parse_args()
    if args.device == "cpu":
        torch.set_num_threads(args.num_threads)
    dtype = getattr(torch, args.dtype)
    rate, bandwidth = probe(args.device, dtype)
    print(f"roof: {rate / 1e9:.0f} GFLOP/s, {bandwidth / 1e9:.1f} GB/s")
    print(f"{'model':>6} {'phase':>27} {'ms':>9} {'GFLOP':>9} {'of rate':>8} {'MB':>9} {'of bw':>7} {'of limit':>9}")
    results = []
    for name in args.models:
        torch.manual_seed(0)
        config = LlamaConfig(**MODELS[name], tie_word_embeddings=True, eos_token_id=[], pad_token_id=0)
        lm = LlamaForCausalLM(config).to(args.device, dtype)
        for phase, (seconds, work) in measure(lm, args).items():
            of_rate = work.flops / rate / seconds
            of_bandwidth = work.num_bytes / bandwidth / seconds
            print(
                f"{name:>6} {phase:>27} {1e3 * seconds:9.1f} {work.flops / 1e9:9.2f} {of_rate:8.0%} "
                f"{work.num_bytes / 1e6:9.1f} {of_bandwidth:7.0%} {max(of_rate, of_bandwidth):9.0%}",
                flush=True,
            )
            row = {"model": name, "phase": phase, "seconds": seconds, "flops": work.flops, "bytes": work.num_bytes}
            results.append({**row, "of_rate": of_rate, "of_bandwidth": of_bandwidth})
    settings = {key: str(value) for key, value in vars(args).items()}
    roofs = {"flops_per_s": rate, "bytes_per_s": bandwidth}
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(json.dumps({"settings": settings, "roofs": roofs, "results": results}, indent=1))


if __name__ == "__main__":
    main()
