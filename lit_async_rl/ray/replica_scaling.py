"""Adapts the number of replicas on Ray to the bottleneck of the run."""

from __future__ import annotations

import math
from typing import Any

import lightning.pytorch as pl

from lit_async_rl.callbacks.monitors.bottleneck_verdict import intervals_of
from lit_async_rl.callbacks.parts import rollout_data
from lit_async_rl.environments.multi_request import MultiRequestEngine
from lit_async_rl.ray.engine import RayEngine
from lit_async_rl.scheduling.bottleneck import Intervals, Settings, diagnose
from lit_async_rl.utils.checks import check_range
from lit_async_rl.utils.lightning_types import AnyModule, AnyTrainer

MIN_FREE_SHARE = 0.15  # of a step, with fewer replicas; prevents alternating numbers at a constant load


def wanted_replicas(window: Intervals, replicas: int, low: int, high: int) -> int:
    """The smallest number of replicas that can generate as fast as the trainer trains.

    In the window, generation took E = replicas * T_gen replica seconds, and training T_train. With n replicas the
    window takes max(T_train, E / n). If the engine is the bottleneck, n rises to E / T_train, but at most doubles,
    because E is extrapolated. If the trainer is, n falls to E / ((1 - `MIN_FREE_SHARE`) T_train).

    Args:
        window: totals of a window with a constant number of replicas.
        replicas: that number.
        low: minimum of the result.
        high: maximum of the result.
    """
    work_s = replicas * window.engine_busy_s
    side = diagnose(window, Settings()).side
    wanted = replicas
    if side == "engine":
        wanted = min(2 * replicas, max(replicas + 1, math.ceil(work_s / max(1e-9, window.trainer_s))))
    elif side in ("trainer", "weight sync"):
        wanted = min(replicas, max(1, math.ceil(work_s / max(1e-9, (1 - MIN_FREE_SHARE) * window.trainer_s))))
    return min(high, max(low, wanted))


class ReplicaScaling(pl.Callback):
    """Starts and ends replicas of a `RayEngine` during a run, so that engine and trainer do not wait for each other.

    The bottleneck of each window of `every_n_steps` steps is determined as in `BottleneckVerdict`. If it is the engine,
    replicas are added until the trainer would no longer wait. If it is the trainer, superfluous replicas end after
    their running requests. The staleness bound does not depend on the number of replicas.

    Logs `perf/replicas`.

    Args:
        min_replicas: fewest replicas.
        max_replicas: most replicas; those for which Ray has no resources wait.
        every_n_steps: optimizer steps per window.

    Raises:
        ValueError: a setting is out of range, or the engine is not a `RayEngine`.
    """

    def __init__(self, min_replicas: int = 1, max_replicas: int = 8, every_n_steps: int = 20) -> None:
        owner = "ReplicaScaling"
        check_range(owner, "integer >= 1", min_replicas=min_replicas, every_n_steps=every_n_steps)
        check_range(owner, f"integer >= {min_replicas}", max_replicas=max_replicas)
        self.min_replicas = min_replicas
        self.max_replicas = max_replicas
        self.every_n_steps = every_n_steps
        self._began: Intervals | None = None
        self._step = 0

    def on_train_start(self, trainer: AnyTrainer, pl_module: AnyModule) -> None:
        self._engine(trainer)
        self._began = None
        self._step = trainer.global_step

    def on_validation_end(self, trainer: AnyTrainer, pl_module: AnyModule) -> None:
        self._began = None  # begins a new window: the time of validation must not count

    def on_train_batch_end(
        self, trainer: AnyTrainer, pl_module: AnyModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Adapts the number of replicas at the end of a window."""
        now = intervals_of(trainer)
        if now is None or trainer.global_step == self._step:  # another rank has the engine
            return
        engine = self._engine(trainer)
        pl_module.log("perf/replicas", float(engine.replicas), rank_zero_only=True)
        if self._began is None or engine.num_ready != engine.replicas:  # the number is constant within a window
            self._began = now
            self._step = trainer.global_step
        elif trainer.global_step - self._step >= self.every_n_steps:
            wanted = wanted_replicas(now - self._began, engine.replicas, self.min_replicas, high=self.max_replicas)
            self._began = now
            self._step = trainer.global_step
            if wanted != engine.replicas:
                engine.resize(wanted)
                self._began = None

    def _engine(self, trainer: AnyTrainer) -> RayEngine:
        engine = rollout_data(trainer, "ReplicaScaling").engine
        engine = engine.engine if isinstance(engine, MultiRequestEngine) else engine
        if not isinstance(engine, RayEngine):
            raise ValueError(f"ReplicaScaling needs data.engine=RayEngine, got {type(engine).__name__}")
        return engine
