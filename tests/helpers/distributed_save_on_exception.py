"""Run by two processes: one raises within a step while `ModelCheckpoint(save_on_exception=True)` is on.

python distributed_save_on_exception.py RANK FOLDER
"""

import sys

import lightning.pytorch as pl
from flow import fit, make_data, make_module
from lightning.pytorch.callbacks import ModelCheckpoint
from sharded_training import make_strategy


class Raise(pl.Callback):
    def __init__(self, rank: int) -> None:
        self.rank = rank

    def on_before_backward(self, trainer, pl_module, loss) -> None:
        if trainer.global_step == 2 and trainer.global_rank == self.rank:
            print("raising now", flush=True)
            raise KeyError("broken here")


if __name__ == "__main__":
    rank, folder = sys.argv[1:]
    callbacks = [Raise(int(rank)), ModelCheckpoint(folder, save_on_exception=True)]
    settings = dict(strategy=make_strategy("ddp"), devices=2, enable_checkpointing=True)
    fit(make_module(), make_data(rollout_timeout_s=30.0, rank_timeout_s=30.0), 1000, callbacks=callbacks, **settings)
