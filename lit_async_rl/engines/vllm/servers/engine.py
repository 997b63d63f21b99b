"""vLLM servers as the engine, over HTTP. The trainer does not import vLLM.

| who | waits for | woken by |
|---|---|---|
| `poll` (producer's thread) | a finished sample | the loop's thread, an error, `close` |
| `setup`, `load_weights` (trainer's thread) | the servers; without in-flight updates all requests first | the same |
| the loop's thread | the servers, calls from other threads | asyncio; see `lit_async_rl.engines.vllm.servers.fleet` |
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Any

from torch import Tensor

from lit_async_rl.engines.base import GenerationRequest
from lit_async_rl.engines.vllm.background import BackgroundEngine, check_sleep_level, free_cached_memory
from lit_async_rl.engines.vllm.engine_arguments import describe_config
from lit_async_rl.engines.vllm.file_transfer import FileTransfer, SharedMemoryTransfer
from lit_async_rl.engines.vllm.servers.client import ServerClient
from lit_async_rl.engines.vllm.servers.fleet import ServerFleet
from lit_async_rl.engines.vllm.servers.handshake import Expected
from lit_async_rl.engines.vllm.servers.membership import Membership, server_url, wait_for_servers_file
from lit_async_rl.engines.vllm.servers.sleep import FleetSleep
from lit_async_rl.errors import SetupError
from lit_async_rl.models.end_tokens import stored_eos_token_ids
from lit_async_rl.models.tokenizer import StopStrings
from lit_async_rl.utils.checks import check_range
from lit_async_rl.utils.guarded_calls import LoopThread


class VLLMServerEngine(BackgroundEngine[FileTransfer]):
    """vLLM servers (0.32 or newer, `scripts/serve.py`), on this machine and on others.

    Each prompt goes, with all its samples, to the server with the fewest outstanding tokens; later turns of its
    episodes go where its beginning is cached, unless that server has far more to do. A server that dies or hangs is
    taken out and its requests are sampled again by others: no group is lost or delivered twice. A server that recovers
    gets the newest weights before any request. Each of these events is logged in one line.

    A group that is sampled again starts from its prompt. If servers die often, long completions are therefore
    underrepresented.

    Weight updates work as in `VLLMEngine`, all servers at the same time; so do `in_flight_weight_updates` and
    `clear_cache`. Not reproducible to the bit.

    With `servers_file` servers may join and leave while a run goes on: the file, one server a line, is read at every
    probe. One that joins is brought in like one that recovers; one that leaves finishes the requests that it has.

    Args:
        servers: `host:port`, or `http(s)://host:port`.
        in_flight_weight_updates: False: running requests finish under the old weights before an update.
        clear_cache: whether running completions recompute their KV cache after an update.
        transfer: moves weights to the servers; None is `SharedMemoryTransfer()`, for servers on this machine.
            `FileTransfer` with a folder that all machines see under the same path serves others.
        api_key_variable: environment variable with the servers' API key, if they require one.
        probe_interval_s: pause between two health checks of a server.
        health_timeout_s: timeout of a health check; after it the server counts as hung.
        request_timeout_s: timeout of the samples of a prompt.
        update_timeout_s: timeout of loading weights, and of the wait for requests before it.
        startup_timeout_s: timeout of the wait for servers that are starting.
        recovery_timeout_s: maximum time without any server before the engine counts as failed.
        servers_file: names the servers, in place of `servers`; `setup` waits for the file and for those in it.
        sleep_level: see `VLLMEngine`; the servers need `--enable-sleep-mode`, and must serve this run only.

    Raises:
        ValueError: a setting is out of range, or a server is not given as `host:port`.
    """

    uses_probe = True

    def __init__(
        self,
        servers: list[str] | None = None,
        in_flight_weight_updates: bool = True,
        clear_cache: bool = False,
        transfer: FileTransfer | None = None,
        api_key_variable: str = "VLLM_API_KEY",
        probe_interval_s: float = 2.0,
        health_timeout_s: float = 20.0,
        request_timeout_s: float = 1800.0,
        update_timeout_s: float = 600.0,
        startup_timeout_s: float = 600.0,
        recovery_timeout_s: float = 300.0,
        servers_file: str | None = None,
        sleep_level: int = 0,
    ) -> None:
        check_range(
            "data.engine",
            "positive",
            probe_interval_s=probe_interval_s,
            health_timeout_s=health_timeout_s,
            request_timeout_s=request_timeout_s,
            update_timeout_s=update_timeout_s,
            startup_timeout_s=startup_timeout_s,
            recovery_timeout_s=recovery_timeout_s,
        )
        self.urls = [server_url(server) for server in servers or []]
        self.servers_file = servers_file
        if servers_file is None and (not self.urls or len(set(self.urls)) < len(self.urls)):
            raise ValueError(f"data.engine.servers must name at least one server, and each once, got {servers}")
        if servers_file is not None and servers:
            raise ValueError(
                f"data.engine.servers_file={servers_file!r} takes the place of data.engine.servers={servers}"
            )
        name = "the fleet of vLLM servers"
        super().__init__(name, transfer or SharedMemoryTransfer(), in_flight_weight_updates, clear_cache=clear_cache)
        self.api_key_variable = api_key_variable
        self.sleep_level = check_sleep_level(sleep_level, transfer)
        self.probe_interval_s = probe_interval_s
        self.health_timeout_s = health_timeout_s
        self.request_timeout_s = request_timeout_s
        self.update_timeout_s = update_timeout_s
        self.startup_timeout_s = startup_timeout_s
        self.recovery_timeout_s = recovery_timeout_s
        self._thread: LoopThread | None = None
        self._model = ""
        self._clients: list[ServerClient] = []
        self._stop_strings: StopStrings | None = None

    # -- trainer's thread ---------------------------------------------------------------------------------------------

    def setup(self, model: str) -> None:
        """Waits for all servers and checks that they serve `model`; `load_weights` loads the weights.

        Raises:
            FileNotFoundError: there is no such model.
            EngineError: a server was not reachable in time, or cannot be used; says why.
        """
        config = self._read_config(model)
        self._model = model
        if self.servers_file is not None:
            self.urls = wait_for_servers_file(self.servers_file, self.startup_timeout_s)
        self._clients = [self._make_client(url) for url in self.urls]
        self._fleet = ServerFleet(
            self._clients,
            self._book,
            run=uuid.uuid4().hex[:8],
            clear_cache=self.clear_cache,
            probe_interval_s=self.probe_interval_s,
            recovery_timeout_s=self.recovery_timeout_s,
        )
        self._fleet.background = self._background()
        self._sleep = FleetSleep(self._fleet, self.sleep_level)
        self._thread = LoopThread("vLLM servers")
        start = self._fleet.start(
            Expected(describe_config(config), sleeps=self.sleep_level > 0),
            self._vocab_size,
            stored_eos_token_ids(model),
            self.startup_timeout_s,
        )
        limit_s = self.startup_timeout_s + 10 * self.health_timeout_s  # each of its waits has a shorter one
        setting = f"data.engine.startup_timeout_s={self.startup_timeout_s:g}"
        served = self._thread.call(start, limit_s, "the check of the vLLM servers", setting)
        self._max_model_len = served.max_model_len
        self.dtype = served.dtype

    @property
    def _api_key(self) -> str | None:
        return os.environ.get(self.api_key_variable)

    def _make_client(self, url: str) -> ServerClient:
        return ServerClient(
            url,
            self._api_key,
            self.health_timeout_s,
            request_timeout_s=self.request_timeout_s,
            update_timeout_s=self.update_timeout_s,
        )

    def _background(self) -> list[Callable[[], Coroutine[Any, Any, None]]]:
        """Tasks that run beside the fleet once it has weights."""
        if self.servers_file is None:
            return []

        def joining(url: str) -> ServerClient:
            client = self._make_client(url)
            client.stop_strings = self._stop_strings
            self._clients.append(client)
            return client

        return [
            Membership(
                self._fleet,
                self.servers_file,
                joining,
                interval_s=self.probe_interval_s,
                drain_timeout_s=self.request_timeout_s,
            ).watch
        ]

    @property
    def _loop(self) -> LoopThread:
        if self._thread is None:
            raise SetupError("the engine was used before its setup")
        return self._thread

    @property
    def _update_limit(self) -> str:
        return f"data.engine.update_timeout_s={self.update_timeout_s:g}"

    def _publish(self, version: int, weights: Iterator[tuple[str, Tensor]]) -> float:
        """Servers that fail to load are taken out; with the first weights that is an error."""
        loop = self._loop
        limit_s = self.update_timeout_s
        if not self.in_flight_weight_updates:
            loop.call(self._fleet.drain(), limit_s, "waiting for requests under old weights", self._update_limit)
        patience_s = 2 * limit_s + 10 * self.health_timeout_s  # each of its waits has a shorter one
        coming = "waiting for a server that was coming back"
        loop.call(self._fleet.begin_update(), patience_s, coming, self._update_limit)
        try:
            self._fleet.probe = self.probe
            self.transfer.stage(weights)
            if self._sleep.is_on:
                free_cached_memory()
            update = self._sleep.update(version, self.transfer)
            return loop.call(update, patience_s, "loading weights into the vLLM servers", self._update_limit)
        finally:
            loop.soon(self._sleep.end)

    def sleep(self) -> None:
        """Frees the servers' memory of KV cache and weights until the next update, unless requests are running."""
        if self.sleep_level:
            limit_s = 2 * self.update_timeout_s
            self._loop.call(self._sleep.begin(), limit_s, "putting the vLLM servers to sleep", self._update_limit)

    @property
    def needs_weights(self) -> bool:  # type: ignore[override]
        return self.sleep_level == 2 and self._thread is not None and self._sleep.is_on

    # -- producer's thread --------------------------------------------------------------------------------------------

    def _launch(self, requests: Sequence[GenerationRequest]) -> None:
        if self._stop_strings is None and any(request.sampling.stop for request in requests):
            self._stop_strings = StopStrings.of_model(self._model)
            for client in self._clients:
                client.stop_strings = self._stop_strings
        self._book.begin(request.id for request in requests)
        self._loop.soon(self._sleep.submit, requests)

    def _cancel(self, request_ids: set[int]) -> None:
        self._loop.soon(self._fleet.requests.abort, request_ids)

    # -- any thread ---------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Disconnects from the servers, which keep running; unblocks `poll` and `load_weights`."""
        self._book.close()
        if self._thread is not None:
            self._thread.close(self._fleet.close())
        self.transfer.close()
