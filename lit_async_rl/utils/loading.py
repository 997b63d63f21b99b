"""Imports that take seconds: a notice before them, and no garbage collection meanwhile."""

from __future__ import annotations

import contextlib
import gc
import os
import sys
from collections.abc import Iterator

LIBRARIES = "torch, lightning and transformers"


@contextlib.contextmanager
def loading(what: str = LIBRARIES) -> Iterator[None]:
    """Context of imports that take seconds: announces them on stderr, in one process per machine.

    Garbage collection, a fifth of their time, is off: it would look at millions of objects that imports make and keep.
    """
    if "lightning" in sys.modules:
        yield
        return
    if os.environ.get("LOCAL_RANK", "0") == "0":
        print(f"loading {what} ...", file=sys.stderr, flush=True)
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
