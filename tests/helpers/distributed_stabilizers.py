"""Run by two processes (and by one, for comparison): stabilizers under every strategy; rank 0 writes what they saw.

python distributed_stabilizers.py OUTPUT.json
"""

import json
import os
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from foreign_modules import ROWS, Probe, Regression, Rows, fit
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader, Subset

from lit_async_rl.callbacks import (
    CollapseAlarm,
    ESSLearningRate,
    GradientAlignmentControl,
    GradientClipping,
    GradientMonitor,
    StalenessController,
    WeightDriftMonitor,
)
from lit_async_rl.models.sharding import FSDPStrategy
from lit_async_rl.models.weights import is_wrapped
from lit_async_rl.stabilizers.alignment import FixedResidual
from lit_async_rl.stabilizers.rollback import RollBack
from lit_async_rl.stabilizers.signals import SignalCollector

RANK = int(os.environ.get("RANK", "0"))
WORLD = int(os.environ.get("WORLD_SIZE", "1"))
WATCHED = ("gac/cosine", "gac/norm", "gac/regime", "ess/ratio", "ess/lr_scale", "ess/num_samples", "grad/norm")
WATCHED += ("controller/log_odds", "drift/step", "drift/path", "drift/total")


class FullySharded(Regression):
    """The same module with FSDP2; some ranks hold nothing of its last layer."""

    def configure_model(self) -> None:
        fully_shard(self.net, mesh=self.device_mesh["data_parallel"])


class TensorParallel(Regression):
    """The same module with its hidden units divided; the last bias is replicated. Both ranks see the same data."""

    def configure_model(self) -> None:
        parallelize_module(
            self.net, self.device_mesh["tensor_parallel"], {"0": ColwiseParallel(), "2": RowwiseParallel()}
        )


def run_rollback(module: Regression, data_ranks: int, **kwargs: Any) -> list[float]:
    """Breaks a limit from step 4 on; the alarm of step 5 must undo steps 3 to 5, moments included."""
    rows = Rows(6 * ROWS)
    rows.log_ratio[3 * ROWS :] *= 100
    mine = Subset(rows, range(RANK % data_ranks, 6 * ROWS, data_ranks))
    alarm = CollapseAlarm(
        RollBack(every_n_steps=1),
        min_ess_ratio=0.18,
        max_kl=None,
        max_grad_norm_factor=None,
        patience=2,
        cooldown_steps=9,
    )
    settings = dict(max_steps=6, devices=WORLD, use_distributed_sampler=False)
    trainer = fit(module, alarm, data=DataLoader(mine, batch_size=ROWS // data_ranks), **(settings | kwargs))
    assert len(alarm.reports) == 1, alarm.reports
    assert "after step 2" in alarm.reports[0], alarm.reports
    return full_weights(module, trainer.strategy.model).tolist()


def full_weights(module: nn.Module, root: nn.Module) -> Tensor:
    if is_wrapped(root):
        with FullyShardedDataParallel.summon_full_params(root, writeback=False):
            return torch.cat([p.detach().reshape(-1).clone() for p in module.parameters()])
    parts = [p.full_tensor() if isinstance(p, DTensor) else p for p in module.parameters()]
    return torch.cat([p.detach().reshape(-1) for p in parts])


def run(module: Regression, accumulate: int, data_ranks: int, **kwargs: Any) -> dict[str, Any]:
    probe = Probe()
    gac = GradientAlignmentControl(low=0.1, high=0.97, residual=FixedResidual(), max_consecutive_skips=1)
    ess = ESSLearningRate()
    clipping = GradientClipping(0.5)
    drift = WeightDriftMonitor()
    controller = StalenessController(limit=1e9, min_staleness=None, max_rollbacks=0)  # only watches
    rows = Subset(Rows(2 * 6 * ROWS, scale=0.7), range(RANK % data_ranks, 2 * 6 * ROWS, data_ranks))
    data = DataLoader(rows, batch_size=ROWS // data_ranks)
    settings = dict(accumulate_grad_batches=accumulate, devices=WORLD, use_distributed_sampler=False)
    trainer = fit(module, probe, gac, ess, controller, clipping, drift, data=data, **(settings | kwargs))
    states = [gac.state_dict(), ess.state_dict(), controller.state_dict(), clipping.state_dict()]
    if WORLD > 1:
        everybody = [None] * WORLD
        dist.all_gather_object(everybody, states)
        assert all(other == states for other in everybody), "callback states differ between ranks"
    return {
        "weights": full_weights(module, trainer.strategy.model).tolist(),
        "steps": [{k: m[k] for k in WATCHED if k in m} for m in probe.metrics[accumulate - 1 :: accumulate]],
    }


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.3)


def check_signals_of_one_rank_only() -> None:
    collector = SignalCollector()
    if RANK == 1:
        collector.add({"log_ratio": torch.tensor([700.0, 0.0])})
    signals = collector.reduce("cpu")
    assert (signals.num_samples, signals.ess_ratio) == (2, 0.5), signals
    assert collector.reduce("cpu").ess_ratio is None


class FrozenBackbone(pl.LightningModule):
    """Most of rank 0's shard is frozen, and none of rank 1's."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
        self.net[0].requires_grad_(False)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.net(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def check_that_ranks_copy_gradients_or_none_does() -> None:
    """Where they decide apart, one waits for a sketch that the other never makes."""
    limit = timedelta(seconds=60)
    strategy = FSDPStrategy(use_orig_params=True, process_group_backend="gloo", timeout=limit)
    monitor = GradientMonitor(max_copied=1000)
    data = DataLoader(torch.ones(16, 64), batch_size=4)
    fit(FrozenBackbone(), monitor, data=data, max_steps=3, devices=WORLD, strategy=strategy)


def adam(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.03)


def main(output: str) -> None:
    results = {}
    for accumulate in (1, 2):
        if WORLD == 1:
            results["rollback"] = run_rollback(Regression(adam), 1)
            results[f"single-{accumulate}"] = run(Regression(sgd), accumulate, 1)
            continue
        strategies = {
            "ddp": lambda opt: (Regression(opt), DDPStrategy(process_group_backend="gloo")),
            "fsdp1": lambda opt: (Regression(opt), FSDPStrategy(use_orig_params=True)),
            "fsdp1-flat": lambda opt: (Regression(opt), FSDPStrategy(use_orig_params=False)),
            "fsdp2": lambda opt: (
                FullySharded(opt),
                ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1),
            ),
            "tp": lambda opt: (
                TensorParallel(opt),
                ModelParallelStrategy(data_parallel_size=1, tensor_parallel_size=2),
            ),
        }
        for name, make in strategies.items():
            module, strategy = make(sgd)
            results[f"{name}-{accumulate}"] = run(module, accumulate, 1 if name == "tp" else WORLD, strategy=strategy)
            if accumulate == 1:
                module, strategy = make(adam)
                results[f"{name}-rollback"] = run_rollback(module, 1 if name == "tp" else WORLD, strategy=strategy)
    if WORLD > 1:
        check_signals_of_one_rank_only()
        check_that_ranks_copy_gradients_or_none_does()
    if RANK == 0:
        Path(output).write_text(json.dumps(results))


if __name__ == "__main__":
    main(sys.argv[1])
