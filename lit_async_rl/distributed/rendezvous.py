"""The first meeting of the ranks of a run, before `lit_async_rl.distributed.liveness` can watch them."""

from __future__ import annotations

import signal
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import _set_pg_timeout

from lit_async_rl.errors import RankError
from lit_async_rl.utils.lightning_types import AnyTrainer


def limit_rendezvous(trainer: AnyTrainer, limit_s: float) -> None:
    """Ends the wait for a rank that never comes (killed, or its machine lost) after `limit_s`.

    torch would wait for the strategy's `timeout`, 30 minutes by default, which stays that of the collectives.

    Args:
        trainer: that has not run yet.
        limit_s: from the first rank's arrival to the last one's.
    """
    strategy: Any = trainer.strategy
    if trainer.world_size == 1 or not hasattr(strategy, "_timeout"):
        return
    set_up = strategy.setup_environment

    def set_up_in_time() -> None:
        if dist.is_initialized():
            set_up()
            return
        timeout, strategy._timeout = strategy._timeout, timedelta(seconds=limit_s)
        try:
            set_up()
        except RuntimeError as error:
            if strategy.launcher is not None:  # else the ranks that it started would wait for this one
                strategy.launcher.kill(signal.SIGTERM)
            problem = str(error).partition("\n")[0]
            raise RankError(
                f"the {trainer.world_size} ranks did not all come within data.limits.start_timeout_s={limit_s:g}: was "
                f"one killed, or is MASTER_ADDR:MASTER_PORT out of reach or in use? ({problem})"
            ) from error
        finally:
            strategy._timeout = timeout
        _set_pg_timeout(timeout or dist.default_pg_timeout)

    strategy.setup_environment = set_up_in_time
