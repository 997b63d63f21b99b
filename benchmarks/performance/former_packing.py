"""Are steps on prefix trees as fast as with the packing before, of prompts alone? Pairs on the data of two examples.

    python benchmarks/performance/former_packing.py --output docs/measurements/former_packing.json

The former packing is read from a commit of this repository, and uses the rest as it is now. A pass is collation,
forward and backward pass of a step with the shapes of the quick start and of SmolLM2 (`configs/`): their prompts, and
random completions. Both ways alternate; ratios are medians of pairs of processor times, with the smallest and largest.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import lit_async_rl as rl
from benchmarks.common.measurement import ROOT, measurement, write_measurement
from lit_async_rl.advantages.group import GroupMeanStd
from lit_async_rl.data.collate import collate_step
from lit_async_rl.losses.aggregation import TokenMean
from lit_async_rl.models.loading import load_policy
from lit_async_rl.models.lora import add_lora
from lit_async_rl.models.policy import CausalPolicy
from lit_async_rl.models.tokenizer import TextCodec
from lit_async_rl.types import Rollout, RolloutGroup

FORMER = "061b51a0^"  # before packing on trees was merged
SMOLLM2 = dict(largest=14, smallest_factor=1, largest_factor=12, kinds=("sums", "products"), held_out=0.55)
LAST_LAYERS = r".*layers\.(1[5-9]|2\d)\..*_proj"
# model, prompts, groups of a step, shortest and longest completion, adapters
CASES: dict[str, tuple[Callable[[], str], Callable[[], Any], int, tuple[int, int], rl.LoRA | None]] = {
    "quick start": (lambda: str(rl.asset("sort_policy")), lambda: rl.SortDigits(8, size=100), 32, (9, 9), None),
    "SmolLM2": (
        lambda: "models/smollm2",
        lambda: rl.MentalArithmetic(**SMOLLM2),
        4,
        (3, 16),
        rl.LoRA(rank=16, alpha=32, target_modules=LAST_LAYERS),
    ),
}


def former_packing(commit: str) -> Any:
    """The former class, from the repository's history."""
    file = f"{commit}:lit_async_rl/models/packing.py"
    code = subprocess.run(
        ["git", "show", file], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60
    ).stdout
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "former_packing.py")
        path.write_text(code)
        spec = importlib.util.spec_from_file_location("former_packing", path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
    return module.SharedPromptPacking()


def make_groups(
    codec: TextCodec, prompts: Any, number: int, lengths: tuple[int, int], vocab_size: int
) -> list[RolloutGroup]:
    """Groups of eight random completions."""
    chance = random.Random(0)
    groups = []
    for index, prompt in enumerate(islice(iter(prompts), number)):
        rollouts = []
        for n in range(8):
            length = chance.randint(*lengths)
            tokens = tuple(chance.randrange(vocab_size) for _ in range(length))
            rollouts.append(
                Rollout(
                    token_ids=tokens,
                    logprobs=(-1.0,) * length,
                    versions=(0,) * length,
                    finish_reason="stop",
                    reward=float(n),
                )
            )
        groups.append(
            RolloutGroup(
                index=index,
                prompt=prompt,
                prompt_ids=codec.encode(prompt),
                rollouts=tuple(rollouts),
                admitted_version=0,
            )
        )
    return groups


def step_s(policy: CausalPolicy, groups: list[RolloutGroup], precision: torch.dtype | None, is_former: bool) -> float:
    """Seconds of processor time of a step's collation, forward and backward pass."""
    policy.zero_grad()
    began = time.process_time()
    (batch,) = collate_step(
        groups,
        advantage=GroupMeanStd(),
        aggregation=TokenMean(),
        num_micro_batches=1,
        pad_token_id=0,
        temperature=1.0,
        keep_groups_whole=True,
        tree_costs=None if is_former else policy.tree_costs,
    )
    with torch.autocast("cpu", precision or torch.bfloat16, enabled=precision is not None):
        stats = policy(batch.input_ids, batch.loss_mask, group_index=batch.tree_groups)
        (stats.logprobs * batch.token_weights).sum().backward()
    return time.process_time() - began


def measure(name: str, repeats: int, former: Any) -> dict[str, Any]:
    """Ratios of one case."""
    model, prompts, number, lengths, lora = CASES[name]
    lm = load_policy(model())
    precision = None if lora is None else torch.bfloat16
    if lora is not None:
        lm = add_lora(lm, lora)
    policies = {way: CausalPolicy(lm, packing=rl.PrefixTreePacking()) for way in ("trees", "former")}
    policies["former"].packing = former
    vocab_size = policies["trees"].causal_lm.config.vocab_size
    groups = make_groups(TextCodec(model()), prompts(), number=number, lengths=lengths, vocab_size=vocab_size)
    seconds: dict[str, list[float]] = {way: [] for way in policies}
    for turn in range(repeats + 1):
        for way in sorted(policies, reverse=bool(turn % 2)):
            taken = step_s(policies[way], groups, precision, is_former=way == "former")
            if turn:  # the first warms up
                seconds[way].append(taken)
    ratios = [before / now for before, now in zip(seconds["former"], seconds["trees"], strict=True)]
    return {
        "prompt": len(groups[0].prompt_ids),
        "seconds": {way: statistics.median(values) for way, values in seconds.items()},
        "ratio": statistics.median(ratios),
        "range": [min(ratios), max(ratios)],
        "pairs": len(ratios),
    }


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--former", default=FORMER, help="commit of the former packing")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    former = former_packing(args.former)
    cases = {}
    for name in CASES:
        cases[name] = found = measure(name, args.repeats, former)
        low, high = found["range"]
        print(f"{name}: time of the former packing / trees {found['ratio']:.2f} ({low:.2f} to {high:.2f})", flush=True)
    if args.output is not None:
        write_measurement(args.output, as_measurement(cases))


def as_measurement(cases: dict[str, Any]) -> dict[str, Any]:
    """The table of the documentation."""
    rows = [
        [
            name,
            found["prompt"],
            *(round(found["seconds"][way], 3) for way in ("former", "trees")),
            round(found["ratio"], 2),
            " to ".join(f"{one:.2f}" for one in found["range"]),
        ]
        for name, found in cases.items()
    ]
    return measurement(
        "former_packing",
        round(min(found["ratio"] for found in cases.values()), 2),
        "ratio of processor time of the former packing to prefix trees, the smaller of the examples",
        columns=["example", "tokens of a prompt", "former, s", "trees, s", "former / trees", "pairs from and to"],
        rows=rows,
        command="python benchmarks/performance/former_packing.py --output docs/measurements/former_packing.json",
        machine=f"one thread of two shared cores at a load of {os.getloadavg()[0]:.0f}, torch {torch.__version__}",
        cases=cases,
    )


if __name__ == "__main__":
    main()
