"""Answers of the API from the policy's replies: one JSON object, or server-sent events.

A stream is cut from the whole reply, token by token, after it is complete: engines return whole completions. Its texts
joined are the text of the same call without a stream, since a character of several tokens belongs to the last of them.
"""

from __future__ import annotations

import functools
import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lit_async_rl.agents.api.bodies import Call
from lit_async_rl.agents.calls import Reply
from lit_async_rl.models.tokenizer import TextCodec

MAX_PIECES = 16  # of a streamed reply: each costs the client and the server a JSON object
MIN_LOGPROB = -9999.0  # the API's number for a probability of 0, which JSON cannot write
BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
DONE = "data: [DONE]\n\n"


class TokenTexts:
    """Texts and bytes of tokens.

    Args:
        codec: of the model.
    """

    def __init__(self, codec: TextCodec) -> None:
        self._codec = codec
        self._bytes: dict[int, bytes] = {}

    @functools.cached_property
    def longest(self) -> int:
        """Characters of the longest token."""
        return max(map(len, self._codec.tokenizer.get_vocab()), default=1)

    def of(self, token_ids: Sequence[int]) -> list[str]:
        """Text of each token; a character of several tokens belongs to the last of them."""
        return self._codec.token_texts(list(token_ids))

    def bytes_of(self, token: int) -> bytes:
        """Bytes of a token, which may be a part of a character."""
        if token not in self._bytes:
            self._bytes[token] = self._find_bytes(token)
        return self._bytes[token]

    def _find_bytes(self, token: int) -> bytes:
        piece = self._codec.tokenizer.convert_ids_to_tokens(token)
        if isinstance(piece, str) and token not in self._codec.tokenizer.added_tokens_decoder:
            if match := BYTE_TOKEN.fullmatch(piece):
                return bytes([int(match[1], 16)])
            if self._is_byte_level and all(character in byte_alphabet() for character in piece):
                return bytes(byte_alphabet()[character] for character in piece)
        return self._codec.token_texts([token])[0].encode(errors="replace")

    @functools.cached_property
    def _is_byte_level(self) -> bool:
        backend = getattr(self._codec.tokenizer, "backend_tokenizer", None)
        return "ByteLevel" in str(getattr(backend, "decoder", ""))


@functools.cache
def byte_alphabet() -> dict[str, int]:
    """The byte that each character of a byte-level vocabulary stands for (GPT-2's table)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}


class Answer:
    """The answer to one call, in either form; the same whenever it is asked for.

    Args:
        call: what was asked.
        replies: replies of the policy, `call.n` for each prompt.
        texts: texts of tokens.
        number: of the answer.
        created: seconds since the epoch.
    """

    def __init__(self, call: Call, replies: Sequence[Reply], texts: TokenTexts, *, number: str, created: int) -> None:
        self._call = call
        self._replies = replies
        self._texts = texts
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
        choice: dict[str, Any] = {"index": number, "finish_reason": reply.finish_reason, "logprobs": None}
        if self._is_chat:
            choice["message"] = {"refusal": None, **self._message(reply)}
        else:
            choice["text"] = reply.text
        if self._call.logprobs:
            choice["logprobs"] = self._logprobs(reply, 0, end=len(reply.token_ids))
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

    def _logprobs(self, reply: Reply, begin: int, *, end: int) -> dict[str, Any]:
        """Log-probabilities of the tokens `begin` to `end`."""
        ids = reply.token_ids[begin:end]
        entries = [
            self._entry(token, float(value)) for token, value in zip(ids, reply.logprobs[begin:end], strict=True)
        ]
        tops = [self._top(reply, number) for number in range(begin, begin + len(ids))]
        if self._is_chat:
            content = [entry | {"top_logprobs": top} for entry, top in zip(entries, tops, strict=True)]
            return {"content": content, "refusal": None}
        num_before = len("".join(self._texts.of(reply.token_ids[:begin])))
        *offsets, _ = itertools.accumulate(map(len, self._texts.of(ids)), initial=num_before)
        named = [{entry["token"]: entry["logprob"] for entry in top} for top in tops]
        return {
            "tokens": [entry["token"] for entry in entries],
            "token_logprobs": [entry["logprob"] for entry in entries],
            "text_offset": offsets,
            "top_logprobs": named if self._call.top_logprobs else None,
        }

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        data = list(self._texts.bytes_of(token))
        return {"token": self._shown(token), "logprob": max(logprob, MIN_LOGPROB), "bytes": data}

    def _shown(self, token: int) -> str:
        data = self._texts.bytes_of(token)
        try:
            return data.decode()
        except UnicodeDecodeError:  # a part of a character, in the API's form
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def _top(self, reply: Reply, number: int) -> list[dict[str, Any]]:
        """The likeliest tokens at a position, as far as `data.sampling.head` has them recorded."""
        if not self._call.top_logprobs or reply.head is None:
            return []
        likeliest = reply.head.ids[number, : self._call.top_logprobs].tolist()
        values = reply.head.logprobs[number, : self._call.top_logprobs].tolist()
        return [self._entry(token, value) for token, value in zip(likeliest, values, strict=True)]

    # -- streams -------------------------------------------------------------------------------------------------------

    def _chat_deltas(self, reply: Reply) -> Iterator[dict[str, Any]]:
        message = self._message(reply)
        yield {"delta": {"role": "assistant", "content": "", "refusal": None}, "logprobs": None}
        if message.get("reasoning_content"):
            yield {"delta": {"reasoning_content": message["reasoning_content"]}, "logprobs": None}
        for text, begin, end in self._pieces(reply, message.get("content") or ""):
            logprobs = self._logprobs(reply, begin, end=end) if self._call.logprobs else None
            if text or logprobs:
                yield {"delta": {"content": text} if text else {}, "logprobs": logprobs}
        for number, call in enumerate(message.get("tool_calls") or ()):
            named = {"name": call["function"]["name"], "arguments": ""}
            head = {"index": number, "id": call["id"], "type": "function", "function": named}
            yield {"delta": {"tool_calls": [head]}, "logprobs": None}
            arguments = {"index": number, "function": {"arguments": call["function"]["arguments"]}}
            yield {"delta": {"tool_calls": [arguments]}, "logprobs": None}
        yield {"delta": {}, "logprobs": None, "finish_reason": reply.finish_reason} | self._ids(reply)

    def _text_deltas(self, reply: Reply) -> Iterator[dict[str, Any]]:
        for text, begin, end in self._pieces(reply, reply.text):
            yield {"text": text, "logprobs": self._logprobs(reply, begin, end=end) if self._call.logprobs else None}
        yield {"text": "", "logprobs": None, "finish_reason": reply.finish_reason} | self._ids(reply)

    def _pieces(self, reply: Reply, content: str) -> list[tuple[str, int, int]]:
        """Parts of the content with the tokens that they come from; all tokens, and all of the content, once.

        One part where texts of tokens do not add up to the content: between calls, and where a decoder drops spaces.
        """
        length = len(reply.token_ids)
        texts = self._texts.of(reply.token_ids)
        if "".join(texts)[: len(content)] != content:
            return [(content, 0, length)]
        width = max(1, -(-length // MAX_PIECES))
        pieces = []
        done = 0
        for begin in range(0, length, width):
            end = min(begin + width, length)
            text = "".join(texts[begin:end])[: len(content) - done]
            done += len(text)
            pieces.append((text, begin, end))
        return pieces


def as_json(value: Any) -> str:
    """A value as it is sent."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
