"""Peak memory of a training pass with a vocabulary of 152,000: it grows with the chunk of logits, not with B T V.

    python benchmarks/performance/logprob_memory.py --output logprob_memory.json

The body of the model is tiny, so that nearly all memory is the head's. Memory is what the process (or the CUDA device)
holds at most during forward and backward, less what it held before.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from lit_async_rl.models.policy import CausalPolicy


def begin_peak(device: str) -> int:
    """Resets the peak; returns the bytes in use."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM, the highest resident size (proc(5))
    return _status("VmRSS")


def end_peak(device: str) -> int:
    """Peak bytes since `begin_peak`."""
    return torch.cuda.max_memory_allocated() if device == "cuda" else _status("VmHWM")


def _status(name: str) -> int:
    line = next(row for row in Path("/proc/self/status").read_text().splitlines() if row.startswith(name))
    return 1024 * int(line.split()[1])


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocab_size", type=int, default=152_000)
    parser.add_argument("--tokens", type=int, nargs="+", default=[256, 512, 1024, 2048])
    parser.add_argument("--chunks", type=int, nargs="+", default=[64, 256, 4096])
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--output", type=Path, default=Path("logprob_memory.json"))
    args = parser.parse_args()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=args.vocab_size,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        tie_word_embeddings=True,
    )
    lm = LlamaForCausalLM(config).to(args.device)
    results = []
    print(f"{'chunk':>7} {'one chunk MB':>13}" + "".join(f"{f'N = {n}':>22}" for n in args.tokens))
    for chunk in args.chunks:
        policy = CausalPolicy(lm, chunk_tokens=chunk)
        line = f"{chunk:>7} {chunk * args.vocab_size * 4 / 1e6:13.0f}"
        for num_tokens in args.tokens:
            ids = torch.randint(0, args.vocab_size, (num_tokens // 64, 65), device=args.device)
            mask = torch.ones_like(ids, dtype=torch.bool)
            policy(ids[:1, :2], mask[:1, :2]).logprobs.sum().backward()  # gradients exist before it is measured
            before = begin_peak(args.device)
            began = time.process_time()
            policy(ids, mask).logprobs.sum().backward()
            peak = end_peak(args.device) - before
            cpu_s = time.process_time() - began
            line += f"{f'{peak / 1e6:.0f} MB, {cpu_s:.1f} s':>22}"
            results.append({"chunk": chunk, "tokens": num_tokens, "peak_bytes": peak, "cpu_s": cpu_s})
        print(line, flush=True)
    settings = {key: str(value) for key, value in vars(args).items()}
    args.output.write_text(json.dumps({"settings": settings, "results": results}, indent=1))


if __name__ == "__main__":
    main()
