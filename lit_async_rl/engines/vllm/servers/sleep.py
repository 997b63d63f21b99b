"""Sleep of the servers of a fleet while a trainer on the same GPUs trains. Everything here runs in the fleet's loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from lit_async_rl.engines.base import GenerationRequest
from lit_async_rl.engines.vllm.background import free_cached_memory
from lit_async_rl.engines.vllm.file_transfer import FileTransfer
from lit_async_rl.engines.vllm.servers.client import ServerClient
from lit_async_rl.engines.vllm.servers.connection import ServerFailure, ServerRefusal
from lit_async_rl.engines.vllm.servers.fleet import ServerFleet


class FleetSleep:
    """Puts all servers that are in to sleep; the next update, or at level 1 a request, wakes them.

    A server that is out meanwhile comes back awake, and gets no requests before the others.

    Args:
        fleet: has weights.
        level: see `VLLMEngine`.
    """

    def __init__(self, fleet: ServerFleet, level: int) -> None:
        self.fleet = fleet
        self.level = level
        self.is_on = False

    async def begin(self) -> None:
        """Has them free their memory, unless requests are running."""
        await self.fleet.begin_update()
        if self.is_on or not self.fleet.pool.is_idle:
            self.fleet.end_update(keep_held=self.is_on)
            return
        self.fleet.pool.hold()
        self.is_on = True
        try:
            await self._each(lambda client: client.sleep(self.level))
        finally:
            self.fleet.end_update(keep_held=True)

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """Passes requests on; they wait if the servers sleep."""
        self.fleet.requests.submit(requests)
        if self.is_on and self.level == 1:
            self.fleet.start_task(self._interrupt())

    async def _interrupt(self) -> None:
        """Wakes the servers with the weights that they had."""
        await self.fleet.begin_update()
        try:
            if self.is_on:  # still: an update wakes them, too
                await asyncio.to_thread(free_cached_memory)
                await self._each(ServerClient.wake)
        finally:
            self.end()

    async def update(self, version: int, transfer: FileTransfer) -> float:
        """Weight update of the fleet, which wakes all servers that are in; returns the seconds paused."""
        pause_s = await self.fleet.update(version, transfer)
        self.is_on = False
        return pause_s

    def end(self) -> None:
        """Ends an update; sends the requests held back."""
        self.is_on = False
        self.fleet.end_update()

    async def _each(self, call: Callable[[ServerClient], Coroutine[Any, Any, None]]) -> None:
        """Calls all servers that are in; those that fail are taken out."""
        clients = self.fleet.clients_in
        for client, found in zip(
            clients, await asyncio.gather(*map(call, clients), return_exceptions=True), strict=True
        ):
            if isinstance(found, ServerFailure | ServerRefusal):
                self.fleet.take_out(client.url, str(found))
            elif found is not None:
                raise found
