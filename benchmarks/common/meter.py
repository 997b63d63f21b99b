"""Processor time inside of functions."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from typing import Any


class Meter:
    """Processor time inside of methods, in all threads. Of methods that call each other the outer one counts.

    Attributes:
        spent: seconds of each call by name, less those of reading the clock.
    """

    def __init__(self) -> None:
        self.spent: defaultdict[str, list[float]] = defaultdict(list)
        self._inside = threading.local()

    @contextlib.contextmanager
    def over(self, owner: Any, name: str) -> Iterator[None]:
        """Context in which the calls of a method are measured."""
        method = getattr(owner, name)
        clock = time.thread_time

        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if getattr(self._inside, "is_so", False):
                return method(*args, **kwargs)
            self._inside.is_so = True
            clock()  # into the processor's cache
            before = clock()
            began = clock()
            try:
                return method(*args, **kwargs)
            finally:
                self.spent[f"{owner.__name__}.{name}"].append(clock() - began - (began - before))
                self._inside.is_so = False

        setattr(owner, name, wrapper)
        try:
            yield
        finally:
            setattr(owner, name, method)
