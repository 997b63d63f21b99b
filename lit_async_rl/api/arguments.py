"""Arguments of `fit` in other forms: models and tokenizers in memory, dictionaries, lists, PEFT's LoRA.

A model in memory is written to the run's folder, where trainer and engine read it like any other.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import is_peft_available

from lit_async_rl.api.run_folders import remove_unused
from lit_async_rl.callbacks.parts import run_folder
from lit_async_rl.data.settings import Limits, Scoring, Validation
from lit_async_rl.models.export import export_model
from lit_async_rl.models.loading import base_of, load_tokenizer, model_folder
from lit_async_rl.models.lora import LoRA
from lit_async_rl.models.sharding import Sharding
from lit_async_rl.runtime.files import part_name
from lit_async_rl.training.module import PolicyModule
from lit_async_rl.types import SamplingParams
from lit_async_rl.utils.checks import meant

# -- Groups of settings -----------------------------------------------------------------------------------------------


GROUPS: dict[str, Callable[..., Any]] = {
    "sampling": SamplingParams,
    "scoring": Scoring,
    "validation": Validation,
    "limits": Limits,
    "lora": LoRA,
    "sharding": Sharding,
}
PEFT_SETTINGS = {"r": "rank", "lora_alpha": "alpha", "target_modules": "target_modules", "modules_to_save": None}
PEFT_IGNORED = ("task_type", "inference_mode", "base_model_name_or_path", "revision", "peft_type", "auto_mapping")


def as_groups(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings with an object of this package for each dictionary, list of held-out prompts and `peft.LoraConfig`.

    Raises:
        TypeError: a dictionary has a key that its class does not.
        ValueError: a `LoraConfig` has a setting that adapters here lack.
    """
    made = dict(settings)
    for name in GROUPS.keys() & settings.keys():
        made[name] = _as_group(name, settings[name])
    return made


def _as_group(name: str, value: Any) -> Any:
    kind = GROUPS[name]
    if name == "lora" and is_peft_available():
        import peft

        if isinstance(value, peft.LoraConfig):
            return _as_lora(value)
    if name == "validation" and value is not None and not isinstance(value, Mapping | Validation | int | type):
        return Validation(prompts=value)
    if type(value) is not dict:
        return value
    given = {key: _as_group(key, one) if key in GROUPS else one for key, one in value.items()}
    known = _parameters(kind)
    for key in given:
        if key not in known:
            raise TypeError(
                f"{name} has no setting {key!r}{meant(str(key), known)} (rl.{kind.__name__} has {', '.join(known)})"
            )
    return kind(**given)


def _parameters(kind: Callable[..., Any]) -> tuple[str, ...]:
    return tuple(inspect.signature(kind).parameters)


def _as_lora(config: Any) -> LoRA:
    """This package's adapters for those of PEFT.

    Raises:
        ValueError: names the settings that they do not have.
    """
    plain = type(config)()
    own = {name: value for name, value in vars(config).items() if value != getattr(plain, name, None)}
    others = [f"{name}={own[name]!r}" for name in own if name not in (*PEFT_SETTINGS, *PEFT_IGNORED)]
    if others:
        why = " (with dropout, ratios would not be 1 on fresh data)" if "lora_dropout" in own else ""
        raise ValueError(
            f"lora: {', '.join(others)} of peft.LoraConfig cannot be used{why}: set only {', '.join(PEFT_SETTINGS)}"
        )
    targets = config.target_modules
    return LoRA(
        rank=config.r,
        alpha=config.lora_alpha,
        target_modules=sorted(targets) if isinstance(targets, set) else targets,
        modules_to_save=config.modules_to_save,
    )


# -- Models and tokenizers in memory ----------------------------------------------------------------------------------


MODEL_FOLDER = "model"  # in the run's folder


def check_model(model: Any, tokenizer: Any) -> None:
    """Refuses what is no model, and a tokenizer that cannot go with it.

    Raises:
        ValueError: says what is wanted.
    """
    wanted = "the name or folder of a model, a transformers.PreTrainedModel, or an rl.PolicyModule"
    if isinstance(model, type):
        raise ValueError(f"model must be {wanted}, but {model.__name__} is a class: write {model.__name__}(...)")
    if hasattr(model, "merge_and_unload"):
        raise ValueError(f"model must be {wanted}, got a {type(model).__name__}: pass model.merge_and_unload()")
    if not isinstance(model, str | os.PathLike | PreTrainedModel | PolicyModule):
        name = "None" if model is None else f"a {type(model).__name__}: {str(model)[:80]!r}"
        raise ValueError(f"model must be {wanted}, got {name}")
    if tokenizer is None:
        return
    if not isinstance(tokenizer, PreTrainedTokenizerBase):
        raise ValueError(f"tokenizer must be a transformers tokenizer, got {type(tokenizer).__name__}")
    if isinstance(model, PolicyModule):
        raise ValueError("tokenizer cannot be combined with a PolicyModule, which loads its own tokenizer")


@contextmanager
def in_folder(
    model: str | os.PathLike[str] | PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    trainer: pl.Trainer,
    name: str = MODEL_FOLDER,
) -> Iterator[str]:
    """Context with a folder of the model and its tokenizer: the run's, or without a logger one that goes at the end.

    A named model without another tokenizer stays where it is. An error before the first step removes the folder, or
    brings back what was there. Ranks other than the leading one have temporary folders.

    Args:
        model: in memory, or its name or folder.
        tokenizer: in place of the model's own; None is that of where the model came from.
        trainer: of the run, whose folder is known.
        name: of the folder, in the run's.

    Raises:
        ValueError: there is no tokenizer; or the folder to write holds the model's own files.
    """
    if not isinstance(model, PreTrainedModel) and tokenizer is None:
        yield os.fspath(model)
        return
    tokenizer = tokenizer or _own_tokenizer(model)
    run = run_folder(trainer)  # a collective
    if not trainer.is_global_zero:
        run = None
    with contextlib.ExitStack() as stack:
        temporary = stack.enter_context(tempfile.TemporaryDirectory(prefix="lit-async-rl-")) if run is None else ""
        folder = Path(temporary or run or "", name)
        part = part_name(folder)
        old = part.with_suffix(".old.part")  # recovered after a crash by `remove_stale_parts`
        _remove(part)  # of a killed process of the same number, as in a container that is started again
        if old.exists():
            _remove(old) if folder.exists() else old.rename(folder)
        is_new = not folder.exists()

        def remove_after_a_step(trainer: pl.Trainer, *_: Any) -> None:
            if trainer.global_step:
                _remove(old)

        try:
            part.mkdir(parents=True)
            _write(model, tokenizer, part, folder=folder)
            if not is_new:  # of the run that is resumed, whose adapter and checkpoints name it
                folder.rename(old)
                callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
                callbacks.insert(0, pl.callbacks.LambdaCallback(on_train_batch_end=remove_after_a_step))
            part.rename(folder)
            yield str(folder)
        except BaseException:
            if trainer.global_step == 0:
                _remove(part)
                if old.exists():
                    _remove(folder)
                    old.rename(folder)
                elif is_new and not _has_forked(trainer):
                    _remove(folder)
                remove_unused(trainer)
            raise
        finally:
            _remove(old)


def _remove(folder: Path) -> None:
    if folder.is_symlink():
        folder.unlink()
    else:
        shutil.rmtree(folder, ignore_errors=True)


def _write(model: Any, tokenizer: PreTrainedTokenizerBase, part: Path, *, folder: Path) -> None:
    """Writes a model and its tokenizer to `part`, which then becomes `folder`."""
    if isinstance(model, PreTrainedModel):
        export_model(model, tokenizer, part, weights=model.state_dict())
        return
    name = os.path.expanduser(model)
    source = model_folder(name)
    if folder.resolve() in (source.resolve(), Path(base_of(name)).resolve()):
        raise ValueError(
            f"model={os.fspath(model)!r}: its files are in {str(folder)!r}, where this run would write the model and "
            "the tokenizer: leave tokenizer out"
        )
    for file in source.iterdir():
        if not file.name.startswith(("tokenizer", "chat_template", "vocab", "merges", "special_tokens")):
            (part / file.name).symlink_to(file.resolve())
    tokenizer.save_pretrained(part)


def _has_forked(trainer: pl.Trainer) -> bool:
    """Whether ranks were forked from this process, whose Trainer does not know their steps after an error."""
    launcher: Any = trainer.strategy.launcher
    return launcher is not None and launcher.is_interactive_compatible and bool(getattr(launcher, "procs", ()))


def _own_tokenizer(model: Any) -> PreTrainedTokenizerBase:
    name = getattr(model, "name_or_path", "") or ""
    try:
        return load_tokenizer(name)
    except FileNotFoundError:
        raise ValueError(
            f"tokenizer must be given: the in-memory model was loaded from {name!r}, which has no tokenizer"
        ) from None


# -- Settings in messages, named as they were typed -------------------------------------------------------------------


def as_typed(message: str, names: Sequence[str]) -> str:
    """A message of the three classes without the section of settings (`data.group_size`), for arguments of `fit`."""
    known = "|".join(map(re.escape, sorted(names, key=len, reverse=True)))
    return re.sub(rf"(?<![\w./])(?:data|model|trainer)\.(?=(?:{known})\b(?!/))", "", message)
