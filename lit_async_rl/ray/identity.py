"""Checks before a replica gets requests that it has the trainer's model, and computes the same."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import transformers

import lit_async_rl
from lit_async_rl.engines.base import Probe, default_bound
from lit_async_rl.models.loading import load_config

# fields that do not change the model's function: engine and trainer set the precision, the trainer the end tokens
IGNORED_FIELDS = frozenset(
    {
        "_attn_implementation",
        "_name_or_path",
        "architectures",
        "attn_implementation",
        "auto_map",
        "bos_token_id",
        "chunk_size_feed_forward",
        "decoder_start_token_id",
        "dtype",
        "eos_token_id",
        "id2label",
        "initializer_range",
        "is_encoder_decoder",
        "label2id",
        "model_type_override",
        "name_or_path",
        "output_attentions",
        "output_hidden_states",
        "pad_token_id",
        "problem_type",
        "quantization_config",
        "return_dict",
        "sep_token_id",
        "tokenizer_class",
        "torch_dtype",
        "torchscript",
        "transformers_version",
        "use_cache",
    }
)


def describe_model(model: str) -> dict[str, Any]:
    """A model as this process reads it, in JSON values: configuration, and versions of the packages that read it."""
    fields = load_config(model).get_text_config().to_dict()
    kept = {name: value for name, value in fields.items() if name not in IGNORED_FIELDS and value is not None}
    return {
        "package": lit_async_rl.__version__,
        "transformers": transformers.__version__,
        "config": json.loads(json.dumps(kept, sort_keys=True, default=str)),
    }


def find_other_model(found: Mapping[str, Any], expected: Mapping[str, Any]) -> str:
    """Difference of a replica's `describe_model` from ours, in words that follow its name; empty if there is none."""
    if found["package"] != expected["package"]:
        return (
            f"runs lit-async-rl {found['package']}, the trainer {expected['package']}: install the same version there"
        )
    # another transformers may name further fields
    is_other_library = found["transformers"] != expected["transformers"]
    problem = difference(found["config"], expected["config"], common_only=is_other_library)
    return f"has another model: {problem}" if problem else ""


def difference(found: Mapping[str, Any], expected: Mapping[str, Any], common_only: bool, prefix: str = "") -> str:
    """First difference of a replica's configuration, as `its rope_theta is 500, ours 10000`; empty if there is none.

    With `common_only`, fields that only one side has are ignored, as between versions of transformers.
    """
    names = found.keys() & expected.keys() if common_only else found.keys() | expected.keys()
    for name in sorted(names):
        theirs = found.get(name)
        ours = expected.get(name)
        if isinstance(theirs, Mapping) and isinstance(ours, Mapping):
            if inner := difference(theirs, ours, common_only, prefix=f"{prefix}{name}."):
                return inner
        elif theirs != ours:
            return f"its {prefix}{name} is {theirs!r}, ours {ours!r}"
    return ""


def find_other_arithmetic(answer: Mapping[str, Any], version: int, probe: Probe | None) -> str:
    """Fault in a replica's proof of a version, in words that follow its name; empty if valid.

    The answer is that of `Replica.prove`; `probe` has the trainer's log-probabilities, if known.
    """
    if list(answer["versions"]) != [version]:
        return f"tags new tokens with versions {list(answer['versions'])}, not {version}"
    found = answer["logprobs"]
    if probe is None or found is None:
        return ""
    if len(found) != len(probe.logprobs):
        return f"has log-probabilities of {len(found)} tokens, asked for {len(probe.logprobs)}"
    error = probe.error(found)
    bound = default_bound(probe.dtype, answer["dtype"])
    if error <= bound:  # not so for NaN
        return ""
    return (
        f"computes other log-probabilities than the trainer with the weights of version {version}: the mean absolute "
        f"difference over {len(found)} tokens is {error:.2g}, and {probe.dtype}/{answer['dtype']} explains {bound:g}"
    )
