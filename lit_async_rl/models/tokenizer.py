"""Encoding of prompts, and decoding of completions."""

from __future__ import annotations

import functools
import hashlib
import re
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, Literal, get_args

import jinja2
import jinja2.meta
import torch
from jaxtyping import Bool
from jinja2 import TemplateError
from torch import Tensor

from lit_async_rl.models.architecture import configured_length
from lit_async_rl.models.end_tokens import EndTokens, stored_end_tokens
from lit_async_rl.models.loading import load_config, load_tokenizer
from lit_async_rl.models.run_clock import clock_options
from lit_async_rl.problem import TEMPLATE_KWARGS, TOOLS, Prompt
from lit_async_rl.utils.plain import as_lists, is_missing

# -- Stop strings: detection of the first token after which the decoded completion contains one -----------------------
# Decoding the text after every token would cost more than sampling it, so two cheaper filters come first: a table,
# kept for the stop strings last asked for, of the tokens that can complete one, then the text of the last few tokens.
# All tokens are decoded only if that text contains a stop string.


REPLACEMENT_CHARACTER = "\ufffd"  # decoders write it for bytes that are no complete character
MAX_CHARACTER_BYTES = 4  # in UTF-8; each byte may be a token of its own
EXTRA_TAIL_TOKENS = 8  # decoded in addition, because decoders may treat the first token differently
MAX_TABLES = 64  # of stop strings: agents may name others in each call


def cut_at_stop(text: str, stops: Sequence[str]) -> str:
    """Cuts `text` before the first stop string; returns it unchanged if it contains none."""
    begins = [text.find(stop) for stop in stops]
    return text[: min((begin for begin in begins if begin >= 0), default=None)]


class StopStrings:
    """Detects stop strings in token ids, across token and character boundaries.

    Args:
        tokenizer: tokenizer of the model; special tokens are not part of the text.
        vocab_size: size of the model's vocabulary; None is that of the tokenizer.
    """

    def __init__(self, tokenizer: Any, vocab_size: int | None = None) -> None:
        self.tokenizer = tokenizer
        self._vocab_size = vocab_size or len(tokenizer)

    @classmethod
    def of_model(cls, model: str | None, vocab_size: int) -> StopStrings:
        """Loads the tokenizer of a model.

        Raises:
            ValueError: `model` is empty, as for a model built in memory.
            FileNotFoundError: there is no tokenizer.
        """
        if not model:
            raise ValueError("sampling.stop needs a tokenizer, but the engine's model was not loaded from a folder")
        return cls(load_tokenizer(model), vocab_size)

    def may_end(self, stops: tuple[str, ...]) -> Bool[Tensor, " V"]:
        """Mask of tokens that can complete a stop string, with false positives, but no false negatives."""
        return _may_end(self.tokenizer, stops, self._vocab_size)

    def is_at_end(self, token_ids: Sequence[int], stops: Sequence[str]) -> bool:
        """Whether the last token completes a stop string; the text before it must contain none."""
        tail = self._tail_text(token_ids, EXTRA_TAIL_TOKENS + MAX_CHARACTER_BYTES * max(map(len, stops)))
        if not any(stop in tail for stop in stops):
            return False
        text = _visible(self.tokenizer, token_ids)
        return any(stop in text for stop in stops)

    def first_end(self, token_ids: Sequence[int], stops: tuple[str, ...], after: int = 0) -> int | None:
        """Smallest n > `after` for which the first n tokens contain a stop string; None if there is none."""
        candidates = self.may_end(stops)[torch.tensor(token_ids[after:], dtype=torch.long)].nonzero()[:, 0]
        ends = (after + n + 1 for n in candidates.tolist())
        return next((end for end in ends if self.is_at_end(token_ids[:end], stops)), None)

    def _tail_text(self, token_ids: Sequence[int], length: int) -> str:
        """Text of the shortest suffix of `token_ids` with `length` visible tokens."""
        known = _pieces(self.tokenizer)
        begin = len(token_ids)
        pieces: list[str | None] = []
        while begin and length:
            begin -= 1
            token = token_ids[begin]
            if token >= len(known) or (piece := known[token]) == "":  # special, or unknown to the tokenizer
                continue
            pieces.append(piece)
            length -= 1
        if any(piece is None or REPLACEMENT_CHARACTER in piece for piece in pieces):
            return _visible(self.tokenizer, token_ids[begin:])
        return "".join(piece for piece in reversed(pieces) if piece)


def _visible(tokenizer: Any, token_ids: Sequence[int]) -> str:
    """Text of tokens without the special ones."""
    return str(tokenizer.decode(list(token_ids), skip_special_tokens=True))


@lru_cache(maxsize=4)
def _pieces(tokenizer: Any) -> list[str | None]:
    """Text that each token appends to a preceding token; None where it depends on the context."""
    alone = tokenizer.batch_decode([[n] for n in range(len(tokenizer))], skip_special_tokens=True)
    if getattr(tokenizer, "clean_up_tokenization_spaces", False):
        return [None] * len(alone)
    plain = (n for n, text in enumerate(alone) if text and text == text.strip() and REPLACEMENT_CHARACTER not in text)
    first = next(plain, None)
    if first is None:
        return [None] * len(alone)
    pairs = tokenizer.batch_decode([[first, n] for n in range(len(alone))], skip_special_tokens=True)
    before = alone[first]
    return [text[len(before) :] if text.startswith(before) else None for text in pairs]


@lru_cache(maxsize=4)
def _ordered(tokenizer: Any) -> tuple[list[str], list[int], list[int]]:
    """Texts of `_pieces` sorted, their tokens, and the tokens without a text."""
    known = sorted((piece, token) for token, piece in enumerate(_pieces(tokenizer)) if piece)
    unclear = [token for token, piece in enumerate(_pieces(tokenizer)) if piece is None]
    return [piece for piece, _ in known], [token for _, token in known], unclear


@lru_cache(maxsize=MAX_TABLES)
def _may_end(tokenizer: Any, stops: tuple[str, ...], vocab_size: int) -> Bool[Tensor, " V"]:
    """See `StopStrings.may_end`. Takes some milliseconds a string of any length; the engine waits for it."""
    texts, tokens, unclear = _ordered(tokenizer)
    found = set(unclear)
    longest = max(map(len, texts), default=0)
    # incomplete bytes may belong to a character of a stop string
    parts = [*stops, *([] if all(stop.isascii() for stop in stops) else [REPLACEMENT_CHARACTER])]
    for part in parts:
        if len(part) <= longest:
            found.update(token for text, token in zip(texts, tokens, strict=True) if part in text)
    for stop in stops:
        for begin in range(max(1, len(stop) - longest), len(stop)):  # no token begins with a longer end of it
            end = stop[begin:]
            first = bisect_left(texts, end)
            found.update(tokens[first : bisect_right(texts, end, lo=first, key=lambda piece: piece[: len(end)])])
    table = torch.zeros(max(vocab_size, len(tokenizer)), dtype=torch.bool)
    table[torch.tensor(sorted(found), dtype=torch.long)] = True
    return table[:vocab_size]


SpecialTokens = Literal["tags", "none", "all"]
SPECIAL_TOKENS = get_args(SpecialTokens)
GENERATION_TAG = re.compile(r"\{%-?\s*(end)?generation\s*-?%\}")


class TextCodec:
    """Encodes prompts and decodes completions with a model's tokenizer.

    The chat template is applied to prompts that are messages, with `tools` and `chat_template_kwargs` of their
    metadata. If the last message is from the assistant, the completion continues it; otherwise it is the assistant's
    next turn.

    Args:
        model: Hugging Face name or folder.
        special_tokens: special tokens in decoded text, see `data.scoring.special_tokens`.

    Raises:
        FileNotFoundError: there is no tokenizer.
    """

    def __init__(self, model: str, special_tokens: SpecialTokens = "tags") -> None:
        self.tokenizer = load_tokenizer(model)
        config: Any = load_config(model).get_text_config()
        self.context_length = configured_length(config)
        self.vocab_size = int(config.vocab_size)  # of the model, which may have more ids than the tokenizer
        self.model = model
        self.special_tokens = special_tokens
        self._texts: dict[int, str] = {}
        self._lost: dict[Any, int | None] = {}

    @functools.cached_property
    def ends(self) -> EndTokens:
        """Tokens that end a completion, the same as in the engines."""
        return stored_end_tokens(self.model)

    @functools.cached_property
    def vocabulary_digest(self) -> str:
        """Digest of the tokens and their ids."""
        vocabulary = sorted(self.tokenizer.get_vocab().items(), key=lambda token: (token[1], str(token[0])))
        return hashlib.sha256(repr(vocabulary).encode(errors="surrogatepass")).hexdigest()[:16]

    @property
    def pad_token_id(self) -> int:
        """Padding token id; 0 if the tokenizer has none, because padding is masked."""
        return self.tokenizer.pad_token_id or 0

    def encode(self, prompt: Prompt) -> tuple[int, ...]:
        """Token ids of a prompt.

        A text gets the tokenizer's prefix (BOS), unless it begins with that, as a rendered chat template does, but no
        suffix (EOS), because the completion continues it.

        Raises:
            ValueError: the prompt has no tokens, or the chat template is missing or refuses the messages.
        """
        ids = self.encode_text(prompt.text) if prompt.messages is None else self._encode_messages(prompt)
        if not ids:
            raise ValueError(f"a prompt has no tokens: {prompt.text!r}")
        return ids

    def encode_text(self, text: str) -> tuple[int, ...]:
        """Token ids of a text with the tokenizer's prefix, without its suffix, see `encode`."""
        own = tuple(self.tokenizer(text, add_special_tokens=False)["input_ids"])
        whole = tuple(self.tokenizer(text)["input_ids"])
        num_added = len(whole) - len(own)
        begins = [begin for begin in range(num_added + 1) if whole[begin : begin + len(own)] == own]
        if not own or not begins:  # an empty text, or one with other tokens when special tokens are added
            return whole[:-1] if whole and whole[-1] == self.tokenizer.eos_token_id else whole
        before = whole[: begins[-1]]
        return own if own[: len(before)] == before else before + own

    def _encode_messages(self, prompt: Prompt) -> tuple[int, ...]:
        messages = prompt.messages or ()
        if not self.tokenizer.chat_template:
            raise ValueError(
                f"a prompt is a list of messages, but the tokenizer of {self.model!r} has no chat template"
            )
        continues = messages[-1]["role"] == "assistant"
        options = self.template_options(prompt.metadata)
        options |= dict(add_generation_prompt=not continues, continue_final_message=continues)
        options |= clock_options(self.tokenizer.chat_template)
        try:
            ids: Any = self.tokenizer.apply_chat_template(
                [dict(message) for message in messages], return_dict=False, **options
            )
        except (TemplateError, ValueError, TypeError) as error:
            roles = ", ".join(message["role"] for message in messages)
            raise ValueError(
                f"the chat template of {self.model!r} refuses a prompt with the roles {roles}: {error}"
            ) from error
        if (lost := self._left_out(messages, options)) is not None:
            raise ValueError(
                f"the chat template of {self.model!r} leaves out message {lost} (role {messages[lost]['role']}) of a "
                "prompt, so the policy would never read this message"
            )
        return tuple(ids)

    def _left_out(self, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]) -> int | None:
        """First message that the template does not render; None if it renders all.

        Tested with placeholders, once per sequence of roles; not for answers, whose reasoning templates drop.
        """
        shape = (
            tuple((message["role"], *sorted(message)) for message in messages),
            *sorted(options),
            options["continue_final_message"],
        )
        if shape not in self._lost:
            marks = {n: f"MESSAGE{n}TEXT" for n, message in enumerate(messages) if message["role"] != "assistant"}
            marked = [
                dict(message) | ({"content": marks[n]} if n in marks else {}) for n, message in enumerate(messages)
            ]
            try:
                text = str(self.tokenizer.apply_chat_template(marked, tokenize=False, **options))
            except (TemplateError, ValueError, TypeError):  # the template depends on the texts: assume it renders all
                text = " ".join(marks.values())
            self._lost[shape] = next((n for n, mark in marks.items() if mark not in text), None)
        return self._lost[shape]

    def template_options(self, metadata: Mapping[str, Any]) -> dict[str, Any]:
        """Arguments of the chat template besides the messages.

        Raises:
            ValueError: the template does not read one of them, or it has the wrong type.
        """
        tools = as_lists(metadata.get(TOOLS))
        kwargs = metadata.get(TEMPLATE_KWARGS)
        options: dict[str, Any] = {}
        if not is_missing(kwargs):
            if not isinstance(kwargs, Mapping):
                raise ValueError(f"chat_template_kwargs of a prompt must be a dictionary, got {str(kwargs)[:80]!r}")
            options |= {name: value for name, value in kwargs.items() if not is_missing(value)}
        if tools is not None and not is_missing(tools) and len(tools):
            if isinstance(tools, str) or not all(isinstance(tool, Mapping) for tool in tools):
                raise ValueError(f"tools of a prompt must be a list of JSON schemas, got {str(tools)[:80]!r}")
            options[TOOLS] = [dict(tool) for tool in tools]
        if unknown := sorted(set(options) - self.template_variables):
            raise ValueError(
                f"a prompt's chat_template_kwargs or tools set {', '.join(unknown)}, which the chat template of "
                f"{self.model!r} does not read; the template reads "
                f"{', '.join(sorted(self.template_variables)) or 'none'}"
            )
        return options

    @functools.cached_property
    def template_variables(self) -> frozenset[str]:
        """Names that the chat template reads."""
        template = self.tokenizer.chat_template
        sources = template.values() if isinstance(template, dict) else [template or ""]
        environment = jinja2.Environment(extensions=["jinja2.ext.loopcontrols"])  # parses, never renders
        read: set[str] = set()
        for source in sources:
            plain = GENERATION_TAG.sub(
                "", source
            )  # a tag of transformers around the assistant's text, unknown to jinja
            read |= jinja2.meta.find_undeclared_variables(environment.parse(plain))
        return frozenset(read - {"messages", "add_generation_prompt", "raise_exception", "strftime_now"})

    def encode_continuation(self, text: str) -> tuple[int, ...]:
        """Token ids of text within a conversation, without special tokens.

        Encoded after a token that ends a turn, because SentencePiece puts a space before a text on its own.
        """
        for token in self.ends.ids:
            lead = self.tokenizer.convert_ids_to_tokens(token)
            ids = tuple(self.tokenizer(f"{lead}{text}", add_special_tokens=False)["input_ids"])
            if ids[:1] == (token,):
                return ids[1:]
        return tuple(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def decode(self, token_ids: Sequence[int], stop: Sequence[str] = (), stop_token_ids: Sequence[int] = ()) -> str:
        """Text of a completion up to the first stop string, with special tokens as `special_tokens` says.

        Args:
            token_ids: tokens of the completion.
            stop: stop strings, searched in the text without special tokens.
            stop_token_ids: stop tokens; special ones among them are not `tags`.
        """
        plain = _visible(self.tokenizer, token_ids)
        known = cut_at_stop(plain, stop)
        dropped = self._dropped(stop_token_ids)
        if self._special.difference(dropped).isdisjoint(token_ids):
            return known
        if len(known) == len(plain):
            return self._with_special(token_ids, dropped)
        for end in range(len(token_ids), -1, -1):  # a stop string ends the completion, so this is a few tokens
            head = _visible(self.tokenizer, token_ids[:end])
            if known.startswith(head):
                return self._with_special(token_ids[:end], dropped) + known[len(head) :]
        return known

    @property
    def tags(self) -> list[str]:
        """Up to 8 of the special tokens that `tags` keeps in texts."""
        ids = sorted(self._special - self._dropped(()))[:8]
        return [str(self.tokenizer.convert_ids_to_tokens(token)) for token in ids]

    def _dropped(self, stop_token_ids: Sequence[int]) -> frozenset[int]:
        """Special tokens to remove from decoded text."""
        if self.special_tokens == "all":
            return frozenset()
        if self.special_tokens == "none":
            return self._special
        return self._no_tags | self._special.intersection((*self.ends.ids, *stop_token_ids))

    def _with_special(self, token_ids: Sequence[int], dropped: frozenset[int]) -> str:
        kept = [token for token in token_ids if token not in dropped]
        return str(self.tokenizer.decode(kept, skip_special_tokens=False, spaces_between_special_tokens=False))

    @functools.cached_property
    def _special(self) -> frozenset[int]:
        """All special tokens."""
        added = self.tokenizer.added_tokens_decoder.items()
        return frozenset({*self.tokenizer.all_special_ids, *(token for token, one in added if one.special)})

    @functools.cached_property
    def _no_tags(self) -> frozenset[int]:
        """Special tokens that mark the beginning, the end, the padding or the gaps of texts."""
        names = ("bos", "eos", "pad", "unk", "sep", "cls", "mask")
        ids = [getattr(self.tokenizer, f"{name}_token_id", None) for name in names]
        return frozenset(token for token in ids if token is not None)

    def token_texts(self, token_ids: Sequence[int]) -> list[str]:
        """Text of each token, special ones included; a character of several tokens belongs to the last of them."""
        texts = [self._token_text(token) for token in token_ids]
        begin = 0
        while begin < len(texts):
            end = begin + 1
            if REPLACEMENT_CHARACTER in texts[begin]:  # a character of several tokens has at most four bytes
                for end in range(begin + 2, min(begin + 4, len(texts)) + 1):
                    whole = str(self.tokenizer.decode(list(token_ids[begin:end])))
                    if REPLACEMENT_CHARACTER not in whole:
                        texts[begin:end] = [*[""] * (end - begin - 1), whole]
                        break
                else:
                    end = begin + 1
            begin = end
        return texts

    def _token_text(self, token: int) -> str:
        if token not in self._texts:
            text = str(self.tokenizer.decode([token]))
            piece = self.tokenizer.convert_ids_to_tokens(token)
            leads = isinstance(piece, str) and piece.startswith("\u2581")  # SentencePiece drops the first space
            self._texts[token] = f" {text}" if leads and not text.startswith(" ") else text
        return self._texts[token]

    def check_turn_end(self, has_messages: bool, can_stop: bool) -> None:
        """Checks that completions of chat prompts can end.

        Args:
            has_messages: whether prompts are messages, whose turns the chat template ends.
            can_stop: whether stop strings, stop tokens or end tokens are set.

        Raises:
            ValueError: the template ends a turn with ordinary text, or nothing ends it, and there is no other end.
        """
        if not has_messages or can_stop or not self.tokenizer.chat_template:
            return
        end = self.ends.turn_end.strip()
        if not self.ends.turn_ends_with_token:
            raise ValueError(
                f"the chat template of {self.model!r} ends a turn with {end[:40]!r}, which is not a token of its "
                f"tokenizer, so completions would run to sampling.max_tokens: set sampling.stop: [{end[:40]!r}]"
            )
        if not self.ends.ids:
            raise ValueError(
                f"the model {self.model!r} has no end token: its chat template, tokenizer, config.json and "
                "generation_config.json name none. Set sampling.stop or sampling.stop_token_ids"
            )

    def check_stop(self, stop: Sequence[str], token_ids: Sequence[int] = ()) -> None:
        """Checks stop strings and stop tokens.

        Raises:
            ValueError: a string is a special token, which decoded text lacks; the model has no such token.
        """
        if unknown := [token for token in token_ids if token >= self.vocab_size]:
            raise ValueError(
                f"sampling.stop_token_ids must be token ids of {self.model!r}, from 0 to {self.vocab_size - 1}, got "
                f"{unknown}"
            )
        for text in stop:
            if text in self.tokenizer.all_special_tokens:
                token = self.tokenizer.convert_tokens_to_ids(text)
                raise ValueError(
                    f"sampling.stop: {text!r} is a special token of {self.model!r}, which never appears in decoded "
                    f"text: use sampling.stop_token_ids: [{token}]"
                )
