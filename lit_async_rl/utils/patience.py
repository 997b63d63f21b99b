"""Notices about long waits: one after three seconds, and then ever more rarely."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

FIRST_S, FACTOR, LONGEST_S = 3.0, 4.0, 600.0  # after 3 s, 12 s, 48 s, 3 minutes, then every ten minutes


@contextmanager
def announced(what: str | Callable[[], str]) -> Iterator[None]:
    """Context of a wait that is said on stderr while it takes long, by one process of each machine.

    Args:
        what: completes "waiting for ..."; a function is called for each notice.
    """
    if os.environ.get("LOCAL_RANK", "0") != "0":
        yield
        return
    is_over = threading.Event()
    began = time.monotonic()
    thread = threading.Thread(target=_announce, args=(what, is_over, began), name="patience", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()


def _announce(what: str | Callable[[], str], is_over: threading.Event, began: float) -> None:
    pause_s = FIRST_S
    while not is_over.wait(max(0.0, began + pause_s - time.monotonic())):
        text = what if isinstance(what, str) else what()
        seconds = time.monotonic() - began
        if not is_over.is_set():
            print(f"waiting for {text} ({duration(seconds)} so far)", file=sys.stderr, flush=True)
        pause_s = seconds + min(LONGEST_S, (FACTOR - 1) * seconds)


def duration(seconds: float) -> str:
    """`3 s`, `2:05` (minutes) or `1:02:05`."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
