"""Agents in their own lasting processes: their Python takes no time from the trainer's, and may fail alone.

| who | waits for | woken by |
|---|---|---|
| an episode here | its reply, at most `timeout_s` | the task that reads replies, also at the process's end |
| the task that reads replies | a reply | the connection, also at the process's end |

What happens there is in `player.py`. Agent and prompts are pickled, because they have arbitrary settings and metadata;
only the child unpickles them, and they come from its parent. Its replies are JSON, see `runtime/process.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import pickle
import sys
from collections.abc import AsyncIterator, Mapping
from dataclasses import asdict
from typing import Any

from lit_async_rl.agents.api.openai_clients import EndpointAddress, address_of
from lit_async_rl.agents.endpoint.clients import EndpointClients
from lit_async_rl.agents.endpoint.command import CONCEALED
from lit_async_rl.agents.endpoint.player import MAX_ERROR_CHARS
from lit_async_rl.agents.engine import Agent, agent_name, load_agent
from lit_async_rl.agents.results import AgentResult, stated_result
from lit_async_rl.problem import Prompt
from lit_async_rl.runtime.process import Child, InvalidMessage, end_reason, packed, receive_from
from lit_async_rl.runtime.shared_context import SharedContext
from lit_async_rl.utils.checks import check_range
from lit_async_rl.utils.elsewhere import RemoteProxy

START_TIMEOUT_S = 300.0  # imports of the child
ANSWER_TIMEOUT_S = 30.0  # of its event loop, which an agent may block
REAP_TIMEOUT_S = 5.0
MAX_REPLY_BYTES = 2**20
_PLAYER = "lit_async_rl.agents.endpoint.player"


class ProcessAgentError(RuntimeError):
    """An agent failed, or its process ended; names both."""


class AgentProcessEnded(ProcessAgentError):
    """The process ended with the episode in it."""


class ProcessAgent(RemoteProxy):
    """Plays episodes of an agent in other processes, each with an `openai.AsyncOpenAI` at the endpoint.

    An agent's Python, the official client included, otherwise shares one interpreter with engine and trainer. Its calls
    go to the endpoint over HTTP. A process plays any number of episodes at a time. If it ends, or an agent blocks it
    (`time.sleep` in a coroutine), the episodes in it count as failed, and another takes its place. What agents print
    goes to stderr. Rewards and checkpoints are those of the same agent in the trainer's process.

    Example:
        ```yaml
        agent: {class_path: lit_async_rl.ProcessAgent, init_args: {agent: my_agent.play, processes: 2}}
        ```

    Args:
        agent: coroutine function of a prompt and a client, its name, or an object, as for `AgentEngine`; another
            process must be able to import it.
        processes: number of processes; an episode goes to the one with the fewest.

    Attributes:
        clients: gives processes an episode's address and key, unless the engine has `clients`.
        original: the agent.

    Raises:
        ValueError: a setting is out of range, or the agent cannot be imported or pickled.
    """

    def __init__(self, agent: Agent | str, processes: int = 1) -> None:
        check_range("ProcessAgent", "integer >= 1", processes=processes)
        check_range("ProcessAgent", "<= 10000", processes=processes)
        self.original: Agent = load_agent(agent, "ProcessAgent.agent")
        self.agent = self.original
        self.processes = processes
        self.clients = EndpointClients()
        pickled = _pickled(self.original)
        name = agent_name(self.original)
        self._places = [_Place(name, pickled) for _ in range(processes)]

    async def __call__(self, prompt: Prompt, client: Any) -> AgentResult:
        """Plays one episode.

        Args:
            prompt: of the episode.
            client: of the episode, with its address and key.

        Raises:
            ProcessAgentError: the agent raised, or its process ended.
            StalledError: a process did not start.
        """
        place = min(self._places, key=lambda one: one.num_running)
        place.num_running += 1
        try:
            worker = await place.shared.get()
            if worker.has_ended:  # since the last episode: no reason for this one to fail
                await place.shared.discard(worker)
                worker = await place.shared.get()
            try:
                return await worker.play(prompt, address_of(client))
            except AgentProcessEnded:
                await place.shared.discard(worker)
                raise
        finally:
            place.num_running -= 1

    async def astart(self) -> None:
        """Starts the processes, before the time of the first episode.

        Raises:
            ProcessAgentError: the agent cannot be made there.
            StalledError: it takes too long.
        """
        await asyncio.gather(*(place.shared.start() for place in self._places))

    async def aclose(self) -> None:
        """Ends the processes; a later episode starts others."""
        await asyncio.gather(*(place.shared.close() for place in self._places))


def _pickled(agent: Agent) -> bytes:
    shown = agent_name(agent)
    if "__main__" in (getattr(agent, "__module__", None), type(agent).__module__):
        raise ValueError(
            f"ProcessAgent.agent={shown} is defined in the main script, which another process cannot import: "
            "put it into a module of its own"
        )
    try:
        return pickle.dumps(agent)
    except Exception as error:
        raise ValueError(f"ProcessAgent.agent={shown} cannot be sent to another process: {error}") from error


class _Place:
    """Where a process is, and after it another."""

    def __init__(self, name: str, agent: bytes) -> None:
        self.num_running = 0
        self.shared = SharedContext(f"the process of agent {name}", lambda: _started(name, agent), START_TIMEOUT_S)


@contextlib.asynccontextmanager
async def _started(name: str, agent: bytes) -> AsyncIterator[_Worker]:
    """A process that has imported the agent; killed at the end."""
    child = Child([sys.executable, "-m", _PLAYER], name=f"agent {name}", is_guarded=True)
    worker = _Worker(name, child, *await child.streams())
    try:
        await worker.start(agent)
        yield worker
    finally:
        await worker.end()


class _Worker:
    """A process, seen from here."""

    def __init__(self, name: str, child: Child, replies: asyncio.StreamReader, messages: asyncio.StreamWriter) -> None:
        self._name = name
        self._child = child
        self._replies = replies
        self._messages = messages
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Future[AgentResult]] = {}
        self._cancelled: set[int] = set()  # whose process has not yet said that it knows
        self._reading: asyncio.Task[None] | None = None
        self._reason = ""  # why it was killed

    async def start(self, agent: bytes) -> None:
        """Has it import the agent."""
        self._write({"kind": "import"}, agent)
        with contextlib.suppress(InvalidMessage):
            fields, _ = await receive_from(self._replies, MAX_REPLY_BYTES) or ({}, b"")
            if fields.get("ready") is True:
                self._reading = asyncio.create_task(self._read())
                return
            if isinstance(error := fields.get("error"), str):
                raise ProcessAgentError(
                    f"agent {self._name} cannot be created in its process: {error[:MAX_ERROR_CHARS]}"
                )
        raise ProcessAgentError(f"agent {self._name} did not start: its process {await self._how_it_ended()}")

    @property
    def has_ended(self) -> bool:
        """Whether it plays no more."""
        return self._reading is None or self._reading.done()

    async def play(self, prompt: Prompt, address: EndpointAddress) -> AgentResult:
        """Plays an episode there; cancelled there if it is cancelled here."""
        if self.has_ended:
            raise AgentProcessEnded(f"agent {self._name}: its process has ended")
        number = next(self._numbers)
        self._waiting[number] = asyncio.get_running_loop().create_future()
        try:
            self._write({"kind": "play", "call": number, "address": asdict(address)}, pickle.dumps(prompt))
            return await self._waiting[number]
        except asyncio.CancelledError:
            self._cancel(number)
            raise
        except AgentProcessEnded:
            raise
        except ProcessAgentError as error:
            raise ProcessAgentError(str(error).replace(address.api_key, CONCEALED)) from None
        finally:
            self._waiting.pop(number, None)

    async def end(self) -> None:
        """Kills it."""
        self._kill("was ended")
        if self._reading is not None:
            await asyncio.wait({self._reading}, timeout=REAP_TIMEOUT_S)
        self._messages.transport.abort()
        await asyncio.to_thread(self._child.end)

    def _write(self, fields: Mapping[str, Any], blob: bytes = b"") -> None:
        if not self._messages.is_closing():  # else it has ended, as the task that reads is about to notice
            self._messages.write(packed(fields, blob))

    def _cancel(self, number: int) -> None:
        self._cancelled.add(number)
        self._write({"kind": "cancel", "call": number})
        asyncio.get_running_loop().call_later(ANSWER_TIMEOUT_S, self._check, number)

    def _check(self, number: int) -> None:
        if number in self._cancelled:
            self._kill(f"did not answer for {ANSWER_TIMEOUT_S:g} s, blocked by an agent, and was killed")

    def _kill(self, reason: str) -> None:
        self._reason = self._reason or reason
        self._child.terminate()  # its guard kills it

    async def _read(self) -> None:
        """Passes replies on until the process has ended."""
        try:
            while message := await receive_from(self._replies, MAX_REPLY_BYTES):
                self._take(message[0])
        except ValueError as error:
            self._kill(f"sent something that is not a reply ({error}), and was killed")
        finally:
            self._cancelled.clear()
            ended = f"agent {self._name}: its process {await self._how_it_ended()}"
            for waiting in self._waiting.values():
                if not waiting.done():
                    waiting.set_exception(AgentProcessEnded(ended))

    def _take(self, reply: dict[str, Any]) -> None:
        number = reply.get("call")
        if not isinstance(number, int):
            raise ValueError("without a number")
        self._cancelled.discard(number)
        waiting = self._waiting.get(number)
        if waiting is None or waiting.done():  # it was cancelled
            return
        if isinstance(error := reply.get("error"), str):
            waiting.set_exception(ProcessAgentError(error[:MAX_ERROR_CHARS]))
            return
        result = stated_result(reply)
        if result is None:
            raise ValueError("no finite reward")
        waiting.set_result(result)

    async def _how_it_ended(self) -> str:
        status = await asyncio.to_thread(self._child.status, REAP_TIMEOUT_S)
        if status is None:
            self._kill("closed its pipe, and was killed")
        if self._reason or status is None:
            return self._reason
        if status < 0:
            return f"was ended by {end_reason(status)}"
        return f"ended with exit {end_reason(status)}; what it said is above"
