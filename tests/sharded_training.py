"""Run by one process or several: trains under a strategy; rank 0 writes what came out.

python sharded_training.py JOB OUTPUT.json [CHECKPOINT]
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from flow import barrier_engine, fit, make_data, make_module
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy, ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

from lit_async_rl.callbacks import GradientClipping
from lit_async_rl.losses import Reinforce
from lit_async_rl.sharding import wrap_transformer_blocks

RANK, WORLD = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
STEPS = 10


class FSDPOnCPU(FSDPStrategy):
    """FSDP1 without an accelerator, which Lightning's own class refuses."""

    def _setup_model(self, model: nn.Module) -> nn.Module:
        return FullyShardedDataParallel(module=model, device_id=torch.device("cpu"), **self.kwargs)


def make_strategy(name: str) -> Any:
    if name == "single":
        return "auto"
    if name == "ddp":
        return DDPStrategy(process_group_backend="gloo")
    if name == "fsdp1":
        return FSDPOnCPU(auto_wrap_policy=wrap_transformer_blocks, state_dict_type="sharded")
    tensor = WORLD if name == "tp" else 2 if name == "fsdp2_tp" else 1
    return ModelParallelStrategy(WORLD // tensor, tensor, save_distributed_checkpoint=False)


class Record(pl.Callback):
    """Loss of every step over all ranks, as it is before anything multiplies it."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.rewards: list[float] = []
        self._sum = 0.0

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        self._sum += float(outputs["loss"])  # Lightning has divided it by the micro-batches
        if (batch_idx + 1) % trainer.accumulate_grad_batches == 0:
            total = torch.tensor(self._sum)
            if WORLD > 1:
                dist.all_reduce(total)
            self.losses.append(float(total) / WORLD)
            self._sum = 0.0
            groups = trainer.datamodule.last_step_groups
            self.rewards.append(sum(r.reward for g in groups for r in g.rollouts))


def run(
    strategy: str,
    staleness: int,
    accumulate: int,
    steps: int = STEPS,
    ckpt: str | None = None,
    stream=False,
    **extra: Any,
):
    pl.seed_everything(0, verbose=False)
    record, clip = Record(), GradientClipping(0.5)
    data = make_data(
        schedule="fixed_lag",
        max_staleness=staleness,
        micro_batches_per_step=accumulate,
        stream_groups=stream,
        engine=barrier_engine(),
    )
    module = make_module(**(dict(loss=Reinforce(), learning_rate=1e-4) | extra))
    begin = ckpt if ckpt and Path(ckpt).exists() else None
    trainer = fit(module, data, steps, [record, clip], begin, strategy=make_strategy(strategy), devices=WORLD)
    if ckpt and begin is None:
        trainer.save_checkpoint(ckpt)
    weights = torch.cat([w.flatten() for _, w in sorted((n, w.clone()) for n, w in module.stream_weights())])
    result = dict(losses=record.losses, rewards=record.rewards, version=module.version)
    return result | dict(weights=weights[::97].tolist(), norm=float(weights.double().norm()))


class Fail(pl.Callback):
    """On one rank, in the middle of a step."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def on_before_backward(self, trainer, pl_module, loss) -> None:
        if trainer.global_step == 3 and trainer.global_rank == self.rank:
            print("failing now", flush=True)
            raise OSError("planted")


class Say(pl.Callback):
    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        print(f"step {trainer.global_step}", flush=True)


def slow_reward(prompt: Any, completion: str) -> float:
    time.sleep(0.02)
    return float(len(completion))


def run_endless(strategy: str, failing: str) -> None:
    callbacks = [Say(), *([Fail(int(failing))] if failing else [])]
    data = make_data(reward=slow_reward, rank_timeout_s=8.0)
    fit(make_module(), data, 100_000, callbacks, strategy=make_strategy(strategy), devices=WORLD)


def main(job: str, output: str, *arguments: str) -> None:
    strategy, _, settings = job.partition(":")
    if settings == "endless":
        run_endless(strategy, output)
        return
    result = {}
    for setting in settings.split(","):
        staleness, accumulate = map(int, setting.removesuffix("s").split("x"))
        result[setting] = run(strategy, staleness, accumulate, stream=setting.endswith("s"))
    if RANK == 0:
        Path(output).write_text(json.dumps(result))


if __name__ == "__main__":
    began = time.monotonic()
    main(*sys.argv[1:])
    print(f"{sys.argv[1]}: {time.monotonic() - began:.1f} s")
