"""Tokens per processor second with vLLM, and what updates of the weights cost, for several models.

Throughput: the same prompts and lengths, one thread, by transformers' `generate`, the embedded engine, `VLLMEngine`
(which returns log-probabilities and versions) and vLLM's own `LLM.generate` (which returns neither), each in a process
of its own; processor time of all processes together, because the machine may be shared. Updates: see `vllm_updates.py`.

    OMP_NUM_THREADS=1 .venv-vllm/bin/python benchmarks/performance/vllm_tables.py --models 0.6M models/smollm2

writes docs/measurements/vllm_throughput_MODEL.json and vllm_updates_MODEL.json; `python docs/measurements.py` makes the
tables.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import vllm_updates
from engine import MODELS, build, run_generate, workloads
from vllm_engine import processor_seconds

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.common.measurement import measurement, write_measurement
from lit_async_rl.engines.base import GenerationRequest
from lit_async_rl.engines.completion_check import run_requests
from lit_async_rl.engines.embedded.engine import EmbeddedEngine
from lit_async_rl.models.loading import load_policy
from lit_async_rl.vllm.engine import VLLMEngine
from lit_async_rl.vllm.engine_arguments import CPU_VARIABLES, VARIABLES

ROOT = Path(__file__).parents[2]
ENGINES = {
    "generate": "transformers `generate`",
    "embedded": "embedded engine",
    "vllm": "`VLLMEngine`",
    "plain": "vLLM's `LLM.generate`",
}
KV_CACHE_GB = 0.5
LEAST_S = 1.0  # of a measurement: the kernel counts processor time in hundredths of a second
Sample = Callable[[Sequence[GenerationRequest]], object]


def save(name: str, folder: str) -> str:
    """Writes a model whose completions end only at their length; returns its folder."""
    lm: Any = build(name, "cpu", "float32") if name in MODELS else load_policy(name)
    lm.config.eos_token_id = lm.generation_config.eos_token_id = []
    lm.save_pretrained(folder)
    return folder


def generate(model: str, num_seqs: int, dtype: str) -> Sample:
    """Transformers' own, in batches; each takes as long as its longest completion."""
    lm: Any = load_policy(model).to(getattr(torch, dtype)).eval()
    return lambda requests: run_generate(lm, list(requests), num_seqs)


def embedded(model: str, num_seqs: int, dtype: str) -> Sample:
    """Our engine in this process, with a copy of the weights, as in training."""
    engine = EmbeddedEngine(num_slots=num_seqs, dtype=dtype, device="cpu")
    engine.setup(model)
    engine.load_weights(0, load_policy(model).named_parameters())
    return engine.run


def vllm(model: str, num_seqs: int, dtype: str) -> Sample:
    """Our engine around vLLM, which ends with this process."""
    engine = VLLMEngine(dtype=dtype, max_num_seqs=num_seqs, kv_cache_memory_gb=KV_CACHE_GB)
    engine.setup(model)
    engine.load_weights(0, load_policy(model).named_parameters())
    return lambda requests: run_requests(engine, requests)


def plain(model: str, num_seqs: int, dtype: str) -> Sample:
    """VLLM as its documentation shows it, with the settings that its CPU build needs."""
    os.environ |= VARIABLES | CPU_VARIABLES
    from vllm import LLM, SamplingParams, TokensPrompt

    llm = LLM(
        model=model,
        dtype=dtype,
        skip_tokenizer_init=True,
        max_num_seqs=num_seqs,
        kv_cache_memory_bytes=int(KV_CACHE_GB * 2**30),
        enforce_eager=True,
    )

    def sample(requests: Sequence[GenerationRequest]) -> None:
        prompts = [TokensPrompt(prompt_token_ids=list(request.prompt_ids)) for request in requests]
        params = [
            SamplingParams(n=r.num_samples, max_tokens=r.sampling.max_tokens, ignore_eos=True, detokenize=False)
            for r in requests
        ]
        llm.generate(prompts, params, use_tqdm=False)

    return sample


def throughput(args: argparse.Namespace) -> dict[str, list[float]]:
    """Tokens per processor second of one engine in each repeat, by workload; in a process of its own."""
    start = {"generate": generate, "embedded": embedded, "vllm": vllm, "plain": plain}[args.engine]
    sample = start(args.models[0], args.num_prompts * args.num_samples, args.dtype)
    found: dict[str, list[float]] = {}
    for lengths, requests in workloads(args).items():
        num_tokens = sum(request.num_samples * request.sampling.max_tokens for request in requests)
        sample(requests)  # warms up
        num_runs = 1
        rates = found.setdefault(lengths, [])
        while len(rates) < args.repeats:
            began = processor_seconds()
            for _ in range(num_runs):
                sample(requests)
            took = processor_seconds() - began
            if took >= LEAST_S:
                rates.append(num_runs * num_tokens / took)
            else:
                num_runs = math.ceil(1.2 * num_runs * LEAST_S / max(0.01, took))
    return found


def rates_of(model: str, args: argparse.Namespace) -> dict[str, dict[str, list[float]]]:
    """The same for all engines."""
    command = [sys.executable, __file__, "--models", model, "--dtype", args.dtype, "--repeats", str(args.repeats)]
    for name in ("num_prompts", "num_samples", "prompt_tokens", "new_tokens", "num_batches"):
        command += [f"--{name}", str(getattr(args, name))]
    found = {}
    for engine in ENGINES:
        done = subprocess.run([*command, "--engine", engine], capture_output=True, text=True, timeout=args.timeout_s)
        if done.returncode:
            raise RuntimeError(f"{engine} failed: {done.stderr[-2000:]}")
        found[engine] = json.loads(done.stdout.splitlines()[-1])
    return found


def show(values: Sequence[float]) -> str:
    """Median and range."""
    return f"{statistics.median(values):,.0f} ({min(values):,.0f} to {max(values):,.0f})"


def updates_of(model: str, args: argparse.Namespace) -> list[list[Any]]:
    """Rows of the table of updates, of all kinds."""
    own = argparse.Namespace(model=model, dtype="bfloat16", steps=args.steps)
    engine = vllm_updates.started(own)
    rows = []
    try:
        for kind, rate, settings in vllm_updates.CASES:
            transfer = vllm_updates.Staging(dtype=own.dtype, **settings)
            found = vllm_updates.measure(engine, own, kind, rate, transfer)
            name = kind if kind.startswith("whole") else f"{kind}, learning rate {rate:g}"
            numbers = round(found["staging_s"], 3), round(1e3 * found["pause_s"]), round(1e3 * found["load_weights_s"])
            rows.append([name, found["bytes"], *numbers])
            print(*rows[-1], flush=True)
    finally:
        engine.close()
    return rows


def write(args: argparse.Namespace, name: str, value: float, unit: str, columns: list[str], rows: list[Any]) -> None:
    """A measurement, see docs/measurements.py."""
    name = re.sub(r"\W", "_", name)
    command = "python benchmarks/performance/vllm_tables.py " + " ".join(sys.argv[1:])
    machine = f"2 cores that did other work at the same time (load {os.getloadavg()[2]:.0f}), one thread"
    found = measurement(name, value, unit, columns=columns, rows=rows, command=command, machine=machine)
    write_measurement(args.folder / f"{name}.json", found)


def measure_rates(name: str, model: str, args: argparse.Namespace) -> None:
    """The table of throughput of one model."""
    found = rates_of(model, args)
    rows = []
    for lengths in found["vllm"]:
        rows.append([lengths, *(show(found[engine][lengths]) for engine in ENGINES)])
        ratio = statistics.median(found["vllm"][lengths]) / statistics.median(found["plain"][lengths])
        print(*rows[-1], flush=True)
    unit = "times the tokens per processor second of `LLM.generate`, in the last row"
    columns = [f"lengths of completions, {name}", *ENGINES.values()]
    write(args, f"vllm_throughput_{name}", round(ratio, 2), unit=unit, columns=columns, rows=rows)


def measure_updates(name: str, model: str, args: argparse.Namespace) -> None:
    """The table of updates of one model."""
    rows = updates_of(model, args)
    whole, delta = (next(row[1] for row in reversed(rows) if row[0].startswith(kind)) for kind in ("whole", "delta"))
    columns = [f"update of {name}, bfloat16", "bytes", "staging, processor s", "pause, ms", "`load_weights`, ms"]
    unit = "times fewer bytes at learning rate 1e-5"
    write(args, f"vllm_updates_{name}", round(whole / delta, 1), unit=unit, columns=columns, rows=rows)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["0.6M"], help="of benchmarks/performance/engine.py, or folders")
    parser.add_argument("--num_prompts", type=int, default=4)
    parser.add_argument("--num_samples", type=int, default=8)
    parser.add_argument("--prompt_tokens", type=int, default=24)
    parser.add_argument("--new_tokens", type=int, default=64)
    parser.add_argument("--num_batches", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--steps", type=int, default=3, help="updates of each kind")
    parser.add_argument("--dtype", default="float32", help="of throughput; updates are in bfloat16")
    parser.add_argument("--timeout_s", type=float, default=1800.0, help="of one engine")
    parser.add_argument("--folder", type=Path, default=ROOT / "docs/measurements")
    parser.add_argument("--label", help="of the model in names and tables; its folder's name by default")
    parser.add_argument("--only", choices=["throughput", "updates"], help="leaves out the other")
    parser.add_argument("--engine", choices=list(ENGINES), help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.engine:
        print(json.dumps(throughput(args)), flush=True)
        os._exit(0)  # the kernel ends vLLM's processes
    for name in args.models:
        with tempfile.TemporaryDirectory() as folder:
            model = save(name, folder)
            label = args.label or Path(name).name
            if args.only != "updates":
                measure_rates(label, model, args)
            if args.only != "throughput":
                measure_updates(label, model, args)


if __name__ == "__main__":
    main()
