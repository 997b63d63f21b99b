"""Token ids that end a completion."""

from __future__ import annotations

import contextlib
import logging
from typing import Any

from transformers import PreTrainedModel

from lit_async_rl.models.loading import load_config, load_generation_config, load_tokenizer

log = logging.getLogger(__name__)


def eos_token_ids(lm: PreTrainedModel) -> tuple[int, ...]:
    """Token ids that end a completion, see `stored_eos_token_ids`."""
    return _first_eos(lm.name_or_path or "", lm.generation_config, lm.config.get_text_config())


def stored_eos_token_ids(model: str) -> tuple[int, ...]:
    """Token ids that end a completion, read from the files of a model that is not loaded.

    They are those of the generation configuration; if it names none, of the configuration, and then of the tokenizer.
    An empty list says that nothing ends a completion. Warns if there are none.
    """
    return _first_eos(model, load_generation_config(model), load_config(model).get_text_config())


def _first_eos(model: str, *configs: Any) -> tuple[int, ...]:
    for config in configs:
        ids = getattr(config, "eos_token_id", None)
        if ids is not None:
            return (ids,) if isinstance(ids, int) else tuple(ids)
    with contextlib.suppress(FileNotFoundError):  # a model may come without a tokenizer, or from memory
        if model and (token := load_tokenizer(model).eos_token_id) is not None:
            return (int(token),)
    log.warning(
        "model.model=%r: neither generation_config.json nor config.json nor the tokenizer names a token that ends a "
        "text, so completions end at sampling.max_tokens only; see sampling.stop_token_ids and sampling.stop",
        model,
    )
    return ()
