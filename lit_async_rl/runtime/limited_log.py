"""Rate limit for warnings."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque

MAX_LINES = 10
WINDOW_S = 10.0


class LimitedLog:
    """Logs at most `MAX_LINES` warnings in any `WINDOW_S` seconds, and the number of suppressed ones."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._lock = threading.Lock()  # of the two members below; `warning` is called from several threads
        self._written: deque[float] = deque(maxlen=MAX_LINES)
        self._num_suppressed = 0

    def warning(self, message: str, *args: object) -> None:
        """Logs a warning, as `logging.Logger.warning`."""
        with self._lock:
            now = time.monotonic()
            if len(self._written) == MAX_LINES and now - self._written[0] < WINDOW_S:
                self._num_suppressed += 1
                return
            self._written.append(now)
            num_suppressed = self._num_suppressed
            self._num_suppressed = 0
        if num_suppressed:
            message = message + " (%d more such lines were left out before)"
            args = (*args, num_suppressed)
        self._log.warning(message, *args)
