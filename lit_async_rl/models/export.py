"""Export of a model as a Hugging Face folder, and a check of it before training."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import GENERATION_CONFIG_NAME

from lit_async_rl.errors import describe
from lit_async_rl.runtime.files import naming_full_disk


def export_model(
    lm: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: str | Path, weights: Mapping[str, Tensor]
) -> None:
    """Writes model and tokenizer.

    transformers loads some generation configurations that it refuses to save (such as `temperature` without
    `do_sample`); these are written unchanged.

    Args:
        lm: causal LM.
        tokenizer: tokenizer of the model.
        folder: output folder.
        weights: contiguous tensors by their Hugging Face names.

    Raises:
        OSError: the disk is full; the message names the folder.
    """
    original: Any = lm.generation_config  # None in some models
    refused = None if original is None or _is_valid(original) else original
    with naming_full_disk(f"model {folder}"):
        if refused is not None:
            lm.generation_config = GenerationConfig()
        try:
            lm.save_pretrained(folder, state_dict=dict(weights))
        finally:
            lm.generation_config = original
        if refused is not None:
            refused.to_json_file(Path(folder) / GENERATION_CONFIG_NAME)
        tokenizer.save_pretrained(folder)


def export_problems(lm: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Reasons why an export would fail or could not be loaded again.

    Found by writing everything but the weights to a temporary folder.
    """
    problems = []
    if type(lm.config) not in AutoModelForCausalLM._model_mapping:  # the text part of Mllama and Emu3
        problems.append(
            f"AutoModelForCausalLM would not read it again: its configuration is a {type(lm.config).__name__}, which "
            f"only {type(lm).__name__} reads"
        )
    with tempfile.TemporaryDirectory() as folder:
        for name, part in (("configuration", lm.config), ("tokenizer", tokenizer)):
            try:
                part.save_pretrained(folder)
            except Exception as error:
                problems.append(f"its {name} cannot be saved: {describe(error)}")
    quantizer = getattr(lm, "hf_quantizer", None)
    if quantizer is not None and not quantizer.is_serializable():
        problems.append("its quantized weights cannot be saved")
    return problems


def _is_valid(config: GenerationConfig) -> bool:
    try:
        config.validate(strict=True)
    except ValueError:
        return False
    return True
