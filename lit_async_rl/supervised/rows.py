"""From a record to the tokens of a row and those that train.

A conversation is tokenised as agents continue one (`lit_async_rl.agents.rendering`): an assistant's turn follows the
tokens that the policy reads when it samples that turn, is written as the template writes a conversation's last turn
(with its reasoning), and ends with the token that ends a turn. RL later samples the same form.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np

from lit_async_rl.agents.calls import REASONING_KEYS, AgentCallError
from lit_async_rl.agents.rendering import REWRITES, ChatRenderer, checked_call_messages
from lit_async_rl.models.tokenizer import TextCodec
from lit_async_rl.problem import TOOLS, Prompt
from lit_async_rl.supervised.records import SEGMENTS

LossOn = Literal["all", "last"]


@dataclass(frozen=True, kw_only=True)
class Row:
    """Tokens of a record up to the last one that trains.

    Attributes:
        ids: the tokens.
        trains: True where a token trains; never the first, which nothing predicts.
    """

    ids: np.ndarray
    trains: np.ndarray

    def cut(self, length: int) -> Row:
        """The row of its first tokens."""
        return Row(ids=self.ids[:length], trains=self.trains[:length])


class RowEncoder:
    """Encodes records with the tokenizer and the chat template of a model.

    Args:
        codec: of the model.
        loss_on: whether `all` turns of the assistant train, or the `last` one.

    Attributes:
        unknown_id: token of text that the tokenizer lacks; None if it lacks none.
    """

    def __init__(self, codec: TextCodec, loss_on: LossOn) -> None:
        self._codec = codec
        self._renderer = ChatRenderer(codec)
        self._loss_on = loss_on
        self.unknown_id = _unknown_id(codec.tokenizer)

    def __call__(self, prompt: Prompt) -> Row:
        """Row of a record.

        Raises:
            ValueError: nothing in it can train, or the chat template refuses it or omits a part.
        """
        parts: list[tuple[Sequence[int], bool]]
        if SEGMENTS in prompt.metadata:
            texts = prompt.metadata[SEGMENTS]
            encoders = [self._codec.encode_text, *[self._codec.encode_continuation] * (len(texts) - 1)]
            parts = [(encode(text), train) for encode, (text, train) in zip(encoders, texts, strict=False)]
        elif prompt.messages is None:
            parts = self._of_text(prompt)
        else:
            parts = self._of_messages(prompt)
        if self._loss_on == "last":
            last = max((n for n, (_, train) in enumerate(parts) if train), default=0)
            parts = [(ids, train and n == last) for n, (ids, train) in enumerate(parts)]
        ids = np.array([token for ids, _ in parts for token in ids], dtype=np.int32)
        trains = np.array([train for ids, train in parts for _ in ids], dtype=bool)
        trains[:1] = False
        if not trains.any():
            raise ValueError("no token of the record is trained on")
        return Row(ids=ids, trains=trains).cut(int(np.flatnonzero(trains)[-1]) + 1)

    def _of_text(self, prompt: Prompt) -> list[tuple[Sequence[int], bool]]:
        """A prompt, tokenised as in RL, and its completion with the token that ends a text; see `_after`."""
        if prompt.answer is None:
            raise ValueError("the record has a prompt, but no completion")
        if not prompt.answer:
            raise ValueError("the completion is empty")
        before = self._codec.encode(prompt)
        whole = self._codec.encode(Prompt(text=prompt.text + prompt.answer))
        own = self._after(before, whole, prompt.answer)
        ends = self._codec.ends.ids
        end = self._codec.tokenizer.eos_token_id
        end = end if end in ends or not ends else ends[0]
        is_ended = end is None or own[-1:] == (end,)
        return [(before, False), (own if is_ended else (*own, end), True)]

    def _after(self, before: tuple[int, ...], whole: tuple[int, ...], text: str) -> tuple[int, ...]:
        """Tokens of a text behind others: as if written together, provided that these keep their tokens."""
        return whole[len(before) :] if whole[: len(before)] == before else self._codec.encode_continuation(text)

    def _of_messages(self, prompt: Prompt) -> list[tuple[Sequence[int], bool]]:
        if not self._renderer.has_template:
            raise ValueError(
                f"the record has messages, but the tokenizer of {self._codec.model!r} has no chat template"
            )
        given = list(prompt.messages or ())
        if prompt.answer is not None:
            given.append({"role": "assistant", "content": prompt.answer})
        options = self._codec.template_options(prompt.metadata)
        tools = options.pop(TOOLS, ())
        try:
            return self._turns(checked_call_messages(given), tools, options)
        except AgentCallError as error:
            raise ValueError(str(error)) from error

    def _turns(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], options: Mapping[str, Any]
    ) -> list[tuple[Sequence[int], bool]]:
        """Tokens of the assistant's turns, and those between them."""
        turns = [n for n, message in enumerate(messages) if message["role"] == "assistant"]
        if not turns:
            raise ValueError("the conversation has no assistant turn")
        if turns[0] == 0:
            raise ValueError("the conversation begins with an assistant turn: put another message before that turn")
        parts: list[tuple[Sequence[int], bool]] = []
        before: list[str] = []
        for number, place in enumerate(turns):
            now = self._renderer.segments(messages[:place], tools, options, sampled=turns[:number])
            roles = [messages[turn - 1]["role"] for turn in turns[:number]]
            if not self._renderer.is_continued(before, now[:-1], roles=roles, tools=tools, options=options):
                raise ValueError(REWRITES)
            own = self._turn(messages[: place + 1], tools, options, earlier=turns[:number])
            last = tuple(parts[-1][0]) if parts else ()
            encode = partial(self._renderer.encode_after, last) if parts else self._renderer.encode
            given = encode(now[-1])
            parts += [(given, False), (self._after(given, encode(now[-1] + own), own), True)]
            before.append(now[-1])
        return parts

    def _turn(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
        options: Mapping[str, Any],
        earlier: Sequence[int],
    ) -> str:
        """Text of the assistant's turn at the end of a conversation."""
        message = messages[-1]
        where = f"message {len(messages) - 1}"
        reasoning = message.get(REASONING_KEYS[0], "")
        calls = message.get("tool_calls", ())
        if not (message["content"].strip() or calls):
            raise ValueError(f"{where}, an assistant turn, is empty")
        text = self._renderer.turn(messages, tools, options, sampled=earlier)
        parts = [("the content", message["content"]), ("the reasoning", reasoning)]
        lost = [what for what, part in parts if part.strip() not in text]
        # Kimi K2 writes the id of a call, and others its name
        lost += [
            "a tool call" for call in calls if call["function"]["name"] not in text and str(call["id"]) not in text
        ]
        if lost:
            raise ValueError(f"the chat template leaves out {lost[0]} of {where}, so the model would not learn it")
        return text


def _unknown_id(tokenizer: Any) -> int | None:
    """Token of text that a tokenizer lacks. `tokenizer.unk_token` may be the end of a text if it lacks none."""
    model = getattr(getattr(tokenizer, "backend_tokenizer", None), "model", None)
    text = getattr(model, "unk_token", None)
    return None if text in (None, tokenizer.eos_token) else int(tokenizer.convert_tokens_to_ids(text))
