"""Fleet of vLLM servers as one engine: weight updates, failing and recovering servers.

Everything here runs in one event loop.

| who | waits for | ends when |
|---|---|---|
| `Dispatcher._run`, one per request sent | its response | the server fails, or is taken out |
| `_watch`, one per server | the next health check | `close` |
| `update` (for the trainer) | all servers that are in | each has loaded the weights or was taken out |

A server is *in* or *out*. It starts out, and is taken out at its first failure of any kind: unreachable, timed out, or
wrong weights, or an answer that is not what was asked for. Its requests then go to other servers. It is brought in
again only after it has passed the handshake, loaded the newest weights, tagged a sampled token with them, and given a
fixed token sequence the trainer's log-probabilities. The more often it fails without a good answer in between, the
longer it stays out.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any

from lit_async_rl.engines.base import Probe
from lit_async_rl.engines.vllm.file_transfer import FileTransfer
from lit_async_rl.engines.vllm.requests import RequestBook
from lit_async_rl.engines.vllm.servers import handshake
from lit_async_rl.engines.vllm.servers.client import ServerClient
from lit_async_rl.engines.vllm.servers.connection import ServerFailure, ServerRefusal
from lit_async_rl.engines.vllm.servers.dispatcher import Dispatcher, Terms
from lit_async_rl.engines.vllm.servers.outages import Outages
from lit_async_rl.engines.vllm.servers.pool import ServerPool
from lit_async_rl.engines.vllm.servers.publication import Publication
from lit_async_rl.errors import EngineError, describe


class ServerFleet:
    """Publishes weights, and keeps out servers that fail.

    Args:
        clients: the servers.
        book: receives finished samples and the engine's failure.
        run: distinguishes our version tags from those of other trainers.
        clear_cache: see `VLLMServerEngine`.
        probe_interval_s: pause between two health checks of a server.
        recovery_timeout_s: maximum time without any server.
    """

    def __init__(
        self,
        clients: Sequence[ServerClient],
        book: RequestBook,
        run: str,
        clear_cache: bool,
        probe_interval_s: float,
        recovery_timeout_s: float,
    ) -> None:
        self._clients = {client.url: client for client in clients}
        self.pool = ServerPool(self._clients)
        self._book = book
        self.clear_cache = clear_cache
        self.probe_interval_s = probe_interval_s
        self.recovery_timeout_s = recovery_timeout_s
        self._watchers: dict[str, asyncio.Task[None]] = {}
        self.background: list[Callable[[], Coroutine[Any, Any, None]]] = []  # started with the first weights
        self._outages = Outages(self._clients)
        self.probe: Probe | None = None
        self._terms = Terms(run)
        self._publication = Publication()
        self._changing = asyncio.Lock()  # held while a server's weights, or the newest weights themselves, change
        self._num_changes = 0
        self.requests = Dispatcher(
            self._clients,
            self.pool,
            book,
            terms=self._terms,
            start_task=self.start_task,
            on_failure=self.take_out,
            on_success=self._outages.forgive,
        )

    # -- servers ------------------------------------------------------------------------------------------------------

    async def start(
        self, expected: handshake.Expected, vocab_size: int, eos_token_ids: Sequence[int], timeout_s: float
    ) -> handshake.Served:
        """Waits until all servers are ready; returns the smallest of their limits. Raises: see `wait_for_servers`."""
        self._expected = expected
        self._terms.vocab_size = vocab_size
        self._terms.eos_token_ids = eos_token_ids
        served = await handshake.wait_for_servers(self._clients.values(), expected, timeout_s)
        self._terms.max_model_len = served.max_model_len
        return served

    @property
    def urls(self) -> set[str]:
        """All servers, in or out."""
        return set(self._clients)

    @property
    def clients_in(self) -> list[ServerClient]:
        """Servers that get requests."""
        return [self._clients[url] for url in self.pool.servers_in]

    def add(self, client: ServerClient) -> None:
        """Adds a server, which is out until its watcher brings it in; there must be weights."""
        self._clients[client.url] = client
        self._outages.add(client.url)
        self.requests.add(client.url)
        self.pool.add(client.url)
        self._watchers[client.url] = self.start_task(self._watch(client))

    async def remove(self, url: str) -> None:
        """Forgets a server; requests that it still has go to others."""
        async with self._changing:  # not in the middle of an update
            self._watchers.pop(url).cancel()
            self.take_out(url, "it leaves")
            self.pool.remove(url)
            await self._clients.pop(url).close()
            self._outages.remove(url)
            self.requests.remove(url)

    async def _watch(self, client: ServerClient) -> None:
        while True:
            is_in = client.url in self.pool.servers_in
            await asyncio.sleep(self.probe_interval_s * (1 if is_in else self._outages.backoff(client.url)))
            if client.url in self.pool.servers_in:
                await self._probe(client)
            else:
                await self._try_to_bring_in(client)
            self._check_alone()

    async def _probe(self, client: ServerClient) -> None:
        """Health check; its result is ignored while the server loads weights, as it cannot answer then."""
        number = self._num_changes
        problem = ""
        try:
            if (tag := await client.probe()) != self._terms.tag:
                wanted = self._terms.tag
                problem = f"has weights {tag!r}, not {wanted!r}: it was restarted, or another trainer uses it, too"
        except (ServerFailure, ServerRefusal) as error:
            problem = str(error)
        if problem and number == self._num_changes and not self._changing.locked():
            self.take_out(client.url, problem)

    async def _try_to_bring_in(self, client: ServerClient) -> None:
        try:
            await handshake.check_server(client, self._expected, self._terms.max_model_len)
            async with self._changing:
                self._num_changes += 1
                await self._load_and_prove(client)
                self._bring_in(client.url)
        except (ServerFailure, ServerRefusal) as error:
            self._outages.go_on(client.url, str(error), counts=isinstance(error, ServerRefusal))

    async def _load_and_prove(self, client: ServerClient) -> float:
        """Aborts all requests of the server, loads the weights, and checks that a token is tagged with them."""
        load = partial(client.load, await self._publication.whole(), self._terms.tag, self.clear_cache, abort=True)
        try:
            pause_s = await load()
        except ServerFailure:  # as a model does that another load has left half loaded; then it is whole again
            pause_s = await load()
        await handshake.prove_version(client, self._terms.run, self._terms.version)
        if self.probe is not None and self.probe.version == self._terms.version:
            await handshake.prove_weights(client, self.probe)
        return pause_s

    def _bring_in(self, url: str) -> None:
        self.pool.bring_in(url)
        self._outages.end(url, self._terms.version)
        self.requests.dispatch()

    def take_out(self, url: str, why: str) -> None:
        """Moves the requests of a server to other servers."""
        if url not in self.pool.servers_in:
            return
        lost = self.pool.take_out(url)
        self.requests.cancel(lost)
        self._outages.begin(url, why, len(lost))
        self.requests.dispatch()

    def _check_alone(self) -> None:
        if not self.pool.servers_in and self._outages.seconds > self.recovery_timeout_s:
            limit = f"data.engine.recovery_timeout_s={self.recovery_timeout_s:g}"
            self._book.fail(EngineError(f"no server for {limit}: {self._outages.reasons}"))

    # -- weights ------------------------------------------------------------------------------------------------------

    async def drain(self) -> None:
        """Holds new requests back and waits for all others."""
        self.pool.hold()
        while not self.pool.is_idle:
            await asyncio.sleep(0.005)
            self._book.check()

    async def begin_update(self) -> None:
        """Keeps servers from being brought in while the folder of the newest weights may change."""
        await self._changing.acquire()
        self._num_changes += 1

    async def update(self, version: int, transfer: FileTransfer) -> float:
        """Loads staged weights on all servers that are in; takes out those that fail. Returns the seconds paused.

        Raises:
            EngineError: a server did not load the first weights.
        """
        is_first = self._terms.version < 0
        self._terms.version = version
        self._publication.transfer = transfer
        clients = [client for url, client in self._clients.items() if is_first or url in self.pool.servers_in]
        load_running = partial(self._publication.load_running, tag=self._terms.tag, clear_cache=self.clear_cache)
        loads = map(self._load_and_prove if is_first else load_running, clients)
        pauses = []
        for client, found in zip(clients, await asyncio.gather(*loads, return_exceptions=True), strict=True):
            if isinstance(found, float):
                pauses.append(found)
            elif not isinstance(found, ServerFailure | ServerRefusal):
                raise EngineError(f"vLLM server {client.url} did not load the weights: {describe(found)}") from found
            elif is_first:
                raise EngineError(f"vLLM server {client.url} did not load the weights: {found}") from found
            else:
                self.take_out(client.url, str(found))
        self._terms.loaded = version
        # not before: a request sent meanwhile may read its prompt with the old weights
        self._terms.salt = self._terms.tag
        if is_first:
            for url in self._clients:
                self._bring_in(url)
            self._watchers = {client.url: self.start_task(self._watch(client)) for client in clients}
            self._watchers |= {f"background {n}": self.start_task(run()) for n, run in enumerate(self.background)}
        return max(pauses, default=0.0)

    def end_update(self, keep_held: bool = False) -> None:
        """Allows servers to be brought in again and sends the requests held back, unless they are to be kept."""
        self._changing.release()
        if not keep_held:
            self.pool.release()
            self.requests.dispatch()

    # -- tasks --------------------------------------------------------------------------------------------------------

    def start_task(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Starts a task whose exception is recorded as the engine's failure."""
        task = asyncio.create_task(work)
        task.add_done_callback(self._on_end)
        return task

    def _on_end(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._book.fail(error)

    async def close(self) -> None:
        await asyncio.gather(*(client.close() for client in self._clients.values()))
