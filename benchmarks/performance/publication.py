"""Cost of a new version of the weights: processor time of an update, and how long the trainer waits for it.

    python benchmarks/performance/publication.py --model models/smollm2
    python benchmarks/performance/publication.py --model models/smollm2 --before ../other_checkout

`--before` runs the same with the code of another checkout, in alternating turns. The update is that of
`configs/smollm2.yaml`, LoRA of rank 16 on layers 15 to 29, or of all weights. Processor time is that of the whole
update, until the engine would sample from it; the wait is wall time beside an engine that decodes 96 rows in a thread
of its own, so it grows where other programs use the cores.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path

import torch

from lit_async_rl.engines.base import GenerationRequest, SamplingParams
from lit_async_rl.engines.embedded.engine import EmbeddedEngine
from lit_async_rl.models.loading import load_policy
from lit_async_rl.models.lora import LoRA, add_lora
from lit_async_rl.models.policy import CausalPolicy
from lit_async_rl.models.weights import stream_weights
from lit_async_rl.rollouts.engine_listener import EngineCalls

ROOT = Path(__file__).parents[2]
CASES = {"LoRA, bfloat16 engine": (True, "bfloat16"), "LoRA, float32 engine": (True, "float32")}
CASES |= {"all weights, bfloat16 engine": (False, "bfloat16")}
SLOTS = 96
NUM_UPDATES = 8
STEP_S = 0.5


def measure(model: str, lora: bool, dtype: str) -> dict[str, float]:
    """Medians over updates: `cpu_ms` with an idle engine, `wait_ms` beside a busy one."""
    lm = load_policy(model)
    target = r".*layers\.(1[5-9]|2\d)\..*_proj"
    policy = CausalPolicy(add_lora(lm, LoRA(rank=16, alpha=32, target_modules=target)) if lora else lm)
    engine = EmbeddedEngine(num_slots=SLOTS, dtype=dtype, self_check=False)
    engine.setup(model)
    calls = EngineCalls(engine, 600.0)
    known = dict[str, int]()
    stopped = threading.Event()

    def publish(version: int) -> None:
        calls.load_weights(version, stream_weights(policy, adapters=engine.takes_adapters, known=known))

    def keep_busy() -> None:
        sampling = SamplingParams(max_tokens=16)
        number = 0
        while not stopped.is_set():
            prompt = tuple(range(100 + number, 140 + number))
            engine.submit([GenerationRequest(id=number, prompt_ids=prompt, num_samples=SLOTS, sampling=sampling)])
            left = SLOTS
            number = number + 1
            while left and not stopped.is_set():
                left -= len(engine.poll(0.1))

    publish(0)
    cpu = []
    waits = []
    for version in range(1, NUM_UPDATES + 1):
        began = time.process_time()
        publish(version)
        engine.poll(0.0)  # an idle engine takes it here
        cpu.append(time.process_time() - began)
    thread = threading.Thread(target=keep_busy)
    thread.start()
    for version in range(NUM_UPDATES + 1, 2 * NUM_UPDATES + 1):
        time.sleep(STEP_S)
        began = time.monotonic()
        publish(version)
        waits.append(time.monotonic() - began)
    stopped.set()
    thread.join()
    engine.close()
    return {"cpu_ms": 1e3 * statistics.median(cpu), "wait_ms": 1e3 * statistics.median(waits)}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="models/smollm2")
    parser.add_argument("--before", type=Path, help="checkout whose code is measured, too")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--case", choices=list(CASES), help="measure in this process, and print")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.case:
        print("RESULT", json.dumps(measure(args.model, *CASES[args.case])))
        return
    checkouts = {"before": args.before, "now": ROOT} if args.before else {"now": ROOT}
    for case in CASES:
        found: dict[str, list[dict[str, float]]] = {name: [] for name in checkouts}
        for _ in range(args.rounds):
            for name, folder in checkouts.items():
                command = [sys.executable, __file__, "--model", args.model, "--case", case]
                environment = {**os.environ, "PYTHONPATH": str(folder.resolve())}
                done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=600)
                found[name].append(json.loads(done.stdout.rpartition("RESULT ")[2].splitlines()[0]))
        for name, runs in found.items():
            shown = "  ".join(f"{key} {' '.join(f'{run[key]:.0f}' for run in runs)}" for key in runs[0])
            print(f"{case:30} {name:7} {shown}", flush=True)


if __name__ == "__main__":
    main()
