"""Processor time per group of placing, checking and filing with many replicas, in virtual time and without actors.

    OMP_NUM_THREADS=1 python benchmarks/ray/placement.py --output docs/measurements/ray_placement.json

Groups are admitted, placed, finished by their replicas after random times, validated sample by sample, and trained on,
by the code of a run; only the actors and the model are missing. Each group is trained on within its staleness bound.
"""

from __future__ import annotations

import argparse
import heapq
import random
import sys
import time
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.common.measurement import measurement, write_measurement
from lit_async_rl.engines.base import Completion, GenerationRequest, SamplingParams
from lit_async_rl.engines.embedded.own_process import pack_completions
from lit_async_rl.ray.entries import Assignment, Part, ReplicaEntry
from lit_async_rl.ray.placement import Placement
from lit_async_rl.scheduling.admission import Admission

NUM_TOKENS = 8
SAMPLING = SamplingParams(max_tokens=NUM_TOKENS)


def cost(num_groups: int, num_replicas: int, group_size: int, max_staleness: int) -> tuple[float, float, int]:
    """Microseconds per group in all, and of placement alone; and the largest staleness."""
    rng = random.Random(0)
    admission = Admission(num_replicas, max_staleness)
    placement = Placement(4.0)
    entries = [ReplicaEntry(number, sent=0) for number in range(num_replicas)]
    for entry in entries:
        placement.add(entry.number)
    running: list[tuple[float, int, int]] = []  # end, replica, group
    admitted_at: dict[int, int] = {}
    now = 0.0
    version = staleness = num_trained = num_taken = 0
    placing_s = 0.0
    began = time.process_time()
    while num_trained < num_groups:
        for _ in range(admission.num_admissible):
            index = admission.admit()
            request = GenerationRequest(
                id=index, prompt_ids=(1, 2, 3), num_samples=group_size, sampling=SAMPLING, session=index
            )
            one = Assignment(index, Part(request, tuple(range(group_size))), oldest=0)
            start = time.process_time()
            number = placement.place(request.session, one.num_tokens)
            placing_s += time.process_time() - start
            entries[number].held[index] = one
            admitted_at[index] = version
            heapq.heappush(running, (now + rng.lognormvariate(0.0, 1.0), number, index))
        now, number, index = heapq.heappop(running)
        packed, _ = pack_completions([sampled(index, n) for n in range(group_size)])
        answer = {"completions": packed, "assignments": [index] * group_size, "tensors": {}}
        found, problem = entries[number].unpack(answer, vocab_size=64, max_model_len=64)
        for sample in found:
            placement.finish(number, sample.num_tokens)
        if problem or len(found) != group_size:
            raise RuntimeError(f"group {index}: {problem or found}")
        admission.finish(index)
        while (chosen := admission.choose()) is not None:
            admission.take(chosen)
            staleness = max(staleness, version - admitted_at.pop(chosen))
            num_trained += 1
            num_taken += 1
            if num_taken == num_replicas:
                num_taken = 0
                version += 1
                admission.advance()
    total_s = time.process_time() - began
    return 1e6 * total_s / num_trained, 1e6 * placing_s / num_trained, staleness


def sampled(index: int, number: int) -> Completion:
    """A completion of version 0."""
    return Completion(
        request_id=index,
        sample_index=number,
        token_ids=(5,) * NUM_TOKENS,
        logprobs=(-1.0,) * NUM_TOKENS,
        versions=(0,) * NUM_TOKENS,
        finish_reason="stop",
    )


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num_groups", type=int, default=100_000)
    parser.add_argument("--group_size", type=int, default=2)
    parser.add_argument("--max_staleness", type=int, default=4)
    parser.add_argument("--machine", default="two cores")
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    rows = []
    for num_replicas in (2, 64, 2000):
        total, placing, staleness = cost(
            args.num_groups, num_replicas, args.group_size, max_staleness=args.max_staleness
        )
        rows.append([num_replicas, round(total, 1), round(placing, 1), staleness])
        print(rows[-1], flush=True)
    write_measurement(
        args.output,
        measurement(
            "ray_placement",
            rows[-1][1],
            "microseconds of processor time per group with 2,000 replicas, validation of its samples included",
            columns=["replicas", "microseconds per group", "of them placement", "largest staleness (bound 4)"],
            rows=rows,
            command=f"python benchmarks/ray/placement.py --num_groups {args.num_groups}",
            machine=f"{args.machine}; {args.num_groups:,} groups of {args.group_size} in virtual time",
        ),
    )


if __name__ == "__main__":
    main()
