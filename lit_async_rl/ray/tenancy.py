"""Ownership of a replica, and when it ends itself: engines that outlive their trainer, seen from their own process.

A replica has one trainer at a time. A later start of the same run takes it over at once; another run can have it when
it is free: released, or not called for `BUSY_S`. What an earlier trainer still calls is refused, so that of two only
one decides. Without a trainer a replica waits for the next one, until

* the command of its run has ended, which owns the run's coordinator, or
* no trainer has called it for the lease.

Nothing is thus left for ever, whatever ended the others, unless the lease has no limit.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

RENEW_S = 2.0  # between two calls of a trainer that has nothing else to ask
LEASE_RULE = ">= 5 and finite"  # seconds: a trainer that calls every two must not be taken for gone
BUSY_S = 10.0  # a trainer that was silent for longer is gone, as far as another run is concerned
LOOK_S = 1.0
ORPHAN_S = 5.0  # silence after which a replica asks for its run's command


class TakenOver(Exception):
    """A trainer calls a replica that another one has claimed since."""


@dataclass(frozen=True, kw_only=True)
class Lease:
    """How long a replica stays without its trainer.

    Args:
        seconds: since the last call; None is without limit.
        run: name of the actor that ends with the run's command, see `Coordinator`; None where there is none.
        namespace: of that actor.
    """

    seconds: float | None
    run: str | None
    namespace: str


class Tenancy:
    """The trainer that a replica works for. Safe in all threads.

    Args:
        lease: None for a replica that Ray ends with its trainer.
    """

    def __init__(self, lease: Lease | None) -> None:
        self._lease = lease
        self._lock = threading.Lock()
        self._run = ""
        self._who = ""
        self._heard = time.monotonic()
        self.owner = ""

    def claim(self, owner: str, run: str, who: str) -> str:
        """Makes a trainer the owner; who else has the replica, where it may not be taken over, or an empty text.

        Args:
            owner: of this start of a trainer; unique.
            run: of its run.
            who: it is, for messages.
        """
        with self._lock:
            is_busy = time.monotonic() - self._heard < BUSY_S
            if self.owner and self.owner != owner and self._run != run and is_busy:
                return self._who
            self.owner = owner
            self._run = run
            self._who = who
            self._heard = time.monotonic()
            return ""

    def hears(self, owner: str) -> bool:
        """Notes a call; whether it is the owner's."""
        with self._lock:
            if owner != self.owner:
                return False
            self._heard = time.monotonic()
            return True

    def release(self) -> None:
        """Leaves the replica to whoever comes next."""
        with self._lock:
            self.owner = ""

    def watch(self, ray: Any, end: Callable[[str], None]) -> None:
        """Calls `end` with the reason, in a thread, when nobody will come back for the replica."""
        if self._lease is not None:
            threading.Thread(target=self._watch, args=(ray, end), name="lease", daemon=True).start()

    def _watch(self, ray: Any, end: Callable[[str], None]) -> None:
        while not (reason := self._over(ray)):
            time.sleep(LOOK_S)
        end(reason)

    def _over(self, ray: Any) -> str:
        lease = self._lease
        silent_s = time.monotonic() - self._heard
        if lease is None or silent_s < min(ORPHAN_S, lease.seconds or ORPHAN_S):
            return ""
        if lease.seconds is not None and silent_s > lease.seconds:
            return f"no trainer has called for engine_lease_s={lease.seconds:g}"
        if lease.run is not None and not _is_there(ray, lease.run, lease.namespace):
            return "the command of its run has ended"
        return ""


def _is_there(ray: Any, name: str, namespace: str) -> bool:
    try:
        ray.get_actor(name, namespace=namespace)
    except ValueError:
        return False
    except Exception:  # Ray does not answer: it ends its processes itself, if it is gone
        return True
    return True
