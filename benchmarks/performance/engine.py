"""Tokens per second of the embedded engine against `model.generate`: same model, prompts, lengths and threads.

Two workloads: all completions equally long, and lengths uniform in 4 ... `--new_tokens`, where `generate` waits for the
longest of each batch (only the tokens asked for count). Runs alternate, medians are reported; on a CPU, of tokens per
second of processor time.

    python benchmarks/performance/engine.py --output engine.json
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, logging

from lit_async_rl.engines.base import GenerationRequest, SamplingParams
from lit_async_rl.engines.embedded.engine import EmbeddedEngine

# Key-value heads are shared as in Llama 3 and Qwen, except where the name says "MHA".
_SMALL = dict(vocab_size=98, hidden_size=128, intermediate_size=384, num_hidden_layers=3, num_attention_heads=4)
_LARGER = dict(vocab_size=512, hidden_size=256, intermediate_size=704, num_hidden_layers=6, num_attention_heads=8)
MODELS = {
    "0.6M": dict(_SMALL, num_key_value_heads=2),
    "5M": dict(_LARGER, num_key_value_heads=2),
    "0.6M-MHA": _SMALL,
    "5M-MHA": _LARGER,
}


def build(name: str, device: str, dtype: str) -> LlamaForCausalLM:
    """A random model that never samples EOS."""
    torch.manual_seed(0)
    lm = LlamaForCausalLM(LlamaConfig(**MODELS[name], tie_word_embeddings=True, eos_token_id=[], pad_token_id=0))
    lm.generation_config.eos_token_id = []
    return lm.to(device, getattr(torch, dtype)).eval()


def own_engine(lm: LlamaForCausalLM, num_slots: int, args: argparse.Namespace) -> EmbeddedEngine:
    """An engine as in training, with its own copy of the weights."""
    engine = EmbeddedEngine(num_slots=num_slots, device=args.device, dtype=args.dtype, num_threads=args.num_threads)
    with tempfile.TemporaryDirectory() as folder:
        lm.save_pretrained(folder)
        engine.setup(folder)
    engine.load_weights(0, lm.named_parameters())
    return engine


def run_generate(lm: LlamaForCausalLM, requests: list[GenerationRequest], batch_size: int) -> None:
    """Batches in order of the requests; each runs until its longest completion is finished."""
    rows = [(r.prompt_ids, r.sampling.max_tokens) for r in requests for _ in range(r.num_samples)]
    for begin in range(0, len(rows), batch_size):
        batch = rows[begin : begin + batch_size]
        ids = torch.tensor([prompt for prompt, _ in batch], device=lm.device)
        lm.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=True,
            top_k=0,
            max_new_tokens=max(length for _, length in batch),
        )


def workloads(args: argparse.Namespace) -> dict[str, list[GenerationRequest]]:
    """Requests by name; with mixed lengths one per completion, because a length belongs to a request."""
    rng = random.Random(0)
    prompts = [tuple(rng.randrange(2, 98) for _ in range(args.prompt_tokens)) for _ in range(args.num_prompts)]

    def request(n: int, prompt: tuple[int, ...], num_samples: int, length: int) -> GenerationRequest:
        sampling = SamplingParams(max_tokens=length)
        return GenerationRequest(id=n, prompt_ids=prompt, num_samples=num_samples, sampling=sampling)

    mixed = [prompt for prompt in prompts for _ in range(args.num_samples)] * args.num_batches
    return {
        "equal": [request(n, prompt, args.num_samples, length=args.new_tokens) for n, prompt in enumerate(prompts)],
        "mixed": [request(n, prompt, 1, length=rng.randint(4, args.new_tokens)) for n, prompt in enumerate(mixed)],
    }


def compare(
    runs: Mapping[str, Callable[[], object]], num_tokens: int, repeats: int, clock: Callable[[], float]
) -> dict[str, float]:
    """Median tokens per second of each, in alternating runs after a warm-up."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for repeat in range(repeats + 1):
        for name, run in runs.items():
            began = clock()
            run()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            if repeat:
                seconds[name].append(clock() - began)
    return {name: num_tokens / statistics.median(values) for name, values in seconds.items()}


def make_parser(description: str | None, models: list[str], output: str) -> argparse.ArgumentParser:
    """Options of the measurement, with these defaults."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=models)
    parser.add_argument("--num_prompts", type=int, default=8)
    parser.add_argument("--num_samples", type=int, default=8)
    parser.add_argument("--prompt_tokens", type=int, default=24)
    parser.add_argument("--new_tokens", type=int, default=128)
    parser.add_argument("--num_batches", type=int, default=8, help="batches of generate in the mixed workload")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--num_threads", type=int, default=1)
    parser.add_argument("--device", default="cpu", help="of the embedded engine and generate")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--output", type=Path, default=Path(output))
    return parser


def main() -> None:
    """Command line."""
    args = make_parser(__doc__, list(MODELS), "engine.json").parse_args()
    torch.set_num_threads(args.num_threads)
    logging.disable_progress_bar()
    slots = args.num_prompts * args.num_samples
    clock = time.perf_counter if torch.cuda.is_available() else time.process_time  # others may use the processors too
    results = []
    print(f"{'model':>9} {'lengths':>8} {'generate tok/s':>15} {'engine tok/s':>13} {'ratio':>6}")
    for name in args.models:
        lm = build(name, args.device, args.dtype)
        for lengths, requests in workloads(args).items():
            engine = own_engine(lm, slots, args)
            runs: dict[str, Callable[[], None]] = {
                "generate": lambda lm=lm, requests=requests: run_generate(lm, requests, slots),
                "engine": lambda engine=engine, requests=requests: engine.run(requests),
            }
            num_tokens = sum(r.num_samples * r.sampling.max_tokens for r in requests)
            rates = compare(runs, num_tokens, args.repeats, clock=clock)
            ratio = rates["engine"] / rates["generate"]
            print(f"{name:>9} {lengths:>8} {rates['generate']:15.0f} {rates['engine']:13.0f} {ratio:6.2f}", flush=True)
            results.append({"model": name, "lengths": lengths, **rates, "ratio": ratio})
    args.output.write_text(json.dumps({"settings": {**vars(args), "output": None}, "results": results}, indent=1))


if __name__ == "__main__":
    main()
