"""Processor time of the self-check at set-up, for a model of the shape of Qwen2.5-0.5B in float32 with random weights.

OMP_NUM_THREADS=1 python benchmarks/performance/self_check.py
"""

from __future__ import annotations

import copy
import time

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from lit_async_rl.engines.embedded.decoding_check import check_decoding
from lit_async_rl.engines.embedded.slots import Slots
from lit_async_rl.models.packing import PrefixTreePacking
from lit_async_rl.models.policy import CausalPolicy
from lit_async_rl.models.self_check import check_policy

SHAPE = dict(hidden_size=896, intermediate_size=4864, num_hidden_layers=24, num_attention_heads=14)
REPEATS = 3


def main() -> None:
    """Command line."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = Qwen2Config(**SHAPE, num_key_value_heads=2, vocab_size=151_936, tie_word_embeddings=True)
    lm = Qwen2ForCausalLM(config).eval()
    policies = {"trainer": CausalPolicy(lm), "trainer, packed": CausalPolicy(lm, packing=PrefixTreePacking())}
    for _ in range(REPEATS):
        for name, policy in policies.items():
            began = time.process_time()
            check_policy(policy, bound=1e-4)
            print(f"{name:16} {time.process_time() - began:.2f} s", flush=True)
        slots = Slots(copy.deepcopy(lm), num_slots=64, eos_token_ids=(), seed=0, owns_weights=True)
        for linear in slots.packed.values():  # as an engine's own weights are
            linear.write(linear.parameter)
        began = time.process_time()
        check_decoding(slots)
        print(f"{'engine':16} {time.process_time() - began:.2f} s", flush=True)


if __name__ == "__main__":
    main()
