"""Moves the number of replicas on Ray by what limits the run."""

from __future__ import annotations

import math
import time
from typing import Any

import lightning.pytorch as pl

from lit_async_rl.callbacks.parts import rollout_data
from lit_async_rl.callbacks.run.weight_sync import WeightSync
from lit_async_rl.environments.episode_engine import EpisodeEngine
from lit_async_rl.ray.engine import RayEngine
from lit_async_rl.scheduling.bottleneck import Intervals, Settings, diagnose
from lit_async_rl.utils.checks import check_range
from lit_async_rl.utils.lightning_types import AnyModule, AnyTrainer

MARGIN = 0.15  # share of a step that fewer replicas must leave free; keeps a steady load at one number


def wanted_replicas(window: Intervals, replicas: int, low: int, high: int) -> int:
    """The number of replicas with which generation would just keep up with training.

    Generating took E = replicas * T_gen seconds of replicas in the window, training T_train. With n of them a step
    takes max(T_train, E / n): n rises to E / T_train when the engine is the bottleneck, at most doubling, because E is
    extrapolated; and it falls when the trainer is, to the fewest that leave `MARGIN` of T_train free.

    Args:
        window: of the run, with the present number.
        replicas: present number.
        low: fewest.
        high: most.
    """
    work_s = replicas * window.engine_busy_s
    side = diagnose(window, Settings()).side
    wanted = replicas
    if side == "engine":
        wanted = min(2 * replicas, max(replicas + 1, math.ceil(work_s / max(1e-9, window.trainer_s))))
    elif side in ("trainer", "weight sync"):
        wanted = min(replicas, max(1, math.ceil(work_s / max(1e-9, (1 - MARGIN) * window.trainer_s))))
    return min(high, max(low, wanted))


class ReplicaScaling(pl.Callback):
    """Starts and ends replicas of a `RayEngine` while a run goes on, so that neither side waits for the other.

    Each window of `every_n_steps` steps is judged as `BottleneckVerdict` does. When the engine is the bottleneck, so
    many replicas are added as would remove the wait; when the trainer is, those that it does not need are ended as soon
    as they have finished what they had. The staleness bound does not depend on their number.

    Logs `perf/replicas`.

    Args:
        min_replicas: fewest.
        max_replicas: most; Ray may have room for fewer, and those beyond wait.
        every_n_steps: optimizer steps of a window.

    Raises:
        ValueError: a setting is out of range, or the engine is no `RayEngine`.
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
        self._began = None  # its time belongs to no window

    def on_train_batch_end(
        self, trainer: AnyTrainer, pl_module: AnyModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Judges a window that has ended."""
        data = rollout_data(trainer, "ReplicaScaling")
        stats = data.stats()
        if stats is None or trainer.global_step == self._step:  # another rank has the engine
            return
        engine = self._engine(trainer)
        pl_module.log("perf/replicas", float(engine.replicas), rank_zero_only=True)
        syncs = [one.total_s for one in trainer.callbacks if isinstance(one, WeightSync)]  # type: ignore[attr-defined]
        now = Intervals(
            wall_s=time.monotonic(),
            wait_s=stats.wait_s,
            sync_s=sum(syncs),
            engine_busy_s=stats.engine_busy_s,
            scoring_s=stats.scoring_s,
        )
        if self._began is None or engine.num_ready != engine.replicas:  # a window has one number of replicas
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
        engine = engine.engine if isinstance(engine, EpisodeEngine) else engine
        if not isinstance(engine, RayEngine):
            raise ValueError(f"ReplicaScaling needs data.engine=RayEngine, got {type(engine).__name__}")
        return engine
