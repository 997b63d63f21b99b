"""`sft`, the shortest way to fine-tune, and its default callbacks and model writer, which the command line shares."""

from __future__ import annotations

import contextlib
import inspect
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.loggers import CSVLogger
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lit_async_rl.api.arguments import as_groups, check_model, in_folder
from lit_async_rl.api.resume_check import check_resume
from lit_async_rl.api.run import CtrlC, conclude, is_shown_whole, run
from lit_async_rl.api.run_config import SaveSettings, comparable
from lit_async_rl.api.run_folders import gather_loggers, run_folders
from lit_async_rl.api.trainer import TRAINER_SETTINGS, Trainer
from lit_async_rl.callbacks.parts import run_folder
from lit_async_rl.distributed.scatter import limit_rendezvous
from lit_async_rl.models.export import export_model
from lit_async_rl.models.loading import adapter_folder, base_of, has_adapter
from lit_async_rl.models.lora import LoRA
from lit_async_rl.models.weights import is_sharded
from lit_async_rl.runtime.files import naming_full_disk
from lit_async_rl.supervised.data import SFTDataModule
from lit_async_rl.supervised.module import SFTModule
from lit_async_rl.training.checkpoint_io import check_checkpoint
from lit_async_rl.training.module import PolicyModule
from lit_async_rl.utils.checks import meant
from lit_async_rl.utils.saving import check_last_is_saved
from lit_async_rl.utils.user_code import user_traceback

log = logging.getLogger(__name__)
BASE_FOLDER = "base"  # in the run's folder: an in-memory model, or a model with another tokenizer
MODULE_SETTINGS = tuple(inspect.signature(SFTModule.__init__).parameters)[2:]  # without self and the model
DATA_SETTINGS = tuple(inspect.signature(SFTDataModule.__init__).parameters)[2:]  # without self and the model
SETTINGS = (*MODULE_SETTINGS, *DATA_SETTINGS, "defaults", *TRAINER_SETTINGS)
LEFT_OUT = (  # default callbacks of RL that need rollouts
    *("rollouts", "staleness", "importance", "engine_check", "fresh_data", "throughput", "reward_hacking"),
    *("timeline", "samples", "weight_sync", "verdict", "ess_learning_rate"),
)


def sft(
    model: str | os.PathLike[str] | PreTrainedModel,
    records: Any,
    *,
    max_steps: int = -1,
    ckpt_path: str | os.PathLike[str] | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    **settings: Any,
) -> Trainer:
    """Fine-tunes a language model on records, prints a summary, and writes the model into the run's folder.

    Example:
        ```python
        import lit_async_rl as rl

        records = [{"prompt": "3142=", "completion": "1234"}, {"prompt": "21=", "completion": "12"}]
        trainer = rl.sft(rl.asset("sort_policy"), records, samples_per_step=2, epochs=3, accelerator="cpu")
        policy = trainer.lightning_module
        ```

    Args:
        model: Hugging Face name or folder, or a `transformers.PreTrainedModel`.
        records: as of `SFTDataModule`.
        max_steps: optimizer steps; -1 leaves the length to `epochs`.
        ckpt_path: checkpoint to resume from.
        tokenizer: in place of the model's own.
        **settings: any other argument of `SFTModule`, `SFTDataModule` and `Trainer`.

    Returns:
        The Trainer; `trainer.lightning_module` is the trained module. `fit` continues from `RUN/model`, or from
        `RUN/adapter` if only the adapter differs from the base. A model from memory is in `RUN/base`.

    Raises:
        FileNotFoundError: there is no such checkpoint or file.
        OSError: another process uses the run's folder.
        TypeError: none of the three has such an argument.
        ValueError: a setting or a record is bad.
    """
    folder: list[str] = []
    try:
        return _sft(
            model,
            records,
            max_steps=max_steps,
            ckpt_path=ckpt_path,
            tokenizer=tokenizer,
            settings=settings,
            folder=folder,
        )
    except Exception as error:
        if is_shown_whole(error, folder, ("model", *SETTINGS)):
            raise
        raise error.with_traceback(user_traceback(error)) from None


def _sft(
    model: Any,
    records: Any,
    *,
    max_steps: int,
    ckpt_path: str | os.PathLike[str] | None,
    tokenizer: Any,
    settings: Mapping[str, Any],
    folder: list[str],
) -> Trainer:
    """`sft` with full tracebacks; `folder` gets the run's."""
    for name in settings:
        if name not in SETTINGS:
            raise TypeError(f"sft has no setting {name!r}{meant(name, SETTINGS)}")
    check_model(model, tokenizer)
    if isinstance(model, PolicyModule):
        raise ValueError(
            "model must be a name, a folder or a transformers.PreTrainedModel: sft creates the PolicyModule itself"
        )
    made = as_groups({**settings, "records": records})
    of_module = {name: value for name, value in made.items() if name in MODULE_SETTINGS}
    of_data = {name: value for name, value in made.items() if name in DATA_SETTINGS}
    of_trainer = {name: value for name, value in made.items() if name in ("defaults", *TRAINER_SETTINGS)}
    ckpt_path = None if ckpt_path is None else os.path.expanduser(ckpt_path)
    if ckpt_path is not None:
        check_checkpoint(ckpt_path)
    defaults = dict.fromkeys(LEFT_OUT) | dict(of_trainer.pop("defaults", None) or {})
    trainer = Trainer(max_steps=max_steps, defaults=defaults, adds_csv_log=False, **of_trainer)
    gather_loggers(trainer, ckpt_path)
    with contextlib.ExitStack() as stack:
        # what is trained, or its adapter, is written beside it
        model = stack.enter_context(in_folder(model, tokenizer, trainer, name=BASE_FOLDER))
        data = SFTDataModule(model, **of_data)
        data.read_records()
        data.limit_steps(trainer)
        sections = {
            "model": {"model": model, **of_module},
            "data": of_data,
            "trainer": {"max_steps": trainer.max_steps, **of_trainer},
        }
        trainer.callbacks.insert(0, SaveSettings(sections, ckpt_path))  # type: ignore[attr-defined]
        module = SFTModule(model, **of_module)
        limit_rendezvous(trainer, data.limits.start_timeout_s, comparable(sections))
        stack.enter_context(CtrlC())
        check_resume(trainer, module, data, ckpt_path=ckpt_path)
        with run_folders(trainer, ckpt_path):
            folder += [one.log_dir for one in trainer.loggers[:1] if isinstance(one, CSVLogger)]
            stopped_at = train(trainer, module, data, ckpt_path=ckpt_path)
        if stopped_at and trainer.is_global_zero:
            print(f"resume with: sft(..., ckpt_path={stopped_at!r})")
        check_last_is_saved(trainer)
    return trainer


def train(trainer: pl.Trainer, module: SFTModule, data: SFTDataModule, ckpt_path: str | None) -> str | None:
    """Trains, prints the summary, and writes the model unless the run was stopped; returns `run`'s result."""
    stopped_at = run(trainer, module, data, ckpt_path=ckpt_path)
    conclude(trainer)
    if stopped_at is None and (folder := write_model(trainer, module, data)) and trainer.is_global_zero:
        print(f"train on with: --model.model {folder}")
    return stopped_at


def _is_all_of_it(lora: LoRA, model: str) -> bool:
    """Whether the trained adapter and the base that it names are the model: no adapter of the model was merged."""
    return not has_adapter(model) or (lora.continue_adapter and base_of(model) != adapter_folder(model))


def write_model(trainer: pl.Trainer, module: SFTModule, data: SFTDataModule) -> str | None:
    """Writes the trained model, or the adapter alone, into the run's folder. A collective if weights are sharded.

    Returns:
        The folder; None of a run without one.
    """
    run_of = run_folder(trainer)
    if run_of is None or "://" in str(run_of):
        return None
    policy = module.policy
    lora = module.given["lora"]
    is_whole = not is_sharded(trainer.strategy.model or module)
    if policy.has_adapters and is_whole and not lora.modules_to_save and _is_all_of_it(lora, module.model):
        folder = Path(run_of, "adapter")
        if trainer.is_global_zero:
            lm: Any = policy.lm
            for config in lm.peft_config.values():  # found from any working folder
                base = Path(base_of(module.model))
                config.base_model_name_or_path = str(base.resolve()) if base.exists() else str(base)
            with naming_full_disk(f"adapter {folder}"):
                lm.save_pretrained(folder)
                data.codec.tokenizer.save_pretrained(folder)
        return str(folder)
    folder = Path(run_of, "model")
    weights: dict[str, Any] = {}
    for name, tensor in module.stream_weights():  # all ranks: each weight is gathered by a collective
        if trainer.is_global_zero:
            weights[name] = tensor.detach().cpu().contiguous()
    if trainer.is_global_zero:
        export_model(policy.causal_lm, data.codec.tokenizer, folder, weights=weights)
    return str(folder)
