"""Answers of the API from the policy's replies: one JSON object, or server-sent events.

A stream has the reply in one piece: engines return whole completions. In `logprobs`, a character of several tokens
belongs to the last of them; `return_token_ids` has the exact tokens.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lit_async_rl.agents.api.bodies import Call
from lit_async_rl.agents.calls import Reply
from lit_async_rl.models.tokenizer import TextCodec

MIN_LOGPROB = -9999.0  # the API's number for a probability of 0, which JSON cannot write
DONE = "data: [DONE]\n\n"


class Answer:
    """The answer to one call, in either form; the same whenever it is asked for.

    Args:
        call: what was asked.
        replies: replies of the policy, `call.n` for each prompt.
        codec: of the model.
        number: of the answer.
        created: seconds since the epoch.
    """

    def __init__(self, call: Call, replies: Sequence[Reply], codec: TextCodec, *, number: str, created: int) -> None:
        self._call = call
        self._replies = replies
        self._codec = codec
        self._number = number
        self._is_chat = bool(call.messages)
        kind = "chatcmpl" if self._is_chat else "cmpl"
        self._frame: dict[str, Any] = {
            "id": f"{kind}-{number}",
            "object": "chat.completion" if self._is_chat else "text_completion",
            "created": created,
            "model": call.model,
        }

    @property
    def whole(self) -> bytes:
        """One JSON object."""
        choices = [self._choice(number, reply) for number, reply in enumerate(self._replies)]
        return as_json(self._frame | {"choices": choices, "usage": self._usage}).encode()

    @property
    def events(self) -> bytes:
        """Server-sent events."""
        frame = self._frame | ({"object": "chat.completion.chunk"} if self._is_chat else {})
        none_yet = {"usage": None} if self._call.include_usage else {}
        parts = []
        for number, reply in enumerate(self._replies):
            for choice in self._chat_deltas(reply) if self._is_chat else self._text_deltas(reply):
                parts.append(frame | {"choices": [{"index": number, "finish_reason": None} | choice]} | none_yet)
        if self._call.include_usage:
            parts.append(frame | {"choices": [], "usage": self._usage})
        return "".join([*(f"data: {as_json(part)}\n\n" for part in parts), DONE]).encode()

    @property
    def _usage(self) -> dict[str, int]:
        sampled = sum(len(reply.token_ids) for reply in self._replies)
        read = sum(reply.prompt_token_count for reply in self._replies[:: self._call.n])
        return {"prompt_tokens": read, "completion_tokens": sampled, "total_tokens": read + sampled}

    # -- whole ---------------------------------------------------------------------------------------------------------

    def _choice(self, number: int, reply: Reply) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": number, "finish_reason": reply.finish_reason}
        choice["logprobs"] = self._logprobs(reply)
        if self._is_chat:
            choice["message"] = {"refusal": None, **self._message(reply)}
        else:
            choice["text"] = reply.text
        return choice | self._ids(reply)

    def _message(self, reply: Reply) -> Mapping[str, Any]:
        message = reply.message.as_message()
        if not message["content"] and "tool_calls" in message:
            message["content"] = None
        return message

    def _ids(self, reply: Reply) -> dict[str, Any]:
        if not self._call.return_token_ids:
            return {}
        return {"token_ids": list(reply.token_ids), "versions": list(reply.versions)}

    def _logprobs(self, reply: Reply) -> dict[str, Any] | None:
        """Log-probabilities of all tokens; None if they were not asked for."""
        if not self._call.logprobs:
            return None
        entries = [_entry(text, value) for text, value in zip(reply.token_texts, reply.logprobs, strict=True)]
        tops = [self._top(reply, number) for number in range(len(entries))]
        if self._is_chat:
            content = [entry | {"top_logprobs": top} for entry, top in zip(entries, tops, strict=True)]
            return {"content": content, "refusal": None}
        *offsets, _ = itertools.accumulate(map(len, reply.token_texts), initial=0)
        # parts of characters have the same text: the likeliest of them counts
        named = [{entry["token"]: entry["logprob"] for entry in reversed(top)} for top in tops]
        return {
            "tokens": list(reply.token_texts),
            "token_logprobs": [entry["logprob"] for entry in entries],
            "text_offset": offsets,
            "top_logprobs": named if self._call.top_logprobs else None,
        }

    def _top(self, reply: Reply, number: int) -> list[dict[str, Any]]:
        """The likeliest tokens at a position, as far as `data.sampling.head` has them recorded."""
        if not self._call.top_logprobs or reply.head is None:
            return []
        likeliest = reply.head.ids[number, : self._call.top_logprobs].tolist()
        values = reply.head.logprobs[number, : self._call.top_logprobs].tolist()
        texts = [self._codec.token_texts([token])[0] for token in likeliest]
        return [_entry(text, value) for text, value in zip(texts, values, strict=True)]

    # -- streams -------------------------------------------------------------------------------------------------------

    def _chat_deltas(self, reply: Reply) -> Iterator[dict[str, Any]]:
        message = self._message(reply)
        yield {"delta": {"role": "assistant", "content": "", "refusal": None}, "logprobs": None}
        if message.get("reasoning_content"):
            yield {"delta": {"reasoning_content": message["reasoning_content"]}, "logprobs": None}
        if message["content"] or self._call.logprobs:
            yield {"delta": {"content": message["content"] or ""}, "logprobs": self._logprobs(reply)}
        for number, call in enumerate(message.get("tool_calls") or ()):
            yield {"delta": {"tool_calls": [{"index": number, **call}]}, "logprobs": None}
        yield {"delta": {}, "logprobs": None, "finish_reason": reply.finish_reason} | self._ids(reply)

    def _text_deltas(self, reply: Reply) -> Iterator[dict[str, Any]]:
        yield {"text": reply.text, "logprobs": self._logprobs(reply)}
        yield {"text": "", "logprobs": None, "finish_reason": reply.finish_reason} | self._ids(reply)


def _entry(text: str, logprob: float) -> dict[str, Any]:
    return {"token": text, "logprob": max(float(logprob), MIN_LOGPROB), "bytes": list(text.encode(errors="replace"))}


def as_json(value: Any) -> str:
    """A value as it is sent."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
