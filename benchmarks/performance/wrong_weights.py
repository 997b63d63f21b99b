"""How far log-probabilities move when one tensor of a real model is scaled by 1.01, against what rounding explains.

Completions are sampled from the model in bfloat16 after random prompts. The error is `engine/logprob_error`, the mean
absolute difference of log-probabilities of the same tokens, here between a trainer in float32 and an engine in
float32 or bfloat16 that has one wrong tensor.

    python benchmarks/performance/wrong_weights.py --model models/smollm2

writes docs/measurements/wrong_weights.json.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.common.measurement import measurement, write_measurement
from lit_async_rl.models.loading import load_policy

ROOT = Path(__file__).parents[2]
SCALED = (
    "model.embed_tokens.weight",
    "model.norm.weight",
    "model.layers.0.self_attn.q_proj.weight",
    "model.layers.0.mlp.down_proj.weight",
    "model.layers.15.self_attn.v_proj.weight",
    "model.layers.15.mlp.down_proj.weight",
    "model.layers.29.mlp.up_proj.weight",
)
PROMPT_TOKENS = 8


@torch.no_grad()
def logprobs(lm: Any, ids: Tensor) -> Tensor:
    """Log-probabilities of all tokens after the prompt."""
    found = lm(input_ids=ids).logits.float().log_softmax(-1)
    return found[:, PROMPT_TOKENS - 1 : -1].gather(-1, ids[:, PROMPT_TOKENS:, None])[..., 0]


@torch.no_grad()
def error_with(lm: Any, name: str, factor: float, ids: Tensor, right: Tensor) -> float:
    """The error if one tensor is scaled."""
    parameter = lm.get_parameter(name)
    before = parameter.clone()
    parameter.mul_(factor)
    found = (logprobs(lm, ids) - right).abs().mean().item()
    parameter.copy_(before)
    return found


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="models/smollm2")
    parser.add_argument("--num_samples", type=int, default=4)
    parser.add_argument("--new_tokens", type=int, default=48)
    parser.add_argument("--factor", type=float, default=1.01)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    exact: Any = load_policy(args.model).float().eval()
    rounded: Any = load_policy(args.model).to(torch.bfloat16).eval()
    prompts = torch.randint(2, exact.config.vocab_size, (args.num_samples, PROMPT_TOKENS))
    ids = rounded.generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        do_sample=True,
        top_k=0,
        max_new_tokens=args.new_tokens,
        min_new_tokens=args.new_tokens,
    )
    right = logprobs(exact, ids)
    rows: list[list[Any]] = [["none", 0.0, error_with(rounded, SCALED[0], 1.0, ids=ids, right=right)]]
    for name in SCALED:
        errors = [error_with(lm, name, args.factor, ids=ids, right=right) for lm in (exact, rounded)]
        rows.append([f"`{name}`", *errors])
        print(*rows[-1], flush=True)
    columns = [f"tensor scaled by {args.factor:g}", "error in float32, nats", "error in bfloat16, nats"]
    found = measurement(
        "wrong_weights",
        round(min(row[1] for row in rows[1:]), 5),
        "nats, smallest error in float32",
        columns=columns,
        rows=[[name, f"{a:.2g}", f"{b:.2g}"] for name, a, b in rows],
        command="python benchmarks/performance/wrong_weights.py " + " ".join(sys.argv[1:]),
        machine=f"one of {os.cpu_count()} cores",
    )
    write_measurement(ROOT / "docs/measurements/wrong_weights.json", found)


if __name__ == "__main__":
    main()
