"""Runs the trainer's state machine under random transitions and checks its invariants after each of them.

Samples, rewards, micro-batches, steps, publications, checkpoints in any hook, kills, resumes, changes of the bound,
failing engines and rewards, and SIGTERM occur in an order determined by the seed; see
`tests.reliability.state_machine.machine`.

    python -m tests.reliability.state_machine --transitions 2000000 --seed 0

The first violation ends it with seed and settings of the machine; --machine repeats that one.
"""

from __future__ import annotations

import argparse
import gc
import logging
import time

import torch

from tests.reliability.state_machine.driver import Driver, run_one

EVERY = 50_000  # transitions between two lines


def main() -> None:
    """Command line; prints the progress."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--transitions", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--machine", type=int, help="seed of a single machine")
    settings = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    gc.freeze()  # a restarted engine collects garbage, which should not look at all of torch
    driver = Driver(settings.seed)
    began = time.monotonic()
    if settings.machine is not None:
        run_one(settings.machine, driver.most_transitions)
        return
    for until in range(min(EVERY, settings.transitions), settings.transitions + EVERY, EVERY):
        driver.run(min(until, settings.transitions))
        rate = driver.num_transitions / (time.monotonic() - began)
        counts = f"{driver.num_transitions} transitions, {driver.num_steps} steps, {driver.num_machines} runs"
        print(f"seed {settings.seed}: {counts}, 0 violations, {rate:.0f} transitions/s", flush=True)
        if driver.num_transitions >= settings.transitions:
            break


if __name__ == "__main__":
    main()
