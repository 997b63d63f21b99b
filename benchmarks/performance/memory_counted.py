"""Memory of a training step by model size, counted as `lit-async-rl plan` counts it: needs neither GPU nor weights.

    python benchmarks/performance/memory_counted.py --write docs/measurements/memory_counted.json

16 rows of 512 tokens (8,192 in all) in each of two micro-batches, gradient checkpointing, weights in float32 and
products in bfloat16; shapes are those of Qwen2.5.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from transformers import Qwen2Config

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.common.measurement import measurement, write_measurement
from lit_async_rl.lab.memory import StepShape, training_memory, ways_to_fit

SIZES = {  # hidden size, that of the MLP, layers, heads, key-value heads, whether embeddings are tied; training GPUs
    "0.5B": (896, 4864, 24, 14, 2, True, 1),
    "1.5B": (1536, 8960, 28, 12, 2, True, 1),
    "7B": (3584, 18944, 28, 28, 4, False, 4),
    "32B": (5120, 27648, 64, 40, 8, False, 32),
}
SHAPE = StepShape(rows=16, prompt_tokens=128, completion_tokens=384, micro_batches=2, gradient_checkpointing=True)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path, required=True)
    args = parser.parse_args()
    rows = []
    for name, (hidden, inner, layers, heads, key_heads, tied, gpus) in SIZES.items():
        config = Qwen2Config(
            hidden_size=hidden,
            intermediate_size=inner,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=key_heads,
            tie_word_embeddings=tied,
            vocab_size=151_936 if tied else 152_064,
        )
        alone = training_memory(config, SHAPE)
        (fit,) = ways_to_fit(config, SHAPE, capacity=10**15, trainer_devices=gpus, is_sharded=gpus > 1)
        share = alone.states / gpus
        rows.append([name, gpus, alone.states / 1e9, share / 1e9, (fit.num_bytes - share) / 1e9, fit.num_bytes / 1e9])
        print(*rows[-1], flush=True)
    columns = ["model", "training GPUs", "weights, gradients, moments, GB", "share of each GPU, GB", "beside, GB", "GB"]
    found = measurement(
        "memory_counted",
        round(rows[0][-1], 1),
        "GB of a training step of 0.5B at most",
        columns=columns,
        rows=[[name, gpus, *(round(size, 1) for size in sizes)] for name, gpus, *sizes in rows],
        command="python benchmarks/performance/memory_counted.py --write docs/measurements/memory_counted.json",
        machine="tensors without values: no device",
    )
    write_measurement(args.write, found)


if __name__ == "__main__":
    main()
