"""Location of an actor's process, and the last lines of its log.

Imports nothing large, so that a process that only reads a file on another node starts at once.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from typing import Any

from lit_async_rl.utils.checks import find_other_kind

MAX_LINE_CHARS = 300
DEATH = "Fatal Python error: "
PLACE = {"pid": int, "host": str, "node": str, "logs": list}
NOT_OF_INTEREST = (":job_id:", ":actor_name:", "Extension modules:")  # lines of a worker's log


def where_it_is(ray: Any) -> dict[str, Any]:
    """Process, machine, node and log files of this actor."""
    return {
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "node": ray.get_runtime_context().get_node_id(),
        "logs": [os.readlink(f"/proc/self/fd/{fd}") for fd in (1, 2) if os.path.exists(f"/proc/self/fd/{fd}")],
    }


def read_place(answer: Mapping[str, Any]) -> dict[str, Any]:
    """The part of an actor's answer that `where_it_is` has given.

    Raises:
        TypeError: it has none.
    """
    if wrong := find_other_kind(answer, PLACE):
        raise TypeError(f"a process whose {wrong}")
    return {name: answer[name] for name in PLACE} | {"logs": list(map(str, answer["logs"]))}


def describe_place(place: Mapping[str, Any]) -> str:
    """Process and machine of an actor, for messages."""
    return f"pid {place['pid']}, {place['host']}, node {place['node'][:8]}"


def tail(paths: Sequence[str], num_lines: int) -> str:
    """The last lines of log files, one file after the other; empty where none can be read.

    After a fatal error of Python, its first lines instead: the stacks of all threads follow them.
    """
    lines = []
    for path in paths:
        try:
            with open(path, errors="replace") as file:
                written = file.readlines()
        except OSError:
            continue
        deaths = [number for number, line in enumerate(written) if line.startswith(DEATH)]
        last = written[deaths[-1] :][:num_lines] if deaths else written[-num_lines:]
        lines += [line.rstrip()[:MAX_LINE_CHARS] for line in last]
    return "\n".join(line for line in lines if line and not line.startswith(NOT_OF_INTEREST))
