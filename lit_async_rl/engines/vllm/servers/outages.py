"""Why servers are out, how often they failed, and how long to wait before the next try."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Iterable

log = logging.getLogger(__name__)

MAX_BACKOFF = 32  # times the interval between two tries to bring a server in
REPEAT_S = 60.0  # least time between two lines about a server that stays out


class Outages:
    """Record of failing servers; not thread-safe.

    Args:
        servers: names; all start out.
    """

    def __init__(self, servers: Iterable[str]) -> None:
        self._why = dict.fromkeys(servers, "has no weights yet")
        self._strikes: Counter[str] = Counter()  # since the last good answer
        self._written: dict[str, float] = {}  # when it was logged last that it stays out
        self._last_taken_out = 0.0

    def add(self, server: str) -> None:
        """Records a server that has joined, and is out."""
        self._why[server] = "has just joined"

    def remove(self, server: str) -> None:
        """Forgets a server."""
        for record in (self._why, self._strikes, self._written):
            record.pop(server, None)

    def begin(self, server: str, why: str, num_requests: int) -> None:
        """Records and logs that a server was taken out."""
        self._why[server] = why
        self._last_taken_out = time.monotonic()
        self._strikes[server] += 1
        log.warning("vLLM server %s is out: %s; its %d requests go to others", server, why, num_requests)

    def go_on(self, server: str, why: str, counts: bool) -> None:
        """Records that it could not be brought in; logs the reason if it changed, at most once in `REPEAT_S`.

        Args:
            server: its name.
            why: the reason.
            counts: whether it answered, so that it should be asked less often.
        """
        before = self._why[server]
        self._why[server] = why
        self._strikes[server] += counts
        if before != why and time.monotonic() - self._written.get(server, -REPEAT_S) >= REPEAT_S:
            self._written[server] = time.monotonic()
            log.warning("vLLM server %s is still out: %s", server, why)

    def end(self, server: str, version: int) -> None:
        """Logs that a server is in; only a good answer clears its record."""
        log.warning("vLLM server %s is in, with version %d", server, version)

    def forgive(self, server: str) -> None:
        """Records a good answer."""
        self._strikes.pop(server, None)

    def backoff(self, server: str) -> int:
        """Intervals to wait before the next try to bring it in: 1 after the first failure, then doubled."""
        return int(min(2 ** max(0, self._strikes[server] - 1), MAX_BACKOFF))

    @property
    def reasons(self) -> str:
        """Every server with the reason that it is, or was last, out."""
        return "; ".join(f"{server} {why}" for server, why in self._why.items())

    @property
    def seconds(self) -> float:
        """Since a server was taken out last."""
        return time.monotonic() - self._last_taken_out
