"""Speedup of shared-prompt packing in a training pass, measured and by formula.

    python benchmarks/performance/packing.py --output packing.json

Runs alternate between the two; seconds are medians. The formula counts tokens (lit_async_rl.models.packing); it leaves
out attention, and the head, which is applied to completions only.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from lit_async_rl.models.packing import SharedPromptPacking, group_cost
from lit_async_rl.models.policy import CausalPolicy


def make_batch(prompt: int, completion: int, group_size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Token ids, mask and group index of one group."""
    ids = torch.randint(3, 90, (group_size, prompt + completion))
    ids[:, :prompt] = ids[0, :prompt]
    mask = torch.zeros(ids.shape, dtype=torch.bool)
    mask[:, prompt:] = True
    return ids, mask, torch.zeros(group_size, dtype=torch.long)


def pass_s(policy: CausalPolicy, batch: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> float:
    """Seconds of one forward and backward pass."""
    ids, mask, group_index = batch
    policy.zero_grad()
    began = time.perf_counter()
    policy(ids, mask, group_index=group_index).logprobs.sum().backward()
    if ids.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - began


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--attention", default="sdpa", help="flex_attention on a GPU")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=args.hidden,
        intermediate_size=4 * args.hidden,
        num_hidden_layers=args.layers,
        num_attention_heads=4,
        max_position_embeddings=2**16,
    )
    lm = LlamaForCausalLM(config)
    padded = CausalPolicy(lm.to(args.device))  # type: ignore[arg-type]
    packed = CausalPolicy(lm, packing=SharedPromptPacking())
    table: dict[str, dict[str, float]] = {}
    for prompt, completion, group_size in [(32, 32, 8), (64, 32, 8), (128, 32, 8), (256, 64, 8), (512, 128, 8)]:
        ids, mask, group_index = make_batch(prompt, completion, group_size)
        batch = ids.to(args.device), mask.to(args.device), group_index.to(args.device)
        seconds: dict[str, list[float]] = {"padded": [], "packed": []}
        for turn in range(args.repeats + 1):
            for name, policy in [("padded", padded), ("packed", packed)]:
                lm.set_attn_implementation(args.attention if name == "packed" else "sdpa")
                taken = pass_s(policy, batch)
                if turn:  # the first warms up
                    seconds[name].append(taken)
        costs = [group_cost(prompt, (completion,) * group_size, shared) for shared in (False, True)]
        tokens, pairs = (1 - new / old for old, new in zip(*costs, strict=True))
        saved = 1 - statistics.median(seconds["packed"]) / statistics.median(seconds["padded"])
        table[f"{prompt} + {group_size} x {completion}"] = {
            "tokens_saved": tokens,
            "pairs_saved": pairs,
            "seconds_padded": statistics.median(seconds["padded"]),
            "time_saved": saved,
            "share_of_predicted": saved / tokens,
        }
        print(
            f"prompt {prompt:4}, {group_size} x {completion:3}: tokens -{tokens:.0%}, attention pairs -{pairs:.0%}; "
            f"time -{saved:.0%}, which is {saved / tokens:.0%} of what tokens predict",
            flush=True,
        )
    if args.output is not None:
        args.output.write_text(json.dumps(table, indent=2) + "\n")


if __name__ == "__main__":
    main()
