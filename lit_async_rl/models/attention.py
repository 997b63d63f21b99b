"""Choice of attention and expert kernels that honour every setting of a model's configuration.

The kernels of transformers silently ignore arguments that they do not support. A test of all families of transformers
5.19, with every setting of attention and experts exaggerated in turn, found one difference between `sdpa` and `eager`:
`attn_logit_softcapping` (Gemma 2, VaultGemma). Families with attention sinks do not offer `sdpa`.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator
from contextlib import contextmanager

from transformers import PreTrainedConfig, PreTrainedModel

IGNORED_SETTINGS = {"sdpa": ("attn_logit_softcapping",)}  # of a configuration, by kernel
log = logging.getLogger(__name__)


def ignored_setting(lm: PreTrainedModel, implementation: str | None = None) -> str:
    """Setting of a model's configuration that an attention kernel ignores, as `name=value`; empty if none.

    Args:
        lm: the model.
        implementation: the kernel; None is the present one.
    """
    for config in (lm.config, lm.config.get_text_config()):
        for name in IGNORED_SETTINGS.get(implementation or lm.config._attn_implementation, ()):
            if (value := getattr(config, name, None)) is not None:
                return f"{name}={value:g}"
    return ""


def choose_attention(lm: PreTrainedModel, named: str | None) -> None:
    """Switches a model to eager attention if its default kernel ignores a setting of its configuration.

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
            f"model.attn_implementation={named!r} ignores {setting} of model type {kind!r}, so the run "
            "would train a different distribution from the model's. Leave attn_implementation out, or use eager, "
            "flex_attention or flash_attention_2"
        )
    _announce_eager(kind, lm.config._attn_implementation, setting)
    lm.set_attn_implementation("eager")


@functools.cache
def _announce_eager(kind: str, default: str, setting: str) -> None:
    log.warning(
        "model type %r: the eager attention implementation is used, because the default implementation %s ignores the "
        "model's %s. On a GPU, set model.attn_implementation: flex_attention, which takes less memory than eager",
        *(kind, default, setting),
    )


def decoding_attention(lm: PreTrainedModel) -> str:
    """Kernel that takes the embedded engine's masks and honours the configuration: `sdpa`, else `eager`."""
    return "sdpa" if lm._supports_sdpa and not ignored_setting(lm, "sdpa") else "eager"


@contextmanager
def eager_kernels(lm: PreTrainedModel) -> Iterator[None]:
    """Context with eager attention and experts, which ignore no setting.

    Families that choose their kernel at construction keep it.
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
