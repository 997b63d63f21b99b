"""The process of a tested program: it has no tests, and answers calls of its functions, see `tests`."""

from __future__ import annotations

import contextlib
import socket
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any

from lit_async_rl.sandbox.interpreter import execute
from lit_async_rl.sandbox.values import Channel, Closed, NotPlain, as_exception, decode, encode

# Operations of tests on an object of the program
_OPERATORS: dict[str, Callable[..., Any]] = {
    "len": len,
    "iter": iter,
    "next": next,
    "getitem": lambda one, key: one[key],
    "str": str,
    "repr": repr,
    "bool": bool,
    "eq": lambda one, other: bool(one == other),
    "ne": lambda one, other: bool(one != other),
    "lt": lambda one, other: bool(one < other),
    "add": lambda one, other: one + other,
    "sub": lambda one, other: one - other,
    "mul": lambda one, other: one * other,
    "getattr": getattr,
    "setattr": setattr,
    "call": lambda one, *args, **kwargs: one(*args, **kwargs),
    "isinstance": isinstance,
}


class _Functions:
    """Answers calls, in a process that the program may have taken over."""

    def __init__(self, channel: Channel, names: dict[str, Any]) -> None:
        self._channel = channel
        self._names = names
        self._objects: list[Any] = []
        self._numbers: dict[int, int] = {}

    def export(self, value: Any) -> list[Any]:
        number = self._numbers.get(id(value))
        if number is None:
            number = len(self._objects)
            self._objects.append(value)  # keeps its id unique
            self._numbers[id(value)] = number
        return ["object", number]

    def refer(self, found: list[Any]) -> Any:
        kind, number = found
        if kind == "object":
            return self._objects[number]
        if kind == "callback":
            return lambda *args: self._call_back(number, args)
        raise NotPlain(f"no value of the kind {kind!r}")

    def _call_back(self, number: int, args: Sequence[Any]) -> Any:
        self._channel.send(["callback", number, [encode(one, self.export) for one in args]])
        while True:
            message = self._channel.receive()
            if message[0] == "returned":
                return decode(message[1], self.refer)
            if message[0] == "raised":
                raise as_exception(message[1], message[2])
            self.answer(message)

    def answer(self, message: list[Any]) -> None:
        what, number, arguments, keywords = message
        try:
            args = [decode(one, self.refer) for one in arguments]
            before = [encode(one, self.export) for one in args]
            kwargs = {name: decode(one, self.refer) for name, one in keywords.items()}
            value = _OPERATORS[what](self._objects[number], *args, **kwargs)
            answer = ["returned", encode(value, self.export), self._changes(args, before)]
        except Closed:
            raise
        except BaseException as error:
            kinds = [one.__name__ for one in type(error).__mro__]
            answer = ["raised", kinds, str(error)[:1000]]
        self._channel.send(answer)

    def _changes(self, args: Sequence[Any], before: Sequence[Any]) -> list[Any]:
        """Arguments modified by the call."""
        changed = []
        for place, value in enumerate(args):
            if isinstance(value, (list, dict, set, bytearray)) and (now := encode(value, self.export)) != before[place]:
                changed.append([place, now])
        return changed


def serve_functions(source: str, connection: socket.socket) -> int:
    """Runs the program, then serves calls of its functions. Returns the exit status."""
    channel = Channel(connection)
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = sys.modules["program"] = main  # dataclasses and pickle look classes up there
    main.__dict__["__name__"] = "program"  # tests import a program, they do not start it
    if status := execute(source, main.__dict__):
        channel.send(["failed", status])
        return status
    functions = _Functions(channel, main.__dict__)
    names: dict[str, Any] = {}
    for name, value in list(main.__dict__.items()):
        if name.startswith("__"):
            continue
        if isinstance(value, types.ModuleType):
            names[name] = ["module", value.__name__]
        elif isinstance(value, type) and issubclass(value, BaseException):
            names[name] = ["exception", [one.__name__ for one in value.__mro__], functions.export(value)[1]]
        else:
            with contextlib.suppress(NotPlain):
                names[name] = encode(value, functions.export)
    channel.send(["ready", names])
    with contextlib.suppress(Closed):
        while True:
            functions.answer(channel.receive())
    return 0
