"""The calculator task as an agent that calls the policy through a client, with a tool."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from typing import Any

from lit_async_rl.agents.calls import ReplyMessage, ToolCall
from lit_async_rl.agents.parsing import NewId, ReplyParser
from lit_async_rl.problem import Prompt
from lit_async_rl.rewards.functions import exact_match
from lit_async_rl.tasks.calculator import CALL
from lit_async_rl.utils.checks import check_range

ADD: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    },
}


class CalculatorParser(ReplyParser):
    """Reads `[17+25]` as a call of the tool `add`, as the shipped `calculator_policy` writes it."""

    def parse(self, text: str, tools: Sequence[Mapping[str, Any]], new_id: NewId) -> ReplyMessage:
        """The call, if the text is one and the tool is offered; the text otherwise."""
        call = CALL.fullmatch(text.strip())
        if call is None or not tools:
            return ReplyMessage(content=text)
        arguments = json.dumps({"a": int(call[1]), "b": int(call[2])})
        return ReplyMessage(content="", tool_calls=(ToolCall(id=new_id(), name="add", arguments=arguments),))


class CalculatorAgent:
    """Asks the policy for a sum, and answers its calls of the tool `add`; reward 1 if the last reply is correct.

    Only methods of `openai.AsyncOpenAI` are used, so any client will do.

    Args:
        max_calls: largest number of tool calls; a further one ends the episode with reward 0.
        latency_s: seconds per tool call, to simulate slow tools.

    Raises:
        ValueError: a setting is out of range.
    """

    def __init__(self, max_calls: int = 2, latency_s: float = 0.0) -> None:
        check_range("CalculatorAgent", "integer >= 1", max_calls=max_calls)
        check_range("CalculatorAgent", ">= 0", latency_s=latency_s)
        self.max_calls = max_calls
        self.latency_s = latency_s

    async def __call__(self, prompt: Prompt, client: Any) -> float:
        """Plays one episode; returns its reward."""
        messages: list[Any] = [{"role": "user", "content": prompt.text}]
        for _ in range(self.max_calls + 1):
            response = await client.chat.completions.create(model="policy", messages=messages, tools=[ADD])
            message = response.choices[0].message
            if not message.tool_calls:
                return exact_match(prompt, message.content)
            messages.append(message)
            for call in message.tool_calls:
                numbers = json.loads(call.function.arguments)
                await asyncio.sleep(self.latency_s)
                content = str(numbers["a"] + numbers["b"])
                messages.append({"role": "tool", "tool_call_id": call.id, "content": content})
        return 0.0
