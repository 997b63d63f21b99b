"""Command line: LightningCLI, where constructor signatures are the schema.

Several `--config` files compose, `${...}` interpolates, dotted flags override files, and are never abbreviated
(argparse would take the misspelt `--data.max_stalenes 7` for `max_staleness`).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from jsonargparse import set_parsing_settings
from lightning.pytorch import Trainer as LightningTrainer
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from omegaconf.errors import InterpolationResolutionError

import lit_async_rl
from lit_async_rl.api.defaults import defaults_file, full_path
from lit_async_rl.api.run_config import comparable
from lit_async_rl.api.trainer import Trainer, repeated_callback
from lit_async_rl.cli.config_check import check_class_paths, check_config_files, check_values, places_of_callback
from lit_async_rl.cli.config_words import files_first
from lit_async_rl.cli.error_report import Parser
from lit_async_rl.cli.loggers import SaveConfig, gather_loggers
from lit_async_rl.data.module import RolloutDataModule
from lit_async_rl.distributed.rendezvous import limit_rendezvous
from lit_async_rl.models.sharding import ModelParallelStrategy
from lit_async_rl.training.checkpoint_io import check_checkpoint
from lit_async_rl.training.module import PolicyModule
from lit_async_rl.utils.checks import check_range

for _name in lit_async_rl.__all__:
    getattr(lit_async_rl, _name)  # configurations name classes without their module, once they are imported


class AsyncRLCLI(LightningCLI):
    """LightningCLI with sections `model:` (`PolicyModule`), `data:` (`RolloutDataModule`) and `trainer:`.

    Defaults of the last two stand in `configs/defaults.yaml`, and are those of `lit_async_rl.Trainer`.
    """

    def __init__(self, args: Sequence[str] | None = None, extra: dict[str, dict[str, Any]] | None = None) -> None:
        self._args, self._extra = args, extra or {}  # options of one command
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
            trainer_class=LightningTrainer,  # has the settings that there are
            trainer_defaults=dict(defaults_file()["trainer"]),
        )

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        """Refuses invalid configuration files and class paths before anything is called."""
        given = sys.argv[1:] if args is None else args
        check_config_files(given)
        set_parsing_settings(import_path_denylist=[])  # those denied by default are errors now
        try:
            self.config = parser.parse_args(files_first(given))
        except InterpolationResolutionError as error:
            place = str(error.full_key or "a setting")
            escaped = "" if error.full_key is None else r"; a text that contains ${...} is written \${...}"
            raise ValueError(f"{place}: {str(error).splitlines()[0]}{escaped}") from None
        seed = self.config["seed_everything"]
        check_range("", "in [0, 4294967295]", seed_everything=None if isinstance(seed, bool) else seed)
        check_values(self.config, parser._actions)
        check_class_paths(self.config)

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Links values that two classes share, so that a configuration states each once."""
        parser.add_argument("--num_threads", type=int, default=1, help="torch threads of the trainer's thread")
        parser.add_argument("--ckpt_path", type=str | None, default=None, help="checkpoint to resume from or evaluate")
        for name, options in self._extra.items():
            parser.add_argument(name, **options)
        for key, callback in defaults_file()["defaults"].items():
            default = callback and {**callback, "class_path": full_path(callback["class_path"])}
            parser.add_argument(f"--defaults.{key}", type=Callback | None, default=default, help="null: without it")
        parser.link_arguments("model.model", "data.model")

    def before_instantiate_classes(self) -> None:
        """Refuses what would fail late; threads must be set before any parallel work."""
        if self.config["ckpt_path"] is not None and os.environ.get("LOCAL_RANK", "0") == "0":
            check_checkpoint(self.config["ckpt_path"])
        check_range("", ">= 1", num_threads=self.config["num_threads"])
        torch.set_num_threads(self.config["num_threads"])

    def instantiate_trainer(self, **kwargs: Any) -> Any:
        """A Trainer with the default callbacks as configured, whose loggers write into one folder.

        Raises:
            ValueError: a callback with state is there twice; names the files that add it.
        """
        given = sys.argv[1:] if self._args is None else self._args
        callbacks = self.config_init["trainer"]["callbacks"] or []
        if repeated := repeated_callback(callbacks if isinstance(callbacks, list) else [callbacks]):
            places = places_of_callback(repeated, given)
            raise ValueError(
                f"trainer.callbacks has {repeated} twice ({places}), and checkpoints have one place for its state: "
                "leave one out"
            )
        defaults = vars(self.config_init["defaults"])
        self.trainer_class = partial(Trainer, defaults=defaults, adds_csv_log=False)  # type: ignore[assignment]
        trainer = super().instantiate_trainer(**kwargs)
        if isinstance(trainer.strategy, ModelParallelStrategy):
            trainer.strategy.check_sizes()
        shared = {name: self.config[name].as_dict() for name in ("model", "data")}
        limit_rendezvous(trainer, self.datamodule.limits.start_timeout_s, comparable(shared))
        if self._extra:  # of a command that does not train
            trainer.loggers = []
        gather_loggers(trainer, given, self.config["seed_everything"], self.config["ckpt_path"])
        return trainer
