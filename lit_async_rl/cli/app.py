"""Command line: LightningCLI, where constructor signatures are the schema.

Several `--config` files compose, `${...}` interpolates, dotted flags override, and flags are never abbreviated
(argparse would take the misspelt `--data.max_stalenes 7` for `max_staleness`).
"""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from jsonargparse import set_parsing_settings
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from transformers.utils import logging as transformers_logging

import lit_async_rl
from lit_async_rl.callbacks import (
    BottleneckVerdict,
    GradientMonitor,
    ImportanceMonitor,
    Progress,
    RolloutMonitor,
    RunSummary,
    SampleLogger,
    SaveOnFailure,
    SaveOnSigterm,
    SkipNonFinite,
    StalenessMonitor,
    ThroughputMonitor,
    WeightSync,
)
from lit_async_rl.cli.config_check import check_class_paths, check_config_files
from lit_async_rl.cli.error_report import Parser, one_line_errors
from lit_async_rl.cli.interrupts import CtrlC, fit_until_stopped, resume_command
from lit_async_rl.cli.loggers import SaveConfig, gather_loggers
from lit_async_rl.cli.run_folders import run_folders
from lit_async_rl.data.module import RolloutDataModule
from lit_async_rl.distributed.rendezvous import limit_rendezvous
from lit_async_rl.errors import describe
from lit_async_rl.models.sharded_checkpoint import nothing_executed
from lit_async_rl.models.weights import stream_weights
from lit_async_rl.training.checkpoint_io import AtomicCheckpointIO, check_checkpoint
from lit_async_rl.training.module import PolicyModule

for _name in lit_async_rl.__all__:
    getattr(lit_async_rl, _name)  # configurations name classes without their module, once they are imported

NOTICES = (  # about internals
    *("treespec", "does not have many workers", "in eval mode at the start of training", "Total length of"),
    *("The dirpath has changed", "your dataloader is not resumable", "`weights_only`", "weights_only="),
)


class AsyncRLCLI(LightningCLI):
    """`model:` is a `PolicyModule`, `data:` a `RolloutDataModule`, `trainer:` Lightning's.

    `WeightSync`, the monitors and a CSV log are always there.
    """

    def __init__(self, args: Sequence[str] | None = None, extra: dict[str, dict[str, Any]] | None = None) -> None:
        self.summary = RunSummary()
        self._args = args
        self._extra = extra or {}  # options of a script that does not train, and so logs nothing
        super().__init__(
            PolicyModule,
            RolloutDataModule,
            args=None if args is None else list(args),
            run=False,
            auto_configure_optimizers=False,
            seed_everything_default=0,
            parser_class=Parser,
            parser_kwargs={"parser_mode": "omegaconf", "allow_abbrev": False},
            save_config_callback=SaveConfig if extra is None else None,
            save_config_kwargs={"overwrite": True},
            trainer_defaults={
                "callbacks": [
                    *(RolloutMonitor(), StalenessMonitor(), ImportanceMonitor(), ThroughputMonitor()),
                    *(GradientMonitor(), SampleLogger(), Progress(), WeightSync()),
                    *(BottleneckVerdict(), self.summary),
                    *(SkipNonFinite(), SaveOnFailure(), SaveOnSigterm()),
                ]
            },
        )

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        """Refuses what is no configuration, and classes that are none, before anything is called."""
        check_config_files(sys.argv[1:] if args is None else args)
        set_parsing_settings(import_path_denylist=[])  # those denied by default are errors now
        super().parse_arguments(parser, args)
        check_class_paths(self.config)

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Shares values that two classes need, so that a configuration states each once."""
        parser.add_argument("--num_threads", type=int, default=1, help="torch threads of the trainer's thread")
        parser.add_argument("--ckpt_path", type=str | None, default=None, help="checkpoint to resume from or evaluate")
        for name, options in self._extra.items():
            parser.add_argument(name, **options)
        parser.link_arguments("model.model", "data.model")

    def before_instantiate_classes(self) -> None:
        """Refuses what would fail late; threads must be set before any parallel work."""
        if self.config["ckpt_path"] is not None and os.environ.get("LOCAL_RANK", "0") == "0":
            check_checkpoint(self.config["ckpt_path"])
        if (interval := self.config["trainer"]["val_check_interval"]) is not None and not interval:
            raise ValueError(f"trainer.val_check_interval must be positive, got {interval}")
        if self.config["num_threads"] < 1:
            raise ValueError(f"num_threads must be >= 1, got {self.config['num_threads']}")
        torch.set_num_threads(self.config["num_threads"])

    def instantiate_trainer(self, **kwargs: Any) -> Any:
        """Adds the CSV log beside other loggers; what is switched off takes our own callback for it away, too."""
        switches = {"enable_progress_bar": (Progress,), "enable_checkpointing": (SaveOnFailure, SaveOnSigterm)}
        off = [kinds for name, kinds in switches.items() if self.config_init["trainer"][name] is False]
        unwanted = tuple(kind for kinds in off for kind in kinds)
        defaults, given = self.trainer_defaults["callbacks"], self.config_init["trainer"]["callbacks"] or []
        unwanted += tuple(type(c) for c in (given if isinstance(given, list) else [given]))  # those take their place
        self.trainer_defaults["callbacks"] = [c for c in defaults if not isinstance(c, unwanted)]
        chosen = {name: self.config_init["trainer"][name] for name in ("accelerator", "devices", "precision")}
        try:
            trainer = super().instantiate_trainer(**kwargs)
        except (MisconfigurationException, TypeError, ValueError) as error:
            settings = ", ".join(f"{name}={value!r}" for name, value in chosen.items())
            raise ValueError(f"trainer ({settings}): {describe(error)}") from error
        limit_rendezvous(trainer, self.datamodule.limits.start_timeout_s)
        if type(trainer.strategy.checkpoint_io) is TorchCheckpointIO:
            trainer.strategy.checkpoint_io = AtomicCheckpointIO()
        if self._extra:
            trainer.loggers = []
        given = sys.argv[1:] if self._args is None else self._args
        gather_loggers(trainer, given, self.config["seed_everything"], self.config["ckpt_path"])
        return trainer


def main(args: Sequence[str] | None = None) -> None:
    """Measures held-out accuracy, trains, measures again, and says in a short table what happened."""
    run: list[AsyncRLCLI] = []
    with command(lambda: run[0].trainer.log_dir if run else None), CtrlC():
        cli = AsyncRLCLI(args)
        run.append(cli)
        trainer, model, data = cli.trainer, cli.model, cli.datamodule
        ckpt_path = cli.config["ckpt_path"]
        with run_folders(trainer, ckpt_path):
            if data.validation.prompts is not None:
                trainer.validate(model, data, ckpt_path=ckpt_path, verbose=False)
            stopped_at = fit_until_stopped(trainer, model, data, ckpt_path)
            if data.validation.prompts is not None and stopped_at is None:
                trainer.validate(model, data, verbose=False)
        cli.summary.print(trainer)
        if stopped_at is not None and trainer.is_global_zero:
            print(f"resume with: {resume_command(stopped_at, args)}")


def evaluate(args: Sequence[str] | None = None) -> None:
    """Held-out pass@1 and pass@k of a checkpoint, with some samples."""
    with command():
        cli = AsyncRLCLI(args, {"--num_shown": {"type": int, "default": 8, "help": "samples to print"}})
        if cli.datamodule.validation.prompts is None:
            raise ValueError("data.validation.prompts is not set: there is nothing to evaluate on")
        metrics = cli.trainer.validate(cli.model, cli.datamodule, ckpt_path=cli.config["ckpt_path"], verbose=False)[0]
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
        if Path(cli.config["out"]).is_file():
            raise ValueError(f"out={cli.config['out']!r} is a file, and must be a folder: nothing was written")
        if any(Path(cli.config["out"]).glob("*")):
            raise ValueError(f"out={cli.config['out']!r} is not empty: nothing was written")
        checkpoint = torch.load(cli.config["ckpt_path"], map_location="cpu", weights_only=True)
        cli.model.configure_model()
        cli.model.on_load_checkpoint(checkpoint)
        cli.model.load_state_dict(checkpoint["state_dict"], strict=cli.model.strict_loading)
        lm = cli.model.policy.causal_lm
        weights = {name: tensor.contiguous() for name, tensor in stream_weights(cli.model.policy)}
        lm.save_pretrained(cli.config["out"], state_dict=weights)
        cli.datamodule.codec.tokenizer.save_pretrained(cli.config["out"])
        print(f"version {cli.model.version} written to {cli.config['out']}")


@contextmanager
def command(folder: Callable[[], str | None] = lambda: None) -> Iterator[None]:
    """Around a command: errors in one line, no notices about internals, and nothing that is loaded is executed."""
    quiet()
    with one_line_errors(folder), nothing_executed():
        yield


def quiet() -> None:
    """Keeps messages about internals out of the user's terminal."""
    transformers_logging.disable_progress_bar()
    for name in ("lightning.pytorch.utilities.rank_zero", "lightning.fabric.utilities.rank_zero"):
        logging.getLogger(name).addFilter(lambda record: "💡" not in record.getMessage())
    for message in NOTICES:
        warnings.filterwarnings("ignore", message=f".*{message}.*")
