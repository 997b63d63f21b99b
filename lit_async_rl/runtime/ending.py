"""Names code of the user that keeps a process from ending.

At its end Python waits for all threads of executors, and for all that are no daemons: a reward that asks its judge in a
`ThreadPoolExecutor` of its own, without a time limit, keeps the process of a run that has failed long before.
"""

from __future__ import annotations

import functools
import logging
import threading

from lit_async_rl.runtime.waiting import CLOCK_INTERVAL_S, clock
from lit_async_rl.utils.user_code import running_lines

STAYS_S = 5.0  # after which the log names the threads
log = logging.getLogger(__name__)


@functools.cache
def watch_end() -> None:
    """Has the log name the user's threads for which this process waits at its end; once for each process."""
    watch = _Watch()
    # before those of `concurrent.futures`, which join its threads: the last that is registered is called first
    register = getattr(threading, "_register_atexit", None)
    if register is not None:  # it is not public
        clock.now()  # starts its thread: none can be started at the end
        clock.watchers.append(watch.look)
        register(watch.begin)


class _Watch:
    def __init__(self) -> None:
        self._has_begun = False
        self._num_looks = 0  # since then

    def begin(self) -> None:
        """Called by the main thread when it has left the program."""
        self._has_begun = True

    def look(self) -> None:
        """Called every `CLOCK_INTERVAL_S`."""
        if not self._has_begun:
            return
        self._num_looks += 1
        lines = running_lines() if self._num_looks == round(STAYS_S / CLOCK_INTERVAL_S) else []
        if lines:
            log.warning(
                "the program is done, but Python waits for threads of your code that are still running. Press Ctrl-C "
                "to end the process, and give the calls in the following lines a time limit:\n%s",
                "\n".join(lines),
            )
