"""Names code of the user that keeps a process from ending.

At its end Python waits for all threads of executors, and for all that are no daemons: a reward that asks its judge in a
`ThreadPoolExecutor` of its own, without a time limit, keeps the process of a run that has failed long before.
"""

from __future__ import annotations

import functools
import logging
import sys
import threading

from lit_async_rl.runtime.waiting import CLOCK_INTERVAL_S, clock
from lit_async_rl.utils.user_code import running_lines

STAYS_S = 5.0  # after which the log names the threads
log = logging.getLogger(__name__)


@functools.cache
def watch_end() -> None:
    """Has the log name the user's threads for which this process waits at its end; once for each process."""
    clock.now()  # starts its thread
    clock.watchers.append(_Watch().look)


class _Watch:
    def __init__(self) -> None:
        self._num_looks = 0  # since the main thread's end

    def look(self) -> None:
        """Called every `CLOCK_INTERVAL_S`."""
        if not _waits_for_threads():
            return
        self._num_looks += 1
        lines = running_lines() if self._num_looks == round(STAYS_S / CLOCK_INTERVAL_S) else []
        if lines:
            log.warning(
                "the program is done, but Python waits for threads of your code that still run. Press Ctrl-C to end "
                "the process, and give these calls a time limit:\n%s",
                "\n".join(lines),
            )


def _waits_for_threads() -> bool:
    """Whether the main thread has left the program, and joins the others."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None and frame.f_back is not None:
        frame = frame.f_back
    return frame is not None and frame.f_code.co_name == "_shutdown" and frame.f_code.co_filename == threading.__file__
