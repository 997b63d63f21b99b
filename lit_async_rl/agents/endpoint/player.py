"""The program of a process that plays the episodes of an agent, see `ProcessAgent`. Imports little, to start soon.

A thread passes messages of the trainer to the event loop, and ends the process when the trainer has ended, or needs no
more. All else happens in the loop.
"""

from __future__ import annotations

import asyncio
import json
import os
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lit_async_rl.agents.api.openai_clients import EndpointAddress, OpenAIClients, import_openai
from lit_async_rl.agents.results import result_of
from lit_async_rl.runtime.loop import run_once, watched
from lit_async_rl.runtime.process import Channel, Message
from lit_async_rl.runtime.threads import start_thread
from lit_async_rl.utils.user_code import user_line

MAX_ERROR_CHARS = 2000


@dataclass(eq=False)
class _Player:
    """Plays episodes, and reports their results."""

    agent: Callable[[Any, Any], Any]
    trainer: Channel

    def __post_init__(self) -> None:
        import_openai()  # which takes a second, before the first episode's time
        self.clients = OpenAIClients()
        self.tasks: dict[int, asyncio.Task[None]] = {}

    def take(self, message: Message) -> None:
        """Does what the trainer says."""
        fields, prompt = message
        number = fields["call"]
        if fields["kind"] == "play":
            address = EndpointAddress(**fields["address"])
            task = asyncio.get_running_loop().create_task(self._play(number, prompt, address=address))
            self.tasks[number] = task
            task.add_done_callback(lambda _: self.tasks.pop(number, None))
            return
        if number in self.tasks:
            self.tasks[number].cancel()
        self.trainer.send({"call": number})  # also of one that has ended: the trainer learns that this loop runs

    async def _play(self, number: int, prompt: bytes, address: EndpointAddress) -> None:
        try:
            client = self.clients.make(address)
            result = result_of(await self.agent(pickle.loads(prompt), client))
            parts = {name: float(part) for name, part in result.parts.items()}
            reply = {"call": number, "reward": float(result.reward), "parts": parts}
            json.dumps(reply, allow_nan=False)  # raises if a number is not finite
            self.trainer.send(reply)
        except SystemExit as error:
            self.trainer.send({"call": number, "error": f"it called sys.exit({error.code!r})"})
        except Exception as error:
            self.trainer.send({"call": number, "error": _described(error)})


def _described(error: BaseException) -> str:
    where = user_line(error)
    return f"{type(error).__name__}: {error}"[:MAX_ERROR_CHARS] + (f"\n{where}" if where else "")


def _main() -> None:
    trainer = Channel.of_parent()
    message = trainer.receive()
    if message is None:
        return
    try:
        player = _Player(pickle.loads(message[1]), trainer)
    except BaseException as error:  # of the agent's module
        trainer.send({"error": _described(error)})
        return
    run_once(_serve(player))


async def _serve(player: _Player) -> None:
    loop = asyncio.get_running_loop()

    def read() -> None:
        while (message := player.trainer.receive()) is not None:
            loop.call_soon_threadsafe(player.take, message)
        os._exit(0)  # the trainer has ended, or needs no more

    start_thread(read, name="messages")
    player.trainer.send({"ready": True})
    name = getattr(player.agent, "__qualname__", type(player.agent).__name__)
    with watched(loop, f"agent {name}"):
        await asyncio.Event().wait()


if __name__ == "__main__":
    _main()
