"""Tokens that end a completion: one set for every engine, collected from all of a model's files."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lit_async_rl.models.loading import base_of, load_config, load_generation_config, load_tokenizer

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
        named: ids by source (generation_config, config, tokenizer, chat template) that names any.
        left_out: named ids that are no end: the chat template writes them inside of a turn.
        turn_end: text that the chat template writes after an assistant's last message; empty if none.
        turn_ends_with_token: False if that text begins with ordinary text.
    """

    ids: tuple[int, ...]
    named: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    left_out: tuple[int, ...] = ()
    turn_end: str = ""
    turn_ends_with_token: bool = True

    @property
    def are_disputed(self) -> bool:
        """Whether the first source, which other programs use alone, names other tokens."""
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
    """End tokens of a loaded model, see `find_end_tokens`. Warns if there are none."""
    return _ids_or_warning(find_end_tokens(lm.name_or_path or "", lm.generation_config, lm.config), lm.name_or_path)


def stored_eos_token_ids(model: str) -> tuple[int, ...]:
    """End tokens from the files of a model. Warns if there are none."""
    return _ids_or_warning(stored_end_tokens(model), model)


def stored_end_tokens(model: str) -> EndTokens:
    """End tokens of the model in a folder or on the hub, see `find_end_tokens`."""
    return find_end_tokens(model, load_generation_config(model), load_config(model))


def sampled_model(model: str) -> str:
    """Model that an engine is set up with: the base of an adapter, whose changes come with the first weights.

    The adapter itself if the tokenizer saved with it ends completions elsewhere.
    """
    base = base_of(model)
    has_same_ends = base == model or stored_end_tokens(model).ids == stored_end_tokens(base).ids
    return base if has_same_ends else model


def find_end_tokens(model: str, generation_config: Any, config: Any) -> EndTokens:
    """Union of the end tokens named by generation configuration, configuration, tokenizer and chat template.

    Tokens of the generation configuration always count; an empty list there means that nothing ends a completion. Ids
    of the configuration, which are stale more often, count if the generation configuration names none, or if they are
    special tokens. The tokenizer's end of text and the token that the chat template writes after an answer count, too,
    unless the template also writes it between reasoning and answer (`<|end|>` of gpt-oss).

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
    found = _cached_tokenizer_ends(model, _modification_time(model))
    kept += [token for token in configured or () if token in found.special]
    named["tokenizer"] = found.eos
    named[TEMPLATE] = found.turn_end_ids
    kept += [token for token in (*found.eos, *found.turn_end_ids) if token not in found.inside]
    present = {place: ids for place, ids in named.items() if ids}
    ids = tuple(dict.fromkeys(kept))
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
            "model.model=%r: neither generation_config.json nor config.json nor the tokenizer names an end token, so "
            "completions end only at sampling.max_tokens; to end them earlier, set sampling.stop_token_ids or "
            "sampling.stop",
            model,
        )
    return ends.ids


@dataclass(frozen=True, kw_only=True)
class _TokenizerEnds:
    """Ends that a tokenizer and its chat template name; by default those of a model without a tokenizer."""

    special: frozenset[int] = frozenset()
    eos: tuple[int, ...] = ()
    turn_end_ids: tuple[int, ...] = ()
    inside: frozenset[int] = frozenset()
    turn_end: str = ""
    turn_ends_with_token: bool = True


def _modification_time(model: str) -> float:
    """Time of the last change of a folder's tokenizer, for the cache of `_cached_tokenizer_ends`."""
    files = [Path(model) / name for name in ("tokenizer_config.json", "tokenizer.json", "chat_template.jinja")]
    return max((file.stat().st_mtime for file in files if file.is_file()), default=0.0)


@functools.lru_cache(maxsize=16)
def _cached_tokenizer_ends(model: str, modified: float) -> _TokenizerEnds:
    with contextlib.suppress(FileNotFoundError):  # a model may come without a tokenizer, or from memory
        return tokenizer_ends(load_tokenizer(model))
    return _TokenizerEnds()


def tokenizer_ends(tokenizer: PreTrainedTokenizerBase) -> _TokenizerEnds:
    """End tokens of a tokenizer and, by rendering conversations, of its chat template."""
    special = frozenset({*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder})
    eos = () if tokenizer.eos_token_id is None else (int(tokenizer.eos_token_id),)
    if not tokenizer.chat_template:
        return _TokenizerEnds(special=special, eos=eos)
    question = {"role": "user", "content": USER}
    answer = {"role": "assistant", "content": ANSWER}
    reasoned = answer | {"reasoning_content": REASONING, "thinking": REASONING}
    # nothing if the template does not render the reasoning, or renders it later
    reasoned_end = _render(tokenizer, [question, reasoned]).partition(ANSWER)[0].partition(REASONING)[2]
    inside = special.intersection(_encoded(tokenizer, reasoned_end))
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


def _encoded(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"]) if text else []


def _first_token(tokenizer: PreTrainedTokenizerBase, text: str, special: Collection[int]) -> tuple[int, ...]:
    """The special token at the beginning of `text`, after whitespace; empty if other text comes first."""
    for token in _encoded(tokenizer, text.lstrip()):
        if token in special:
            return (int(token),)
        if str(tokenizer.decode([token])).strip():
            return ()
    return ()
