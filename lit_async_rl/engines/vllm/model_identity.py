"""Identity of a model by its whole text configuration, which trainer and server must agree on.

Imports little, because every vLLM worker imports it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

# Fields that do not change what the model computes: precision is vLLM's own setting, ends of text are the trainer's.
IGNORED = frozenset(
    (
        *("_name_or_path", "name_or_path", "architectures", "transformers_version", "auto_map", "model_type_override"),
        *("dtype", "torch_dtype", "use_cache", "attn_implementation", "_attn_implementation", "torchscript"),
        *("bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "decoder_start_token_id"),
        *("return_dict", "output_attentions", "output_hidden_states", "initializer_range", "is_encoder_decoder"),
        *("id2label", "label2id", "problem_type", "tokenizer_class", "chunk_size_feed_forward", "quantization_config"),
    )
)


def describe_config(config: Any) -> dict[str, Any]:
    """All other fields of a transformers text configuration, as JSON has them."""
    fields = {name: value for name, value in config.to_dict().items() if name not in IGNORED and value is not None}
    plain: dict[str, Any] = json.loads(json.dumps(fields, sort_keys=True, default=str))
    return plain


def difference(found: Mapping[str, Any], expected: Mapping[str, Any], common_only: bool, prefix: str = "") -> str:
    """The first field in which two configurations differ, as `its rope_theta is 500, ours 10000`; empty if equal.

    Args:
        found: of the server.
        expected: of the trainer.
        common_only: ignores fields that one of them lacks, as another version of transformers may.
        prefix: of names in the message.
    """
    names = found.keys() & expected.keys() if common_only else found.keys() | expected.keys()
    for name in sorted(names):
        theirs, ours = found.get(name), expected.get(name)
        if isinstance(theirs, Mapping) and isinstance(ours, Mapping):
            if inner := difference(theirs, ours, common_only, f"{prefix}{name}."):
                return inner
        elif theirs != ours:
            return f"its {prefix}{name} is {theirs!r}, ours {ours!r}"
    return ""
