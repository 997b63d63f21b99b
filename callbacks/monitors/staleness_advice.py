"""Collects what `scheduling.worth` needs of a run: waits of its groups, effective sample sizes, processor time."""

from __future__ import annotations

import statistics
from collections import deque

import torch

from lit_async_rl.callbacks.monitors.bottleneck_settings import StepLoad, num_cores
from lit_async_rl.data.module import RolloutDataModule
from lit_async_rl.environments.episode_engine import EpisodeEngine
from lit_async_rl.scheduling.bottleneck import Intervals
from lit_async_rl.scheduling.policies import Bounded
from lit_async_rl.scheduling.worth import Advice, StepWork, advise
from lit_async_rl.utils.lightning_types import AnyModule

KEPT = 4096  # groups and steps
FEWEST = 8  # steps before anything is said


class StalenessAdvice:
    """Recommends a staleness bound for runs like this one."""

    def __init__(self) -> None:
        self._waits: deque[float] = deque(maxlen=KEPT)
        self._ess: deque[float] = deque(maxlen=KEPT)

    def observe(self, data: RolloutDataModule, ess_ratio: float | None) -> None:
        """Takes in one optimizer step."""
        self._waits.extend(group.generation_s for group in data.last_step_groups)
        if ess_ratio is not None:
            self._ess.append(ess_ratio)

    def advice(self, data: RolloutDataModule, pl_module: AnyModule, run: Intervals, load: StepLoad) -> Advice | None:
        """The recommendation; None if the run was too short, or its admission does not wait at a bound that stayed."""
        steps = load.num_steps
        if steps < FEWEST or not self._waits or not isinstance(data.admission, Bounded):
            return None
        if data.max_staleness != data.configured_bound:
            return None
        engine = data.engine.engine if isinstance(data.engine, EpisodeEngine) else data.engine
        cpu_s = run.cpu_s if pl_module.device.type == "cpu" else 0.0
        if cpu_s and getattr(engine, "own_process", False):  # it computes while it is busy, on each of its threads
            cpu_s += run.engine_busy_s * (getattr(engine, "num_threads", None) or torch.get_num_threads())
        work = StepWork(
            train_s=run.trainer_s / steps,
            engine_s=run.engine_busy_s / steps,
            waits=tuple(self._waits),
            busy_share=run.engine_busy_s / run.wall_s,
            groups_per_step=data.groups_per_step,
            core_s=cpu_s / num_cores() / steps,
        )
        return advise(
            work,
            ess_ratio=statistics.median(self._ess) if self._ess else None,
            present=data.max_staleness,
            num_slots=getattr(engine, "num_slots", None),
            waiting_rollouts=load.num_unfinished / steps * data.group_size,
        )
