"""Commands that read a configuration: train, evaluate, export."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.loggers import CSVLogger
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from lit_async_rl.api import run as api
from lit_async_rl.api.interrupts import CtrlC
from lit_async_rl.api.notices import quiet
from lit_async_rl.api.run_folders import run_folders
from lit_async_rl.cli.app import AsyncRLCLI
from lit_async_rl.cli.error_report import one_line_errors
from lit_async_rl.cli.resume import resume_command
from lit_async_rl.models.export import export_model
from lit_async_rl.models.sharded_checkpoint import nothing_executed
from lit_async_rl.models.weights import stream_weights
from lit_async_rl.training.checkpoint_io import check_is_one_file
from lit_async_rl.utils.checks import check_range
from lit_async_rl.utils.files import check_writable
from lit_async_rl.utils.saving import check_last_is_saved


def main(args: Sequence[str] | None = None) -> None:
    """Measures held-out accuracy, trains, measures again, and prints a summary table."""
    run: list[AsyncRLCLI] = []
    with command(lambda: _own_folder(run[0].trainer) if run else None), CtrlC():
        cli = AsyncRLCLI(args)
        run.append(cli)
        trainer, ckpt_path = cli.trainer, cli.config["ckpt_path"]
        with run_folders(trainer, ckpt_path):
            stopped_at = api.run(trainer, cli.model, cli.datamodule, ckpt_path)
        api.print_summary(trainer)
        api.upload_report(trainer)
        if stopped_at and trainer.is_global_zero:
            print(f"resume with: {resume_command(stopped_at, args)}")
        check_last_is_saved(trainer)


def evaluate(args: Sequence[str] | None = None) -> None:
    """Held-out pass@1 and pass@k of a checkpoint, with samples."""
    with command():
        cli = AsyncRLCLI(args, {"--num_shown": {"type": int, "default": 8, "help": "samples to print"}})
        check_range("", ">= 0", num_shown=cli.config["num_shown"])
        if cli.datamodule.validation.source is None:
            raise ValueError("data.validation.prompts is not set: there is nothing to evaluate on")
        if not cli.trainer.limit_val_batches:
            raise ValueError("trainer.limit_val_batches=0: there is nothing to evaluate on")
        metrics = cli.trainer.validate(cli.model, cli.datamodule, ckpt_path=cli.config["ckpt_path"], verbose=False)[0]
        if not cli.trainer.is_global_zero:  # metrics are those of all ranks
            return
        table = Table("prompt", "completion", "answer", "reward", title="samples")
        one_of_each = cli.model.validator.samples[:: cli.datamodule.validation.num_samples]
        for sample in one_of_each[: cli.config["num_shown"]]:
            row = (sample.prompt.text, sample.completion, sample.prompt.answer or "", f"{sample.reward:g}")
            table.add_row(*map(escape, row))
        console = Console()
        console.print(table)
        for name, value in metrics.items():
            console.print(f"{name:12} {value:.4f}")


def export(args: Sequence[str] | None = None) -> None:
    """Writes a checkpoint as a Hugging Face folder."""
    with command():
        cli = AsyncRLCLI(args, {"--out": {"type": str, "required": True, "help": "folder to write"}})
        if cli.config["ckpt_path"] is None:
            raise ValueError("ckpt_path is not set: name the checkpoint to export")
        if not cli.trainer.is_global_zero:  # started by torchrun: one writes
            return
        if Path(cli.config["out"]).is_file():
            raise ValueError(f"out={cli.config['out']!r} is a file, and must be a folder: nothing was written")
        if any(Path(cli.config["out"]).glob("*")):
            raise ValueError(f"out={cli.config['out']!r} is not empty: nothing was written")
        check_is_one_file(cli.config["ckpt_path"])
        checkpoint = torch.load(cli.config["ckpt_path"], map_location="cpu", weights_only=True)
        cli.model.configure_model()
        cli.model.on_load_checkpoint(checkpoint)
        cli.model.load_state_dict(checkpoint["state_dict"], strict=cli.model.strict_loading)
        check_writable(Path(cli.config["out"]), "out")
        lm = cli.model.policy.causal_lm
        weights = {name: tensor.detach().contiguous() for name, tensor in stream_weights(cli.model.policy)}
        export_model(lm, cli.datamodule.codec.tokenizer, cli.config["out"], weights)
        print(f"version {cli.model.version} written to {cli.config['out']}")


def _own_folder(trainer: Trainer) -> str | None:
    """The run's folder on rank 0. Asks no other rank, unlike `trainer.log_dir`: after an error none may be left."""
    logs = trainer.loggers if trainer.is_global_zero else []
    return next((log.log_dir for log in logs if isinstance(log, CSVLogger)), None)


@contextmanager
def command(folder: Callable[[], str | None] = lambda: None) -> Iterator[None]:
    """Context of a command: one-line errors, no messages about internals, no code execution on loading.

    Modules of the working folder can be imported.
    """
    quiet()
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # rewards and prompts beside a configuration; last, so that they hide nothing
    with one_line_errors(folder), nothing_executed():
        yield
