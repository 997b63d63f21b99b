"""Ranks of a run: data-parallel positions, and a process group for CPU tensors."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist

from lit_async_rl.utils.lightning_types import AnyTrainer

_cpu_groups: dict[Any, dist.ProcessGroup] = {}


def data_parallel(trainer: AnyTrainer) -> tuple[int, int]:
    """(number of data-parallel positions, position of this rank); tensor-parallel ranks share a position."""
    # not by class: lightning.pytorch and pytorch_lightning have one each
    kwargs: dict[str, Any] | None = getattr(trainer.strategy, "distributed_sampler_kwargs", None)
    return (1, 0) if kwargs is None else (kwargs["num_replicas"], kwargs["rank"])


def num_copies(trainer: AnyTrainer) -> int:
    """Number of ranks in a tensor-parallel group, which share their data: a sum over all ranks counts all so often."""
    return int(trainer.world_size) // data_parallel(trainer)[0]


def cpu_group() -> dist.ProcessGroup | None:
    """Process group of all ranks for CPU tensors, with any default backend; None in a single process.

    The first call is a collective. The group's timeout is a day, because callers bound their own waits (`StepScatter`).
    """
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return None
    world = dist.group.WORLD
    if world not in _cpu_groups:
        _cpu_groups.clear()  # an earlier group belongs to a default group that was destroyed
        _cpu_groups[world] = dist.new_group(backend="gloo", timeout=timedelta(days=1))
    return _cpu_groups[world]
