"""Bytes, work and pauses of weight updates of vLLM: whole, what has changed, and adapters.

A model is trained on random completions with AdamW; after each step vLLM gets its weights while it generates. Bytes are
exact; staging is processor time of the trainer; pauses are wall time without generation, which a busy machine makes
longer, and are taken at their smallest.

    .venv-vllm/bin/python benchmarks/performance/vllm_updates.py --model FOLDER --output updates.json
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch

from lit_async_rl.engines.base import GenerationRequest, SamplingParams
from lit_async_rl.models.loading import load_policy
from lit_async_rl.models.lora import LoRA, add_lora
from lit_async_rl.models.policy import CausalPolicy
from lit_async_rl.models.weights import stream_weights
from lit_async_rl.vllm.engine import VLLMEngine
from lit_async_rl.vllm.file_transfer import FileTransfer, SharedMemoryTransfer

CASES: list[tuple[str, float, dict[str, Any]]] = [
    ("whole, loaded in the pause", 1e-6, {"preload": False}),
    ("whole", 1e-6, {}),
    ("delta", 1e-6, {"delta": True}),
    ("delta", 1e-5, {"delta": True}),
    ("adapters", 1e-5, {"delta": True}),
]


class Staging(SharedMemoryTransfer):
    """Measures the processor time of staging."""

    staging_s = 0.0

    def stage(self, weights: Any) -> None:
        """As always."""
        began = time.process_time()
        super().stage(weights)
        self.staging_s = time.process_time() - began


def train_step(policy: CausalPolicy, optimizer: torch.optim.Optimizer, seed: int) -> None:
    """One step of REINFORCE on random completions with random advantages."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(2, policy.causal_lm.config.vocab_size, (4, 24), generator=generator)
    mask = torch.zeros_like(ids, dtype=torch.bool)
    mask[:, 8:] = True
    optimizer.zero_grad()
    advantage = torch.randn(4, 1, generator=generator)
    (-(policy(ids, mask).logprobs * advantage)[mask].mean()).backward()
    optimizer.step()


def keep_busy(engine: VLLMEngine, number: int) -> int:
    """Eight samples run during an update; returns the number of the next request."""
    sampling = SamplingParams(max_tokens=200)
    asked = [GenerationRequest(id=number + n, prompt_ids=(5, 6, 7), num_samples=1, sampling=sampling) for n in range(8)]
    engine.submit(asked)
    return number + 8


def count_bytes(args: argparse.Namespace, kind: str, rate: float, transfer: Staging) -> dict:
    """The bytes of some updates of one kind, without an engine; the first one is whole for all of them."""
    policy, optimizer = prepare(args.model, kind, rate)
    sizes = []
    staging_s = []
    for step in range(args.steps + 1):
        train_step(policy, optimizer, step)
        transfer.stage(stream_weights(policy, adapters=transfer.takes_adapters))
        sizes.append(transfer.staged_bytes)
        staging_s.append(transfer.staging_s)
    transfer.close()
    found = {"kind": kind, "rate": rate, "whole_bytes": sizes[0], "bytes": sorted(sizes[1:])[len(sizes[1:]) // 2]}
    return found | {"staging_s": min(staging_s[1:]), "rows": sizes}


def prepare(model: str, kind: str, rate: float) -> tuple[CausalPolicy, torch.optim.Optimizer]:
    """A policy, with adapters or all weights to be trained."""
    lm = load_policy(model)
    policy = CausalPolicy(add_lora(lm, LoRA(rank=16)) if kind == "adapters" else lm)
    trained = [p for p in policy.parameters() if p.requires_grad]
    return policy, torch.optim.AdamW(trained, lr=rate, weight_decay=0.0, fused=True)


def measure(engine: VLLMEngine, args: argparse.Namespace, kind: str, rate: float, transfer: FileTransfer) -> dict:
    """Some updates of one kind; the first one, which is whole for all of them, does not count."""
    policy, optimizer = prepare(args.model, kind, rate)
    engine.transfer.close()
    engine.transfer = transfer
    rows: list[dict[str, float]] = []
    number = 1_000_000
    for step in range(args.steps + 1):
        train_step(policy, optimizer, step)
        number = keep_busy(engine, number)
        time.sleep(0.5)
        began = time.monotonic()
        engine.load_weights(step, stream_weights(policy, adapters=transfer.takes_adapters))
        took = time.monotonic() - began
        engine.abort(range(number - 8, number))
        if step:
            found = {"bytes": transfer.staged_bytes, "staging_s": getattr(transfer, "staging_s", 0.0)}
            rows.append({**found, "pause_s": engine.update_pauses_s[-1], "load_weights_s": took})
    middle = sorted(rows, key=lambda row: row["bytes"])[len(rows) // 2]
    best = {name: min(row[name] for row in rows) for name in ("staging_s", "pause_s", "load_weights_s")}
    return {"kind": kind, "rate": rate, "bytes": middle["bytes"], **best, "rows": rows}


def started(args: argparse.Namespace) -> VLLMEngine:
    """An engine with the weights of the model."""
    engine = VLLMEngine(dtype=args.dtype, max_num_seqs=8, kv_cache_memory_gb=0.25, max_model_len=256)
    engine.setup(args.model)
    engine.load_weights(0, load_policy(args.model).named_parameters())
    return engine


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="Hugging Face folder")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--bytes_only", action="store_true", help="without vLLM: sizes and staging")
    parser.add_argument("--output", type=Path, default=Path("updates.json"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    engine = None if args.bytes_only else started(args)
    results = []
    for kind, rate, settings in CASES:
        transfer = Staging(dtype=args.dtype, **settings)
        if engine is not None:
            found = measure(engine, args, kind, rate=rate, transfer=transfer)
        elif transfer.delta:
            found = count_bytes(args, kind, rate, transfer=transfer)
        else:
            continue
        print({name: value for name, value in found.items() if name != "rows"}, flush=True)
        results.append(found)
    if engine is not None:
        engine.close()
    args.output.write_text(json.dumps({"settings": {**vars(args), "output": None}, "results": results}, indent=1))


if __name__ == "__main__":
    main()
