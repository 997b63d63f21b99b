"""Writing a model as a Hugging Face folder, and finding out before training whether that will work."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from torch import Tensor
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import GENERATION_CONFIG_NAME

from lit_async_rl.errors import describe


def export_model(
    lm: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: str | Path, weights: Mapping[str, Tensor]
) -> None:
    """Writes model and tokenizer.

    A `generation_config` that transformers loads, and then refuses to save (`temperature` without `do_sample`, say),
    is written as it was loaded.

    Args:
        lm: causal LM.
        tokenizer: of the model.
        folder: to write to.
        weights: by their Hugging Face names, contiguous.
    """
    with _savable(lm, Path(folder)):
        lm.save_pretrained(folder, state_dict=dict(weights))
    tokenizer.save_pretrained(folder)


def export_problems(lm: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Problems that `export_model` or a reader would have: found by writing all but the weights to a scratch folder."""
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


@contextmanager
def _savable(lm: PreTrainedModel, folder: Path) -> Iterator[None]:
    """Context in which transformers saves a model whatever its `generation_config`, which is written on exit."""
    given: GenerationConfig | None = lm.generation_config
    if given is None or _is_valid(given):
        yield
        return
    lm.generation_config = GenerationConfig()
    try:
        yield
    finally:
        lm.generation_config = given
    given.to_json_file(folder / GENERATION_CONFIG_NAME)


def _is_valid(config: GenerationConfig) -> bool:
    try:
        config.validate(strict=True)
    except ValueError:
        return False
    return True
