"""Run by two processes: `fit` where a process group exists before.

python distributed_meeting.py KIND FOLDER LIMIT_S
"""

import os
import resource
import sys
import time

import torch.distributed as dist

import lit_async_rl as rl

RANK = int(os.environ["RANK"])


def train(folder: str, limit_s: float, **changes) -> None:
    few = dict(groups_per_step=2, group_size=2, sampling=rl.SamplingParams(max_tokens=4), micro_batches_per_step=2)
    few |= dict(accelerator="cpu", devices=2, enable_progress_bar=False, max_steps=2, learning_rate=1e-4)
    few |= dict(limits=rl.Limits(start_timeout_s=limit_s), logger=rl.CSVLog(folder, name="runs"))
    trainer = rl.fit(rl.asset("small_sort_policy"), rl.SortDigits(4, size=20), rl.exact_match, **(few | changes))
    print(f"trained {trainer.global_step} steps on {dist.get_backend()}", flush=True)


if __name__ == "__main__":
    kind, folder, limit = sys.argv[1:]
    limit_s = float(limit)
    if kind != "second fit":
        dist.init_process_group("cuda:gloo" if kind == "no cpu" else "gloo")
    if kind == "none comes" and RANK == 1:
        time.sleep(600)  # ended by the test
    if kind == "disagree":
        train(folder, limit_s, max_steps=2 + RANK, learning_rate=[1e-4, 2e-4][RANK])
    elif kind == "full disk":
        if RANK == 0:
            resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, resource.RLIM_INFINITY))
        held_out = rl.Validation(prompts=rl.SortDigits(4, size=4, split="held_out"))
        train(folder, limit_s, validation=held_out)
    elif kind == "one device":
        train(folder, limit_s, devices=1)
    else:
        train(folder, limit_s)
    if kind == "second fit":
        train(folder, limit_s)
