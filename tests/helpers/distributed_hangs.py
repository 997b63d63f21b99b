"""Run by two processes: one of them hangs for ever in the third step, alive.

python distributed_hangs.py STRATEGY RANK WHERE LIMIT_S
"""

import os
import sys
import time

import lightning.pytorch as pl
from flow import fit, make_data, make_module
from sharded_training import make_strategy


class Hang(pl.Callback):
    def __init__(self, rank: int, where: str) -> None:
        self.rank = rank
        self.where = where

    def hang_in(self, where, trainer) -> None:
        if where == self.where and trainer.global_step == 2 and trainer.global_rank == self.rank:
            print("hanging now", flush=True)
            while True:  # not a single call: only progress counts
                time.sleep(1.0)

    def on_train_start(self, trainer, pl_module) -> None:
        pl_module.policy.register_forward_pre_hook(lambda *_: self.hang_in("forward", trainer))
        trainer.optimizers[0].register_step_post_hook(lambda *_: self.hang_in("optimizer", trainer))

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        self.hang_in("callback", trainer)

    def on_before_backward(self, trainer, pl_module, loss) -> None:
        self.hang_in("before backward", trainer)


if __name__ == "__main__":
    strategy, rank, where, limit_s = sys.argv[1:]
    data = make_data(rollout_timeout_s=float(limit_s), rank_timeout_s=60.0)
    print(os.environ["RANK"], "starts", flush=True)
    fit(make_module(), data, 1000, callbacks=[Hang(int(rank), where)], strategy=make_strategy(strategy), devices=2)
