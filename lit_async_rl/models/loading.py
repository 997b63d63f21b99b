"""Loading Hugging Face causal LMs and tokenizers, with errors that name the setting."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import json
import logging
import threading
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import torch
import torch.distributed.checkpoint as dcp
from huggingface_hub import snapshot_download
from jinja2 import TemplateError
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

from lit_async_rl.models.attention import choose_attention
from lit_async_rl.utils.checks import check_dtype
from lit_async_rl.utils.hub import go_offline_if_unreachable
from lit_async_rl.utils.waiting import announced

# -- Properties of a model's architecture: context length, layers other than attention, stored buffers ----------------


# settings of configurations that limit the number of tokens some layers attend to
WINDOW_SETTINGS = (
    "sliding_window",
    "attention_window_size",
    "sliding_window_size",
    "attention_chunk_size",
    "index_topk",
)


def body(lm: PreTrainedModel) -> nn.Module:
    """The model below the output head, also if `base_model_prefix` names no submodule (Llama 4, Mllama)."""
    base: nn.Module = lm.base_model
    return getattr(lm, "model", lm) if base is lm else base


def context_length(lm: PreTrainedModel) -> int:
    """Context length of a model, see `configured_length`."""
    return configured_length(lm.config)


def configured_length(of_model: PreTrainedConfig) -> int:
    """Context length in tokens: positions, the shortest attention window, or `rotary_length`, whichever is least."""
    config = of_model.get_text_config()
    length = min(getattr(config, "max_position_embeddings", None) or 2**20, rotary_length(config) or 2**20)
    names = WINDOW_SETTINGS if getattr(config, "use_sliding_window", True) else ()
    windows = [getattr(config, name, None) for name in names]
    if "local" in getattr(config, "attention_layers", ()):  # GPT-Neo; `window_size` means something else elsewhere
        windows.append(config.window_size)
    return min(length, *(window or length for window in windows), length)


def rotary_length(of_model: PreTrainedConfig) -> int | None:
    """Number of tokens beyond which the rotary frequencies of all positions change; None if they never do.

    transformers chooses the frequencies by the longest row of a forward pass (`longrope` of Phi-3 and Phi-4-mini,
    `dynamic`). Beyond this length a row would change the shorter rows beside it, and keys in a cache would be wrong.
    """
    config = of_model.get_text_config()
    parameters = getattr(config, "rope_parameters", None) or {}
    limits = []
    # one set of parameters, or one for each kind of layer
    for rope in [parameters] if "rope_type" in parameters else parameters.values():
        kind = rope.get("rope_type") if isinstance(rope, dict) else None
        if kind == "longrope":
            limits.append(rope["original_max_position_embeddings"])
        elif kind == "dynamic":
            limits.append(config.max_position_embeddings)
    return min(limits, default=None)


def other_layers(lm: PreTrainedModel) -> str:
    """Kinds of layers other than full and sliding attention, by their names in the configuration; empty if none."""
    kinds = set(getattr(lm.config.get_text_config(), "layer_types", None) or ())
    others = sorted(kinds - {"full_attention", "sliding_attention"})
    return ", ".join(others) or ("recurrent" if lm._is_stateful else "")


def stored_buffers(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """(name, buffer) of persistent buffers: weights in the model's files that receive no gradient.

    Examples are scales of Gemma 4's layers, and router biases of DeepSeek, GLM and others.
    """
    for prefix, part in module.named_modules():
        for name, buffer in part.named_buffers(recurse=False):
            if name not in part._non_persistent_buffers_set:
                yield f"{prefix}.{name}" if prefix else name, buffer


# -- Meta-device loading: weights are read after sharding, so no process holds all of them ----------------------------
# The model is built on the meta device; then each process reads its own slices (FSDP2, tensor parallelism), or one
# block after the other (FSDP1), from the safetensors files of the Hugging Face model.


_patch_lock = threading.Lock()


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Context in which parameters are created on the meta device; buffers are computed, because files lack most.

    Patches `nn.Module` while active. Other threads are unaffected: the patch acts in the thread that entered.
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
        """Reads stored buffers of `part` and its parameters on the meta device; of sharded ones only own slices.

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
        buffers = {id(buffer) for _, buffer in stored_buffers(part)}  # after `allocate`, which replaces them
        stored = {name: b for name, b in stored_buffers(lm) if id(b) in buffers and name in self._names}
        self._load({name: own[name].detach() for name in names} | stored)

    def _load(self, parameters: Mapping[str, Tensor]) -> None:
        if unknown := parameters.keys() - self._names:
            raise ValueError(
                f"model.sharding.meta_device: the files of model.model={self.model!r} have no weight {min(unknown)!r}; "
                "transformers renames them while it loads. Leave meta_device out for this model."
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
        raise FileNotFoundError(f"model.model must name a model of the hub, or a folder, got {model!r}")
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
    """Whether `model` can only be the name of a repository on the hub: neither an existing folder nor a path."""
    if not model:  # such as None; `load_pretrained` raises the error
        return False
    is_path = model.startswith((".", "/", "~", FETCHED_MODELS)) or model.count("/") > 1
    return not is_path and not Path(model).exists()


@functools.cache
def adapter_snapshot(repository: str) -> str | None:
    """Local copy of a repository on the hub that contains an adapter of PEFT; None if it contains none.

    Asks the hub once per process, or only the cache when offline. The adapter is loaded separately, because
    transformers would load the adapter's base, insert its layers, and return that as the model.
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


def _is_about_attention(error: Exception) -> bool:
    return "attn_implementation" in str(error) or "attention" in str(error).lower()


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
    """Hint with the command that fetches the model of a shipped configuration; empty for other models."""
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

    A folder, or a repository on the hub, may hold an adapter of PEFT (`adapter_config.json`), alone or beside the
    weights: it is part of the model.

    Args:
        model: name on the Hugging Face hub, or folder with `config.json` and weights.
        dtype: name of a torch dtype.
        attn_implementation: attention implementation of transformers; None is its default, or eager attention if the
            default ignores a setting of the configuration (Gemma 2's soft cap), see `choose_attention`.
        random_init: initialise randomly, with the architecture of `model`.
        device: `auto` is the first accelerator, or the CPU; `meta` reads no weights (`WeightFiles` does so later).
        adapter: `merge` an adapter in the folder into the weights, or `leave_out`, for callers that load it.

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
    """Checks that weights are not quantized: such weights cannot be trained, merged or published to an engine.

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
    """Folder of a model's PEFT adapter: `model` itself, or the local copy of a repository; None without adapter."""
    if is_hub_name(model):
        return adapter_snapshot(model)
    return model if model and Path(model, ADAPTER).is_file() else None


def has_adapter(model: str) -> bool:
    """Whether the model's folder, or its repository on the hub, contains an adapter of PEFT."""
    return adapter_folder(model) is not None


def base_of(model: str) -> str:
    """Name or folder of the full weights: the base of an adapter if `model` contains only an adapter, else its own.

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
    """Context with the name or folder of a model without its adapter, whose layers transformers would insert."""
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
    """The model with the folder's adapter (of any kind that PEFT can merge) merged into its weights."""
    import peft

    adapted: Any = peft.PeftModel.from_pretrained(lm, folder)
    merged: PreTrainedModel = adapted.merge_and_unload()
    return merged.requires_grad_(True)


def _load_base(loader: Any, model: str) -> Any:
    """Loads a configuration or tokenizer from the base of a model.

    Raises:
        FileNotFoundError: there is no such model, or no such base of its adapter.
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
    """Folder of a model's files, which are fetched from the hub if they are not cached.

    Raises:
        FileNotFoundError: there is no such model.
    """
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
            f"model.model={model!r}: the tokenizer has {len(tokenizer)} tokens but the model's vocabulary only "
            f"{vocab_size}"
        )


def stored_dtype(model: str) -> str:
    """Name of the dtype of a model's files; float32 if its configuration does not name one.

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
    """Device by name; `auto` is the first accelerator, or the CPU."""
    if name != "auto":
        return torch.device(name)
    accelerator = torch.accelerator.current_accelerator()
    return accelerator if accelerator is not None and torch.accelerator.is_available() else torch.device("cpu")


def _remove_dropout(lm: nn.Module) -> None:
    """Sets probabilities of dropout, layer skipping and router noise to 0; each family keeps them elsewhere."""
    for module in lm.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for holder in (module, getattr(module, "config", None)):  # Falcon and Persimmon read it from the configuration
            for name, value in vars(holder).copy().items() if holder is not None else ():
                if isinstance(value, float) and value and ("drop" in name or "jitter" in name):
                    setattr(holder, name, 0.0)


# -- Tokens that end a completion: one set for every engine, collected from all of a model's files --------------------


log = logging.getLogger(__name__)
GENERATION = "generation_config"
TEMPLATE = "chat template"
# contents of conversations that are rendered to find out how a template ends a turn
USER = "USERTEXT"
ANSWER = "ANSWERTEXT"
REASONING = "REASONINGTEXT"


@dataclass(frozen=True, kw_only=True)
class EndTokens:
    """Tokens that end a completion of a model, and their sources.

    Attributes:
        ids: all end tokens; empty if nothing ends a completion.
        named: ids by source (generation_config, config, tokenizer, chat template), without sources that name none.
        left_out: named ids that are no end, because the chat template writes them inside of a turn.
        turn_end: text that the chat template writes after an assistant's last message; empty if it writes none.
        turn_ends_with_token: False if that text begins with ordinary text instead of a special token.
    """

    ids: tuple[int, ...]
    named: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    left_out: tuple[int, ...] = ()
    turn_end: str = ""
    turn_ends_with_token: bool = True

    @property
    def are_disputed(self) -> bool:
        """Whether the first source, the only one in use elsewhere, names other tokens."""
        first = next(iter(self.named.values()), ())
        return bool(self.left_out) or not set(self.ids) <= set(first)

    def describe(self, tokenizer: PreTrainedTokenizerBase) -> str:
        """One line with the end tokens and their sources."""

        def shown(ids: Collection[int]) -> str:
            return ", ".join(f"{token} {tokenizer.convert_ids_to_tokens(token)!r}" for token in sorted(ids))

        places = "; ".join(f"{place}: {shown(ids)}" for place, ids in self.named.items())
        line = f"completions end at each of {shown(self.ids)} ({places})"
        if self.left_out:
            line += f", and not at {shown(self.left_out)}, which the chat template writes inside of a turn"
        first = list(next(iter(self.named.values()), ()))
        return f"{line}; sampling.end_token_ids: {first} is the first of these places alone"


def eos_token_ids(lm: PreTrainedModel) -> tuple[int, ...]:
    """Token ids that end a completion of a loaded model, see `find_end_tokens`. Warns if there are none."""
    return _ids_or_warning(find_end_tokens(lm.name_or_path or "", lm.generation_config, lm.config), lm.name_or_path)


def stored_eos_token_ids(model: str) -> tuple[int, ...]:
    """Token ids that end a completion, read from the files of a model that is not loaded. Warns if there are none."""
    return _ids_or_warning(stored_end_tokens(model), model)


def stored_end_tokens(model: str) -> EndTokens:
    """Tokens that end a completion of the model in a folder or on the hub, see `find_end_tokens`."""
    return find_end_tokens(model, load_generation_config(model), load_config(model))


def find_end_tokens(model: str, generation_config: Any, config: Any) -> EndTokens:
    """Union of the end tokens named by generation configuration, configuration, tokenizer and chat template.

    Tokens of the generation configuration always count; an empty list there means that nothing ends a completion. Ids
    of the configuration, which are stale more often, count if the generation configuration names none, or if they are
    special tokens. The tokenizer's end of text and the token that the chat template writes after an answer count as
    well, unless the template also writes it between reasoning and answer, as gpt-oss writes `<|end|>`.

    Args:
        model: name or folder of the tokenizer; without a tokenizer only the configurations count.
        generation_config: generation configuration of the model; None if it has none.
        config: configuration of the model.
    """
    stated = _ids(generation_config)
    configured = _ids(config.get_text_config())
    named = {GENERATION: stated, "config": configured}
    first = next((ids for ids in named.values() if ids is not None), None)
    if first == ():
        return EndTokens(ids=(), named={place: ids for place, ids in named.items() if ids == ()})
    kept = list(first or ())
    found = _cached_tokenizer_ends(model, _modification_time(model)) if model else None
    if found is not None:
        kept += [token for token in configured or () if token in found.special]
        named["tokenizer"] = found.eos
        named[TEMPLATE] = found.turn_end_ids
        kept += [token for token in (*found.eos, *found.turn_end_ids) if token not in found.inside]
    present = {place: ids for place, ids in named.items() if ids}
    ids = tuple(dict.fromkeys(kept))
    if found is None:
        return EndTokens(ids=ids, named=present)
    left_out = {token for named_ids in present.values() for token in named_ids if token in found.inside} - set(ids)
    return EndTokens(
        ids=ids,
        named=present,
        left_out=tuple(sorted(left_out)),
        turn_end=found.turn_end,
        turn_ends_with_token=found.turn_ends_with_token,
    )


def _ids(config: Any) -> tuple[int, ...] | None:
    ids = getattr(config, "eos_token_id", None)
    if ids is None:
        return None
    return (ids,) if isinstance(ids, int) else tuple(ids)


def _ids_or_warning(ends: EndTokens, model: str | None) -> tuple[int, ...]:
    if not ends.ids and not ends.named:  # not if a configuration has an empty list on purpose
        log.warning(
            "model.model=%r: neither generation_config.json nor config.json nor the tokenizer names a token that ends "
            "a text, so completions end at sampling.max_tokens only; see sampling.stop_token_ids and sampling.stop",
            model,
        )
    return ends.ids


@dataclass(frozen=True, kw_only=True)
class _TokenizerEnds:
    """Ends that a tokenizer and its chat template name."""

    special: frozenset[int]
    eos: tuple[int, ...]
    turn_end_ids: tuple[int, ...] = ()
    inside: frozenset[int] = frozenset()
    turn_end: str = ""
    turn_ends_with_token: bool = True


def _modification_time(model: str) -> float:
    """Time of the last change of a folder's tokenizer, part of the key of the cache of `_cached_tokenizer_ends`."""
    files = [Path(model) / name for name in ("tokenizer_config.json", "tokenizer.json", "chat_template.jinja")]
    return max((file.stat().st_mtime for file in files if file.is_file()), default=0.0)


@functools.lru_cache(maxsize=16)
def _cached_tokenizer_ends(model: str, modified: float) -> _TokenizerEnds | None:
    with contextlib.suppress(FileNotFoundError):  # a model may come without a tokenizer, or from memory
        return tokenizer_ends(load_tokenizer(model))
    return None


def tokenizer_ends(tokenizer: PreTrainedTokenizerBase) -> _TokenizerEnds:
    """End tokens of a tokenizer and of its chat template; the latter are found by rendering conversations."""
    special = frozenset({*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder})
    eos = () if tokenizer.eos_token_id is None else (int(tokenizer.eos_token_id),)
    if not tokenizer.chat_template:
        return _TokenizerEnds(special=special, eos=eos)
    question = {"role": "user", "content": USER}
    answer = {"role": "assistant", "content": ANSWER}
    reasoned = answer | {"reasoning_content": REASONING, "thinking": REASONING}
    inside = frozenset(special.intersection(_encoded(tokenizer, _between(tokenizer, [question, reasoned], REASONING))))
    turn_end = _after_answer(tokenizer, [question, answer])
    ids = _first_token(tokenizer, turn_end, special)
    ends_with_token = bool(ids) or not turn_end.strip()
    if not turn_end.strip():  # nothing after the last message: the token before the next one is the end, as in GLM-4
        between = _after_answer(tokenizer, [question, answer, question]).partition(USER)[0]
        ids = _first_token(tokenizer, between, special)
    return _TokenizerEnds(
        special=special,
        eos=eos,
        turn_end_ids=ids,
        inside=inside,
        turn_end=turn_end,
        turn_ends_with_token=ends_with_token,
    )


def _render(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, str]]) -> str:
    """Rendering of a conversation; empty if the template refuses it, or needs more than messages."""
    try:
        return str(tokenizer.apply_chat_template(messages, tokenize=False))
    except (TemplateError, ValueError, TypeError, KeyError):
        return ""


def _after_answer(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, str]]) -> str:
    return _render(tokenizer, messages).partition(ANSWER)[2]


def _between(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, str]], begin: str) -> str:
    """Text from `begin` to the answer; empty if the template does not render `begin`, or renders it later."""
    before = _render(tokenizer, messages).partition(ANSWER)[0]
    return before.partition(begin)[2]


def _encoded(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"]) if text else []


def _first_token(tokenizer: PreTrainedTokenizerBase, text: str, special: Collection[int]) -> tuple[int, ...]:
    """The special token at the beginning of `text`, after whitespace; empty if there is other text before."""
    for token in _encoded(tokenizer, text.lstrip()):
        if token in special:
            return (int(token),)
        if str(tokenizer.decode([token])).strip():
            return ()
    return ()
