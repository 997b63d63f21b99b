"""Sandboxes of tests, one for each level that works here."""

from __future__ import annotations

import functools
import sys

from lit_async_rl.errors import SetupError
from lit_async_rl.sandbox.program import SandboxLimits
from lit_async_rl.sandbox.sandbox import Sandbox

LIMITS = SandboxLimits(wall_s=20.0, cpu_s=20, memory_mb=200, processes=16, output_kb=256, file_mb=8, scratch_mb=16)


@functools.cache
def levels(lowest: str = "namespace") -> tuple[str, ...]:
    """Levels that work here, down to one; empty where there is none."""
    found = []
    for level in ("bubblewrap", "namespace", "limits"):
        try:
            Sandbox(level=level, allow_unsandboxed=lowest == "limits").close()
        except SetupError as error:
            print(f"no sandbox of the level {level}: {error}", file=sys.stderr)
        else:
            found.append(level)
    return tuple(found)
