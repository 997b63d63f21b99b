"""Requests of a fleet: sends each to a server, checks what comes back, and files it."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lit_async_rl.engines.base import GenerationRequest
from lit_async_rl.engines.vllm.requests import RequestBook
from lit_async_rl.engines.vllm.servers.answers import first_fault
from lit_async_rl.engines.vllm.servers.client import ServerClient
from lit_async_rl.engines.vllm.servers.connection import ServerFailure, ServerRefusal
from lit_async_rl.engines.vllm.servers.pool import Assignment, ServerPool
from lit_async_rl.errors import EngineError
from lit_async_rl.utils.spans import ENGINE, FIRST_SERVER, Overlap, recorder

MAX_FAILURES = 5  # of one request on one server after the other: then it is the request


@dataclass
class Terms:
    """Versions and limits that requests are sent with and that every answer to them must fit.

    Attributes:
        run: distinguishes our version tags from those of other trainers.
        eos_token_ids: of the policy.
        vocab_size: of the policy.
        max_model_len: most tokens of prompt and completion, on all servers.
        version: newest one that servers were given, whether or not they have loaded it.
        loaded: version that all servers which are in have.
        salt: prompts share their KV cache only under the same one.
    """

    run: str
    eos_token_ids: Sequence[int] = ()
    vocab_size: int = 0
    max_model_len: int = 0
    version: int = -1
    loaded: int = -1
    salt: str = ""

    @property
    def tag(self) -> str:
        """Of tokens sampled from the newest version."""
        return f"{self.run}-{self.version}"


class Dispatcher:
    """Sends the requests that a pool assigns, each in a task of its own.

    Args:
        clients: by URL; changes when servers join and leave.
        pool: assigns requests to those that are in.
        book: receives finished samples.
        terms: of requests and answers.
        start_task: starts a task whose exception is the engine's failure.
        on_failure: called with a server's URL and the reason when a request failed there; sends its requests elsewhere.
        on_success: called with the URL of a server that has given a good answer.
    """

    def __init__(
        self,
        clients: Mapping[str, ServerClient],
        pool: ServerPool,
        book: RequestBook,
        terms: Terms,
        start_task: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]],
        on_failure: Callable[[str, str], None],
        on_success: Callable[[str], None],
    ) -> None:
        self._clients = clients
        self._pool = pool
        self._book = book
        self._terms = terms
        self._start_task = start_task
        self._on_failure = on_failure
        self._on_success = on_success
        self._tasks: dict[Assignment, asyncio.Task[None]] = {}
        self._failures: Counter[int] = Counter()  # of each request
        self._numbers = itertools.count(FIRST_SERVER)  # of servers in a timeline
        self._work: dict[str, Overlap] = {}
        for url in clients:
            self.add(url)

    def add(self, url: str) -> None:
        """Registers a server that has joined."""
        lane = recorder().lane(ENGINE, next(self._numbers), f"server {url}")
        self._work[url] = Overlap("decode", lane)

    def remove(self, url: str) -> None:
        """Forgets a server without requests."""
        del self._work[url]

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """Queues requests and sends those that can be sent."""
        self._pool.submit(requests)
        self.dispatch()

    def abort(self, request_ids: Collection[int]) -> None:
        """Cancels requests; closing their connections makes the servers abort them."""
        self.cancel(self._pool.abort(request_ids))

    def cancel(self, assignments: Iterable[Assignment]) -> None:
        """Ends the tasks that wait for these answers."""
        for assignment in assignments:
            if (task := self._tasks.pop(assignment, None)) is not None:
                task.cancel()

    def dispatch(self) -> None:
        """Sends all queued requests, if a server is in."""
        for assignment in self._pool.dispatch():
            self._tasks[assignment] = self._start_task(self._run(assignment))

    async def _run(self, assignment: Assignment) -> None:
        terms = self._terms
        url = assignment.server
        request = assignment.request
        oldest = self._terms.loaded
        try:
            with self._work[url].one(version=terms.version):
                client = self._clients[url]
                completions = await client.generate(request, terms.eos_token_ids, terms.salt, terms.run)
            versions = (oldest, terms.version)
            if fault := first_fault(
                completions, request, versions, vocab_size=terms.vocab_size, max_model_len=terms.max_model_len
            ):
                raise ServerFailure(fault)
        except (ServerFailure, ServerRefusal) as error:
            self._tasks.pop(assignment, None)
            self._count_failure(assignment, error)
            return
        self._tasks.pop(assignment, None)
        if self._pool.accept(assignment):
            self._failures.pop(request.id, None)
            self._on_success(url)
            self._book.add(request.id, sum(len(completion.token_ids) for completion in completions), completions)
            self._book.end([request.id])

    def _count_failure(self, assignment: Assignment, error: Exception) -> None:
        number = assignment.request.id
        url = assignment.server
        self._failures[number] += 1
        if self._failures[number] >= MAX_FAILURES:
            raise EngineError(f"request {number} failed {MAX_FAILURES} times, at last on {url}: {error}") from error
        self._on_failure(url, str(error))
