"""Processor time inside of functions, and of steps."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl


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


class ProcessorClock(pl.Callback):
    """Processor time of the steps behind the first `warm_up`, whose calls the meter forgets.

    Attributes:
        seconds: of all of these steps, in all threads.
    """

    def __init__(self, meter: Meter, warm_up: int) -> None:
        self.seconds = 0.0
        self._meter = meter
        self._warm_up = warm_up
        self._began = 0.0

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        """The last call counts."""
        if trainer.global_step == self._warm_up:
            self._meter.spent.clear()
            self._began = time.process_time()
        self.seconds = time.process_time() - self._began
