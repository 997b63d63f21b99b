"""Memory of a training step by model size, counted as `lit-async-rl plan` counts it: needs neither GPU nor weights.

    python benchmarks/performance/memory_counted.py --write docs/measurements/memory_counted.json

16 rows of 512 tokens (8,192 in all) in each of two micro-batches, gradient checkpointing, weights in float32 and
products in bfloat16; shapes are those of Qwen2.5.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.common.measurement import measurement, write_measurement
from benchmarks.common.real_shapes import qwen25
from lit_async_rl.lab.memory import StepShape, training_memory, ways_to_fit

TRAINING_GPUS = {"0.5B": 1, "1.5B": 1, "7B": 4, "32B": 32}
SHAPE = StepShape(rows=16, prompt_tokens=128, completion_tokens=384, micro_batches=2, gradient_checkpointing=True)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path, required=True)
    args = parser.parse_args()
    rows = []
    for name, gpus in TRAINING_GPUS.items():
        config = qwen25(name)
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
