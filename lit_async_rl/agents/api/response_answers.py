"""Answers of `/v1/responses` from the policy's replies: a response, or the events that build it up."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

from lit_async_rl.agents.api.answers import Answer, as_json
from lit_async_rl.agents.calls import Reply, ToolCall

Event = dict[str, Any]


class ResponseAnswer(Answer):
    """The answer to a call of the Responses API, in either form; it has one reply."""

    @property
    def whole(self) -> bytes:
        """One JSON object."""
        return as_json(self._response).encode()

    @property
    def events(self) -> bytes:
        """Server-sent events."""
        lines = []
        for number, event in enumerate(self._all_events()):
            lines.append(f"event: {event['type']}\ndata: {as_json(event | {'sequence_number': number})}\n\n")
        return "".join(lines).encode()

    @property
    def _reply(self) -> Reply:
        return self._replies[0]

    @property
    def _status(self) -> str:
        return "incomplete" if self._reply.finish_reason == "length" else "completed"

    # -- whole ---------------------------------------------------------------------------------------------------------

    @functools.cached_property
    def _response(self) -> dict[str, Any]:
        reason = {"reason": "max_output_tokens"} if self._status == "incomplete" else None
        items = self._items
        items[-1]["status"] = self._status
        more = {"status": self._status, "incomplete_details": reason, "output": items, "usage": self._response_usage}
        return self._begun | more | self._ids(self._reply)

    @property
    def _begun(self) -> dict[str, Any]:
        """The response before it has any item."""
        return {
            "id": f"resp_{self._number}",
            "object": "response",
            "created_at": self._frame["created"],
            "model": self._call.model,
            "status": "in_progress",
            "error": None,
            "incomplete_details": None,
            "instructions": None,
            "metadata": {},
            "output": [],
            "previous_response_id": None,
            "tools": [],
            "truncation": "disabled",
            "usage": None,
            **(self._call.request or {}),
        }

    @property
    def _response_usage(self) -> dict[str, Any]:
        usage = self._usage
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},  # not known here
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage["total_tokens"],
        }

    @property
    def _items(self) -> list[dict[str, Any]]:
        """Items of the output: the reply's reasoning, text and tool calls, as far as it has them."""
        message = self._reply.message
        items = []
        if message.reasoning is not None:
            items.append(self._item("rs") | {"content": [{"type": "reasoning_text", "text": message.reasoning}]})
        if message.content or not message.tool_calls:
            items.append(self._item("msg") | {"content": [self._text_part()]})
        items += [self._call_item(number, call) for number, call in enumerate(message.tool_calls)]
        return items

    def _item(self, kind: str) -> dict[str, Any]:
        """A message (`msg`) or reasoning (`rs`) without its content."""
        item = {"id": f"{kind}_{self._number}", "status": "completed", "content": []}
        return item | (
            {"type": "message", "role": "assistant"} if kind == "msg" else {"type": "reasoning", "summary": []}
        )

    def _text_part(self) -> dict[str, Any]:
        found = self._logprobs(self._reply)
        logprobs = [] if found is None else found["content"]
        return {"type": "output_text", "text": self._reply.message.content, "annotations": [], "logprobs": logprobs}

    def _call_item(self, number: int, call: ToolCall) -> dict[str, Any]:
        return {
            "id": f"fc_{self._number}_{number}",
            "type": "function_call",
            "status": "completed",
            "call_id": call.id,
            "name": call.name,
            "arguments": call.arguments,
        }

    # -- streams -------------------------------------------------------------------------------------------------------

    def _all_events(self) -> Iterator[Event]:
        yield {"type": "response.created", "response": self._begun}
        yield {"type": "response.in_progress", "response": self._begun}
        for place, item in enumerate(self._response["output"]):
            yield from self._item_events({"output_index": place}, item)
        yield {"type": f"response.{self._status}", "response": self._response}

    def _item_events(self, at: Event, item: dict[str, Any]) -> Iterator[Event]:
        inside = at | {"item_id": item["id"]}
        empty: Event = {"arguments": ""} if item["type"] == "function_call" else {"content": []}
        yield {"type": "response.output_item.added", **at, "item": item | {"status": "in_progress"} | empty}
        if item["type"] == "function_call":
            yield {"type": "response.function_call_arguments.delta", **inside, "delta": item["arguments"]}
            done = {"name": item["name"], "arguments": item["arguments"]}
            yield {"type": "response.function_call_arguments.done", **inside, **done}
        else:
            yield from self._part_events(inside | {"content_index": 0}, item["content"][0])
        yield {"type": "response.output_item.done", **at, "item": item}

    def _part_events(self, at: Event, part: dict[str, Any]) -> Iterator[Event]:
        is_text = part["type"] == "output_text"
        empty: Event = {"text": "", "logprobs": []} if is_text else {"text": ""}
        yield {"type": "response.content_part.added", **at, "part": part | empty}
        logprobs = {"logprobs": part["logprobs"]} if is_text else {}
        if part["text"] or any(logprobs.values()):
            yield {"type": f"response.{part['type']}.delta", **at, "delta": part["text"], **logprobs}
        yield {"type": f"response.{part['type']}.done", **at, "text": part["text"], **logprobs}
        yield {"type": "response.content_part.done", **at, "part": part}
