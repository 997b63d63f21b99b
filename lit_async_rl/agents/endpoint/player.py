"""The program of a process that plays the episodes of an agent, see `ProcessAgent`. Imports little, to start soon.

A thread reads requests and gives them to the event loop; it ends the process when the trainer has ended, or needs no
more. Everything else happens in that loop.
"""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, BinaryIO

from lit_async_rl.agents.calls import result_of
from lit_async_rl.agents.endpoint.openai_clients import EndpointAddress, OpenAIClients, import_openai
from lit_async_rl.utils.processes import exit_with_parent
from lit_async_rl.utils.user_code import user_line
from lit_async_rl.utils.waiting import use_awake_clock

MAX_ERROR_CHARS = 2000
HEADER_BYTES = 8  # the length of a request


@dataclass(eq=False)
class _Player:
    """Plays episodes, and says what they return."""

    agent: Callable[[Any, Any], Any]
    replies: BinaryIO

    def __post_init__(self) -> None:
        import_openai()  # which takes a second, before the first episode's time
        self.clients = OpenAIClients()
        self.tasks: dict[int, asyncio.Task[None]] = {}

    def take(self, request: tuple[int, tuple[bytes, EndpointAddress] | None]) -> None:
        """Begins an episode; without a prompt and an address it cancels it."""
        (number, episode) = request
        if episode is not None:
            (prompt, address) = episode
            task = asyncio.get_running_loop().create_task(self._play(number, prompt, address))
            self.tasks[number] = task
            task.add_done_callback(lambda _: self.tasks.pop(number, None))
            return
        if number in self.tasks:
            self.tasks[number].cancel()
        self.reply(id=number)  # also of one that has ended: the trainer learns that this loop runs

    def reply(self, **reply: Any) -> None:
        """Says something to the trainer.

        Raises:
            ValueError: a number is not finite.
        """
        line = json.dumps(reply, allow_nan=False)
        self.replies.write(line.encode() + b"\n")
        self.replies.flush()

    async def _play(self, number: int, prompt: bytes, address: EndpointAddress) -> None:
        try:
            client = self.clients.make(address)
            result = result_of(await self.agent(pickle.loads(prompt), client))
            self.reply(id=number, reward=float(result.reward), parts={k: float(x) for k, x in result.parts.items()})
        except SystemExit as error:
            self.reply(id=number, error=f"it called sys.exit({error.code!r})")
        except Exception as error:
            self.reply(id=number, error=_described(error))


def _described(error: BaseException) -> str:
    where = user_line(error)
    return f"{type(error).__name__}: {error}"[:MAX_ERROR_CHARS] + (f"\n{where}" if where else "")


def _read_request(requests: BinaryIO) -> Any:
    """The next one; None at the end."""
    header = requests.read(HEADER_BYTES)
    return pickle.loads(requests.read(int.from_bytes(header, "big"))) if len(header) == HEADER_BYTES else None


def _main(parent: int) -> None:
    # the thread that has started this process ends with a validation, and another goes on with its event loop
    if not exit_with_parent(parent):
        return
    requests = os.fdopen(os.dup(0), "rb")
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)  # what agents print goes to stderr: stdout is for replies
    try:
        player = _Player(_read_request(requests), replies)
    except BaseException as error:  # of the agent's module
        replies.write(json.dumps({"error": _described(error)}).encode() + b"\n")
        replies.flush()
        return
    asyncio.run(_serve(player, requests))


async def _serve(player: _Player, requests: BinaryIO) -> None:
    loop = use_awake_clock(asyncio.get_running_loop())

    def read() -> None:
        while (request := _read_request(requests)) is not None:
            loop.call_soon_threadsafe(player.take, request)
        os._exit(0)  # the trainer has ended, or needs no more

    threading.Thread(target=read, name="requests", daemon=True).start()
    player.reply(ready=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    _main(int(sys.argv[1]))
