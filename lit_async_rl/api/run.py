"""`fit`, the shortest way to train; and a whole run, which the command line shares."""

from __future__ import annotations

import builtins
import contextlib
import inspect
import logging
import os
import signal
import sys
import threading
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import KW_ONLY, dataclass, replace
from functools import partial
from numbers import Integral
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.loggers import CSVLogger, WandbLogger
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lit_async_rl import rules
from lit_async_rl.api.arguments import as_groups, as_typed, check_model, in_folder
from lit_async_rl.api.cluster import Cluster, Place
from lit_async_rl.api.ranks import TellFolder, load_trained, metrics_of, placed_settings, uses_gpus
from lit_async_rl.api.resume_check import check_resume
from lit_async_rl.api.run_config import SaveSettings, as_config, comparable
from lit_async_rl.api.run_folders import gather_loggers, run_folders
from lit_async_rl.api.trainer import CONFIGS, TRAINER_SETTINGS, Trainer, build, changed_defaults
from lit_async_rl.callbacks import RunSummary, SaveOnSigterm
from lit_async_rl.callbacks.parts import callbacks_of, run_folder
from lit_async_rl.callbacks.run.save_on_sigterm import signal_status
from lit_async_rl.data.module import RolloutDataModule
from lit_async_rl.distributed.scatter import limit_rendezvous
from lit_async_rl.errors import LastCheckpointError, RankError, describe
from lit_async_rl.losses import PPOClip
from lit_async_rl.models import loading
from lit_async_rl.prompts.records import Records
from lit_async_rl.rewards.calls import Reward
from lit_async_rl.rewards.functions import no_reward
from lit_async_rl.runtime.threads import start_thread
from lit_async_rl.training.checkpoint_io import check_checkpoint
from lit_async_rl.training.distillation import Distillation
from lit_async_rl.training.module import PolicyModule
from lit_async_rl.training.optimizer import DEFAULT_LEARNING_RATE, RateSchedule
from lit_async_rl.training.rate_by_bound import handling, rate_factor
from lit_async_rl.training.trackers import keeps_files, log_file
from lit_async_rl.training.wandb_runs import label_run, sync_command
from lit_async_rl.utils.checks import check_kinds, meant
from lit_async_rl.utils.config_files import load_config
from lit_async_rl.utils.public_names import part
from lit_async_rl.utils.saving import check_last_is_saved
from lit_async_rl.utils.user_code import explains_itself, user_traceback, wants_traceback, write_traceback

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from lit_async_rl.api.fit_settings import FitSettings

log = logging.getLogger(__name__)

MODULE_SETTINGS = tuple(inspect.signature(PolicyModule.__init__).parameters)[2:]  # without self and the model
DATA_SETTINGS = tuple(inspect.signature(RolloutDataModule.__init__).parameters)[2:]  # without self and the prompts
FIT_TRAINER_SETTINGS = ("defaults", *TRAINER_SETTINGS)
SETTINGS = (*MODULE_SETTINGS, *DATA_SETTINGS, *FIT_TRAINER_SETTINGS)
ARGUMENTS = ("model", "prompts", "reward")


def module_defaults() -> dict[str, Any]:
    """Default settings of `PolicyModule`."""
    return {name: one.default for name, one in inspect.signature(PolicyModule).parameters.items()}


def fit(
    model: str | os.PathLike[str] | PreTrainedModel | PolicyModule,
    prompts: Records | os.PathLike[str],
    reward: Reward | None = None,
    *,
    max_steps: int,
    recipe: str | None = "vcpo",
    ckpt_path: str | os.PathLike[str] | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    cluster: Cluster | None = None,
    **settings: Unpack[FitSettings],
) -> Trainer:
    """Trains a language model and prints a summary.

    Ctrl-C, SIGTERM and SIGHUP save `last.ckpt` and say how to resume. No other process can use the run's folder
    meanwhile.

    Example:
        ```python
        import lit_async_rl as rl

        prompts = [{"prompt": "3142=", "answer": "1234"}, {"prompt": "21=", "answer": "12"}]
        trainer = rl.fit(
            rl.asset("sort_policy"), prompts, rl.exact_match,
            max_steps=2, max_staleness=1, groups_per_step=2, group_size=4, accelerator="cpu",
        )
        policy = trainer.lightning_module
        ```

    Args:
        model: Hugging Face name or folder, a `transformers.PreTrainedModel` (which is written to the run's folder, not
            trained in place), or a `PolicyModule`.
        prompts: list of texts or dictionaries, `datasets.Dataset`, path of a file, name of a dataset, or source; see
            `InMemoryPrompts` and `lit_async_rl.prompts.sources.source_class`.
        reward: `reward(prompt, completion) -> float`, plain or `async`. Needed unless an environment scores, or a
            `distillation` alone trains.
        max_steps: optimizer steps.
        recipe: what corrects stale data (`max_staleness` > 0) unless the model is a `PolicyModule`, or loss, proximal
            policy, correction, baseline, advantage or aggregation is given. `"vcpo"`: weights of whole completions, the
            baseline of least variance, and a rate that follows the effective sample size (arXiv:2602.17616); None:
            plain GRPO.
        ckpt_path: checkpoint to resume from; one in `RUN/checkpoints` continues the run in `RUN`.
        cluster: a `RayCluster` places trainer ranks, engines, rewards and environments on Ray; None trains in this
            process. Placed ranks get arguments as pickles.
        tokenizer: in the place of the model's own.
        **settings: any other argument of `PolicyModule`, `RolloutDataModule` and `Trainer`. `sampling`, `scoring`,
            `validation`, `limits`, `lora` and `sharding` may be dictionaries, `validation` held-out prompts, and `lora`
            a `peft.LoraConfig`. Without `learning_rate` and `optimizer` the rate is the default times what fits
            `max_staleness` and the loss (1 with the recipe up to 64), and a line says so.

    Returns:
        The Trainer; `trainer.lightning_module` is the trained module.

    Raises:
        FileNotFoundError: there is no such checkpoint.
        LastCheckpointError: a full disk did not take the last checkpoint; its `trainer` is what would be returned.
        OSError: another process uses the run's folder.
        RankError: a placed rank failed; what it wrote is shown.
        SetupError: Ray is needed, and is not installed, not reachable or has no room.
        TypeError: none of the three has such an argument.
        ValueError: a setting is out of range, or settings contradict each other.
    """
    folder: list[str] = []
    try:
        is_module = isinstance(model, PolicyModule)
        _check_names(settings, is_module)
        check_model(model, tokenizer)
        own, reward, chosen = _completed(dict(settings), reward, recipe, is_module)
        if cluster is not None:
            cluster.check()
        ckpt_path = _checked_path(ckpt_path)
        if cluster is not None and cluster.dry_run:
            cluster.print_dry_run(uses_gpus=uses_gpus(own.get("accelerator")))
            return Trainer(max_steps=max_steps, adds_csv_log=False, logger=False, devices=1, accelerator="cpu")
        given = Given(
            model,
            prompts,  # type: ignore[arg-type]  # the data module takes a path object as well
            reward,
            max_steps=max_steps,
            ckpt_path=ckpt_path,
            cluster=cluster,
            settings=own,
            chosen=chosen,
        )
        if cluster is not None and cluster.places_ranks:
            return _fit_in_ranks(given, cluster, tokenizer)
        with nullcontext() if cluster is None else cluster.actors_connected():
            return _fit_here(given, tokenizer=tokenizer, folder=folder)
    except Exception as error:
        if is_shown_whole(error, folder, (*ARGUMENTS, *SETTINGS)):
            raise
        # cut to the frames of the user's code, without the threads and loops that the error came through
        raise error.with_traceback(user_traceback(error)) from None


def _completed(
    settings: dict[str, Any], reward: Reward | None, recipe: str | None, is_module: bool
) -> tuple[dict[str, Any], Reward | None, str]:
    """Settings with those of the recipe, unless a module is given; the reward; and the line about the chosen rate."""
    own = as_groups(settings)
    distillation = own.get("distillation")
    if isinstance(distillation, Distillation) and not distillation.with_reward:
        recipe = None  # its parts weigh rewards
        if reward is None and not getattr(own.get("engine"), "scores", False):
            reward = no_reward
    if not is_module:
        own = with_recipe(recipe, own)
    of_module = {name: value for name, value in own.items() if name in MODULE_SETTINGS}
    check_kinds("model", PolicyModule.__init__, module_defaults() | of_module)
    own, chosen = (own, "") if is_module else with_rate(own)
    return own, reward, chosen


def _checked_path(ckpt_path: Any) -> str | None:
    if ckpt_path is None:
        return None
    if not isinstance(ckpt_path, str | os.PathLike):
        raise ValueError(f"ckpt_path must be the path of a checkpoint, got {ckpt_path!r:.100}")
    path = os.path.expanduser(ckpt_path)
    check_checkpoint(path)
    return str(path)


def _check_names(settings: Iterable[str], is_module: bool) -> None:
    """Refuses settings that `fit` does not know, or that its module has already."""
    known = (() if is_module else MODULE_SETTINGS) + DATA_SETTINGS + FIT_TRAINER_SETTINGS
    for name in settings:
        if name not in known:
            if is_module and name in MODULE_SETTINGS:
                raise TypeError(
                    f"fit: {name!r} is a setting of PolicyModule, and model is a PolicyModule already: set it there"
                )
            raise TypeError(f"fit has no setting {name!r}{meant(name, known)}")


def is_shown_whole(error: Exception, folder: Sequence[str], names: Sequence[str]) -> bool:
    """Whether an error of a run from Python keeps its whole traceback, which else goes to a file.

    Args:
        error: gets settings named as typed, unless it comes from the user's code.
        folder: the run's, for the whole traceback; empty before there is one.
        names: of the settings.
    """
    own = user_traceback(error)
    if wants_traceback() or (own is None and not explains_itself(error)):
        is_about_settings = isinstance(error, ValueError | TypeError | OSError) and len(error.args) == 1
        if is_about_settings and own is None:
            error.args = (as_typed(str(error.args[0]), names),)
        return True
    kept = next((path for path in folder if Path(path).is_dir()), None)  # not of a run that has not trained yet
    whole = write_traceback(error, kept) or "LIT_ASYNC_RL_TRACEBACK=1"
    if own is None:
        log.warning("%s shows the whole traceback of the error below", whole)
    else:
        log.warning("the error below comes from your code; %s shows the whole traceback", whole)
    return False


@dataclass(frozen=True)
class Given:
    """Arguments of `fit`, from which each process of a run builds its own objects."""

    model: str | os.PathLike[str] | PreTrainedModel | PolicyModule
    prompts: Records
    reward: Reward | None
    _: KW_ONLY
    max_steps: int
    ckpt_path: str | None
    cluster: Cluster | None
    settings: Mapping[str, Any]
    chosen: str  # line about the learning rate, empty if one was given

    def of(self, names: Sequence[str]) -> dict[str, Any]:
        """The settings of one class."""
        return {name: value for name, value in self.settings.items() if name in names}

    def make_module(self) -> PolicyModule:
        """The module that is trained."""
        is_module = isinstance(self.model, PolicyModule)
        return self.model if is_module else PolicyModule(self.model, **self.of(MODULE_SETTINGS))  # type: ignore


def _fit_here(
    given: Given,
    place: Place | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    folder: list[str] | None = None,
) -> Trainer:
    """Trains in this process, and those that Lightning starts.

    Args:
        given: to `fit`.
        place: of this process among placed ranks; None elsewhere.
        tokenizer: in the place of the model's own.
        folder: gets the folder of the run.
    """
    trainer_settings = given.of(FIT_TRAINER_SETTINGS)
    ckpt_path = (place.resume_from if place is not None else None) or given.ckpt_path
    data = RolloutDataModule(prompts=given.prompts, reward=given.reward, **given.of(DATA_SETTINGS))
    trainer = Trainer(max_steps=given.max_steps, adds_csv_log=False, **placed_settings(place, trainer_settings))
    gather_loggers(trainer, ckpt_path)
    with contextlib.ExitStack() as stack:
        if not isinstance(given.model, PolicyModule):
            is_in_memory = tokenizer is not None or isinstance(given.model, PreTrainedModel)
            if trainer.world_size > 1 and is_in_memory:
                raise ValueError(
                    "model: an in-memory model or tokenizer needs a single-process run, but this run has "
                    f"{trainer.world_size} processes: save both with save_pretrained, and pass the folder"
                )
            given = replace(given, model=stack.enter_context(in_folder(given.model, tokenizer, trainer)))
        sections = _sections(given)
        trainer.callbacks.insert(0, SaveSettings(sections, ckpt_path))  # type: ignore[attr-defined]
        if place is not None:
            trainer.callbacks.insert(0, TellFolder(place))  # type: ignore[attr-defined]
        _label_wandb_runs(trainer, sections)
        if given.cluster is not None:
            given.cluster.place_actors(trainer, data)
        module = given.make_module()
        limit_rendezvous(trainer, data.limits.start_timeout_s, comparable(sections))
        stack.enter_context(CtrlC())
        check_resume(trainer, module, data, ckpt_path=ckpt_path)
        if given.chosen:  # when nothing of the settings has been refused
            rank_zero_only(print)(given.chosen)
        with run_folders(trainer, ckpt_path):
            if folder is not None:
                folder += [log.log_dir for log in trainer.loggers[:1] if isinstance(log, CSVLogger)]
            stopped_at = run(trainer, module, data, ckpt_path=ckpt_path)
        conclude(trainer)
        if stopped_at and trainer.is_global_zero:
            print(f"resume with: fit(..., ckpt_path={stopped_at!r})")
        check_last_is_saved(trainer)
    return trainer


def _sections(given: Given) -> dict[str, dict[str, Any]]:
    """The settings of a run by section of the command line."""
    trainer_settings = given.of(FIT_TRAINER_SETTINGS)
    model = given.model
    own = model.given if isinstance(model, PolicyModule) else {"model": model, **given.of(MODULE_SETTINGS)}
    sections = {
        "model": dict(own),
        "data": {"prompts": given.prompts, "reward": given.reward, **given.of(DATA_SETTINGS)},
        "defaults": dict(changed_defaults(trainer_settings.get("defaults"))),
        "trainer": _as_saved(given.max_steps, trainer_settings),
    }
    if given.cluster is not None:
        sections["cluster"] = given.cluster.as_config()
    return sections


def _label_wandb_runs(trainer: pl.Trainer, sections: Mapping[str, Mapping[str, Any]]) -> None:
    for logger in trainer.loggers:
        if isinstance(logger, WandbLogger):
            held, described = as_config(sections)
            name = Path(str(sections["model"]["model"])).name
            is_fresh = sections["data"].get("max_staleness", MAX_STALENESS) == 0
            tags = ["synchronous" if is_fresh else "asynchronous"]
            label_run(logger, name, settings={**held, "objects": described}, tags=tags)


def _fit_in_ranks(given: Given, cluster: Cluster, tokenizer: Any) -> Trainer:
    """Trains in processes that the cluster places; the Trainer here gets what they end with."""
    if tokenizer is not None or isinstance(given.model, PreTrainedModel):
        raise ValueError(
            "model: an in-memory model or tokenizer cannot be used if `cluster` starts the ranks in other processes: "
            "pass the model's name or folder"
        )
    name = given.model.model if isinstance(given.model, PolicyModule) else str(given.model)
    loading.load_config(name)  # a wrong path is said before Ray and the ranks start
    with CtrlC():
        outcome = cluster.launch(partial(_fit_in_rank, given), uses_gpus=uses_gpus(given.settings.get("accelerator")))
    if outcome.status == CTRL_C_STATUS and is_interactive():
        raise KeyboardInterrupt
    if outcome.status > 128:
        raise SystemExit(outcome.status)
    if outcome.status:
        raise RankError(f"the run's ranks exited with status {outcome.status}; see the error above")
    module = given.make_module()
    load_trained(module, outcome.folder)
    trainer = Trainer(max_steps=given.max_steps, adds_csv_log=False, logger=False, devices=1, accelerator="cpu")
    trainer.strategy.connect(module)
    trainer.callback_metrics.update({name: torch.tensor(value) for name, value in (outcome.result or {}).items()})
    return trainer


def _fit_in_rank(given: Given, place: Place) -> None:
    """`fit`, in a process that the cluster has placed."""
    trainer = _fit_here(given, place)
    if trainer.is_global_zero:
        place.give(metrics_of(trainer))


def _as_saved(max_steps: int, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The Trainer's arguments as in `config.yaml`: without `defaults`, other callbacks in a list."""
    saved = {"max_steps": max_steps, **settings}
    saved.pop("defaults", None)
    if isinstance(callbacks := saved.get("callbacks"), pl.Callback):
        saved["callbacks"] = [callbacks]
    return saved


def _full_signature() -> inspect.Signature:
    """The signature of `fit` with every setting by name, for `help` and completion in notebooks."""
    own = [one for one in inspect.signature(fit).parameters.values() if one.kind is not one.VAR_KEYWORD]
    names = {one.name for one in own}
    classes = (PolicyModule, RolloutDataModule, pl.Trainer)
    rest = [one for kind in classes for one in inspect.signature(kind).parameters.values()]
    rest.append(inspect.Parameter("defaults", inspect.Parameter.KEYWORD_ONLY, default=None))
    settings = {one.name: one.replace(kind=one.KEYWORD_ONLY) for one in reversed(rest) if one.name not in names}
    return inspect.Signature([*own, *reversed(settings.values())], return_annotation="Trainer")


fit.__signature__ = _full_signature()  # type: ignore[attr-defined]
fit.__annotations__ = {**fit.__annotations__, "settings": Any}  # the types of editors are not imported at run time


def run(trainer: pl.Trainer, module: PolicyModule, data: Any, ckpt_path: str | None = None) -> str | None:
    """Measures held-out accuracy if there are held-out prompts, trains, and measures the end if training has not.

    `check_last_is_saved` raises, after the summary, if a full disk did not take the last checkpoint.

    Args:
        trainer: of the run.
        module: to be trained.
        data: a `RolloutDataModule`, or that of another stage.
        ckpt_path: checkpoint to go on from.

    Returns:
        The checkpoint to go on from if SIGTERM, SIGHUP or Ctrl-C ended training, empty if there is none; None if none
        of them did.
    """
    rules.refuse(rules.of_loop(trainer, data.micro_batches_per_step))
    validates = data.validates
    with data.kept_open():
        if validates:
            _validate(trainer, module, data, ckpt_path=ckpt_path)
        stopped_at = _fit_until_stopped(trainer, module, data, ckpt_path=ckpt_path)
        if validates and stopped_at is None and not module.is_validated:
            _validate(trainer, module, data)
    return stopped_at


def _validate(trainer: pl.Trainer, module: PolicyModule, data: Any, ckpt_path: str | None = None) -> None:
    try:
        trainer.validate(module, data, ckpt_path=ckpt_path, verbose=False)
    except SIGTERMException:  # while the validation was set up
        raise SystemExit(signal_status()) from None


def _fit_until_stopped(trainer: pl.Trainer, module: PolicyModule, data: Any, ckpt_path: str | None) -> str | None:
    savers = callbacks_of(trainer, SaveOnSigterm)
    try:
        trainer.fit(module, data, ckpt_path=ckpt_path)
    except LastCheckpointError:
        log.debug("check_last_is_saved reports it, after the summary")
    except SIGTERMException:
        if not any(saver.path for saver in savers):
            raise SystemExit(signal_status()) from None
    stopped_at = next((saver.path for saver in savers if saver.path), None)
    is_there = stopped_at is None or "://" in stopped_at or Path(stopped_at).exists()
    return stopped_at if is_there else ""


def conclude(trainer: pl.Trainer) -> None:
    """Prints the table of `RunSummary`, uploads the report, and prints how to upload an offline W&B run."""
    for summary in callbacks_of(trainer, RunSummary):
        summary.print(trainer)
    _upload_report(trainer)
    command = sync_command(trainer.loggers) if trainer.is_global_zero else None
    if command is not None:
        print(f"upload with: {command}")


def _upload_report(trainer: pl.Trainer) -> None:
    """Writes the run's report for trackers that keep files; nothing without one.

    Failures are warnings: the run itself has ended well.
    """
    folder = run_folder(trainer)  # a collective
    loggers = [logger for logger in trainer.loggers if keeps_files(logger)]
    reports = part("report.html")
    if folder is None or not trainer.is_global_zero or not loggers or reports is None:
        return
    try:
        path = reports.write_report(folder)
        for logger in loggers:
            log_file(logger, path, "report")
    except Exception as error:
        log.warning("no report of the run: %s", describe(error))


# -- The correction of stale data that `fit` makes unless told otherwise ----------------------------------------------


RECIPE_SETTINGS = ("loss", "proximal", "correction", "baseline", "advantage", "aggregation")
RECIPES = ("vcpo", None)
RECIPE_FILE = CONFIGS / "stabilizers" / "vcpo_score.yaml"
MAX_STALENESS: int = inspect.signature(RolloutDataModule).parameters["max_staleness"].default


def with_recipe(recipe: str | None, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of `fit` with VCPO's parts (arXiv:2602.17616), where data may be stale and no part is given.

    They come from `configs/stabilizers/vcpo_score.yaml`: the optimal baseline has `SCORE` norms, which need no extra
    pass.

    Args:
        recipe: `"vcpo"`; None leaves the settings as they are.
        settings: of module, data and Trainer.

    Raises:
        ValueError: there is no such recipe.
    """
    if recipe not in RECIPES:
        raise ValueError(f"fit: recipe must be 'vcpo' or None (plain GRPO), got {recipe!r}")
    is_fresh = settings.get("max_staleness", MAX_STALENESS) == 0
    is_alone = settings.get("group_size") == 1  # refused by its own name, not by that of the recipe's baseline
    if recipe is None or is_fresh or is_alone or any(settings.get(part) is not None for part in RECIPE_SETTINGS):
        return dict(settings)
    overlay = load_config(RECIPE_FILE)
    parts = {name: build(spec) for section in ("model", "data") for name, spec in overlay.get(section, {}).items()}
    callbacks = {key: build(spec) for key, spec in overlay["defaults"].items()}
    return {**settings, **parts, "defaults": {**callbacks, **changed_defaults(settings.get("defaults"))}}


# -- The learning rate that `fit` chooses where none is given ---------------------------------------------------------


def with_rate(settings: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """Settings of `fit` with the learning rate that fits the staleness bound, and a line that says so.

    It is `DEFAULT_LEARNING_RATE` times the factor of `lit_async_rl.training.rate_by_bound`; a factor of 1 changes
    nothing. Nothing is chosen, and the line is empty, where a rate, an optimizer or a scheduler of torch is given, or
    where a setting is wrong, which its owner refuses.

    Args:
        settings: of module, data and Trainer, with the recipe's parts.
    """
    scheduler = settings.get("scheduler")
    is_given = any(settings.get(name) is not None for name in ("learning_rate", "optimizer"))
    bound = settings.get("max_staleness", MAX_STALENESS)
    sync_steps = settings.get("weight_sync_steps", 1)
    are_counts = isinstance(bound, Integral) and isinstance(sync_steps, Integral)
    is_wrong = not are_counts or int(bound) < 0 or int(sync_steps) < 1
    if is_given or is_wrong or not isinstance(scheduler, RateSchedule | None):
        return dict(settings), ""
    loss = settings.get("loss") or PPOClip()
    kind = handling(loss, settings.get("correction"), settings.get("baseline"))
    factor = rate_factor(int(bound), kind, int(sync_steps))
    rate = factor * DEFAULT_LEARNING_RATE
    is_fresh = bound == 0 and sync_steps == 1
    means = f"max_staleness={bound}" if sync_steps == 1 else f"max_staleness={bound}, weight_sync_steps={sync_steps}"
    means = means if kind is None or is_fresh else f"{means} with {kind.value}"
    why = f"the default also fits {means}"
    if factor < 1:
        why = f"{factor:.2g} times the default fits {means}"
    elif kind is None and not is_fresh:
        why = f"the default, as what fits a bound was not measured for {type(loss).__name__}"
    usual = "; adapters usually learn at 1e-5 to 1e-4" if settings.get("lora") is not None else ""
    line = f"learning_rate={rate:.3g}, since none was given ({why}){usual}; fit(..., learning_rate=...) sets another"
    return ({**settings, "learning_rate": rate} if factor < 1 else dict(settings)), line


# -- Ctrl-C during training: the first saves and ends cleanly, the second ends at once --------------------------------


CTRL_C_STATUS = 130  # of shells, 128 + SIGINT
_NOTICE = b"Ctrl-C: training ends after this step and saves a checkpoint; once more ends it at once\n"


class CtrlC:
    """Context in which the first Ctrl-C acts like SIGTERM, and the second ends the process at once.

    Before training, when SIGTERM has no handler, Ctrl-C is an ordinary `KeyboardInterrupt`. After Ctrl-C the context
    exits with `SystemExit(130)`; in an interactive session, such as a notebook, which that would end, with
    `KeyboardInterrupt`.

    Attributes:
        was_pressed: whether Ctrl-C was received.
    """

    def __init__(self) -> None:
        self.was_pressed = False
        self._before: Any = None

    def __enter__(self) -> CtrlC:
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGINT, self._press)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)
        SaveOnSigterm.signal_name = "SIGTERM"
        if self.was_pressed and (error is None or isinstance(error, SystemExit | KeyboardInterrupt)):
            raise (KeyboardInterrupt if is_interactive() else SystemExit(CTRL_C_STATUS)) from None

    def _press(self, *_: Any) -> None:
        if self.was_pressed:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
        self.was_pressed = True
        SaveOnSigterm.signal_name = "Ctrl-C"
        if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            raise KeyboardInterrupt
        if os.environ.get("LOCAL_RANK", "0") == "0":
            if os.isatty(2):  # from a thread, and above what is drawn there
                say = partial(print, _NOTICE.decode(), end="", file=sys.stderr, flush=True)
                start_thread(say, name="ctrl-c")
            else:
                os.write(2, _NOTICE)  # `print` may be what was interrupted
        signal.raise_signal(signal.SIGTERM)


def is_interactive() -> bool:
    """Whether Python reads what a person types, in a terminal or a notebook."""
    return hasattr(sys, "ps1") or hasattr(builtins, "__IPYTHON__")
