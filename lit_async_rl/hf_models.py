"""Loading Hugging Face causal LMs and tokenizers, with errors that name the setting."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase


def load_policy(
    model: str, dtype: str = "float32", attn_implementation: str | None = None, random_init: bool = False
) -> PreTrainedModel:
    """A causal LM in evaluation mode and without dropout: a log-probability must not depend on chance.

    Args:
        model: name on the Hugging Face hub, or folder with `config.json` and weights.
        dtype: name of a torch dtype.
        attn_implementation: as in transformers; None is its default.
        random_init: only the architecture is taken from `model`.

    Raises:
        FileNotFoundError: `model` is neither a folder with a model nor a name that can be loaded.
        ValueError: `dtype` is no torch dtype, or the model is no causal LM.
    """
    torch_dtype = getattr(torch, dtype, None)
    if not isinstance(torch_dtype, torch.dtype):
        raise ValueError(f"model.dtype must be the name of a torch dtype such as float32 or bfloat16, got {dtype!r}")
    config = _load(AutoConfig, model)
    if type(config) not in AutoModelForCausalLM._model_mapping:
        raise ValueError(f"model.model={model!r} is a {config.model_type!r} model, which is no causal language model")
    kwargs: dict[str, Any] = {"dtype": torch_dtype}
    if attn_implementation is not None:
        kwargs["attn_implementation"] = attn_implementation
    if random_init:
        lm = AutoModelForCausalLM.from_config(config, **kwargs)
    else:
        lm = _load(AutoModelForCausalLM, model, **kwargs)
    _remove_dropout(lm)
    return lm.eval()


def load_tokenizer(model: str) -> PreTrainedTokenizerBase:
    """The tokenizer of a model.

    Raises:
        FileNotFoundError: there is none.
    """
    return _load(AutoTokenizer, model)


def check_vocabulary(tokenizer: PreTrainedTokenizerBase, vocab_size: int, model: str) -> None:
    """Refuses a tokenizer with ids that the model does not know.

    Raises:
        ValueError: the tokenizer is larger than the model's vocabulary.
    """
    if len(tokenizer) > vocab_size:
        raise ValueError(
            f"model.model={model!r}: the tokenizer has {len(tokenizer)} tokens but the model's vocabulary only {vocab_size}"
        )


def context_length(lm: PreTrainedModel) -> int:
    """Most tokens that the model can read: positions it knows, or its smallest attention window."""
    config = lm.config.get_text_config()
    length = getattr(config, "max_position_embeddings", None) or 2**20
    window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    return min(length, window or length)


def eos_token_ids(lm: PreTrainedModel) -> tuple[int, ...]:
    """All ids that end a completion."""
    ids = lm.generation_config.eos_token_id if lm.generation_config is not None else lm.config.eos_token_id
    if ids is None:
        return ()
    return tuple(ids) if isinstance(ids, list | tuple) else (int(ids),)


def _load(loader: Any, model: str, **kwargs: Any) -> Any:
    is_folder = Path(model).is_dir()
    if not is_folder and (model.startswith((".", "/", "~")) or model.count("/") > 1 or Path(model).exists()):
        raise FileNotFoundError(f"model.model={model!r}: there is no such folder")
    try:
        return loader.from_pretrained(model, **kwargs)
    except (OSError, ValueError) as error:
        what = "the folder holds no model that transformers can load" if is_folder else "not found, here or on the hub"
        raise FileNotFoundError(f"model.model={model!r}: {what} ({str(error).splitlines()[0]})") from error


def _remove_dropout(lm: nn.Module) -> None:
    for module in lm.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        elif hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.0
