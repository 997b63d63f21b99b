"""Time and memory of a training pass on prefix trees, against separate rows.

    python benchmarks/performance/packing.py --output docs/measurements/prefix_trees.json

Each tree is computed in three ways that alternate: padded rows, the tree split at its branches, and the tree with a
dense mask. Seconds are of processor time, ratios are medians of pairs. `tokens` and `pairs` are what the tree saves by
count (`PackedRows`), as ratios of rows to tree, and `former` is what it saves against a packing that shares only what
all rows of the group begin with. `share_of_tokens` is the measured ratio of times divided by that of tokens,
`share_of_operations` by that of 6 H + pairs for each token (`tree_attention.py`), for a mask with all of its L^2 pairs.

`kept_mib` is the memory of the tensors that a pass keeps for its backward pass, without parameters. By the formula it
is that of rows, divided by the ratio of tokens, and 4 L^2 bytes in each layer for a mask; `over_formula` is the ratio.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.common.measurement import measurement, write_measurement
from lit_async_rl.models import packing
from lit_async_rl.models.packing import PrefixTreePacking
from lit_async_rl.models.policy import CausalPolicy

# (tokens of a node, children of a node) from the root; the last level's nodes are the leaves
TREES = {
    "8 completions of 64, prompt 448": ((448, 8), (64, 0)),
    "8 completions of 128, prompt 512": ((512, 8), (128, 0)),
    "4 branches, twice, prompt 512": ((512, 4), (64, 4), (32, 0)),
    "2 levels, 512 tokens": ((256, 8), (32, 0)),
    "5 levels, 512 tokens": ((112, 2), (48, 2), (28, 2), (12, 2), (6, 0)),
    "3 levels of pairs": ((256, 2), (128, 2), (64, 2), (32, 0)),
    "4 levels of pairs": ((512, 2), (256, 2), (128, 2), (64, 0)),
    "5 levels of pairs": ((512, 2), (256, 2), (128, 2), (64, 2), (32, 0)),
    "3 levels, 4096 tokens": ((1024, 4), (256, 4), (128, 0)),
    "5 levels, 4096 tokens": ((768, 2), (416, 2), (208, 2), (104, 2), (52, 0)),
    "agent: 8 episodes of 4 branches, system prompt 512": ((512, 8), (96, 4), (48, 0)),
    "4 completions of 512, prompt 1536": ((1536, 4), (512, 0)),
}
WAYS = ("rows", "split", "mask")
Batch = tuple[Tensor, Tensor, Tensor]


def make_batch(levels: tuple[tuple[int, int], ...]) -> Batch:
    """Token ids, mask and group index of one tree, of which all tokens below the root train in one row."""
    rows: list[tuple[list[int], list[bool]]] = []

    def grow(level: int, tokens: list[int], trains: list[bool]) -> None:
        size, children = levels[level]
        tokens = tokens + torch.randint(3, 250, (size,)).tolist()
        trains = trains + [level > 0] * size
        if not children:
            rows.append((tokens, trains))
        for _ in range(children):
            grow(level + 1, tokens, trains)
            trains = [False] * len(tokens)

    grow(0, [], [])
    return (
        torch.tensor([tokens for tokens, _ in rows]),
        torch.tensor([trains for _, trains in rows]),
        torch.zeros(len(rows), dtype=torch.long),
    )


def pass_s(policy: CausalPolicy, batch: Batch) -> float:
    """Seconds of processor time of one forward and backward pass."""
    policy.zero_grad()
    began = time.process_time()
    policy(batch[0], batch[1], group_index=batch[2]).logprobs.sum().backward()
    return time.process_time() - began


def kept_bytes(policy: CausalPolicy, batch: Batch) -> int:
    """Memory of the tensors that are kept for the backward pass, each storage once, without parameters."""
    known = {parameter.untyped_storage().data_ptr() for parameter in policy.parameters()}
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept.setdefault(tensor.untyped_storage().data_ptr(), tensor.detach())
        return tensor.detach()  # itself would refer to its graph, which would never be freed

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        policy(batch[0], batch[1], group_index=batch[2])
    return sum(tensor.untyped_storage().nbytes() for place, tensor in kept.items() if place not in known)


def choose(way: str) -> None:
    """Makes packed passes split, or take the dense mask."""
    packing.split_is_cheaper = lambda lm, spans, shape: way == "split"


def measure(lm: LlamaForCausalLM, levels: tuple[tuple[int, int], ...], repeats: int) -> dict[str, Any]:
    """Numbers of one tree."""
    batch = make_batch(levels)
    packed = CausalPolicy(lm, packing=PrefixTreePacking())
    policies = {"rows": CausalPolicy(lm), "split": packed, "mask": packed}
    ids, mask, groups = batch
    decides = packing.split_is_cheaper
    chosen = packed.packing.layout(lm, ids[:, :-1], mask[:, 1:], groups.tolist())  # type: ignore[union-attr]
    is_split = decides(lm, chosen.spans, chosen.until.shape)
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    kept = {}
    for turn in range(repeats + 1):
        for way in WAYS:
            choose(way)
            taken = pass_s(policies[way], batch)
            if turn:  # the first warms up
                seconds[way].append(taken)
            else:
                kept[way] = kept_bytes(policies[way], batch)
    packing.split_is_cheaper = decides
    num_rows = ids.shape[0]
    length = ids.shape[1] - 1
    tokens = num_rows * length / chosen.num_tokens
    shared = int((ids == ids[:1]).all(0).cumprod(0).sum())
    former = shared + num_rows * (length - shared)
    hidden = lm.config.hidden_size
    of_rows = num_rows * length * (6 * hidden + (length + 1) / 2)
    operations = {
        "split": of_rows / (6 * hidden * chosen.num_tokens + chosen.num_pairs),
        "mask": of_rows / (chosen.num_tokens * (6 * hidden + chosen.num_tokens)),
    }
    formula = dict.fromkeys(WAYS[1:], kept["rows"] / tokens)
    formula["mask"] += 4 * chosen.num_tokens**2 * lm.config.num_hidden_layers
    times = {
        way: statistics.median(r / t for r, t in zip(seconds["rows"], seconds[way], strict=True)) for way in WAYS[1:]
    }
    return {
        "rows": num_rows,
        "tokens_of_tree": chosen.num_tokens,
        "tokens": tokens,
        "pairs": num_rows * length * (length + 1) / 2 / chosen.num_pairs,
        "chosen": "split" if is_split else "mask",
        "seconds": {way: statistics.median(values) for way, values in seconds.items()},
        "time": times,
        "former": former / chosen.num_tokens,
        "share_of_tokens": {way: ratio / tokens for way, ratio in times.items()},
        "share_of_operations": {way: ratio / operations[way] for way, ratio in times.items()},
        "over_formula": {way: kept[way] / size for way, size in formula.items()},
        "kept_mib": {way: size / 2**20 for way, size in kept.items()},
    }


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--out", type=Path, help="results of trees, of which those that it has are skipped")
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
    trees = json.loads(args.out.read_text()) if args.out is not None and args.out.exists() else {}
    for name, levels in TREES.items():
        if name in trees:
            continue
        trees[name] = found = measure(lm, levels, args.repeats)
        if args.out is not None:
            args.out.write_text(json.dumps(trees))
        print(
            f"{name}: {found['tokens_of_tree']} tokens, {found['tokens']:.2f} times fewer; time "
            + ", ".join(f"{way} {found['time'][way]:.2f} ({found['share_of_tokens'][way]:.2f})" for way in WAYS[1:])
            + f"; MiB {', '.join(f'{size:.0f}' for size in found['kept_mib'].values())}",
            flush=True,
        )
    if args.output is not None:
        write_measurement(args.output, as_measurement({name: trees[name] for name in TREES}, args.hidden, args.layers))


def as_measurement(trees: dict[str, Any], hidden: int, layers: int) -> dict[str, Any]:
    """The table of the documentation."""
    times = ["time of rows / split", "of rows / mask"]
    columns = ["tree", "tokens", "fewer tokens", *times, *(f"kept, {way}" for way in WAYS)]
    columns += ["fewer than formerly", "split / tokens", "mask / operations", "kept / formula"]
    rows = [
        [
            name,
            found["tokens_of_tree"],
            round(found["tokens"], 2),
            *(round(found["time"][way], 2) for way in WAYS[1:]),
            *(f"{found['kept_mib'][way]:.0f} MiB" for way in WAYS),
            round(found["former"], 2),
            round(found["share_of_tokens"]["split"], 2),
            round(found["share_of_operations"]["mask"], 2),
            round(max(found["over_formula"].values()), 2),
        ]
        for name, found in trees.items()
    ]
    return measurement(
        "prefix_trees",
        round(min(found["share_of_tokens"]["split"] for found in trees.values()), 2),
        "ratio of processor time of rows to split trees, divided by the ratio of tokens: the smallest",
        columns=columns,
        rows=rows,
        command="python benchmarks/performance/packing.py --output docs/measurements/prefix_trees.json",
        machine=f"one thread of two shared cores at a load of {os.getloadavg()[0]:.0f}; Llama of {layers} layers of "
        f"width {hidden}, float32, torch {torch.__version__}",
        trees=trees,
    )


if __name__ == "__main__":
    main()
