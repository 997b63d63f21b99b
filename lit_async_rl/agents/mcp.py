"""Tools of Model Context Protocol servers (https://modelcontextprotocol.io) for agents.

`McpTools` has a server's tools, for agents of your own; `McpAgent` is an agent that needs no code.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Any

from lit_async_rl.agents.strict_json import MAX_DEPTH, checked_json, is_too_deep, read_object
from lit_async_rl.problem import Prompt
from lit_async_rl.rewards.calls import Reward, check_reward, score
from lit_async_rl.rewards.forms import as_reward_function
from lit_async_rl.rewards.functions import exact_match
from lit_async_rl.rewards.scorer import Awaiter
from lit_async_rl.runtime.shared_context import SharedContext
from lit_async_rl.utils.checks import check_range
from lit_async_rl.utils.identity import file_contents
from lit_async_rl.utils.secrets import variable

MISSING = 'tools of MCP servers need the package mcp: pip install "lit-async-rl[mcp]"'
MAX_ERROR_CHARS = 2000
MAX_STDERR_BYTES = 2**20
MAX_NAME_CHARS = 200
START_LIMITS = 4  # requests until a server has listed its tools, each with its own limit


class McpServerError(RuntimeError):
    """A tool server does not start, or has ended; the message has the end of its stderr."""


class McpTools:
    """Tools of a server, started by a command, that talks on stdin and stdout. An async context manager.

    Example:
        ```python
        async def agent(prompt, client):
            async with McpTools(["python", "my_server.py"]) as tools:
                messages = [{"role": "user", "content": prompt.text}]
                answer = await client.chat.completions.create(messages=messages, tools=tools.schemas)
                for call in answer.choices[0].message.tool_calls or []:
                    print(await tools.call(call.function.name, call.function.arguments))
        ```

    Args:
        command: program and arguments; no shell reads it.
        environment: names of environment variables that the server gets beside `PATH`, `HOME`, `USER` and the like, so
            that no key is part of a configuration.
        timeout_s: limit of the start, and of each call.

    Attributes:
        schemas: JSON schemas of the tools, in the form of OpenAI's chat API.

    Raises:
        ValueError: a setting is malformed, or a variable is not set.
    """

    def __init__(self, command: Sequence[str], environment: Sequence[str] = (), timeout_s: float = 60.0) -> None:
        if isinstance(command, str) or not command or not all(isinstance(part, str) for part in command):
            raise ValueError(f"McpTools.command must be a list of the program and its arguments, got {command!r}")
        if isinstance(environment, (str, Mapping)):
            raise ValueError("McpTools.environment must be a list of names of environment variables")
        missing = [name for name in environment if name not in os.environ]
        if missing:
            named = variable("McpTools.environment", missing[0])
            raise ValueError(f"{named} names an environment variable that is not set")
        check_range("McpTools", "positive", timeout_s=timeout_s)
        self.command = list(command)
        self.environment = list(environment)
        self.timeout_s = timeout_s
        self.schemas: list[dict[str, Any]] = []
        self._client: Any = None
        self._stderr: Any = None
        self._exits = AsyncExitStack()

    @property
    def name(self) -> str:
        """The command, for messages."""
        return f"the MCP server {' '.join(self.command)[:MAX_NAME_CHARS]!r}"

    async def __aenter__(self) -> McpTools:
        """Starts the server.

        Raises:
            ImportError: the package `mcp` is not installed.
            McpServerError: the server does not start.
        """
        try:
            from mcp import Client, StdioServerParameters, stdio_client
        except ImportError as error:
            raise ImportError(f"{MISSING} ({error})") from error
        self._stderr = self._exits.enter_context(tempfile.TemporaryFile("w+"))  # noqa: SIM115
        server = StdioServerParameters(
            command=self.command[0],
            args=self.command[1:],
            env={name: os.environ.get(name, "") for name in self.environment},
        )
        transport = stdio_client(server, errlog=self._stderr)
        try:
            # not with `wait_for`, whose task would not be the one that leaves the task groups; each request has a limit
            client = Client(transport, read_timeout_seconds=self.timeout_s)
            self._client = await self._exits.enter_async_context(client)
            self.schemas = await self._list()
        except BaseException as error:
            failure = self._failure("the server does not start", error)
            await self._exits.aclose()
            if isinstance(error, Exception):
                raise failure from error
            raise
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._exits.aclose()

    async def _list(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        cursor = None
        while True:
            page = await self._client.list_tools(cursor=cursor)
            for tool in page.tools:
                function = {"name": tool.name, "description": tool.description or "", "parameters": tool.input_schema}
                found.append({"type": "function", "function": function})
            cursor = page.next_cursor
            if cursor is None:
                return found

    async def call(self, name: str, arguments: str | Mapping[str, Any]) -> str:
        """Calls a tool and returns its answer as text; mistakes of the caller and errors of the tool are text, too.

        Args:
            name: of the tool.
            arguments: object, or its JSON as the policy wrote it.

        Raises:
            McpServerError: the server has ended, or does not answer in time.
        """
        if all(schema["function"]["name"] != name for schema in self.schemas):
            return f"error: unknown tool {name!r}"
        try:
            given = read_object(arguments) if isinstance(arguments, str) else dict(arguments)
            checked_json(given, default=str)
        except ValueError as error:
            return f"error: the arguments must be a JSON object: {error}"
        if is_too_deep(given):  # beyond 200, mcp's client cannot write them and its server cannot read them
            return f"error: the arguments are nested more than {MAX_DEPTH} deep"
        try:
            result = await self._client.call_tool(name, given)
        except Exception as error:
            if _is_answer(error):
                return f"error: {error}"
            raise self._failure(f"a call to the tool {name} was not answered", error) from error
        return "\n".join(_text(part) for part in result.content)

    def _failure(self, what: str, error: BaseException) -> McpServerError:
        while getattr(error, "exceptions", None):  # a group of a task group
            error = error.exceptions[0]  # type: ignore[attr-defined]
        size = os.fstat(self._stderr.fileno()).st_size
        tail = os.pread(self._stderr.fileno(), MAX_STDERR_BYTES, max(0, size - MAX_STDERR_BYTES))
        written = self._concealed(tail.decode(errors="replace").strip())[-MAX_ERROR_CHARS:]
        text = self._concealed(f"{self.name}: {what}: {type(error).__name__}: {error}")
        return McpServerError(f"{text}; it wrote: {written}" if written else text)

    def _concealed(self, text: str) -> str:
        """A text without the values of the server's variables; called before the text is cut, which would cut them."""
        for name in self.environment:
            text = text.replace(os.environ.get(name) or name, f"({name})")
        return text


def _is_answer(error: Exception) -> bool:
    """Whether an error is the server's answer, and not its end."""
    from mcp import MCPError
    from mcp.types import INVALID_PARAMS, METHOD_NOT_FOUND

    return isinstance(error, MCPError) and error.error.code in (INVALID_PARAMS, METHOD_NOT_FOUND)


def _text(part: Any) -> str:
    return part.text if part.type == "text" else f"({part.type})"


class McpAgent:
    """Asks the policy, with the tools of a server, until a reply calls none; scores that reply.

    Example:
        ```yaml
        agent: {class_path: lit_async_rl.McpAgent, init_args: {command: [python, my_server.py]}}
        ```

    Args:
        command: see `McpTools`; likewise `environment`.
        environment: see `McpTools`.
        reward: of the last reply, `reward(prompt, completion)`; None is `exact_match`.
        system_prompt: text of a message before that of the prompt.
        max_turns: replies of the policy; an episode whose last one calls a tool has reward 0.
        per_episode: start a server for each episode; otherwise all share one and its state, and it is started again if
            it ends.
        timeout_s: see `McpTools`.

    Raises:
        ValueError: a setting is out of range.
    """

    def __init__(
        self,
        command: Sequence[str],
        environment: Sequence[str] = (),
        reward: Reward | None = None,
        system_prompt: str | None = None,
        max_turns: int = 8,
        per_episode: bool = False,
        timeout_s: float = 60.0,
    ) -> None:
        check_range("McpAgent", "integer >= 1", max_turns=max_turns)
        reward = reward or exact_match
        check_reward(reward, "McpAgent.reward")
        self.reward = as_reward_function(reward)
        self.command = list(McpTools(command, environment, timeout_s).command)
        self.environment = list(environment)
        self.system_prompt = system_prompt
        self.max_turns = max_turns
        self.per_episode = per_episode
        self.timeout_s = timeout_s
        self._awaiter = Awaiter(timeout_s, self.reward)
        self._server = SharedContext(self._tools().name, self._tools, START_LIMITS * timeout_s)

    def identified_by(self) -> dict[str, Any]:
        """Contents of the server's files, which affect rewards like arguments; see `reward_identity`."""
        return {"files": file_contents(self.command)}

    async def astart(self) -> None:
        """Starts the shared server.

        Raises:
            ImportError: the package `mcp` is not installed.
            McpServerError: the server does not start.
        """
        if not self.per_episode:
            await self._server.start()

    async def aclose(self) -> None:
        """Ends the shared server, and the event loop of an async reward; a later episode starts others."""
        try:
            await self._server.close()
        finally:
            await asyncio.to_thread(self._awaiter.close)

    def _tools(self) -> McpTools:
        return McpTools(self.command, self.environment, self.timeout_s)

    async def __call__(self, prompt: Prompt, client: Any) -> float:
        """Plays one episode; returns its reward.

        Raises:
            McpServerError: the server failed.
            RewardError: the reward failed.
        """
        if self.per_episode:
            async with self._tools() as tools:
                return await self._play(prompt, client, tools)
        tools = await self._server.get()
        try:
            return await self._play(prompt, client, tools)
        except McpServerError:
            await self._server.discard(tools)
            raise

    async def _play(self, prompt: Prompt, client: Any, tools: McpTools) -> float:
        messages: list[Any] = []
        if self.system_prompt is not None:
            messages.append({"role": "system", "content": self.system_prompt})
        messages += prompt.messages or [{"role": "user", "content": prompt.text}]
        for _ in range(self.max_turns):
            answer = await client.chat.completions.create(model="policy", messages=messages, tools=tools.schemas)
            message = answer.choices[0].message
            if not message.tool_calls:
                return await asyncio.to_thread(self._score, prompt, message.content or "")
            messages.append(message)
            for call in message.tool_calls:
                content = await tools.call(call.function.name, call.function.arguments)
                messages.append({"role": "tool", "tool_call_id": call.id, "content": content})
        return 0.0

    def _score(self, prompt: Prompt, text: str) -> float:
        return score(self.reward, prompt, text, wait=self._awaiter.wait)
