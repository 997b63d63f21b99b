"""Loading Hugging Face causal LMs and tokenizers, with errors that name the setting."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from lit_async_rl.models.attention import choose_attention
from lit_async_rl.models.meta_loading import allocate, parameters_on_meta
from lit_async_rl.models.pretrained import ADAPTER, adapter_snapshot, check_peft, is_hub_name, load_pretrained
from lit_async_rl.utils.checks import check_dtype
from lit_async_rl.utils.patience import announced


def load_policy(
    model: str,
    dtype: str = "float32",
    attn_implementation: str | None = None,
    random_init: bool = False,
    device: str = "cpu",
    adapter: Literal["merge", "leave_out"] = "merge",
) -> PreTrainedModel:
    """Loads a causal LM in evaluation mode and without dropout, so that log-probabilities are deterministic.

    A folder, or a repository on the hub, may hold an adapter of PEFT (`adapter_config.json`), alone or beside the
    weights: it is part of the model.

    Args:
        model: name on the Hugging Face hub, or folder with `config.json` and weights.
        dtype: name of a torch dtype.
        attn_implementation: attention implementation of transformers; None is its default, or eager attention where
            the default ignores a setting of the configuration (Gemma 2's soft cap), see `choose_attention`.
        random_init: initialise randomly, with the architecture of `model`.
        device: `auto` is the first accelerator, or the CPU; `meta` reads no weights (`WeightFiles` does so later).
        adapter: what becomes of an adapter in the folder; `leave_out` is for those who load it themselves.

    Raises:
        FileNotFoundError: `model` is neither a folder with a model nor a name that can be loaded.
        ValueError: `dtype` is no torch dtype, the model is no causal LM, `attn_implementation` ignores a setting of the
            configuration, or the model has weights that are not finite.
    """
    check_dtype("model.dtype", dtype)
    torch_dtype = getattr(torch, dtype)
    config = load_config(model)
    if type(config) not in AutoModelForCausalLM._model_mapping:
        raise ValueError(
            f"model.model={model!r} is a {config.model_type!r} model, which is not a causal language model"
        )
    check_not_quantized(config, model)
    kwargs: dict[str, Any] = {"dtype": torch_dtype}
    if attn_implementation is not None:
        kwargs["attn_implementation"] = attn_implementation
    if device == "meta":
        with parameters_on_meta():
            lm = AutoModelForCausalLM.from_config(config, **kwargs)
        lm.generation_config = load_generation_config(model) or lm.generation_config
    elif random_init:
        lm = AutoModelForCausalLM.from_config(config, **kwargs)
    else:
        with announced(f"model {model!r} to be read, or downloaded"), _without_adapter(model) as plain:
            lm = load_pretrained(AutoModelForCausalLM, plain, **kwargs)
        folder = adapter_folder(model)
        if folder is not None and adapter == "merge":
            check_peft(model)
            lm = _with_adapter_merged(lm, folder)
        lm.config.name_or_path = model
        check_finite(lm.named_parameters(), f"model.model={model!r}")
    choose_attention(lm, attn_implementation)
    _remove_dropout(lm)
    module: nn.Module = lm.eval()  # the annotations of `PreTrainedModel.to` are lost in a decorator
    if device != "meta":
        module.to(find_device(device))
    return lm


def build_policy(model: str, dtype: str, device: str) -> PreTrainedModel:
    """The architecture of a causal LM for inference, with room for its weights, which are neither read nor initialised.

    Takes the arguments of `load_policy`.
    """
    lm = load_policy(model, dtype=dtype, device="meta").requires_grad_(False)
    allocate(lm, find_device(device))
    return lm


def weight_bytes(model: str, dtype: torch.dtype) -> int:
    """Bytes of a model's weights in `dtype`; reads only its configuration.

    Raises:
        FileNotFoundError, ValueError: as `load_policy`.
    """
    return dtype.itemsize * sum(weight.numel() for weight in load_policy(model, device="meta").parameters())


def check_not_quantized(config: PreTrainedConfig, model: str) -> None:
    """Refuses quantized weights: they cannot be trained, merged with adapters or published to an engine.

    Raises:
        ValueError: names the quantization.
    """
    quantization = getattr(config, "quantization_config", None)
    if quantization:
        method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization.quant_method
        raise ValueError(
            f"model.model={model!r} has quantized weights ({getattr(method, 'value', method)}), which cannot be "
            "trained: name the unquantized model, or save it dequantized, without quantization_config in config.json"
        )


def check_finite(weights: Iterable[tuple[str, Tensor]], where: str) -> None:
    """Refuses weights that are NaN or infinite: they would train nothing, in silence.

    Args:
        weights: by name; those without values (on `meta`) are left out.
        where: how the message begins.

    Raises:
        ValueError: names the first such weight.
    """
    for name, weight in weights:
        if weight.is_floating_point() and not weight.is_meta and not bool(weight.detach().isfinite().all()):
            raise ValueError(f"{where} is broken: its weight {name} holds values that are NaN or infinite")


def adapter_folder(model: str) -> str | None:
    """Folder with the adapter of PEFT that is part of a model; None where it has none.

    It is `model` itself, or the local copy of a repository on the hub.
    """
    if is_hub_name(model):
        return adapter_snapshot(model)
    return model if model and Path(model, ADAPTER).is_file() else None


def has_adapter(model: str) -> bool:
    """Whether the model's folder, or its repository on the hub, holds an adapter of PEFT."""
    return adapter_folder(model) is not None


def base_of(model: str) -> str:
    """Name or folder of the weights: those below an adapter whose folder holds nothing else, or the model's own.

    Raises:
        ValueError: the adapter names no base.
    """
    folder = adapter_folder(model)
    if folder is None:
        return model
    if Path(folder, "config.json").is_file():
        return folder
    base = json.loads(Path(folder, ADAPTER).read_text()).get("base_model_name_or_path")
    if not base:
        raise ValueError(f"model.model={model!r} holds an adapter whose {ADAPTER} has no base_model_name_or_path")
    return str(base)


@contextmanager
def _without_adapter(model: str) -> Iterator[str]:
    """Name or folder of the weights below an adapter: transformers would put the adapter's layers into the model."""
    base = base_of(model)
    if base != adapter_folder(model):
        yield base
        return
    with TemporaryDirectory(prefix="without_adapter_") as folder:
        for path in Path(base).iterdir():
            if not path.name.startswith("adapter_"):
                Path(folder, path.name).symlink_to(path.resolve())
        yield folder


def _with_adapter_merged(lm: PreTrainedModel, folder: str) -> PreTrainedModel:
    """The model with the changes of the folder's adapter in its weights, of whatever kind PEFT can merge."""
    import peft

    adapted: Any = peft.PeftModel.from_pretrained(lm, folder)
    merged: PreTrainedModel = adapted.merge_and_unload()
    return merged.requires_grad_(True)


def _load_base(loader: Any, model: str) -> Any:
    """Loads something of a model that its base has, below an adapter.

    Raises:
        FileNotFoundError: there is no such model, or not the one that its adapter names.
    """
    base = base_of(model)
    if base in (model, adapter_folder(model)):
        return load_pretrained(loader, base)
    try:
        return load_pretrained(loader, base)
    except FileNotFoundError as error:
        raise FileNotFoundError(
            f"model.model={model!r} holds an adapter of {base!r} (base_model_name_or_path in its {ADAPTER}), which "
            f"cannot be loaded: {error}"
        ) from error


def load_config(model: str) -> PreTrainedConfig:
    """Loads the configuration of a model.

    Raises:
        FileNotFoundError: there is no such model.
    """
    config: PreTrainedConfig = _load_base(AutoConfig, model)
    return config


def load_generation_config(model: str) -> GenerationConfig | None:
    """Loads what the model's files say about generation; None if there are no such files."""
    try:
        return GenerationConfig.from_pretrained(base_of(model))
    except OSError:  # many models have no such file; transformers, too, then asks the configuration
        return None


def load_tokenizer(model: str) -> PreTrainedTokenizerBase:
    """Loads the tokenizer of a model.

    Raises:
        FileNotFoundError: there is no such model, or it has no tokenizer.
    """
    folder = adapter_folder(model)
    if folder is not None and any(Path(folder).glob("tokenizer*")):  # beside an adapter, where tokens were added
        return load_pretrained(AutoTokenizer, folder)
    return _load_base(AutoTokenizer, model)


def check_vocabulary(tokenizer: PreTrainedTokenizerBase, vocab_size: int, model: str) -> None:
    """Checks that every token id is within the model's vocabulary.

    Raises:
        ValueError: the tokenizer is larger than the model's vocabulary.
    """
    if len(tokenizer) > vocab_size:
        raise ValueError(
            f"model.model={model!r}: the tokenizer has {len(tokenizer)} tokens but the model's vocabulary only "
            f"{vocab_size}"
        )


def stored_dtype(model: str) -> str:
    """Name of the dtype of a model's files; float32 where its configuration does not say.

    Raises:
        FileNotFoundError: there is no such model.
    """
    dtype = getattr(load_config(model), "dtype", None)
    return "float32" if dtype is None else str(dtype).removeprefix("torch.")


@contextmanager
def evaluation_mode(module: nn.Module) -> Iterator[None]:
    """Context with every submodule in evaluation mode; restores the previous modes."""
    training = [part for part in module.modules() if part.training]
    module.eval()
    try:
        yield
    finally:
        for part in training:
            part.training = True


def find_device(name: str) -> torch.device:
    """Device of that name; `auto` is the first accelerator, or the CPU."""
    if name != "auto":
        return torch.device(name)
    accelerator = torch.accelerator.current_accelerator()
    return accelerator if accelerator is not None and torch.accelerator.is_available() else torch.device("cpu")


def _remove_dropout(lm: nn.Module) -> None:
    """Sets probabilities of dropout, of skipped layers and of router noise to 0, which families keep in many places."""
    for module in lm.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for holder in (module, getattr(module, "config", None)):  # Falcon and Persimmon read it from there
            for name, value in vars(holder).copy().items() if holder is not None else ():
                if isinstance(value, float) and value and ("drop" in name or "jitter" in name):
                    setattr(holder, name, 0.0)
