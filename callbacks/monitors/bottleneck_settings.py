"""Settings to change, for each possible bottleneck and for a collapsing run."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import torch

from lit_async_rl.data.module import RolloutDataModule
from lit_async_rl.engines.base import RolloutEngine
from lit_async_rl.engines.embedded.engine import EmbeddedEngine
from lit_async_rl.environments.episode_engine import EpisodeEngine
from lit_async_rl.rewards.functions import IsolatedReward
from lit_async_rl.rollouts.stats import ProducerStats
from lit_async_rl.scheduling.bottleneck import NOTHING, Intervals, Setting, Settings
from lit_async_rl.scheduling.policies import Bounded
from lit_async_rl.training.module import PolicyModule
from lit_async_rl.types import RolloutBatch
from lit_async_rl.utils.lightning_types import AnyModule, AnyTrainer

MUCH_PADDING = 0.25  # share of the positions in a training pass
MUCH_COMPUTING = 0.5  # share of the time of a reward; below, its workers mostly wait
QUOTA = Path("/sys/fs/cgroup/cpu.max")  # of a container (cgroup v2): microseconds of processor time, and of the period


@dataclass
class StepLoad:
    """Load counters of a window of steps."""

    began: Intervals = NOTHING
    num_steps: int = 0
    num_unfinished: int = 0  # sum over steps
    fewest_queued: int = 0
    num_tokens: int = 0
    num_positions: int = 0  # with padding
    scoring_cpu_share: float = 0.0

    def add(self, batch: RolloutBatch) -> None:
        self.num_tokens += int(batch.attention_mask.sum())
        self.num_positions += batch.attention_mask.numel()

    def look(self, stats: ProducerStats) -> None:
        self.fewest_queued = min(self.fewest_queued, stats.num_queued) if self.num_steps else stats.num_queued
        self.num_unfinished += stats.num_unfinished
        self.scoring_cpu_share = stats.scoring_cpu_share
        self.num_steps += 1


def what_to_turn(data: RolloutDataModule, pl_module: AnyModule, load: StepLoad, num_ranks: int = 1) -> Settings:
    """For each side, a setting that can still be changed.

    Args:
        data: data module of the run.
        pl_module: module in training.
        load: load counters of the window.
        num_ranks: training processes on this machine.
    """
    sync_steps = data.weight_sync_steps
    is_spare = num_busy_threads(data, pl_module, num_ranks) + num_ranks <= num_cores()
    return Settings(
        engine=_engine_setting(data, load.num_unfinished / max(1, load.num_steps), is_spare),
        trainer=_trainer_setting(data, pl_module, 1 - load.num_tokens / max(1, load.num_positions), is_spare),
        reward=_reward_setting(data, load.scoring_cpu_share, is_spare),
        weight_sync=Setting(name="data.weight_sync_steps", present=sync_steps, suggested=2 * sync_steps),
        staleness=_staleness_setting(data),
        fresher=_fresher_setting(data, load.fewest_queued),
    )


def stabilizing_setting(trainer: AnyTrainer, pl_module: AnyModule) -> str:
    """Advice for a collapsing run: VCPO, or a smaller learning rate or staleness bound if VCPO is in use."""
    if isinstance(pl_module, PolicyModule) and pl_module.objective.baseline is None:
        return "add --config configs/stabilizers/vcpo.yaml, and resume from a checkpoint before the collapse"
    data = trainer.datamodule
    bound = f" (now {data.max_staleness})" if isinstance(data, RolloutDataModule) else ""
    return f"lower model.learning_rate or data.max_staleness{bound}, and resume from a checkpoint before the collapse"


def num_cores() -> int:
    """Number of CPU cores available to this process, by affinity and by the quota of its container."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
    try:
        quota, period = QUOTA.read_text().split()
    except (OSError, ValueError):
        return cores
    return cores if quota == "max" else max(1, min(cores, int(quota) // int(period)))


def num_busy_threads(data: RolloutDataModule, pl_module: AnyModule, num_ranks: int) -> int:
    """Number of threads competing for cores: trainers, engine and reward workers."""
    trainers = num_ranks * (torch.get_num_threads() if pl_module.device.type == "cpu" else 1)
    return trainers + _engine_threads(data.engine) + data.scoring.workers


def _engine_threads(engine: RolloutEngine) -> int:
    if isinstance(engine, EpisodeEngine):
        return 1 + _engine_threads(engine.engine)
    threads = getattr(engine, "num_threads", 1)  # of vLLM: of each worker on a CPU
    return torch.get_num_threads() if threads is None else threads


def _engine_setting(data: RolloutDataModule, unfinished: float, is_spare: bool) -> Setting | None:
    prefix, engine, needs = "data.engine", data.engine, _naming(data.engine)
    if isinstance(engine, EpisodeEngine):
        prefix, engine, needs = "data.engine.init_args.engine.init_args", engine.engine, ()
    slots = getattr(engine, "num_slots", None)  # vLLM has none: its limit is the memory
    if slots is not None and unfinished * data.group_size > slots:  # some always wait for a slot
        return Setting(name=f"{prefix}.num_slots", present=slots, suggested=2 * slots, needs=needs)
    if not isinstance(engine, EmbeddedEngine) or engine.num_threads is None or not is_spare:
        return None
    if engine.device in ("auto", "cpu") and not torch.cuda.is_available():
        threads = engine.num_threads
        return Setting(name=f"{prefix}.num_threads", present=threads, suggested=threads + 1, needs=needs)
    return None


def _naming(engine: RolloutEngine) -> tuple[str, ...]:
    """Arguments that name the default engine, which the command line must know before it takes settings of it."""
    if type(engine) is not EmbeddedEngine:
        return ()
    in_order = () if engine.in_flight_weight_updates else ("--data.engine.in_flight_weight_updates", "false")
    return ("--data.engine", "EmbeddedEngine", *in_order)


def _reward_setting(data: RolloutDataModule, cpu_share: float, is_spare: bool) -> Setting | None:
    """More workers, for a reward that waits or has a core left; threads that compute would only take turns."""
    computes = cpu_share > MUCH_COMPUTING
    if computes or (isinstance(data.reward, IsolatedReward) and not is_spare):
        return None
    workers = data.scoring.workers
    return Setting(name="data.scoring.workers", present=workers, suggested=2 * workers)


def _trainer_setting(data: RolloutDataModule, pl_module: AnyModule, padding: float, is_spare: bool) -> Setting | None:
    parts = data.micro_batches_per_step
    if padding > MUCH_PADDING and not data.keep_groups_whole:  # shorter runs of rollouts sorted by length
        return Setting(name="data.micro_batches_per_step", present=parts, suggested=2 * parts)
    if parts > 1 and padding < MUCH_PADDING / 2:
        return Setting(name="data.micro_batches_per_step", present=parts, suggested=parts // 2)
    if isinstance(pl_module, PolicyModule) and pl_module.policy.causal_lm.is_gradient_checkpointing:
        return Setting(name="model.gradient_checkpointing", present=True, suggested=False)
    threads = torch.get_num_threads()
    if pl_module.device.type == "cpu" and is_spare:
        return Setting(name="num_threads", present=threads, suggested=threads + 1)
    return None


def _staleness_setting(data: RolloutDataModule) -> Setting | None:
    bound = data.max_staleness
    if bound and data.admission.in_order:
        return Setting(name="data.admission", present=type(data.admission).__name__, suggested="Bounded")
    ratio = data.admission.async_ratio if isinstance(data.admission, Bounded) else None
    if ratio is not None and ratio < bound:
        return Setting(name="data.admission.async_ratio", present=ratio, suggested=min(bound, max(1, 2 * ratio)))
    if bound and not data.engine.in_flight_weight_updates:
        return Setting(name="data.engine.in_flight_weight_updates", present=False, suggested=True)
    if bound != data.configured_bound:  # a callback has lowered it, for which the setting is the upper limit
        return None
    return Setting(name="data.max_staleness", present=bound, suggested=max(1, 2 * bound))


def _fresher_setting(data: RolloutDataModule, fewest_queued: int) -> Setting | None:
    """A smaller staleness bound, if more than one round was always ready."""
    bound, spare = data.max_staleness, fewest_queued // data.groups_per_round - 1
    if bound != data.configured_bound:
        return None
    suggested = max(1, bound - spare)
    return Setting(name="data.max_staleness", present=bound, suggested=suggested) if 0 < suggested < bound else None
