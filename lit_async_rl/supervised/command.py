"""`lit-async-rl sft --config ...`: the command line of training, with this stage's module and data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lit_async_rl.api.resume_check import check_resume
from lit_async_rl.api.run import CtrlC
from lit_async_rl.api.run_folders import run_folders
from lit_async_rl.cli.app import AsyncRLCLI, command, resume_command
from lit_async_rl.supervised.data import SFTDataModule
from lit_async_rl.supervised.module import SFTModule
from lit_async_rl.supervised.run import LEFT_OUT, train
from lit_async_rl.utils.saving import check_last_is_saved


class SFTCLI(AsyncRLCLI):
    """The command line with `SFTModule` and `SFTDataModule`, whose `epochs` are the length without `max_steps`."""

    stage = "sft"
    module_class = SFTModule
    data_class = SFTDataModule
    left_out = LEFT_OUT
    has_cluster = False

    def instantiate_trainer(self, **kwargs: Any) -> Any:
        if not self._extra:  # of `evaluate` and `export`, which read no training records
            self.datamodule.read_records()
        if self.config_init["trainer"]["max_steps"] < 0:
            kwargs["max_steps"] = 1 if self._extra else self.datamodule.num_steps
        return super().instantiate_trainer(**kwargs)


def main(args: Sequence[str] | None = None) -> None:
    """Measures the held-out loss, fine-tunes, measures again, prints a summary table and writes the model."""
    with command() as running, CtrlC():
        cli = SFTCLI(args)
        running.append(cli.trainer)
        ckpt_path = cli.config["ckpt_path"]
        check_resume(cli.trainer, cli.model, cli.datamodule, ckpt_path=ckpt_path)
        with run_folders(cli.trainer, ckpt_path):
            stopped_at = train(cli.trainer, cli.model, cli.datamodule, ckpt_path=ckpt_path)
        if stopped_at and cli.trainer.is_global_zero:
            print(f"resume with: {resume_command(stopped_at, args, 'sft')}")
        check_last_is_saved(cli.trainer)
