"""Servers that join and leave a fleet while a run goes on, as a file says that is read again and again."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

from lit_async_rl.engines.vllm.servers.client import ServerClient
from lit_async_rl.engines.vllm.servers.fleet import ServerFleet
from lit_async_rl.errors import EngineError

WAIT_S = 0.5  # between two looks at a file that is not there yet
READ_S = 10.0  # a file on a network may hang
log = logging.getLogger(__name__)


def server_url(server: str) -> str:
    """URL of a server given as `host:port` or `http(s)://host:port`.

    Raises:
        ValueError: it has another form.
    """
    url = server if "://" in server else f"http://{server}"
    try:
        parts = urlsplit(url)
        is_good = parts.scheme in ("http", "https") and parts.hostname and parts.port and parts.path in ("", "/")
    except ValueError:  # the port is no number
        is_good = False
    if not is_good:
        raise ValueError(f"data.engine.servers: {server!r} is not of the form host:port or http://host:port")
    return url.rstrip("/")


def read_servers(file: str) -> list[str]:
    """URLs in a file that has one server a line; empty lines and those that begin with # do not count.

    Raises:
        OSError: the file cannot be read.
        ValueError: a line is no server, or there is none.
    """
    lines = [line.strip() for line in Path(file).read_text(encoding="utf-8").splitlines()]
    urls = list(dict.fromkeys(server_url(line) for line in lines if line and not line.startswith("#")))
    if not urls:
        raise ValueError(f"data.engine.servers_file={file!r} names no server")
    return urls


def wait_for_servers_file(file: str, timeout_s: float) -> list[str]:
    """Servers of the file, as soon as it names one: it may be written after the trainer has started.

    Raises:
        EngineError: it did not in time.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            return read_servers(file)
        except (OSError, ValueError) as error:
            if time.monotonic() > deadline:
                waited = f"waited data.engine.startup_timeout_s={timeout_s:g} for it"
                raise EngineError(f"data.engine.servers_file={file!r}: {error}; {waited}") from error
        time.sleep(WAIT_S)


class Membership:
    """Keeps a fleet to the servers that a file names.

    A server that is named anew is brought in like one that comes back. One that is not named any more gets no new
    requests, finishes those that it has (with the newest weights), and is forgotten; the server itself goes on. A file
    that cannot be read or understood changes nothing.

    Args:
        fleet: that has the servers of the file when it was read first.
        file: read every `interval_s`.
        make_client: of a URL.
        interval_s: between two looks.
        drain_timeout_s: after it the requests of a server that leaves go to others.
    """

    def __init__(
        self,
        fleet: ServerFleet,
        file: str,
        make_client: Callable[[str], ServerClient],
        interval_s: float,
        drain_timeout_s: float,
    ) -> None:
        self.fleet = fleet
        self.file = file
        self.interval_s = interval_s
        self.drain_timeout_s = drain_timeout_s
        self._make_client = make_client
        self._problem = ""
        self._leaving: dict[str, float] = {}  # until when

    async def watch(self) -> None:
        """Follows the file until it is cancelled."""
        while True:
            await asyncio.sleep(self.interval_s)
            try:
                wanted = await asyncio.wait_for(asyncio.to_thread(read_servers, self.file), READ_S)
            except (OSError, ValueError, asyncio.TimeoutError) as error:
                problem = str(error) or f"cannot be read within {READ_S:g} s"
                if problem != self._problem:
                    log.warning(
                        "data.engine.servers_file=%r is ignored, servers stay as they are: %s", self.file, problem
                    )
                self._problem = problem
                continue
            self._problem = ""
            await self.follow(wanted)

    async def follow(self, wanted: list[str]) -> None:
        """One look: adds, drains, and removes."""
        now = asyncio.get_running_loop().time()
        present = self.fleet.urls
        for url in wanted:
            if url not in present:
                log.warning("vLLM server %s joins", url)
                self.fleet.add(self._make_client(url))
            elif self._leaving.pop(url, None) is not None:
                self.fleet.pool.stay(url)
        for url in present - set(wanted):
            if url not in self._leaving:
                log.warning("vLLM server %s leaves when its %d requests are done", url, self.fleet.pool.num_sent(url))
                self._leaving[url] = now + self.drain_timeout_s
                self.fleet.pool.leave(url)
        for url, until in list(self._leaving.items()):
            if not self.fleet.pool.num_sent(url) or now > until:
                await self.fleet.remove(url)
                del self._leaving[url]
                log.warning("vLLM server %s has left", url)
