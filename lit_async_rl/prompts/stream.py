"""Infinite, seeded, resumable stream over the prompts of a source."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from lit_async_rl.problem import Prompt
from lit_async_rl.prompts.sources import PromptSource

# -- Validation of prompts: complete, encodable, and within the length limit ------------------------------------------


MAX_CHECKED_AT_START = 10_000  # prompts; in larger sources, each is checked on first use
NUM_DIGEST_SAMPLES = 1000  # approximate number of answers in the digest of a larger source
log = logging.getLogger(__name__)
Encode = Callable[[Prompt], Sequence[int]]


class UsablePrompts:
    """Usable prompts of a source, each checked once; `source.on_bad_prompt` raises or skips bad ones.

    Args:
        source: source of the prompts.
        encode: token ids of a prompt; raises `ValueError` for an invalid one.
        max_tokens: largest prompt length in tokens, besides `source.max_prompt_tokens`; None is no limit.
        why: origin of `max_tokens`, for messages.

    Attributes:
        answers_digest: digest of a reward's inputs, the answers and metadata read by `check`; None before.
    """

    def __init__(self, source: PromptSource, encode: Encode, max_tokens: int | None = None, why: str = "") -> None:
        self._source = source
        self._encode = encode
        own = source.max_prompt_tokens
        self._limit = own
        self._why = f"max_prompt_tokens={own}"
        if max_tokens is not None and (own is None or max_tokens < own):
            self._limit = max_tokens
            self._why = why
        self.left_out: set[int] = set()
        self._good: set[int] = set()
        self._answers = hashlib.sha256()
        self.answers_digest: str | None = None

    def __contains__(self, number: int) -> bool:
        """Whether prompt `number` is usable.

        Raises:
            ValueError: it is not, and `on_bad_prompt` is `error`; or no prompt of the source is usable.
        """
        if number in self._good or number in self.left_out:
            return number in self._good
        problem = self._problem(number)
        if problem is None:
            self._good.add(number)
            return True
        self._leave_out(number, problem)
        return False

    def check(self, limit: int = MAX_CHECKED_AT_START) -> None:
        """Checks all prompts if there are at most `limit`, else the first one.

        Raises:
            ValueError: see `__contains__`.
        """
        size = len(self._source)
        for number in range(size if size <= limit else 1):
            number in self  # noqa: B015  raises for a bad prompt, and stores the result
        if size > limit:
            for number in range(0, size, max(1, size // NUM_DIGEST_SAMPLES)):
                with contextlib.suppress(ValueError):  # a bad prompt; reported on first use
                    self._digest(self._source[number])
        self.answers_digest = self._answers.hexdigest()[:16]

    def _digest(self, prompt: Prompt) -> None:
        if self.answers_digest is None:
            self._answers.update(rewarded_by(prompt).encode())

    def _problem(self, number: int) -> str | None:
        try:
            prompt = self._source[number]
            self._digest(prompt)
            num_tokens = len(self._encode(prompt))
        except ValueError as error:
            where = self._source.where(number)
            return str(error) if where in str(error) else f"{where}: {error}"
        if self._limit is None or num_tokens <= self._limit:
            return None
        return f"{self._source.where(number)}: the prompt has {num_tokens} tokens, more than {self._why}"

    def _leave_out(self, number: int, problem: str) -> None:
        if self._source.on_bad_prompt == "error":
            raise ValueError(f"{problem} (to leave such prompts out, set on_bad_prompt: skip)")
        self.left_out.add(number)
        count = len(self.left_out)
        total = len(self._source)
        if count == total:
            raise ValueError(f"on_bad_prompt=skip left out all {total} prompts; the last problem: {problem}")
        if count & (count - 1) == 0:  # powers of two, so that a large source has few lines
            log.warning(
                "prompts left out so far (on_bad_prompt=skip): %d of %d; the latest problem: %s", count, total, problem
            )


def rewarded_by(prompt: Prompt, of_object: Callable[[Any], str] = lambda value: type(value).__qualname__) -> str:
    """Answers and metadata of a prompt, which a reward reads, as text.

    Args:
        prompt: prompt.
        of_object: text for an object unknown to JSON; by default its type, because images may be many.
    """
    answers = prompt.answer if len(prompt.answers) < 2 else list(prompt.answers)
    return json.dumps([answers, _stable(prompt.metadata, of_object)], ensure_ascii=True)


def _stable(value: Any, of_object: Callable[[Any], str]) -> Any:
    """Metadata in a form that is the same in every process."""
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, Mapping):
        pairs = ((repr(key), _stable(part, of_object)) for key, part in value.items())
        return sorted(pairs, key=lambda pair: pair[0])
    if isinstance(value, list | tuple):
        return [_stable(part, of_object) for part in value]
    return of_object(value)


class UsableSubset(PromptSource):
    """Usable prompts of a source, in its order; the constructor checks all prompts.

    Args:
        source: source of the prompts.
        encode: token ids of a prompt.
        max_tokens: see `UsablePrompts`; likewise `why`.

    Raises:
        ValueError: see `UsablePrompts`.
    """

    def __init__(self, source: PromptSource, encode: Encode, max_tokens: int | None = None, why: str = "") -> None:
        usable = UsablePrompts(source, encode, max_tokens, why=why)
        self._source = source
        self._numbers = [number for number in range(len(source)) if number in usable]

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, index: int) -> Prompt:
        return self._source[self._numbers[index]]

    def where(self, index: int) -> str:
        """Name of the prompt in the source."""
        return self._source.where(self._numbers[index])


class PromptStream:
    """Infinite stream over a source, with a permutation per epoch that depends on seed and epoch only.

    Args:
        source: source of the prompts.
        seed: seed of the permutations.
        shuffle: False keeps the order of the source in every epoch.

    Raises:
        ValueError: the source is empty.
    """

    def __init__(self, source: PromptSource, seed: int = 0, shuffle: bool = True) -> None:
        if len(source) == 0:
            raise ValueError(f"data.prompts: {type(source).__name__} holds no prompts")
        self.source = source
        self.seed = seed
        self.shuffle = shuffle
        self.position = 0  # number of prompts taken so far
        self._orders: dict[int, torch.Tensor] = {}  # permutations by epoch, of this epoch and the one before
        self.usable: UsablePrompts | None = None  # None means that all prompts are usable

    def next(self) -> Prompt:
        """Returns the next prompt."""
        return self.at(self.advance())

    def advance(self) -> int:
        """Advances to the next usable prompt and returns its position; skipped prompts have positions, too."""
        while True:
            self.position += 1
            if self.usable is None or self.number_at(self.position - 1) in self.usable:
                return self.position - 1

    def at(self, position: int) -> Prompt:
        """Prompt at a position of the stream."""
        return self.source[self.number_at(position)]

    def number_at(self, position: int) -> int:
        """Index in the source of the prompt at a position of the stream."""
        epoch, offset = divmod(position, len(self.source))
        if not self.shuffle:
            return offset
        if epoch not in self._orders:
            generator = torch.Generator().manual_seed(hash((self.seed, epoch)) % 2**63)
            self._orders[epoch] = torch.randperm(len(self.source), generator=generator)
            if len(self._orders) > 2:
                del self._orders[min(set(self._orders) - {epoch})]
        return int(self._orders[epoch][offset])

    def state_dict(self) -> dict[str, int]:
        """State: the position; the order follows from the seed."""
        return {"position": self.position}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Restores the position of `state_dict`."""
        self.position = state["position"]
