"""Rate limit for warnings."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque

NUM_LINES, WINDOW_S = 10, 10.0


class LimitedLog:
    """Logs at most `NUM_LINES` warnings in any `WINDOW_S` seconds, and the number of suppressed ones.

    Args:
        log: destination.
    """

    def __init__(self, log: logging.Logger) -> None:
        self._log, self._lock = log, threading.Lock()
        self._written: deque[float] = deque(maxlen=NUM_LINES)
        self._num_left_out = 0

    def warning(self, message: str, *args: object) -> None:
        """Logs a warning, as `logging.Logger.warning`."""
        with self._lock:
            now = time.monotonic()
            if len(self._written) == NUM_LINES and now - self._written[0] < WINDOW_S:
                self._num_left_out += 1
                return
            self._written.append(now)
            num_left_out, self._num_left_out = self._num_left_out, 0
        if num_left_out:
            message, args = message + " (%d more such lines were left out before)", (*args, num_left_out)
        self._log.warning(message, *args)
