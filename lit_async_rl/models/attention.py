"""Kernels of attention and experts: the one that honours a model's configuration, and the reference for the others.

The kernels of transformers take the same arguments and ignore those they cannot compute, in silence. Of the families
of transformers 5.19, with every setting of attention and experts exaggerated in turn, `sdpa` differs from `eager` in
`attn_logit_softcapping` only (Gemma 2, VaultGemma); families whose attention has sinks do not offer it.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator
from contextlib import contextmanager

from transformers import PreTrainedConfig, PreTrainedModel

IGNORED = {"sdpa": ("attn_logit_softcapping",)}  # settings of configurations that a kernel does not compute
log = logging.getLogger(__name__)


def ignored_setting(lm: PreTrainedModel, implementation: str | None = None) -> str:
    """Setting of a model's configuration that an attention kernel ignores, as `name=value`; empty if there is none.

    Args:
        lm: the model.
        implementation: the kernel; None is the one that the model uses.
    """
    for config in (lm.config, lm.config.get_text_config()):
        for name in IGNORED.get(implementation or lm.config._attn_implementation, ()):
            if (value := getattr(config, name, None)) is not None:
                return f"{name}={value:g}"
    return ""


def choose_attention(lm: PreTrainedModel, named: str | None) -> None:
    """Gives a model whose default kernel ignores a setting of its configuration eager attention instead.

    Args:
        lm: the model.
        named: `model.attn_implementation`; None leaves the choice to the model.

    Raises:
        ValueError: the user named a kernel that ignores a setting.
    """
    if not (setting := ignored_setting(lm)):
        return
    kind = lm.config.model_type
    if named is not None:
        raise ValueError(
            f"model.attn_implementation={named!r} ignores {setting} of model type {kind!r}: it would train another "
            "distribution. Leave it out, or use eager, flex_attention or flash_attention_2"
        )
    _announce_eager(kind, lm.config._attn_implementation, setting)
    lm.set_attn_implementation("eager")


@functools.cache
def _announce_eager(kind: str, default: str, setting: str) -> None:
    log.warning(
        "model type %r: attention is computed by eager, because %s ignores its %s. On a GPU, "
        "model.attn_implementation: flex_attention takes less memory",
        *(kind, default, setting),
    )


def decoding_attention(lm: PreTrainedModel) -> str:
    """Kernel that takes the masks of the embedded engine and honours the configuration: `sdpa`, or else `eager`."""
    return "sdpa" if lm._supports_sdpa and not ignored_setting(lm, "sdpa") else "eager"


@contextmanager
def eager_kernels(lm: PreTrainedModel) -> Iterator[None]:
    """Context in which attention and experts are computed eagerly, which honours every setting of a configuration.

    Families that choose the kernel when they are built keep theirs.
    """
    parts = [part for part in lm.modules() if isinstance(part, PreTrainedModel)]
    before: list[tuple[PreTrainedConfig, str, str]] = []
    for part in parts:
        for name, is_settable in (
            ("_attn_implementation_internal", part._can_set_attn_implementation()),
            ("_experts_implementation_internal", part._can_set_experts_implementation()),
        ):
            chosen = getattr(part.config, name, None)
            if is_settable and chosen not in (None, "eager"):
                before.append((part.config, name, chosen))
                setattr(part.config, name, "eager")
    try:
        yield
    finally:
        for config, name, chosen in before:
            setattr(config, name, chosen)
