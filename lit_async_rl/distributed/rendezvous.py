"""The first meeting of the ranks of a run, before `lit_async_rl.distributed.liveness` can watch them."""

from __future__ import annotations

import itertools
import json
import signal
import time
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import _set_pg_timeout

from lit_async_rl.errors import RankError
from lit_async_rl.utils.lightning_types import AnyTrainer

MOST = 3  # settings that a message names
LIMIT = "data.limits.start_timeout_s"
_meetings = itertools.count()  # of this process


def limit_rendezvous(trainer: AnyTrainer, limit_s: float, settings: Mapping[str, str] | None = None) -> None:
    """Ends the wait for a rank that never comes (killed, or its machine lost) after `limit_s`.

    torch would wait for the strategy's `timeout`, 30 minutes by default, which stays that of the collectives. A process
    group that there is already is checked at once, and used.

    Args:
        trainer: that has not run yet.
        limit_s: from the first rank's arrival to the last one's.
        settings: values that must be the same on all ranks, by name.

    Raises:
        ValueError: there is a process group already, which is not that of the Trainer's ranks, cannot move its tensors,
            or connects ranks whose settings differ.
        RankError: there is a process group already, and a rank of it does not come.
    """
    strategy: Any = trainer.strategy
    if trainer.world_size == 1 or not hasattr(strategy, "_timeout"):
        return
    if dist.is_initialized():
        _check_group(trainer)
        _meet(limit_s, {"of the run": "begins", **(settings or {})})
    set_up = strategy.setup_environment

    def set_up_in_time() -> None:
        if not dist.is_initialized():
            _connect_in_time(trainer, set_up, limit_s)
        else:
            set_up()
        _meet(limit_s, {"of the Trainer, what it does": str(trainer.state.fn), **(settings or {})})

    strategy.setup_environment = set_up_in_time


def _connect_in_time(trainer: AnyTrainer, set_up: Any, limit_s: float) -> None:
    strategy: Any = trainer.strategy
    timeout, strategy._timeout = strategy._timeout, timedelta(seconds=limit_s)
    try:
        set_up()
    except RuntimeError as error:
        if strategy.launcher is not None:  # else the ranks that it started would wait for this one
            strategy.launcher.kill(signal.SIGTERM)
        problem = str(error).partition("\n")[0]
        raise RankError(
            f"the {trainer.world_size} ranks did not all come within {LIMIT}={limit_s:g}: was "
            f"one killed, or is MASTER_ADDR:MASTER_PORT out of reach or in use? ({problem})"
        ) from error
    finally:
        strategy._timeout = timeout
    _set_pg_timeout(timeout or dist.default_pg_timeout)


def _check_group(trainer: AnyTrainer) -> None:
    """Refuses a process group that was made before the run, for something else.

    Raises:
        ValueError: says what differs.
    """
    remedy = "call torch.distributed.destroy_process_group() before, and the run makes its own"
    there, here = (dist.get_rank(), dist.get_world_size()), (trainer.global_rank, trainer.world_size)
    if there != here:
        raise ValueError(
            f"this process is rank {there[0]} of {there[1]} in the process group that there is already, and rank "
            f"{here[0]} of {here[1]} for trainer.devices and trainer.num_nodes, which must be the same; or {remedy}"
        )
    kind = trainer.strategy.root_device.type  # type: ignore[union-attr]
    kinds = {device.type for device in dist.group.WORLD._device_types}  # type: ignore[union-attr]
    if kind not in kinds:
        raise ValueError(
            f"trainer.accelerator: the process group that there is already ({dist.get_backend_config()}) moves "
            f"tensors of {sorted(kinds)}, and the Trainer computes on {kind!r}; {remedy}"
        )


def _meet(limit_s: float, settings: Mapping[str, str]) -> None:
    """Waits for all ranks, in the store of the process group: works with any backend, and no collective is left open.

    Raises:
        RankError: a rank does not come.
        ValueError: a rank has other settings.
    """
    default: Any = dist.distributed_c10d._get_default_store()
    store: Any = dist.PrefixStore(f"lit_async_rl/meeting/{next(_meetings)}", default.clone())
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    store.set(str(rank), json.dumps(settings))
    ends_at = time.monotonic() + limit_s
    _wait_for(store, "", ends_at, limit_s)
    found = [json.loads(store.get(str(other))) for other in range(num_ranks)]
    store.set(f"{rank} has read", "")
    _wait_for(store, " has read", ends_at, limit_s)  # rank 0, which holds the store, may end now
    for other in range(num_ranks):
        _check_same(rank, settings, other, found[other])


def _wait_for(store: Any, suffix: str, ends_at: float, limit_s: float) -> None:
    for other in range(dist.get_world_size()):
        try:
            store.wait([f"{other}{suffix}"], timedelta(seconds=max(0.1, ends_at - time.monotonic())))
        except RuntimeError as error:
            problem = str(error).partition("\n")[0]
            raise RankError(
                f"rank {other} did not come within {LIMIT}={limit_s:g}: was it killed, did it fail, or does it do "
                f"something else than rank {dist.get_rank()}? ({problem})"
            ) from error


def _check_same(rank: int, own: Mapping[str, str], other: int, theirs: Mapping[str, str]) -> None:
    """Refuses settings that differ; on both ranks, so that neither waits for the other."""
    names = [name for name in dict.fromkeys([*own, *theirs]) if own.get(name) != theirs.get(name)]
    if not names:
        return
    lower, upper = sorted(((rank, own), (other, theirs)), key=lambda one: one[0])
    shown = "; ".join(
        f"{name} is {lower[1].get(name)} on rank {lower[0]} and {upper[1].get(name)} on rank {upper[0]}"
        for name in names[:MOST]
    )
    more = f", and {len(names) - MOST} more" if len(names) > MOST else ""
    raise ValueError(f"all ranks must have the same settings: {shown}{more}")
