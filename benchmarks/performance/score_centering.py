"""Cost of score centering with a vocabulary of 49 thousand tokens, as shares of a training step and of generation.

A random policy of SmolLM2-135M's shape. Steps are forward and backward pass of one micro-batch, with score centering
and with REINFORCE; generation is that of the embedded engine, with and without recorded heads. Processor time of each,
in turns.

python benchmarks/performance/score_centering.py --head 32 --repetitions 5
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from lit_async_rl.advantages.group import GroupMean
from lit_async_rl.corrections.weights import BehaviorProximal
from lit_async_rl.data.collate import collate_step
from lit_async_rl.engines.base import Completion, GenerationRequest, SamplingParams
from lit_async_rl.engines.embedded.engine import EmbeddedEngine
from lit_async_rl.losses import PolicyLoss, Reinforce, ScoreCentering
from lit_async_rl.losses.aggregation import TokenMean
from lit_async_rl.models.policy import CausalPolicy
from lit_async_rl.problem import Prompt
from lit_async_rl.training.objective import Objective
from lit_async_rl.types import RolloutBatch, RolloutGroup

VOCABULARY = 49152
ROWS = 8


def make_policy(num_layers: int) -> LlamaForCausalLM:
    """SmolLM2-135M's shape, with this many of its 30 layers."""
    config: Any = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=num_layers,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        eos_token_id=None,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config).eval()


def generate(lm: LlamaForCausalLM, head: int | None, num_tokens: int) -> list[Completion]:
    """Completions of one prompt."""
    sampling = SamplingParams(max_tokens=num_tokens, head=head)
    request = GenerationRequest(id=0, prompt_ids=tuple(range(1, 17)), num_samples=ROWS, sampling=sampling)
    engine = EmbeddedEngine.from_module(lm, num_slots=ROWS)  # type: ignore[arg-type]
    return engine.run([request])[0]


def batch_of(completions: list[Completion]) -> RolloutBatch:
    """One micro-batch; every second completion is rewarded."""
    rollouts = tuple(c.scored(float(c.sample_index % 2)) for c in completions)
    prompt_ids = tuple(range(1, 17))
    group = RolloutGroup(index=0, prompt=Prompt(text="p"), prompt_ids=prompt_ids, rollouts=rollouts, admitted_version=0)
    (batch,) = collate_step(
        [group],
        advantage=GroupMean(),
        aggregation=TokenMean(),
        num_micro_batches=1,
        pad_token_id=0,
        temperature=1.0,
    )
    return batch


def step(policy: CausalPolicy, loss: PolicyLoss, batch: RolloutBatch) -> None:
    """Forward and backward pass."""
    objective = Objective(loss, BehaviorProximal(), None, baseline=None, kl_coefficient=0.0, entropy_coefficient=0.0)
    value, _ = objective(policy, None, batch, 1)
    value.backward()
    policy.zero_grad()


def seconds(work: Callable[[], object]) -> float:
    """Processor time of a call."""
    began = time.process_time()
    work()
    return time.process_time() - began


def main(arguments: list[str] | None = None) -> dict[str, float]:
    """Prints both shares in percent, and the medians in seconds, as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--head", type=int, default=32)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--num_tokens", type=int, default=48, help="tokens of each of eight completions")
    parser.add_argument("--num_layers", type=int, default=30)
    options = parser.parse_args(arguments)
    torch.manual_seed(0)
    torch.set_num_threads(1)
    lm = make_policy(options.num_layers)
    policy = CausalPolicy(lm)
    recorded = batch_of(generate(lm, options.head, options.num_tokens))
    plain = recorded.replace(head_ids=None, head_logprobs=None, behavior_entropy=None)
    works: dict[str, Callable[[], object]] = {
        "step_reinforce": lambda: step(policy, Reinforce(), plain),
        "step_score_centering": lambda: step(policy, ScoreCentering(), recorded),
        "generation_plain": lambda: generate(lm, None, options.num_tokens),
        "generation_head": lambda: generate(lm, options.head, options.num_tokens),
    }
    times: dict[str, list[float]] = {name: [] for name in works}
    for number in range(options.repetitions + 1):
        for name, work in works.items():
            spent = seconds(work)
            if number:  # the first warms up
                times[name].append(spent)
    medians = {name: statistics.median(values) for name, values in times.items()}
    found = {
        "share_of_step": 100 * (medians["step_score_centering"] / medians["step_reinforce"] - 1),
        "share_of_generation": 100 * (medians["generation_head"] / medians["generation_plain"] - 1),
        **medians,
    }
    print(json.dumps({name: round(value, 3) for name, value in found.items()}))
    return found


if __name__ == "__main__":
    main()
