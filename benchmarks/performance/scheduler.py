"""Scheduling cost per group, by the number of open groups; and concurrent rollouts in virtual time.

    python benchmarks/performance/scheduler.py

Seconds are processor time. `rule`: admitting, finishing in random order, choosing and taking only. `producer`: the
whole producer (prompts, tokenizer, threads, scoring, bookkeeping) around an engine that takes no time.
"""

from __future__ import annotations

import argparse
import random
import time

from lit_async_rl.assets import asset
from lit_async_rl.engines.base import SamplingParams
from lit_async_rl.models.tokenizer import TextCodec
from lit_async_rl.prompts.stream import PromptStream
from lit_async_rl.rewards.functions import no_reward
from lit_async_rl.rewards.scorer import Scorer
from lit_async_rl.rollouts.producer import Producer
from lit_async_rl.scheduling.admission import Admission
from lit_async_rl.simulation.engine import SimulatedEngine
from lit_async_rl.simulation.latency import Constant, LogNormal
from lit_async_rl.simulation.virtual import VirtualRun
from lit_async_rl.tasks import SortDigits


def rule_cost(num_groups: int, num_rounds: int = 2, seed: int = 0) -> float:
    """Microseconds per group, with `num_groups` in a round and as many ahead."""
    admission = Admission(num_groups, 1)
    rng = random.Random(seed)
    began = time.process_time()
    for _ in range(num_rounds):
        indices = [admission.admit() for _ in range(admission.num_admissible)]
        rng.shuffle(indices)
        for index in indices:
            admission.finish(index)
        while (chosen := admission.choose()) is not None:
            admission.take(chosen)
        admission.advance()
    return (time.process_time() - began) / (num_rounds * num_groups) * 1e6


def producer_cost(num_groups: int) -> float:
    """Microseconds per group, with all of them open at the same time."""
    engine = SimulatedEngine(Constant(0.0), num_slots=1)
    producer = Producer(
        engine=engine,
        stream=PromptStream(SortDigits(8, size=1000)),
        codec=TextCodec(asset("sort_policy")),
        scorer=Scorer(no_reward),
        admission=Admission(num_groups, 0),
        group_size=1,
        sampling=SamplingParams(max_tokens=1),
        timeout_s=60.0,
    )
    began = time.process_time()
    producer.start(0)
    try:
        for _ in range(num_groups):
            producer.take()
    finally:
        producer.stop()
        engine.close()
    return (time.process_time() - began) / num_groups * 1e6


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num_groups", type=int, nargs="+", default=[100, 1_000, 10_000, 100_000])
    args = parser.parse_args()
    print(f"{'groups':>10}{'rule, us/group':>18}{'producer, us/group':>22}")
    for number in args.num_groups:
        rule = min(rule_cost(number) for _ in range(3))
        print(f"{number:>10}{rule:>18.1f}{producer_cost(number):>22.1f}")
    began = time.process_time()
    run = VirtualRun(Admission(256, 4), LogNormal(1.0, 1.0), num_slots=4096, train_s=1.0, group_size=8)
    trace = run.run(20)
    print(
        f"virtual time: {trace.max_rollouts} rollouts at once, {len(trace.trained) * 8} trained on, "
        f"at most {trace.max_staleness} versions old, in {time.process_time() - began:.1f} s"
    )


if __name__ == "__main__":
    main()
