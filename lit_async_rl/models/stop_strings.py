"""Stop strings: detection of the first token after which the decoded completion contains one.

Decoding the text after every token would cost more than sampling it, so two cheaper filters come first: a table, built
once per tokenizer, of the tokens that can complete a stop string, then the text of the last few tokens. All tokens are
decoded only if that text contains a stop string.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor

from lit_async_rl.models.loading import load_tokenizer

UNKNOWN = "\ufffd"  # in place of bytes that are no complete character
BYTES_OF_CHARACTER = 4  # at most, in UTF-8; each may be a token
MARGIN = 8  # more tokens than needed, because decoders may treat the first one in another way


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
        self._tables: dict[tuple[str, ...], Tensor] = {}

    @classmethod
    def of_model(cls, model: str | None, vocab_size: int | None = None) -> StopStrings:
        """Loads the tokenizer of a model.

        Raises:
            ValueError: `model` is empty, as for a model built in memory.
            FileNotFoundError: there is no tokenizer.
        """
        if not model:
            raise ValueError("sampling.stop needs a tokenizer, and the engine's model was not loaded from a folder")
        return cls(load_tokenizer(model), vocab_size)

    def may_end(self, stops: tuple[str, ...]) -> Bool[Tensor, " V"]:
        """Mask of the tokens that can complete a stop string; false positives are possible, false negatives are not."""
        if stops not in self._tables:
            table = torch.zeros(self._vocab_size, dtype=torch.bool)
            pieces = self._pieces[: self._vocab_size]
            table[: len(pieces)] = torch.tensor([_may_end(piece, stops) for piece in pieces])
            self._tables[stops] = table
        return self._tables[stops]

    def is_at_end(self, token_ids: Sequence[int], stops: Sequence[str]) -> bool:
        """Whether the last token completes a stop string; the text of the tokens before it must contain none."""
        tail = self._tail_text(token_ids, MARGIN + BYTES_OF_CHARACTER * max(map(len, stops)))
        if not any(stop in tail for stop in stops):
            return False
        text = self._text(token_ids)
        return any(stop in text for stop in stops)

    def first_end(self, token_ids: Sequence[int], stops: tuple[str, ...], after: int = 0) -> int | None:
        """Smallest number of tokens above `after` whose text contains a stop string; None if there is none."""
        candidates = self.may_end(stops)[torch.tensor(token_ids[after:], dtype=torch.long)].nonzero()[:, 0]
        ends = (after + n + 1 for n in candidates.tolist())
        return next((end for end in ends if self.is_at_end(token_ids[:end], stops)), None)

    def _tail_text(self, token_ids: Sequence[int], length: int) -> str:
        """Text of the shortest suffix of `token_ids` with `length` visible tokens."""
        known, begin = self._pieces, len(token_ids)
        pieces: list[str | None] = []
        while begin and length:
            begin -= 1
            token = token_ids[begin]
            if token >= len(known) or (piece := known[token]) == "":  # special, or unknown to the tokenizer
                continue
            pieces.append(piece)
            length -= 1
        if any(piece is None or UNKNOWN in piece for piece in pieces):
            return self._text(token_ids[begin:])
        return "".join(piece for piece in reversed(pieces) if piece)

    def _text(self, token_ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(token_ids), skip_special_tokens=True))

    @property
    def _pieces(self) -> list[str | None]:
        return _pieces(self.tokenizer)


@lru_cache(maxsize=4)
def _pieces(tokenizer: Any) -> list[str | None]:
    """Text that each token appends to a preceding token; None where it depends on the context."""
    alone = tokenizer.batch_decode([[n] for n in range(len(tokenizer))], skip_special_tokens=True)
    if getattr(tokenizer, "clean_up_tokenization_spaces", False):
        return [None] * len(alone)
    usual = (n for n, text in enumerate(alone) if text and text == text.strip() and UNKNOWN not in text)
    first = next(usual, None)
    if first is None:
        return [None] * len(alone)
    pairs = tokenizer.batch_decode([[first, n] for n in range(len(alone))], skip_special_tokens=True)
    before = alone[first]
    return [text[len(before) :] if text.startswith(before) else None for text in pairs]


def _may_end(piece: str | None, stops: tuple[str, ...]) -> bool:
    if piece is None:
        return True
    if UNKNOWN in piece and not all(stop.isascii() for stop in stops):  # bytes of a character of a stop string, perhaps
        return True
    return any(stop in piece or _begins_with_end(piece, stop) for stop in stops)


def _begins_with_end(piece: str, stop: str) -> bool:
    return any(piece.startswith(stop[begin:]) for begin in range(1, len(stop)))
