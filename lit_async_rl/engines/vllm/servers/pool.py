"""Assignment of requests to servers. Bookkeeping only: no network, clock or threads, so that it can be tested alone."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from lit_async_rl.engines.base import GenerationRequest
from lit_async_rl.errors import InvariantError

NUM_REMEMBERED = 16384  # sessions: what came longest ago is hardly in a cache any more
MAX_RATIO = 2.0  # of outstanding tokens, compared with the server that has fewest, up to which a session stays


@dataclass(frozen=True, eq=False)
class Assignment:
    """One attempt at a request; two attempts at the same request are different assignments."""

    server: str
    request: GenerationRequest

    @property
    def num_tokens(self) -> int:
        """Upper bound on the tokens of prompt and completions."""
        return num_tokens(self.request)


class ServerPool:
    """Sends each request, with all its samples, to the server with the fewest outstanding tokens.

    All samples of a prompt go to one server, which prefills it once. So do requests of one session, turns of an episode
    or parts of a group: to the server that has their common beginning in its cache, unless it has more than `MAX_RATIO`
    times as many outstanding tokens as another would have with the request (the trade-off of SGLang's router: Zheng et
    al. 2024, arXiv:2312.07104).

    A request is in exactly one place: held, queued, or sent to one server that is in. Only the response to its newest
    assignment is accepted, so duplicate or late responses are never used.

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
        self._homes: OrderedDict[int, str] = OrderedDict()  # server that a session went to last

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
            request = self._waiting.popleft()
            assignment = Assignment(self._choose(request, candidates), request)
            self._sent[request.id] = assignment
            self._outstanding[assignment.server] += assignment.num_tokens
            assignments.append(assignment)
        return assignments

    def _choose(self, request: GenerationRequest, candidates: Collection[str]) -> str:
        idlest = min(candidates, key=lambda name: (self._outstanding[name], name))
        if request.session is None:
            return idlest
        home = self._homes.pop(request.session, idlest)
        limit = MAX_RATIO * (self._outstanding[idlest] + num_tokens(request))
        chosen = home if home in candidates and self._outstanding[home] <= limit else idlest
        self._homes[request.session] = chosen
        if len(self._homes) > NUM_REMEMBERED:
            self._homes.popitem(last=False)
        return chosen

    def forget_caches(self) -> None:
        """Sends sessions to any server again: what was cached belongs to older weights."""
        self._homes.clear()

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


def num_tokens(request: GenerationRequest) -> int:
    """Upper bound on the tokens of prompt and completions."""
    return len(request.prompt_ids) + request.num_samples * request.sampling.max_tokens
