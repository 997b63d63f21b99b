"""Loads Hugging Face causal LMs and tokenizers, with errors that name the setting."""

from __future__ import annotations

import functools
import importlib.util
import json
import logging
import threading
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import torch
import torch.distributed.checkpoint as dcp
from huggingface_hub import snapshot_download
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.distributed.checkpoint import HuggingFaceStorageReader
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import find_adapter_config_file
from transformers.utils import logging as transformers_logging

from lit_async_rl.models.architecture import stored_buffers
from lit_async_rl.models.attention import choose_attention
from lit_async_rl.models.hub import go_offline_if_unreachable
from lit_async_rl.runtime.files import located
from lit_async_rl.runtime.waiting import announced
from lit_async_rl.utils.checks import check_dtype

log = logging.getLogger(__name__)

# -- Meta-device loading: weights are read after sharding, so no process holds all of them ----------------------------
# The model is built on the meta device; then each process reads its own slices (FSDP2, tensor parallelism), or one
# block after the other (FSDP1), from the safetensors files of the Hugging Face model.


_patch_lock = threading.Lock()


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Context that creates parameters on the meta device, but computes buffers, because files lack most.

    Patches `nn.Module` while active, for the thread that entered only.
    """
    owner = threading.get_ident()

    def register_on_meta(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        # a parameter that is on meta already may be tied: replacing it would untie it
        if param is not None and not param.is_meta and threading.get_ident() == owner:
            param = nn.Parameter(param.detach().to("meta"), requires_grad=param.requires_grad)
        register(module, name, param)

    with _patch_lock:  # two threads that patch at once would restore each other's function
        register = nn.Module.register_parameter
        nn.Module.register_parameter = register_on_meta  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            nn.Module.register_parameter = register  # type: ignore[method-assign]


def is_on_meta(module: nn.Module) -> bool:
    """Whether some parameters are still on the meta device."""
    return any(parameter.is_meta for parameter in module.parameters())


class WeightFiles:
    """Reader of the safetensors files of a model.

    Args:
        model: Hugging Face name or folder.

    Raises:
        ValueError: there is no safetensors file.
    """

    def __init__(self, model: str) -> None:
        self.model = model
        folder = model if Path(model).is_dir() else snapshot_download(model, allow_patterns=["*.safetensors*"])
        self._reader = HuggingFaceStorageReader(str(folder))
        self._names = self._reader.read_metadata().state_dict_metadata.keys()
        if not self._names:
            raise ValueError(f"model.sharding.meta_device needs safetensors files; model.model={model!r} has none")

    @torch.no_grad()
    def read(self, lm: nn.Module, part: nn.Module, device: torch.device) -> None:
        """Reads stored buffers of `part`, and its parameters on the meta device (of sharded ones only own slices).

        Args:
            lm: model whose parameter names the files use; contains `part`.
            part: block of `lm`, or `lm` itself.
            device: device of the parameters.

        Raises:
            ValueError: names or shapes in the files differ.
        """
        inside = {id(p) for p in part.parameters() if p.is_meta}
        names = [name for name, p in lm.named_parameters() if id(p) in inside]  # tied parameters appear once
        allocate(part, device)
        own = dict(lm.named_parameters())
        self._check_tied(lm, {name: own[name] for name in names})
        buffers = {id(buffer) for _, buffer in stored_buffers(part)}  # after `allocate`, which replaces them
        stored = {name: b for name, b in stored_buffers(lm) if id(b) in buffers and name in self._names}
        self._load({name: own[name].detach() for name in names} | stored)

    def _check_tied(self, lm: nn.Module, parameters: Mapping[str, Tensor]) -> None:
        """Checks that files have one value for tied parameters."""
        first = {id(parameter): name for name, parameter in parameters.items()}
        for other, parameter in lm.named_parameters(remove_duplicate=False):
            name = first.get(id(parameter), other)
            if name != other and {name, other} <= self._names:
                both = {one: torch.empty(parameter.shape, dtype=parameter.dtype) for one in (name, other)}
                self._load(both)
                if not torch.equal(both[name], both[other]):
                    raise _untied(self.model, name, other)

    def _load(self, parameters: Mapping[str, Tensor]) -> None:
        if unknown := parameters.keys() - self._names:
            raise ValueError(
                f"model.sharding.meta_device cannot be used with model.model={self.model!r}: transformers renames "
                f"weights while it loads them, so the model's files have no weight {min(unknown)!r}. Leave "
                "meta_device out."
            )
        state: dict[str, Any] = dict(parameters)
        with warnings.catch_warnings():  # `no_dist`, because each process reads slices of its own
            warnings.filterwarnings("ignore", message=".*torch.distributed is disabled.*")
            dcp.load(state, storage_reader=self._reader, no_dist=True)


def allocate(part: nn.Module, device: torch.device) -> None:
    """Allocates parameters on the meta device; tied ones stay tied, because tensors are swapped in place."""
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        for module in part.modules():
            if any(p.is_meta for p in module.parameters(recurse=False)):
                buffers = dict(module.named_buffers(recurse=False))
                module.to_empty(device=device, recurse=False)
                for name, buffer in buffers.items():
                    module._buffers[name] = buffer.to(device)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)


# -- Loading by classes of transformers, with errors that name the setting --------------------------------------------


ADAPTER = "adapter_config.json"  # marks a folder with an adapter saved by PEFT
FETCHED_MODELS = "models/smollm2"  # prefix of the folders in configs/smollm2.yaml that have to be fetched first


def load_pretrained(loader: Any, model: str, **kwargs: Any) -> Any:
    """Loads a model, tokenizer or configuration by a class of transformers.

    Args:
        loader: class with `from_pretrained`.
        model: name on the Hugging Face hub, or folder.
        **kwargs: arguments of `from_pretrained`.

    Raises:
        FileNotFoundError: there is no such model, or the folder contains none.
        ValueError: the model does not support `attn_implementation`.
    """
    if not model:
        raise FileNotFoundError(f"model.model must name a model on the hub or a folder, got {model!r}")
    model = located(model)
    is_folder = Path(model).is_dir()
    if not is_folder and not is_hub_name(model):
        raise FileNotFoundError(f"model.model={model!r}: there is no such folder{_how_to_fetch(model)}")
    if is_folder and Path(model, ADAPTER).is_file():
        check_peft(model)  # transformers would leave the adapter out without a word
    elif is_folder and not Path(model, "config.json").is_file():
        raise FileNotFoundError(f"model.model={model!r}: the folder has no config.json{_how_to_export(Path(model))}")
    if not is_folder:
        go_offline_if_unreachable()
    try:
        with _without_progress_bar():
            # explicit, because by default transformers asks on the terminal whether to run a model's own code
            return loader.from_pretrained(model, trust_remote_code=False, **kwargs)
    except (OSError, ValueError, ImportError, TypeError, SafetensorError) as error:  # TypeError: a file is missing
        text = str(error)
        is_about_attention = "attn_implementation" in text or "attention" in text.lower()
        if (chosen := kwargs.get("attn_implementation")) and is_about_attention:
            raise ValueError(f"model.attn_implementation={chosen!r} cannot be used: {_first_line(error)}") from error
        if "trust_remote_code" in text:
            raise ValueError(
                f"model.model={model!r} needs Python code of its own (trust_remote_code), which lit-async-rl does not "
                "execute: trainer, engines and exports support only the model families built into transformers. Use a "
                "version of the model without custom code (no auto_map in its config.json)"
            ) from error
        what = "the folder holds no model that transformers can load" if is_folder else "not found, here or on the hub"
        raise FileNotFoundError(f"model.model={model!r}: {what} ({_first_line(error)})") from error


def is_hub_name(model: str) -> bool:
    """Whether `model` can only name a repository on the hub: it is neither an existing folder nor a path."""
    if not model:  # such as None; `load_pretrained` raises the error
        return False
    is_path = model.startswith((".", "/", "~", FETCHED_MODELS)) or model.count("/") > 1
    return not is_path and not Path(model).exists()


@functools.cache
def adapter_snapshot(repository: str) -> str | None:
    """Local copy of a repository on the hub that contains an adapter of PEFT; None if it contains none.

    Asks the hub once per process, or only the cache when offline. Adapters are loaded separately, because transformers
    would return the base with the adapter's layers inserted.
    """
    go_offline_if_unreachable()
    try:
        if find_adapter_config_file(repository) is None:
            return None
    except OSError:  # no such repository: `load_pretrained` raises the error
        return None
    return snapshot_download(repository, ignore_patterns=["*/*"])  # without the checkpoints of a training run


def check_peft(model: str) -> None:
    """Checks that PEFT is installed, for a model with an adapter.

    Raises:
        ModuleNotFoundError: it is not installed.
    """
    if importlib.util.find_spec("peft") is None:
        raise ModuleNotFoundError(
            f'model.model={model!r} holds an adapter, which needs PEFT: pip install "lit-async-rl[peft]"'
        )


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


@contextmanager
def _without_progress_bar() -> Iterator[None]:
    """Context without the progress bar of transformers, which in a notebook recurses endlessly inside Lightning's."""
    was_on = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_on:
            transformers_logging.enable_progress_bar()


def _how_to_fetch(model: str) -> str:
    """Hint at the command that fetches the model of a shipped configuration; empty for other models."""
    command = f"`make smollm2`, or `lit-async-rl fetch smollm2 --out {model}`, makes it"
    return f"; {command}" if model.startswith(FETCHED_MODELS) else ""


def _how_to_export(folder: Path) -> str:
    """Hint with the command that exports a model from a run's folder; empty for other folders."""
    config = folder / "config.yaml"
    checkpoint = folder / "checkpoints" / "last.ckpt"
    if not (config.is_file() and checkpoint.exists()):
        return ""
    return (
        f"; it is the folder of a run, whose model is made by: lit-async-rl export --config {config} "
        f"--ckpt_path {checkpoint} --out FOLDER"
    )


def load_policy(
    model: str,
    dtype: str = "float32",
    attn_implementation: str | None = None,
    random_init: bool = False,
    device: str = "cpu",
    adapter: Literal["merge", "leave_out"] = "merge",
) -> PreTrainedModel:
    """Loads a causal LM in evaluation mode and without dropout, so that log-probabilities are deterministic.

    An adapter of PEFT (`adapter_config.json`) in the folder or repository, alone or beside the weights, is part of the
    model.

    Args:
        model: name on the Hugging Face hub, or folder with `config.json` and weights.
        dtype: name of a torch dtype.
        attn_implementation: as in transformers; None is its default, or eager attention if that ignores a setting of
            the configuration, see `choose_attention`.
        random_init: initialise randomly, with the architecture of `model`.
        device: `auto` is the first accelerator, or the CPU; `meta` reads no weights (`WeightFiles` does so later).
        adapter: `merge` an adapter into the weights, or `leave_out`, for callers that load it.

    Raises:
        FileNotFoundError: `model` is neither a folder with a model nor a name that can be loaded.
        ValueError: `dtype` is no torch dtype, the model is no causal LM, `attn_implementation` ignores a setting of the
            configuration, or weights are missing, not finite, of other shapes than in the configuration, or different
            where it ties them.
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
    elif random_init:
        lm = AutoModelForCausalLM.from_config(config, **kwargs)
    else:
        with announced(f"model {model!r} to be read, or downloaded"), _without_adapter(model) as plain:
            lm, info = load_pretrained(
                AutoModelForCausalLM, plain, output_loading_info=True, ignore_mismatched_sizes=True, **kwargs
            )
        check_complete(info, f"model.model={model!r}")
        for other, name in lm.get_expanded_tied_weights_keys(all_submodels=True).items():
            if lm.get_parameter(other) is not lm.get_parameter(name):
                raise _untied(model, name, other)
        folder = adapter_folder(model)
        if folder is not None and adapter == "merge":
            check_peft(model)
            lm = _with_adapter_merged(lm, folder)
        check_finite(lm.named_parameters(), f"model.model={model!r}")
    if device == "meta" or random_init:
        lm.generation_config = load_generation_config(model) or lm.generation_config
    # end tokens and stop strings are those of its tokenizer, which an adapter may have brought
    lm.config.name_or_path = lm.name_or_path = model
    choose_attention(lm, attn_implementation)
    _remove_dropout(lm)
    module: nn.Module = lm.eval()  # the annotations of `PreTrainedModel.to` are lost in a decorator
    if device != "meta":
        module.to(find_device(device))
    return lm


def check_complete(info: Mapping[str, Any], setting: str) -> None:
    """Checks that a model's files had all of its weights; warns of unused ones.

    Args:
        info: loading info of transformers.
        setting: name and value of the setting, for the message.

    Raises:
        ValueError: weights are missing, which would be random, or have other shapes.
    """
    if missing := sorted(info["missing_keys"]):
        raise ValueError(
            f"{setting}: the model's files lack these weights, which would be random: {', '.join(missing[:4])}"
        )
    for name, stored, built in sorted(info["mismatched_keys"]):
        raise ValueError(
            f"{setting}: the weight {name!r} has shape {tuple(stored)} in its files, but shape {tuple(built)} "
            "according to config.json"
        )
    if unused := sorted(info["unexpected_keys"]):
        log.warning(
            "%s: its files have %d weights that the model lacks; these weights are ignored: %s",
            setting,
            len(unused),
            ", ".join(unused[:4]),
        )


def _untied(model: str, name: str, other: str) -> ValueError:
    """Error of a model that trainer and engines would build differently."""
    return ValueError(
        f"model.model={model!r}: its config.json ties {name} and {other}, and its files have two different weights for "
        "them: set tie_word_embeddings to false in config.json, or take the second one out of the files"
    )


@contextmanager
def complete_adapter(folder: str) -> Iterator[None]:
    """Context in which PEFT loads an adapter.

    Raises:
        ValueError: the adapter lacks weights, which would be random.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*missing adapter keys")
        try:
            yield
        except UserWarning as error:
            raise ValueError(
                f"model.model={folder!r}: some weights are missing from its adapter and would be random: "
                f"{str(error)[:300]}"
            ) from error


def build_policy(model: str, dtype: str, device: str) -> PreTrainedModel:
    """Causal LM for inference with allocated, uninitialised weights; takes the arguments of `load_policy`."""
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
    """Checks that weights are not quantized: those cannot be trained, merged or published to an engine.

    Raises:
        ValueError: they are quantized; names the method.
    """
    quantization = getattr(config, "quantization_config", None)
    if quantization:
        method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization.quant_method
        raise ValueError(
            f"model.model={model!r} has quantized weights ({getattr(method, 'value', method)}), which cannot be "
            "trained: name the unquantized model, or save it dequantized, without quantization_config in config.json"
        )


def check_finite(weights: Iterable[tuple[str, Tensor]], where: str) -> None:
    """Checks that weights are finite; with NaN or infinity a run would silently train nothing.

    Args:
        weights: weights by name; those on the meta device are skipped.
        where: beginning of the message.

    Raises:
        ValueError: a weight is not finite; names the first one.
    """
    for name, weight in weights:
        if weight.is_floating_point() and not weight.is_meta and not bool(weight.detach().isfinite().all()):
            raise ValueError(f"{where} is broken: its weight {name} holds values that are NaN or infinite")


def adapter_folder(model: str) -> str | None:
    """Folder of a model's PEFT adapter: `model`, or the local copy of a repository; None without one."""
    model = located(model)
    if is_hub_name(model):
        return adapter_snapshot(model)
    return model if model and Path(model, ADAPTER).is_file() else None


def has_adapter(model: str) -> bool:
    """Whether the model has a PEFT adapter, see `adapter_folder`."""
    return adapter_folder(model) is not None


def base_of(model: str) -> str:
    """Name or folder of the full weights: the adapter's base if `model` contains only an adapter, else its own.

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
    """Context with the name or folder of a model without its adapter."""
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
    """The model with the folder's adapter, of any kind that PEFT can merge, merged into its weights."""
    import peft

    with complete_adapter(folder):
        adapted: Any = peft.PeftModel.from_pretrained(lm, folder)
    merged: PreTrainedModel = adapted.merge_and_unload()
    return merged.requires_grad_(True)


def _load_base(loader: Any, model: str) -> Any:
    """Loads a configuration or tokenizer from the base of a model.

    Raises:
        FileNotFoundError: there is no such model, or no such base of its adapter.
    """
    base = base_of(model)
    try:
        return load_pretrained(loader, base)
    except FileNotFoundError as error:
        if base in (model, adapter_folder(model)):
            raise
        raise FileNotFoundError(
            f"model.model={model!r} holds an adapter, but the adapter's base model {base!r} "
            f"(base_model_name_or_path in {ADAPTER}) cannot be loaded: {error}"
        ) from error


def load_config(model: str) -> PreTrainedConfig:
    """Loads the configuration of a model.

    Raises:
        FileNotFoundError: there is no such model.
    """
    config: PreTrainedConfig = _load_base(AutoConfig, model)
    return config


def load_generation_config(model: str) -> GenerationConfig | None:
    """Loads the generation configuration of a model; None if it has no such file."""
    try:
        return GenerationConfig.from_pretrained(base_of(model))
    except OSError:  # many models have none; transformers then uses the configuration, too
        return None


def load_tokenizer(model: str) -> PreTrainedTokenizerBase:
    """Loads the tokenizer of a model.

    Raises:
        FileNotFoundError: there is no such model, or it has no tokenizer.
    """
    folder = adapter_folder(model)
    if folder is not None and any(Path(folder).glob("tokenizer*")):  # saved with an adapter that added tokens
        return load_pretrained(AutoTokenizer, folder)
    return _load_base(AutoTokenizer, model)


def model_folder(model: str) -> Path:
    """Folder of a model's files, fetched from the hub if they are not cached.

    Raises:
        FileNotFoundError: there is no such model.
    """
    model = located(model)
    if Path(model).is_dir():
        return Path(model)
    load_config(model)  # with this package's messages
    return Path(snapshot_download(model, ignore_patterns=["*/*"]))


def check_vocabulary(tokenizer: PreTrainedTokenizerBase, vocab_size: int, model: str) -> None:
    """Checks that every token id is within the model's vocabulary.

    Raises:
        ValueError: the tokenizer is larger than the model's vocabulary.
    """
    if len(tokenizer) > vocab_size:
        raise ValueError(
            f"model.model={model!r}: the tokenizer has {len(tokenizer)} tokens, but the model's vocabulary "
            f"has only {vocab_size} tokens"
        )


def stored_dtype(model: str) -> str:
    """Name of the dtype of a model's files; float32 if its configuration names none.

    Raises:
        FileNotFoundError: there is no such model.
    """
    dtype = getattr(load_config(model), "dtype", None)
    return "float32" if dtype is None else str(dtype).removeprefix("torch.")


@contextmanager
def errors_naming(setting: str, section: str = "") -> Iterator[None]:
    """Context for loading another model than the policy: errors name its settings in place of `model`'s.

    Args:
        setting: in place of `model.model`.
        section: in place of `model`; by default that of `setting`.
    """
    section = section or setting.rpartition(".")[0]
    try:
        yield
    except (FileNotFoundError, ValueError) as error:
        text = str(error).replace("model.model", setting)
        for name in ("dtype", "attn_implementation"):
            text = text.replace(f"model.{name}", f"{section}.{name}")
        raise type(error)(text) from error


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
    """Device by name; `auto` is the first accelerator, or the CPU."""
    if name != "auto":
        return torch.device(name)
    accelerator = torch.accelerator.current_accelerator()
    return accelerator if accelerator is not None and torch.accelerator.is_available() else torch.device("cpu")


def _remove_dropout(lm: nn.Module) -> None:
    """Sets probabilities of dropout, layer skipping and router noise to 0, wherever a family keeps them."""
    for module in lm.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for holder in (module, getattr(module, "config", None)):  # Falcon and Persimmon read it from the configuration
            for name, value in vars(holder).copy().items() if holder is not None else ():
                if isinstance(value, float) and value and ("drop" in name or "jitter" in name):
                    setattr(holder, name, 0.0)
