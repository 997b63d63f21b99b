"""Command line: LightningCLI, where constructor signatures are the schema.

Several `--config` files compose, `${...}` interpolates, dotted flags override, and flags are never abbreviated
(argparse would take the misspelt `--data.max_stalenes 7` for `max_staleness`).
"""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI

from lit_async_rl.callbacks.weight_sync import WeightSync
from lit_async_rl.data import RolloutDataModule
from lit_async_rl.module import PolicyModule


class AsyncRLCLI(LightningCLI):
    """`model:` is a `PolicyModule`, `data:` a `RolloutDataModule`, `trainer:` Lightning's; `weight_sync` is added."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(
            PolicyModule,
            RolloutDataModule,
            run=False,
            auto_configure_optimizers=False,
            seed_everything_default=0,
            parser_kwargs={"parser_mode": "omegaconf", "allow_abbrev": False},
            save_config_kwargs={"overwrite": True},
            **kwargs,
        )

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Shares values that two classes need, so that a configuration states each once."""
        parser.add_argument("--num_threads", type=int, default=1, help="torch threads of the trainer's thread")
        parser.add_argument("--ckpt_path", type=str | None, default=None, help="checkpoint to resume from or evaluate")
        parser.add_lightning_class_args(WeightSync, "weight_sync")
        parser.link_arguments("data.weight_sync_steps", "weight_sync.weight_sync_steps")
        parser.link_arguments("model.model", "data.model")
        parser.link_arguments("data.micro_batches_per_step", "trainer.accumulate_grad_batches")

    def before_instantiate_classes(self) -> None:
        """Threads must be set before any parallel work."""
        torch.set_num_threads(self.config["num_threads"])


def main() -> None:
    """Measures held-out accuracy, trains, measures again."""
    cli = AsyncRLCLI()
    trainer, model, data = cli.trainer, cli.model, cli.datamodule
    trainer.validate(model, data, verbose=False)
    trainer.fit(model, data, ckpt_path=cli.config["ckpt_path"])
