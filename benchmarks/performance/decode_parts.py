"""Where the processor time of one decoded token of all rows goes: the embedded engine's parts, medians over 30 tokens.

    python benchmarks/performance/decode_parts.py --model models/smollm2 --dtype bfloat16 --rows 64

The parts are timed where they are called (a thousand calls a token, below 1 ms of cost); what is left is rotary
embedding, activation, bookkeeping and Python.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.common.meter import Meter
from lit_async_rl.engines.base import GenerationRequest, SamplingParams
from lit_async_rl.engines.embedded import forward
from lit_async_rl.engines.embedded.engine import EmbeddedEngine
from lit_async_rl.engines.embedded.forward import CachedForward, PackedProducts, PlainProducts
from lit_async_rl.engines.embedded.kv_cache import SlotCache
from lit_async_rl.engines.embedded.sampling import RowState
from lit_async_rl.models.loading import load_policy

NUM_TOKENS = 30
PARTS: dict[str, list[tuple[Any, str]]] = {
    "products of the layers": [
        (products, name) for products in (PackedProducts, PlainProducts) for name in ("qkv", "add_out", "add_mlp")
    ],
    "product of the head": [(CachedForward, "logits")],
    "attention": [(forward, "_attend")],
    "norms": [(forward.LlamaForward, "_norm")],
    "writing keys and values": [(SlotCache, "write")],
    "sampling": [(RowState, "sample")],
}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="models/smollm2", help="of a family that the engine decodes itself")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--rows", type=int, default=64, help="groups of 8")
    parser.add_argument("--prompt", type=int, default=45, help="tokens")
    args = parser.parse_args()
    torch.set_num_threads(1)
    engine = EmbeddedEngine(num_slots=args.rows, dtype=args.dtype, num_threads=1, self_check=False)
    engine.setup(args.model)
    engine.load_weights(0, load_policy(args.model).named_parameters())
    sampling = SamplingParams(max_tokens=4 * NUM_TOKENS)
    prompts = torch.randint(10, engine.engine.slots.vocab_size, (args.rows // 8, args.prompt)).tolist()
    engine.engine.slots._eos_token_ids = ()
    engine.submit(
        [GenerationRequest(id=n, prompt_ids=tuple(p), num_samples=8, sampling=sampling) for n, p in enumerate(prompts)]
    )
    engine.poll(0.0)
    meters = {part: Meter() for part in PARTS}
    tokens = []
    with contextlib.ExitStack() as stack:
        for part, places in PARTS.items():
            for owner, name in places:
                stack.enter_context(meters[part].over(owner, name))
        for _ in range(NUM_TOKENS):
            for meter in meters.values():
                meter.spent.clear()
            began = time.thread_time()
            engine.poll(0.0)
            whole = time.thread_time() - began
            seconds = {part: sum(map(sum, meter.spent.values())) for part, meter in meters.items()}
            tokens.append({**seconds, "rest": whole - sum(seconds.values()), "all": whole})
    medians = {part: statistics.median(token[part] for token in tokens) for part in tokens[0]}
    for part, value in medians.items():
        print(f"{part:25} {1e3 * value:7.1f} ms {value / medians['all']:5.0%}")
    print(f"{args.rows / medians['all']:.0f} tokens per processor second")


if __name__ == "__main__":
    main()
