"""Copies of a policy while it is trained, and what they cost until then."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import psutil
from torch import Tensor

from benchmarks.time_to_accuracy.latency import take_waits, waits_of_step
from lit_async_rl.utils.lightning_types import AnyModule, AnyTrainer


@dataclass(frozen=True)
class Snapshot:
    """A policy after `step` optimizer steps, `wall_s` seconds and `tokens` trained on: its trained parameters."""

    step: int
    wall_s: float
    tokens: int
    state: dict[str, Tensor]


class Recorder(pl.Callback):
    """Logs `bench/wall_s`, `bench/cpu_s` and `bench/tokens` since training began, and keeps copies of the policy.

    Args:
        every_n_steps: optimizer steps between two copies; the first and the last policy are kept, too.
    """

    def __init__(self, every_n_steps: int) -> None:
        self.every_n_steps = every_n_steps
        self.snapshots: list[Snapshot] = []
        self.loads: list[float] = []
        self.waits: list[dict[str, object]] = []  # rows of `latencies.csv`
        self._began = self._cpu = self._step_began = 0.0
        self._tokens = 0

    def on_train_start(self, trainer: AnyTrainer, pl_module: AnyModule) -> None:
        self._began = time.monotonic()
        self._cpu = cpu_s()
        take_waits()  # of the batch that checks the engine, say
        self._step_began = time.process_time()
        self._keep(trainer, pl_module, 0.0)

    def on_train_batch_end(
        self, trainer: AnyTrainer, pl_module: AnyModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._tokens += int(batch.loss_mask.sum())
        wall_s = time.monotonic() - self._began
        values = {"bench/wall_s": wall_s, "bench/cpu_s": cpu_s() - self._cpu}
        pl_module.log_dict(values | {"bench/tokens": float(self._tokens)})
        step = trainer.global_step
        self.waits += waits_of_step(step, take_waits(), self._step_began)
        self._step_began = time.process_time()
        if step != self.snapshots[-1].step and (step % self.every_n_steps == 0 or step == trainer.max_steps):
            self._keep(trainer, pl_module, wall_s)

    def _keep(self, trainer: AnyTrainer, pl_module: AnyModule, wall_s: float) -> None:
        # not on the GPU, and without what is not trained: runs that share a machine must not fill its memory
        trained = ((name, tensor) for name, tensor in pl_module.named_parameters() if tensor.requires_grad)
        state = {name: tensor.detach().to("cpu", copy=True) for name, tensor in trained}
        self.snapshots.append(Snapshot(trainer.global_step, wall_s, self._tokens, state=state))
        self.loads.append(os.getloadavg()[0])


def cpu_s() -> float:
    """Processor seconds of this process and of those that it started, such as an engine's."""
    me = psutil.Process()
    times = [process.cpu_times() for process in (me, *me.children(recursive=True))]
    return sum(one.user + one.system for one in times)
