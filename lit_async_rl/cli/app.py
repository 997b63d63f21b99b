"""Command line: LightningCLI, where constructor signatures are the schema.

Several `--config` files compose, `${...}` interpolates, dotted flags override files and are never abbreviated (argparse
would take the misspelt `--data.max_stalenes 7` for `max_staleness`).
"""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
import yaml
from jsonargparse import Namespace, set_parsing_settings
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch import Trainer as LightningTrainer
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI, SaveConfigCallback
from lightning.pytorch.loggers import CSVLogger, WandbLogger
from omegaconf.errors import InterpolationResolutionError
from rich.console import Console
from rich.markup import escape
from rich.table import Table

import lit_async_rl
from lit_async_rl.api import run as api
from lit_async_rl.api.cluster import Cluster, Place
from lit_async_rl.api.ranks import TellFolder, placed_flags, uses_gpus
from lit_async_rl.api.resume_check import check_resume
from lit_async_rl.api.run import CtrlC
from lit_async_rl.api.run_config import comparable
from lit_async_rl.api.run_folders import gather_loggers, run_folders
from lit_async_rl.api.trainer import Trainer, defaults_file, full_path, quiet
from lit_async_rl.callbacks.parts import own_log_dir
from lit_async_rl.cli.config_checks import (
    check_class_paths,
    check_config_files,
    check_sections,
    check_stage,
    check_values,
    config_files,
    files_first,
    stage_of,
    trees_of,
)
from lit_async_rl.cli.error_report import Parser
from lit_async_rl.cli.model_card import push, write_card
from lit_async_rl.cli.one_line_errors import one_line_errors
from lit_async_rl.data.module import RolloutDataModule
from lit_async_rl.distributed.scatter import limit_rendezvous
from lit_async_rl.models.export import export_model
from lit_async_rl.models.loading import load_config
from lit_async_rl.models.sharded_checkpoint import nothing_executed
from lit_async_rl.models.sharding import ModelParallelStrategy
from lit_async_rl.models.weights import stream_weights
from lit_async_rl.runtime.files import check_writable
from lit_async_rl.training.checkpoint_io import check_checkpoint, check_is_one_file
from lit_async_rl.training.module import PolicyModule
from lit_async_rl.training.trackers import TrackioLogger, identify_wandb_run
from lit_async_rl.training.wandb_runs import label_run
from lit_async_rl.utils.checks import MANY, check_range
from lit_async_rl.utils.lightning_types import AnyTrainer
from lit_async_rl.utils.public_names import part, public
from lit_async_rl.utils.saving import check_last_is_saved
from lit_async_rl.utils.secrets import concealed

for _name in lit_async_rl.NAMES:
    public(_name)  # imports it: jsonargparse finds bare class names among imported subclasses
CLUSTER = public("RayCluster")


class AsyncRLCLI(LightningCLI):
    """LightningCLI with sections `model:` (`PolicyModule`), `data:` (`RolloutDataModule`) and `trainer:`.

    Defaults of the last two stand in `configs/defaults.yaml`, as for `lit_async_rl.Trainer`.

    Args:
        args: of the command line; None is `sys.argv`.
        extra: options of one command, as arguments of `add_argument` by flag. Such a command does not train, save
            settings or log.
        place: of this process among ranks that a cluster has placed; None elsewhere.
        starts_ranks: whether settings of a cluster that places ranks are only parsed.

    Attributes:
        cluster: of `cluster:`; None without it.
        places_ranks: whether the cluster is to place the ranks; then there is no trainer, model or data module.
        is_dry_run: whether only the placement is shown; likewise.
        stage: command that reads such configurations.
        module_class: of `model:`; `data_class`: of `data:`.
        left_out: default callbacks that this command does not have.
        has_cluster: whether there is a section `cluster:`.
    """

    stage: ClassVar[str] = "train"
    module_class: ClassVar[type[PolicyModule]] = PolicyModule
    data_class: ClassVar[type[LightningDataModule]] = RolloutDataModule
    left_out: ClassVar[Sequence[str]] = ()
    has_cluster: ClassVar[bool] = CLUSTER is not None

    def __init__(
        self,
        args: Sequence[str] | None = None,
        extra: dict[str, dict[str, Any]] | None = None,
        *,
        place: Place | None = None,
        starts_ranks: bool = False,
    ) -> None:
        self._args = args
        self._extra = extra or {}
        self._place = place
        self._starts_ranks = starts_ranks
        self.cluster: Cluster | None = None
        given = sys.argv[1:] if args is None and place is not None else args
        super().__init__(
            self.module_class,
            self.data_class,
            args=None if given is None else [*given, *(placed_flags(place) if place is not None else ())],
            run=False,
            auto_configure_optimizers=False,
            seed_everything_default=0,
            parser_class=Parser,
            parser_kwargs={"parser_mode": "omegaconf", "allow_abbrev": False},
            save_config_callback=SaveConfig if extra is None else None,
            save_config_kwargs={"overwrite": True},
            trainer_class=LightningTrainer,  # its signature has the settings; `instantiate_trainer` makes ours
            trainer_defaults=dict(defaults_file()["trainer"]),
        )

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        """Refuses invalid configuration files and class paths before anything is called."""
        given = sys.argv[1:] if args is None else args
        check_config_files(given)
        check_stage(given, self.stage)
        check_sections(given, parser._actions)
        set_parsing_settings(import_path_denylist=[])  # makes errors of warnings of modules such as `os`
        try:
            self.config = parser.parse_args(files_first(given))
            leave_rate_to_the_run(self.config, partial(parser.parse_args, files_first(given), defaults=False))
        except InterpolationResolutionError as error:
            place = str(error.full_key or "a setting")
            escaped = "" if error.full_key is None else r"; a text that contains ${...} is written \${...}"
            raise ValueError(f"{place}: {str(error).splitlines()[0]}{escaped}") from None
        seed = self.config["seed_everything"]
        check_range("", "in [0, 4294967295]", seed_everything=None if isinstance(seed, bool) else seed)
        check_values(self.config, parser._actions)
        check_class_paths(self.config)

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Links shared values, so that a configuration states each once."""
        parser.add_argument("--num_threads", type=int, default=1, help="torch threads of the trainer's thread")
        parser.add_argument("--ckpt_path", type=str | None, default=None, help="checkpoint to resume from or evaluate")
        for name, options in self._extra.items():
            parser.add_argument(name, **options)
        for key, callback in defaults_file()["defaults"].items():
            if key in self.left_out:
                continue
            default = callback and {**callback, "class_path": full_path(callback["class_path"])}
            parser.add_argument(f"--defaults.{key}", type=Callback | None, default=default, help="null: without it")
        if self.has_cluster:
            parser.add_argument("--cluster", type=CLUSTER | None, default=None, help="ranks, engines, rewards on Ray")
        parser.link_arguments("model.model", "data.model")

    def before_instantiate_classes(self) -> None:
        """Refuses settings that would fail late; sets threads, which must precede any parallel work."""
        if self.config["ckpt_path"] is not None and os.environ.get("LOCAL_RANK", "0") == "0":
            check_checkpoint(self.config["ckpt_path"])
        check_range("", ">= 1", num_threads=self.config["num_threads"])
        check_range("", f"<= {MANY}", num_threads=self.config["num_threads"])
        torch.set_num_threads(self.config["num_threads"])
        self.cluster = self._make_cluster()
        if self.cluster is not None:
            self.cluster.check()
        if self.is_dry_run and self._extra:
            raise ValueError(
                "cluster.dry_run=true works only with the command `train`, because no other command starts ranks"
            )

    def _make_cluster(self) -> Cluster | None:
        if not self.has_cluster:
            return None
        parser = Parser()
        parser.add_argument("--cluster", type=CLUSTER | None, default=None)
        made: Cluster | None = parser.instantiate_classes(Namespace(cluster=self.config["cluster"])).cluster
        return made

    @property
    def places_ranks(self) -> bool:
        return self._starts_ranks and self.cluster is not None and self.cluster.places_ranks

    @property
    def is_dry_run(self) -> bool:
        return self.cluster is not None and self.cluster.dry_run

    def instantiate_classes(self) -> None:
        """Makes all objects, unless the ranks do; the cluster's actors take the place of some."""
        if not self.places_ranks and not self.is_dry_run:
            super().instantiate_classes()
            if self.cluster is not None:
                self.cluster.place_actors(self.trainer, self.datamodule)

    def engines_connected(self) -> AbstractContextManager[Any]:
        """Context in which actors of `cluster:` can be set up; placed ranks are connected already."""
        is_placed = self.cluster is None or self._place is not None
        return nullcontext() if is_placed else self.cluster.actors_connected()  # type: ignore[union-attr]

    def instantiate_trainer(self, **kwargs: Any) -> Any:
        """A Trainer with the default callbacks as configured, whose loggers write into one folder."""
        given = sys.argv[1:] if self._args is None else self._args
        defaults = vars(self.config_init["defaults"]) | dict.fromkeys(self.left_out)
        self.trainer_class = partial(Trainer, defaults=defaults, adds_csv_log=False)  # type: ignore[assignment]
        trainer = super().instantiate_trainer(**kwargs)
        if isinstance(trainer.strategy, ModelParallelStrategy):
            trainer.strategy.check_sizes()
        shared = {name: self.config[name].as_dict() for name in ("model", "data")}
        limit_rendezvous(trainer, self.datamodule.limits.start_timeout_s, comparable(shared))
        if self._extra:  # the command does not train
            trainer.loggers = []
        if self._place is not None:
            trainer.callbacks.insert(0, TellFolder(self._place))  # type: ignore[attr-defined]
        gather_loggers(trainer, self.config["ckpt_path"], run_name(given))
        self._name_tracked_runs(trainer, given)
        return trainer

    def _name_tracked_runs(self, trainer: AnyTrainer, args: Sequence[str]) -> None:
        """Names runs of W&B and Trackio by configuration files and seed; a chosen name stays.

        W&B runs that differ in the seed only are a group; tags are the files' names.
        """
        name = f"{run_name(args)}, seed {self.config['seed_everything']}"
        for logger in trainer.loggers:
            if isinstance(logger, WandbLogger):
                logger._wandb_init.pop("anonymous", None)  # Lightning always gives it, and W&B warns of it
                if not _has_wandb_name(args):
                    identify_wandb_run(logger, name=name)
                settings = json.loads(self.parser.dump(Namespace(self.config), format="json", skip_none=False))
                settings = concealed(settings)
                bound = settings["data"].get("max_staleness")
                kinds = [] if bound is None else ["synchronous" if bound == 0 else "asynchronous"]
                label_run(logger, run_name(args), settings=settings, tags=[*_names(args), *kinds])
            elif isinstance(logger, TrackioLogger):
                version = trainer.loggers[0].version  # of the CSV log: Trackio tells runs apart by their names
                logger.run_name = logger.run_name or f"{name}, {version}"


def leave_rate_to_the_run(config: Namespace, parse_given: Callable[[], Namespace]) -> None:
    """Drops the rate of `model.optimizer` where it is only its class's default: `model.learning_rate` counts.

    Args:
        config: as parsed, with the defaults of classes.
        parse_given: parses again, without defaults.
    """
    arguments = config.get("model.optimizer.init_args")
    if config.get("model.learning_rate") is None or not isinstance(arguments, Namespace) or "lr" not in arguments:
        return
    if parse_given().get("model.optimizer.init_args.lr") is None:
        del arguments["lr"]


class SaveConfig(SaveConfigCallback):
    """Writes all settings to `config.yaml` in the run's folder and to trackers; nothing without a logger."""

    def setup(self, trainer: LightningTrainer, pl_module: LightningModule, stage: str) -> None:
        self.config = concealed(self.config)
        if trainer.loggers and not trainer.fast_dev_run:  # type: ignore[attr-defined]
            super().setup(trainer, pl_module, stage)

    def save_config(self, trainer: LightningTrainer, pl_module: LightningModule, stage: str) -> None:
        """Called once, on rank 0."""
        others = [logger for logger in trainer.loggers if not isinstance(logger, CSVLogger)]
        if not others:
            return  # dumping all settings takes a while
        settings = json.loads(self.parser.dump(Namespace(self.config), format="json", skip_none=False))
        for logger in others:
            logger.log_hyperparams(settings)


# -- Names of a run in its folder and in trackers ---------------------------------------------------------------------


def run_name(args: Sequence[str]) -> str:
    """Names of the configuration files, joined by dashes."""
    return "-".join(_names(args)) or "run"


def _names(args: Sequence[str]) -> list[str]:
    """Names of the configuration files, without overlays of loggers."""
    return list(dict.fromkeys(file.stem for file in config_files(args) if file.parent.name != "loggers"))


def _has_wandb_name(args: Sequence[str]) -> bool:
    """Whether files or flags name W&B's run. jsonargparse keeps the name of a replaced logger."""
    if any(re.match(r"--trainer\.logger(\.init_args)?\.name\b", word) for word in args):
        return True
    kind = ""  # class that settings without `class_path` belong to
    for chosen in _chosen_loggers(args):
        kind = str(chosen.get("class_path", kind))
        if "Wandb" in kind and "name" in {**chosen, **(chosen.get("init_args") or {})}:
            return True
    return False


def _chosen_loggers(args: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Entries of `trainer.logger` in files and flags: classes, alone or in lists, and settings of the class before."""
    files = [tree.get("trainer") or {} for _, tree in trees_of(config_files(args))]
    for trainer in [*files, *_flags(args)]:
        for given in (trainer.get("logger"), trainer.get("logger+")):
            for entry in given if isinstance(given, list) else [given]:
                if isinstance(entry, (dict, str)):
                    yield entry if isinstance(entry, dict) else {"class_path": entry}


def _flags(args: Sequence[str]) -> Iterator[dict[str, Any]]:
    """The values of `--trainer.logger VALUE` and the like, as in a file."""
    for word, following in zip(args, [*args[1:], ""], strict=True):
        flag, has_value, value = word.partition("=")
        if flag in ("--trainer.logger", "--trainer.logger+"):
            yield {flag.removeprefix("--trainer."): yaml.safe_load(value if has_value else following)}


# -- Commands that read a configuration: train, evaluate, export ------------------------------------------------------


def main(args: Sequence[str] | None = None, place: Place | None = None) -> None:
    """Measures held-out accuracy, trains, measures again, and prints a summary table.

    If `cluster:` places ranks, each does that, and this process shows their output.

    Args:
        args: of the command line; None is `sys.argv`.
        place: of this process among ranks that a cluster has placed; None elsewhere.
    """
    with command() as running, CtrlC():
        cli = AsyncRLCLI(args, place=place, starts_ranks=place is None)
        if cli.cluster is not None and cli.is_dry_run:
            cli.cluster.print_dry_run(uses_gpus=uses_gpus(cli.config["trainer"]["accelerator"]))
            return
        if cli.places_ranks and cli.cluster is not None:
            load_config(cli.config["model"]["model"])  # reports a wrong path before Ray and the ranks start
            job = partial(main, list(sys.argv[1:] if args is None else args))
            status = cli.cluster.launch(job, uses_gpus=uses_gpus(cli.config["trainer"]["accelerator"])).status
            if status:
                sys.exit(status)
            return
        trainer = cli.trainer
        running.append(trainer)
        ckpt_path = cli.config["ckpt_path"]
        check_resume(trainer, cli.model, cli.datamodule, ckpt_path=ckpt_path)
        with cli.engines_connected(), run_folders(trainer, ckpt_path):
            stopped_at = api.run(trainer, cli.model, cli.datamodule, ckpt_path=ckpt_path)
        api.conclude(trainer)
        if stopped_at and trainer.is_global_zero:
            print(f"resume with: {resume_command(stopped_at, args)}")
        check_last_is_saved(trainer)


def _cli_of(args: Sequence[str] | None) -> type[AsyncRLCLI]:
    """The command line that a configuration was written for."""
    stage = stage_of(sys.argv[1:] if args is None else args)
    supervised = part("supervised.command") if stage == "sft" else None
    return AsyncRLCLI if supervised is None else supervised.SFTCLI  # type: ignore[no-any-return]


def evaluate(args: Sequence[str] | None = None) -> None:
    """Held-out pass@1 and pass@k of a checkpoint, with samples; held-out loss, if it was fine-tuned."""
    with command():
        cli = _cli_of(args)(args, {"--num_shown": {"type": int, "default": 8, "help": "samples to print"}})
        check_range("", ">= 0", num_shown=cli.config["num_shown"])
        if not cli.datamodule.validates:
            both = "data.validation_records and data.validation.prompts are both not set"
            unset = both if cli.stage == "sft" else "data.validation.prompts is not set"
            raise ValueError(f"{unset}: there is nothing to evaluate on")
        if not cli.trainer.limit_val_batches:
            raise ValueError("trainer.limit_val_batches=0: there is nothing to evaluate on")
        ckpt_path = cli.config["ckpt_path"]
        with cli.engines_connected():
            metrics = cli.trainer.validate(cli.model, cli.datamodule, ckpt_path=ckpt_path, verbose=False)[0]
        if not cli.trainer.is_global_zero:  # the metrics are reduced over ranks, so one prints them
            return
        console = Console()
        if num_scored := cli.model.validator.num_scored:
            table = Table("prompt", "completion", "answer", "reward", title="samples")
            one_of_each = cli.model.validator.samples[:: cli.datamodule.validation.num_samples]
            for sample in one_of_each[: cli.config["num_shown"]]:
                row = (sample.prompt.text, sample.completion, sample.prompt.answer or "", f"{sample.reward:g}")
                table.add_row(*map(escape, row))
            console.print(table)
        width = max(map(len, metrics))
        for name, value in metrics.items():
            half_width = cli.model.validator.half_widths.get(name)
            error = "" if half_width is None else f" ± {half_width:.4f}"
            console.print(f"{name:{width}} {value:.4f}{error}")
        if num_scored:
            console.print(
                f"n = {num_scored} prompts; ± is half the width of a 95 % confidence interval over the prompts"
            )


REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+")


def export(args: Sequence[str] | None = None) -> None:
    """Writes a checkpoint as a Hugging Face folder with a model card; optionally uploads it."""
    with command():
        cli = _cli_of(args)(
            args,
            {
                "--out": {"type": str, "required": True, "help": "folder to write"},
                "--push_to_hub": {"type": str | None, "default": None, "help": "user/name on the Hugging Face hub"},
                "--private": {"type": bool, "default": False, "help": "whether a new repository there is private"},
            },
        )
        repository = cli.config["push_to_hub"]
        if repository is not None and not REPOSITORY.fullmatch(repository):
            raise ValueError(f"push_to_hub must be user/name, got {repository!r}: nothing was written")
        if cli.config["ckpt_path"] is None:
            raise ValueError("ckpt_path is not set: name the checkpoint to export")
        if not cli.trainer.is_global_zero:  # several processes of torchrun would write into the same files
            return
        out = Path(cli.config["out"])
        if out.is_file():
            raise ValueError(f"out={cli.config['out']!r} is a file, but must be a folder: nothing was written")
        if any(out.glob("*")):
            raise ValueError(f"out={cli.config['out']!r} is not empty, so nothing was written: choose another folder")
        check_is_one_file(cli.config["ckpt_path"])
        checkpoint = torch.load(cli.config["ckpt_path"], map_location="cpu", weights_only=True)
        cli.model.configure_model()
        cli.model.on_load_checkpoint(checkpoint)
        cli.model.load_state_dict(checkpoint["state_dict"], strict=cli.model.strict_loading)
        check_writable(out, "out")
        lm = cli.model.policy.causal_lm
        weights = {name: tensor.detach().contiguous() for name, tensor in stream_weights(cli.model.policy)}
        export_model(lm, cli.datamodule.codec.tokenizer, out, weights=weights)
        callbacks = cli.trainer.callbacks  # type: ignore[attr-defined]
        path = Path(cli.config["ckpt_path"])
        step = checkpoint["global_step"]
        write_card(out, cli.model, cli.datamodule, callbacks=callbacks, checkpoint=path, step=step)
        print(f"version {cli.model.version} written to {cli.config['out']}")
        if repository is not None:
            print(f"uploaded to {push(out, repository, private=cli.config['private'])}")


@contextmanager
def command() -> Iterator[list[LightningTrainer]]:
    """Context of a command: one-line errors, no messages about internals, no code execution on loading.

    Modules of the working folder can be imported. The list takes a run's Trainer, whose folder keeps tracebacks.
    """
    running: list[LightningTrainer] = []
    quiet()
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # rewards and prompts beside a configuration; last, so that they hide nothing
    with one_line_errors(lambda: own_log_dir(running[0]) if running else None), nothing_executed():
        yield running


# -- The command that resumes a run -----------------------------------------------------------------------------------


def resume_command(checkpoint: str, args: Sequence[str] | None = None, name: str = "train") -> str:
    """The command line that began this run, with `--ckpt_path`.

    Args:
        checkpoint: to go on from.
        args: of the command; None is `sys.argv`.
        name: of the command.
    """
    given = list(sys.argv[1:] if args is None else args)
    kept = []
    while given:
        word = given.pop(0)
        if word == "--ckpt_path":
            del given[:1]
        elif not word.startswith("--ckpt_path="):
            kept.append(word)
    script = sys.argv[0]
    program = ["python", script] if script.endswith(".py") else [Path(script).name, name]
    return shlex.join([*program, *kept, "--ckpt_path", checkpoint])
