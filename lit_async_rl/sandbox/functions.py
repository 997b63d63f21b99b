"""The process of a tested program: it has no expected values, calls functions, and sends what they return."""

from __future__ import annotations

import json
import socket
import sys
import types
from collections.abc import Mapping
from typing import Any

from lit_async_rl.sandbox.interpreter import execute
from lit_async_rl.sandbox.values import decode, encode


def find_function(program: Mapping[str, Any], name: str, may_be_method: bool) -> Any:
    """A function of a program.

    Args:
        program: its global names.
        name: of the function.
        may_be_method: whether it may be a method of a class `Solution`, as on LeetCode.

    Raises:
        NameError: there is none.
    """
    if name in program:
        return program[name]
    if may_be_method and "Solution" in program:
        return getattr(program["Solution"](), name)
    raise NameError(f"the program has no {name}")


def call_functions(doc: dict[str, Any], connection: socket.socket) -> int:
    """Runs a program, then calls its functions. Returns the exit status of the program.

    Sends a line of JSON for each call: null, or a list of the value; before them one for the program.

    Args:
        doc: `program`, its source; `calls`, each a name, arguments, named arguments, whether these are encoded, and
            whether only the value's truth is wanted; `function`, which may be a method; `stops`, whether an exception
            ends the rest.
        connection: to the trainer.
    """
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = sys.modules["program"] = main  # dataclasses and pickle look classes up there
    names = main.__dict__
    names["__name__"] = "program"  # tests import a program, they do not start it
    if status := execute(doc.pop("program"), names):
        return status
    connection.sendall(b"[null]\n")
    for name, args, kwargs, is_encoded, asks_for_truth in doc["calls"]:
        try:
            function = find_function(names, name, may_be_method=name == doc["function"])
            value = function(*decode(args), **decode(kwargs)) if is_encoded else function(*args, **kwargs)
            answer = json.dumps([encode(bool(value) if asks_for_truth else value)], separators=(",", ":"))
        except BaseException:  # also of an object that is no plain value
            answer = "null"
        connection.sendall(answer.encode() + b"\n")
        if answer == "null" and doc["stops"]:
            break
    return 0
