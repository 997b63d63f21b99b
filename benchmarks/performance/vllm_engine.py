"""Throughput of vLLM, the embedded engine and `model.generate`, and the cost of live weight updates in vLLM.

Tokens per second of processor time, over all processes (of wall time on a GPU), because the machine may be shared: same
model, prompts, lengths and threads; runs alternate, medians are reported. Updates: new weights every `--step_s` seconds
during generation; a pause is the time without generation, and the share lost is the sum of the pauses over the time.
Pauses are wall time, so a busy machine makes them longer.

    .venv-vllm/bin/python benchmarks/performance/vllm_engine.py --output vllm.json
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import threading
import time
from collections.abc import Callable

import psutil
import torch
from engine import build, compare, make_parser, own_engine, run_generate, workloads
from transformers import PreTrainedModel

from lit_async_rl.engines.base import GenerationRequest, SamplingParams
from lit_async_rl.engines.completion_check import run_requests
from lit_async_rl.vllm.engine import VLLMEngine


def start(lm: PreTrainedModel, args: argparse.Namespace, num_seqs: int) -> VLLMEngine:
    """VLLM with the weights of `lm`."""
    engine = VLLMEngine(
        dtype=args.dtype,
        max_num_seqs=num_seqs,
        kv_cache_memory_gb=args.kv_cache_memory_gb,
        num_threads=args.num_threads,
        clear_cache=args.clear_cache,
    )
    with tempfile.TemporaryDirectory() as folder:
        lm.save_pretrained(folder)
        engine.setup(folder)
    engine.load_weights(0, lm.named_parameters())
    return engine


def processor_seconds() -> float:
    """Processor time of this process and its children."""
    own = psutil.Process()
    times = [process.cpu_times() for process in (own, *own.children(recursive=True))]
    return sum(found.user + found.system for found in times)


def rates(lm: PreTrainedModel, engine: VLLMEngine, args: argparse.Namespace, num_seqs: int) -> list[dict]:
    """Tokens per second of all three, for each workload."""
    clock = time.perf_counter if torch.cuda.is_available() else processor_seconds
    rows = []
    for lengths, requests in workloads(args).items():
        embedded = own_engine(lm, num_seqs, args)
        runs: dict[str, Callable[[], object]] = {
            "generate": lambda requests=requests: run_generate(lm, requests, num_seqs),
            "embedded": lambda embedded=embedded, requests=requests: embedded.run(requests),
            "vllm": lambda requests=requests: run_requests(engine, requests),
        }
        num_tokens = sum(r.num_samples * r.sampling.max_tokens for r in requests)
        rows.append({"lengths": lengths, **compare(runs, num_tokens, args.repeats, clock)})
    return rows


def update_costs(lm: PreTrainedModel, engine: VLLMEngine, args: argparse.Namespace, num_seqs: int) -> dict:
    """Pauses of live updates, with `num_seqs` samples running at any time."""
    stopped = threading.Event()

    def keep_busy() -> None:
        sampling = SamplingParams(max_tokens=args.new_tokens)
        number = running = 0
        while not stopped.is_set() or running:
            while running < 2 * num_seqs and not stopped.is_set():
                engine.submit([GenerationRequest(id=number, prompt_ids=(5, 6, 7), num_samples=1, sampling=sampling)])
                number = number + 1
                running = running + 1
            running -= len(engine.poll(0.1))

    producer = threading.Thread(target=keep_busy, daemon=True)
    producer.start()
    began = time.monotonic()
    num_before = len(engine.update_pauses_s)
    tokens_before = engine.num_tokens
    publishing = []
    for version in range(1, args.num_updates + 1):
        time.sleep(args.step_s)
        called = time.monotonic()
        engine.load_weights(version, lm.named_parameters())
        publishing.append(time.monotonic() - called)
    seconds = time.monotonic() - began
    num_tokens = engine.num_tokens - tokens_before
    stopped.set()
    producer.join(60)
    pauses = sorted(engine.update_pauses_s[num_before:])
    return {
        "pause_median_ms": 1e3 * statistics.median(pauses),
        "pause_p95_ms": 1e3 * pauses[int(0.95 * (len(pauses) - 1))],
        "load_weights_median_ms": 1e3 * statistics.median(publishing),
        "share_lost": sum(pauses) / seconds,
        "tokens_per_s": num_tokens / seconds,
    }


def main() -> None:
    """Command line."""
    parser = make_parser(__doc__, ["0.6M", "5M"], "vllm.json")
    parser.add_argument("--num_updates", type=int, default=100)
    parser.add_argument("--step_s", type=float, default=0.25, help="time between two weight updates")
    parser.add_argument("--clear_cache", action="store_true", help="compute running caches again at each update")
    parser.add_argument("--kv_cache_memory_gb", type=float, default=1.0)
    args = parser.parse_args()
    torch.set_num_threads(args.num_threads)
    num_seqs = args.num_prompts * args.num_samples
    results = []
    for name in args.models:
        lm = build(name, args.device, args.dtype)
        engine = start(lm, args, num_seqs)
        for row in rates(lm, engine, args, num_seqs=num_seqs):
            shown = "  ".join(f"{key} {row[key]:.0f}" for key in ("generate", "embedded", "vllm"))
            print(f"{name:>5} {row['lengths']:>6} lengths, tokens/s: {shown}", flush=True)
            results.append({"model": name, **row})
        costs = update_costs(lm, engine, args, num_seqs=num_seqs)
        print(f"{name:>5} updates: " + "  ".join(f"{key} {value:.3g}" for key, value in costs.items()), flush=True)
        results.append({"model": name, **costs})
        engine.close()
    args.output.write_text(json.dumps({"settings": {**vars(args), "output": None}, "results": results}, indent=1))


if __name__ == "__main__":
    main()
