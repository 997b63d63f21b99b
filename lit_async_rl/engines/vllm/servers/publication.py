"""The newest weights, as servers get them: whole ones, or while they generate what has changed."""

from __future__ import annotations

import asyncio
import logging

from lit_async_rl.engines.vllm.file_transfer import FileTransfer
from lit_async_rl.engines.vllm.servers.client import ServerClient
from lit_async_rl.engines.vllm.servers.connection import ServerFailure

log = logging.getLogger(__name__)


class Publication:
    """Staged weights of a fleet.

    Attributes:
        transfer: has staged the newest weights.
    """

    transfer: FileTransfer

    def __init__(self) -> None:
        self._writing = asyncio.Lock()  # held while whole weights are written

    async def whole(self) -> str:
        """Folder of all weights, for a server that does not have the last ones."""
        async with self._writing:
            return await asyncio.to_thread(self.transfer.whole)

    async def load_running(self, client: ServerClient, tag: str, clear_cache: bool) -> float:
        """Loads the weights into a server that has those before; returns the seconds paused.

        Raises:
            ServerFailure: loading failed.
        """
        folder: str | None = self.transfer.staged
        if self.transfer.preload:
            try:
                await client.preload(self.transfer.staged)
                folder = None
            except ServerFailure as error:
                log.warning("vLLM server %s loads weights in a pause, not while it generates: %s", client.url, error)
                folder = await self.whole()
        return await client.load(folder, tag, clear_cache, abort=False)
