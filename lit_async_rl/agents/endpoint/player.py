"""The program of a process that plays the episodes of an agent, see `ProcessAgent`. Imports little, to start soon.

A thread reads messages of the trainer and gives them to the event loop; it ends the process when the trainer has ended,
or needs no more. Everything else happens in that loop.
"""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, BinaryIO

from lit_async_rl.agents.api.openai_clients import OpenAIClients, import_openai
from lit_async_rl.agents.calls import result_of
from lit_async_rl.agents.endpoint.messages import HEADER_BYTES, Cancel, Play
from lit_async_rl.runtime.loop import run_once, watched
from lit_async_rl.utils.user_code import user_line

MAX_ERROR_CHARS = 2000


@dataclass(eq=False)
class _Player:
    """Plays episodes, and says what they return."""

    agent: Callable[[Any, Any], Any]
    replies: BinaryIO

    def __post_init__(self) -> None:
        import_openai()  # which takes a second, before the first episode's time
        self.clients = OpenAIClients()
        self.tasks: dict[int, asyncio.Task[None]] = {}

    def take(self, message: Play | Cancel) -> None:
        """Does what the trainer says."""
        if isinstance(message, Play):
            task = asyncio.get_running_loop().create_task(self._play(message))
            self.tasks[message.number] = task
            task.add_done_callback(lambda _: self.tasks.pop(message.number, None))
            return
        if message.number in self.tasks:
            self.tasks[message.number].cancel()
        self.reply({"id": message.number})  # also of one that has ended: the trainer learns that this loop runs

    def reply(self, reply: dict[str, Any]) -> None:
        """Says something to the trainer: a line of JSON.

        Raises:
            ValueError: a number is not finite.
        """
        line = json.dumps(reply, allow_nan=False)
        self.replies.write(line.encode() + b"\n")
        self.replies.flush()

    async def _play(self, message: Play) -> None:
        number = message.number
        try:
            client = self.clients.make(message.address)
            result = result_of(await self.agent(pickle.loads(message.prompt), client))
            parts = {name: float(part) for name, part in result.parts.items()}
            self.reply({"id": number, "reward": float(result.reward), "parts": parts})
        except SystemExit as error:
            self.reply({"id": number, "error": f"it called sys.exit({error.code!r})"})
        except Exception as error:
            self.reply({"id": number, "error": _described(error)})


def _described(error: BaseException) -> str:
    where = user_line(error)
    return f"{type(error).__name__}: {error}"[:MAX_ERROR_CHARS] + (f"\n{where}" if where else "")


def _read_message(messages: BinaryIO) -> Any:
    """The next one of the trainer; None at the end."""
    header = messages.read(HEADER_BYTES)
    return pickle.loads(messages.read(int.from_bytes(header, "big"))) if len(header) == HEADER_BYTES else None


def _main() -> None:
    messages = os.fdopen(os.dup(0), "rb")
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)  # what agents print goes to stderr: stdout is for replies
    try:
        player = _Player(_read_message(messages), replies)
    except BaseException as error:  # of the agent's module
        replies.write(json.dumps({"error": _described(error)}).encode() + b"\n")
        replies.flush()
        return
    run_once(_serve(player, messages))


async def _serve(player: _Player, messages: BinaryIO) -> None:
    loop = asyncio.get_running_loop()

    def read() -> None:
        while (message := _read_message(messages)) is not None:
            loop.call_soon_threadsafe(player.take, message)
        os._exit(0)  # the trainer has ended, or needs no more

    threading.Thread(target=read, name="messages", daemon=True).start()
    player.reply({"ready": True})
    name = getattr(player.agent, "__qualname__", type(player.agent).__name__)
    with watched(loop, f"agent {name}"):
        await asyncio.Event().wait()


if __name__ == "__main__":
    _main()
