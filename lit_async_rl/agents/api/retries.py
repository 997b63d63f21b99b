"""Which requests of an episode repeat an earlier call, because its client got no answer.

The official client repeats a request after a time-out, a broken connection or a status of 408, 409 or 5xx: the same
body, with a larger `x-stainless-retry-count`. Other clients do so without saying it. A repeated request gets the answer
of the call that it repeats, and nothing is sampled twice:

1. an `Idempotency-Key` names the call;
2. otherwise a call with the same body that nobody waits for, and whose answer nobody got, is continued;
3. otherwise a request that says it is a repetition joins the call with the same body and fewer attempts.

Anything else is a new call: an agent that asks twice wants two samples. Used by the server's event loop only.
"""

from __future__ import annotations

import hashlib
import itertools
import secrets
import threading
import time
from dataclasses import dataclass, field

from lit_async_rl.agents.calls import AgentCallError

MAX_KEY_CHARS = 256


def digest_of(path: str, body: bytes) -> bytes:
    """Digest of a request, equal for its repetitions."""
    return hashlib.blake2b(body, digest_size=16, key=path.encode()).digest()


@dataclass(eq=False)
class RepeatableCall:
    """One call, and who waits for it.

    Attributes:
        id: unique within the episode.
        digest: of path and body.
        idempotency_key: given by the client; None without.
        number: unguessable number of the answer.
        created: seconds since the epoch, as answers have it.
        attempt: `x-stainless-retry-count` of the last request.
        num_waiting: requests that wait for the answer.
        num_delivered: requests that got the answer.
    """

    id: str
    digest: bytes
    idempotency_key: str | None = None
    number: str = field(default_factory=lambda: secrets.token_hex(12))
    created: int = field(default_factory=lambda: int(time.time()))
    attempt: int = 0
    num_waiting: int = 0
    num_delivered: int = 0

    @property
    def is_delivered(self) -> bool:
        """Whether a request got the answer."""
        return self.num_delivered > 0


class CallBook:
    """Calls of one episode. Thread-safe: an agent in its own process may call in two ways at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._calls: dict[bytes, list[RepeatableCall]] = {}
        self._by_key: dict[str, RepeatableCall] = {}
        self._numbers = itertools.count()

    def join(self, digest: bytes, *, attempt: int = 0, idempotency_key: str | None = None) -> RepeatableCall:
        """The call of a request, which now waits for it; followed by `leave` or `fail`.

        Args:
            digest: of the request.
            attempt: how often the client has tried before.
            idempotency_key: given by the client.

        Raises:
            AgentCallError: the idempotency key belongs to another body.
        """
        with self._lock:
            call = self._known(digest, attempt, idempotency_key)
            if call is None:
                call = RepeatableCall(id=f"call-{next(self._numbers)}", digest=digest, idempotency_key=idempotency_key)
                self._calls.setdefault(digest, []).append(call)
                if idempotency_key is not None:
                    self._by_key[idempotency_key] = call
            call.attempt = attempt
            call.num_waiting += 1
            return call

    def _known(self, digest: bytes, attempt: int, idempotency_key: str | None) -> RepeatableCall | None:
        if idempotency_key is not None:
            named = self._by_key.get(idempotency_key)
            if named is not None and named.digest != digest:
                raise AgentCallError("this Idempotency-Key was used with another body", "idempotency_key_in_use")
            return named
        calls = [call for call in self._calls.get(digest, ()) if call.idempotency_key is None]
        lost = next((call for call in calls if not call.num_waiting and not call.is_delivered), None)
        if lost is not None or not attempt:
            return lost
        earlier = [call for call in calls if call.attempt < attempt]
        return max(earlier, key=lambda call: (not call.is_delivered, call.attempt), default=None)

    def leave(self, call: RepeatableCall, *, delivered: bool) -> None:
        """A request no longer waits: it got the answer, or its client has gone."""
        with self._lock:
            call.num_waiting -= 1
            call.num_delivered += delivered

    def lose(self, call: RepeatableCall) -> None:
        """A request that got the answer has not read it after all."""
        with self._lock:
            call.num_delivered -= 1

    def fail(self, call: RepeatableCall) -> None:
        """A call got an error: a request that repeats it is a new call."""
        with self._lock:
            call.num_waiting -= 1
            calls = self._calls.get(call.digest, [])
            if call in calls:
                calls.remove(call)
            if not calls:
                self._calls.pop(call.digest, None)
            if call.idempotency_key is not None:
                self._by_key.pop(call.idempotency_key, None)
