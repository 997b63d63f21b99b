"""A clock that stands still while the process does, so that nobody is taken for hung who was not allowed to run."""

from __future__ import annotations

import logging
import threading
import time

BEAT_S = 0.25
STILL_S = 3.0  # ours: longer than an interpreter busy with one call, or a crowded machine, keeps a thread from running
log = logging.getLogger(__name__)


class AwakeClock:
    """Seconds in which this process ran: SIGSTOP, Ctrl-Z and a suspended job do not count.

    A thread looks at the time every `BEAT_S`; so does every reader. Where nobody looked for more than `STILL_S` the
    process stood still, which one line in the log says.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seen = time.monotonic()
        self._lost_s = 0.0
        self._closed = threading.Event()
        threading.Thread(target=self._beat, name="clock", daemon=True).start()

    def now(self) -> float:
        """Seconds since some moment."""
        with self._lock:
            now = time.monotonic()
            gap, self._seen = now - self._seen, now
            if gap > STILL_S and not self._closed.is_set():
                self._lost_s += gap
                log.warning("this process stood still for %.1f s (was it stopped?); no timeout counts them", gap)
            return now - self._lost_s

    def close(self) -> None:
        """Ends the thread; from now on it is an ordinary clock."""
        self._closed.set()

    def _beat(self) -> None:
        while not self._closed.wait(BEAT_S):
            self.now()
