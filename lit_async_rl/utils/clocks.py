"""Clock that excludes time in which the process was stopped, so that a stopped process does not count as hung."""

from __future__ import annotations

import logging
import threading
import time

BEAT_S = 0.25
STILL_S = 3.0  # ours: longer than an interpreter busy with one call, or a crowded machine, keeps a thread from running
log = logging.getLogger(__name__)


class AwakeClock:
    """Monotonic clock without the time in which this process did not run (SIGSTOP, Ctrl-Z, suspend).

    A thread reads the time every `BEAT_S`, as does every caller. A gap of more than `STILL_S` between two readings
    counts as a stop and is logged.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seen = time.monotonic()
        self._lost_s = 0.0
        self._closed = threading.Event()
        threading.Thread(target=self._beat, name="clock", daemon=True).start()

    def now(self) -> float:
        """Seconds since an arbitrary origin."""
        with self._lock:
            now = time.monotonic()
            gap, self._seen = now - self._seen, now
            if gap > STILL_S and not self._closed.is_set():
                self._lost_s += gap
                log.warning("this process stood still for %.1f s (was it stopped?); no timeout counts them", gap)
            return now - self._lost_s

    def close(self) -> None:
        """Ends the thread; the clock then counts all time."""
        self._closed.set()

    def _beat(self) -> None:
        while not self._closed.wait(BEAT_S):
            self.now()
