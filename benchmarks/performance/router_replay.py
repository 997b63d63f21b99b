"""Log-probabilities of a mixture-of-experts policy in trainer and engine, with and without router replay.

A random Qwen3-MoE; the engine samples with the trainer's weights, with weights rounded to bfloat16, and with weights
that change in the middle of the completions, as in-flight updates do. The trainer's log-probabilities are then computed
with its own choice of experts and with the recorded one.

python benchmarks/performance/router_replay.py --seeds 0 1 2
"""

from __future__ import annotations

import argparse
import copy
import json
import random
import statistics
import tempfile

import torch
from transformers import PreTrainedModel, Qwen3MoeConfig, Qwen3MoeForCausalLM

from lit_async_rl.advantages.group import GroupMean
from lit_async_rl.data.collate import collate_step
from lit_async_rl.engines.base import Completion, GenerationRequest, SamplingParams
from lit_async_rl.engines.embedded.engine import EmbeddedEngine
from lit_async_rl.losses.aggregation import TokenMean
from lit_async_rl.models.policy import CausalPolicy
from lit_async_rl.problem import Prompt
from lit_async_rl.types import RolloutBatch, RolloutGroup

VOCABULARY = 512
PROMPT_TOKENS = 16
SAMPLES = 8
UPDATE = 0.005  # change of the weights by an update, relative to their size
CASES = {
    "the same weights": ("float32", False),
    "engine in bfloat16": ("bfloat16", False),
    "in-flight update": ("float32", True),
    "in-flight update, engine in bfloat16": ("bfloat16", True),
}


def make_policy(seed: int) -> PreTrainedModel:
    """4 layers of 32 experts, 4 for each token, with weights large enough for distributions that are not uniform."""
    torch.manual_seed(seed)
    config = Qwen3MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        moe_intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=32,
        num_experts_per_tok=4,
        norm_topk_prob=True,
        eos_token_id=None,
        pad_token_id=0,
    )
    lm = Qwen3MoeForCausalLM(config)
    with torch.no_grad():
        for parameter in lm.parameters():
            if parameter.dim() > 1:
                parameter.mul_(5)
    return lm.eval()


def updated(lm: PreTrainedModel) -> PreTrainedModel:
    """The policy after an update."""
    other = copy.deepcopy(lm)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(UPDATE * parameter.std(correction=0) * torch.randn_like(parameter))
    return other


def sample(before: PreTrainedModel, after: PreTrainedModel, dtype: str, num_tokens: int) -> RolloutBatch:
    """Completions of eight prompts, the first half of each by `before`."""
    sampling = SamplingParams(max_tokens=num_tokens, experts=True)
    prompts = [tuple(random.Random(n).choices(range(1, VOCABULARY), k=PROMPT_TOKENS)) for n in range(8)]
    requests = [
        GenerationRequest(id=n, prompt_ids=ids, num_samples=SAMPLES, sampling=sampling) for n, ids in enumerate(prompts)
    ]
    with tempfile.TemporaryDirectory() as folder:
        before.save_pretrained(folder)
        engine = EmbeddedEngine(dtype=dtype, device="cpu", num_slots=len(prompts) * SAMPLES)
        engine.setup(folder)
    engine.load_weights(0, before.named_parameters())
    engine.submit(requests)
    found: list[Completion] = []
    while engine.num_tokens < len(prompts) * SAMPLES * num_tokens // 2:
        found += engine.poll(0.0)  # one token of each
    engine.load_weights(1, after.named_parameters())
    while len(found) < len(prompts) * SAMPLES:
        found += engine.poll(10.0)
    engine.close()
    groups = [
        RolloutGroup(
            index=n,
            prompt=Prompt(text="p"),
            prompt_ids=ids,
            rollouts=tuple(c.scored(0.0) for c in found if c.request_id == n),
            admitted_version=0,
        )
        for n, ids in enumerate(prompts)
    ]
    (batch,) = collate_step(
        groups,
        advantage=GroupMean(),
        aggregation=TokenMean(),
        num_micro_batches=1,
        pad_token_id=0,
        temperature=1.0,
    )
    return batch


@torch.no_grad()
def mismatch(lm: PreTrainedModel, batch: RolloutBatch, replay: bool) -> tuple[float, float]:
    """Mean of |log pi - log mu|, and share of ratios outside of [0.8, 1.25]."""
    stats = CausalPolicy(lm)(batch.input_ids, batch.loss_mask, experts=batch.experts if replay else None)
    log_ratio = (stats.logprobs - batch.behavior_logprobs)[batch.loss_mask]
    outside = (log_ratio.exp() < 0.8) | (log_ratio.exp() > 1.25)
    return float(log_ratio.abs().mean()), float(outside.float().mean())


def measure(seed: int, num_tokens: int) -> dict[str, list[float]]:
    """For each case: both numbers with the trainer's own choice, then with replay."""
    found = {}
    for name, (dtype, updates) in CASES.items():
        before = make_policy(seed)
        after = updated(before) if updates else before
        batch = sample(before, after, dtype, num_tokens=num_tokens)
        found[name] = [*mismatch(after, batch, replay=False), *mismatch(after, batch, replay=True)]
    return found


def main(arguments: list[str] | None = None) -> list[list[object]]:
    """Prints the rows of the table as JSON: means over seeds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--num_tokens", type=int, default=64, help="tokens of a completion")
    options = parser.parse_args(arguments)
    runs = [measure(seed, options.num_tokens) for seed in options.seeds]
    rows: list[list[object]] = []
    for name in CASES:
        means = [statistics.fmean(values) for values in zip(*(run[name] for run in runs), strict=True)]
        rows.append([name, *(float(f"{value:.2g}") for value in means)])
    print(json.dumps(rows))
    return rows


if __name__ == "__main__":
    main()
