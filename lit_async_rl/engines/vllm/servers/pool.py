"""Assignment of requests to servers. Bookkeeping only: no network, clock or threads, so that it can be tested alone."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from lit_async_rl.engines.base import GenerationRequest
from lit_async_rl.errors import InvariantError


@dataclass(frozen=True, eq=False)
class Assignment:
    """One attempt at a request; two attempts at the same request are different assignments."""

    server: str
    request: GenerationRequest

    @property
    def num_tokens(self) -> int:
        """Upper bound on the tokens of prompt and completions."""
        return len(self.request.prompt_ids) + self.request.num_samples * self.request.sampling.max_tokens


class ServerPool:
    """Sends each request, with all its samples, to the server with the fewest outstanding tokens.

    All samples of a prompt go to one server, which prefills it once. A request is in exactly one place: held, queued,
    or sent to one server that is in. Only the response to its newest assignment is accepted, so duplicate or late
    responses are never used.

    Args:
        servers: names; all start out.
    """

    def __init__(self, servers: Iterable[str]) -> None:
        self._outstanding = dict.fromkeys(servers, 0)
        self._in: set[str] = set()
        self._leaving: set[str] = set()  # get no new requests
        self._sent: dict[int, Assignment] = {}
        self._waiting: deque[GenerationRequest] = deque()
        self._held: list[GenerationRequest] | None = None

    @property
    def servers_in(self) -> frozenset[str]:
        """Servers that get requests."""
        return frozenset(self._in)

    @property
    def is_idle(self) -> bool:
        """Whether no request is queued or sent; held ones do not count."""
        return not self._sent and not self._waiting

    def outstanding(self, server: str) -> int:
        """Upper bound on the tokens that a server has yet to generate."""
        return self._outstanding[server]

    def submit(self, requests: Iterable[GenerationRequest]) -> None:
        """Queues requests behind all others, or holds them."""
        (self._waiting if self._held is None else self._held).extend(requests)

    def hold(self) -> None:
        """Holds back requests submitted from now on."""
        self._held = [] if self._held is None else self._held

    def release(self) -> None:
        """Queues the requests held back."""
        self._waiting.extend(self._held or ())
        self._held = None

    def dispatch(self) -> list[Assignment]:
        """Assigns all queued requests to servers; none if no server is in."""
        assignments = []
        while self._waiting and (candidates := self._in - self._leaving):
            server = min(candidates, key=lambda name: (self._outstanding[name], name))
            assignment = Assignment(server, self._waiting.popleft())
            self._sent[assignment.request.id] = assignment
            self._outstanding[server] += assignment.num_tokens
            assignments.append(assignment)
        return assignments

    def is_current(self, assignment: Assignment) -> bool:
        """Whether a response to this assignment would be accepted."""
        return self._sent.get(assignment.request.id) is assignment

    def accept(self, assignment: Assignment) -> bool:
        """Accepts a response; False if it is outdated. True at most once per request."""
        if not self.is_current(assignment):
            return False
        self._forget(assignment)
        return True

    def bring_in(self, server: str) -> None:
        """Adds a server to those that get requests."""
        if server not in self._outstanding:
            raise InvariantError(f"{server} is not one of the servers")
        self._in.add(server)

    def add(self, server: str) -> None:
        """Adds a server, which is out."""
        self._outstanding.setdefault(server, 0)

    def leave(self, server: str) -> None:
        """Sends a server no new requests."""
        self._leaving.add(server)

    def stay(self, server: str) -> None:
        """Takes `leave` back."""
        self._leaving.discard(server)

    def remove(self, server: str) -> None:
        """Forgets a server that is out."""
        if server in self._in or self.num_sent(server):
            raise InvariantError(f"{server} is in use and cannot be removed")
        self._leaving.discard(server)
        self._outstanding.pop(server, None)

    def num_sent(self, server: str) -> int:
        """Requests that a server has."""
        return sum(assignment.server == server for assignment in self._sent.values())

    def take_out(self, server: str) -> list[Assignment]:
        """Removes a server; its requests are queued again, before all others and in their old order."""
        self._in.discard(server)
        lost = [assignment for assignment in self._sent.values() if assignment.server == server]
        for assignment in lost:
            self._forget(assignment)
        self._waiting.extendleft(assignment.request for assignment in reversed(lost))
        return lost

    def abort(self, request_ids: Collection[int]) -> list[Assignment]:
        """Removes requests; returns the assignments already sent."""
        sent = [self._sent[request_id] for request_id in request_ids if request_id in self._sent]
        for assignment in sent:
            self._forget(assignment)
        self._waiting = deque(request for request in self._waiting if request.id not in request_ids)
        if self._held is not None:
            self._held = [request for request in self._held if request.id not in request_ids]
        return sent

    def _forget(self, assignment: Assignment) -> None:
        del self._sent[assignment.request.id]
        self._outstanding[assignment.server] -= assignment.num_tokens
