"""Loading by classes of transformers, with errors that name the setting."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from safetensors import SafetensorError
from transformers.utils import find_adapter_config_file
from transformers.utils import logging as transformers_logging

ADAPTER = "adapter_config.json"  # of an adapter that PEFT has saved
FETCHED = "models/smollm2"  # where configs/smollm2.yaml expects what has to be fetched first


def load_pretrained(loader: Any, model: str, **kwargs: Any) -> Any:
    """Loads something of a model by a class of transformers.

    Args:
        loader: class with `from_pretrained`.
        model: name on the Hugging Face hub, or folder.
        **kwargs: of `from_pretrained`.

    Raises:
        FileNotFoundError: there is no such model, or its folder holds none.
        ValueError: the model does not support `attn_implementation`.
    """
    if not model:
        raise FileNotFoundError(f"model.model must name a model of the hub, or a folder, got {model!r}")
    is_folder = Path(model).is_dir()
    if not is_folder and not is_hub_name(model):
        raise FileNotFoundError(f"model.model={model!r}: there is no such folder{_how_to_fetch(model)}")
    if is_folder and Path(model, ADAPTER).is_file():
        check_peft(model)  # transformers would leave the adapter out without a word
    elif is_folder and not Path(model, "config.json").is_file():
        raise FileNotFoundError(f"model.model={model!r}: the folder has no config.json{_how_to_export(Path(model))}")
    try:
        with _without_bar():
            # without `trust_remote_code=False` transformers asks on the terminal whether to run a model's own code
            return loader.from_pretrained(model, trust_remote_code=False, **kwargs)
    except (OSError, ValueError, ImportError, TypeError, SafetensorError) as error:  # TypeError: a file is not there
        if (chosen := kwargs.get("attn_implementation")) and _is_about_attention(error):
            raise ValueError(f"model.attn_implementation={chosen!r} cannot be used: {_first_line(error)}") from error
        if "trust_remote_code" in str(error):
            raise ValueError(
                f"model.model={model!r} needs Python code of its own (trust_remote_code), which is not executed here: "
                "trainer, engines and exports compute the families that transformers has. Use a version of the model "
                "without custom code (no auto_map in its config.json)"
            ) from error
        what = "the folder holds no model that transformers can load" if is_folder else "not found, here or on the hub"
        raise FileNotFoundError(f"model.model={model!r}: {what} ({_first_line(error)})") from error


def is_hub_name(model: str) -> bool:
    """Whether `model` can only be the name of a repository on the hub: it is no folder, and not written as a path."""
    is_path = model.startswith((".", "/", "~", FETCHED)) or model.count("/") > 1
    return bool(model) and not is_path and not Path(model).exists()


@cache
def adapter_snapshot(repository: str) -> str | None:
    """Local copy of a repository on the hub that holds an adapter of PEFT; None if it holds none.

    Asks the hub once in a process, or the cache where that is all there is. Without the copy transformers would load
    the base that the adapter names, put the adapter's layers into it, and call the result the model.
    """
    try:
        if find_adapter_config_file(repository) is None:
            return None
    except OSError:  # no such repository: the model's own loader says so
        return None
    return snapshot_download(repository, ignore_patterns=["*/*"])  # the folders of a run's checkpoints stay there


def check_peft(model: str) -> None:
    """Refuses an adapter where PEFT is not installed.

    Raises:
        ModuleNotFoundError: it is not.
    """
    if importlib.util.find_spec("peft") is None:
        raise ModuleNotFoundError(
            f'model.model={model!r} holds an adapter, which needs PEFT: pip install "lit-async-rl[peft]"'
        )


def _is_about_attention(error: Exception) -> bool:
    return "attn_implementation" in str(error) or "attention" in str(error).lower()


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


@contextmanager
def _without_bar() -> Iterator[None]:
    """Without transformers' own progress bar: in a notebook it recurses endlessly inside of Lightning's."""
    was_on = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_on:
            transformers_logging.enable_progress_bar()


def _how_to_fetch(model: str) -> str:
    """The command that fetches a shipped configuration's model; empty if it is another one."""
    command = f"`make smollm2`, or `lit-async-rl fetch smollm2 --out {model}`, makes it"
    return f"; {command}" if model.startswith(FETCHED) else ""


def _how_to_export(folder: Path) -> str:
    """The command that makes a model of a run's folder; empty if it is none."""
    config, checkpoint = folder / "config.yaml", folder / "checkpoints" / "last.ckpt"
    if not (config.is_file() and checkpoint.exists()):
        return ""
    return (
        f"; it is the folder of a run, whose model is made by: lit-async-rl export --config {config} "
        f"--ckpt_path {checkpoint} --out FOLDER"
    )
