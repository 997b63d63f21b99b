"""Small kernels that several processes start on one GPU: how many a second, with NVIDIA's MPS and without.

python benchmarks/performance/processes_on_gpu.py 1 12
nvidia-cuda-mps-control -d; python benchmarks/performance/processes_on_gpu.py 12   # with CUDA_MPS_PIPE_DIRECTORY set
"""

from __future__ import annotations

import argparse
import multiprocessing
from multiprocessing.queues import Queue
from multiprocessing.synchronize import Barrier

SECONDS = 3.0
ROWS = 96
WIDTH = 576  # of SmolLM2-135M
PATIENCE_S = 120.0


def work(start: Barrier, rates: Queue[float]) -> None:
    """Products and activations of one layer's size, one after the other."""
    import time

    import torch

    x = torch.randn(ROWS, WIDTH, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(WIDTH, WIDTH, device="cuda", dtype=torch.bfloat16)
    torch.cuda.synchronize()
    start.wait(PATIENCE_S)
    began = time.monotonic()
    kernels = 0
    while time.monotonic() < began + SECONDS:
        for _ in range(200):
            torch.nn.functional.silu(x @ weight)
        torch.cuda.synchronize()
        kernels += 400
    rates.put(kernels / (time.monotonic() - began))


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("processes", type=int, nargs="+", help="how many at a time")
    context = multiprocessing.get_context("spawn")
    for number in parser.parse_args().processes:
        start = context.Barrier(number)
        rates: Queue[float] = context.Queue()
        workers = [context.Process(target=work, args=(start, rates)) for _ in range(number)]
        for worker in workers:
            worker.start()
        found = [rates.get(timeout=2 * PATIENCE_S) for _ in workers]
        for worker in workers:
            worker.join(PATIENCE_S)
        print(f"{number} processes: {sum(found) / 1000:.0f} thousand kernels a second in all")


if __name__ == "__main__":
    main()
