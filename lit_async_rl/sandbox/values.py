"""Values that travel between a program and its tests as plain data, and the connection on which they do."""

from __future__ import annotations

import builtins
import collections
import contextlib
import datetime
import decimal
import fractions
import json
import socket
from collections.abc import Callable, Sequence
from typing import Any

MAX_MESSAGE_BYTES = 2**26
MAX_DEPTH = 200  # of nested values


class NotPlain(TypeError):
    """A value that cannot travel between the two processes."""


# -- Values as JSON ---------------------------------------------------------------------------------------------------


def encode(value: Any, export: Callable[[Any], list[Any]], depth: int = 0) -> Any:
    """A value as JSON: a scalar, or a list that begins with its kind. Subclasses become their base class.

    Args:
        value: any object.
        export: makes a reference to an object that is no plain value.
        depth: of nested values so far.

    Raises:
        NotPlain: it is nested too deeply.
    """
    if depth > MAX_DEPTH:
        raise NotPlain(f"a value is nested deeper than {MAX_DEPTH}")
    if value is None or value is True or value is False:
        return value
    if isinstance(value, int):
        number = int(value)
        return number if abs(number) < 2**53 else ["int", hex(number)]
    if isinstance(value, float):
        return ["float", float(value).hex()]
    if isinstance(value, str):
        return ["str", str.encode(str(value), "utf-8", "surrogatepass").hex()] if _is_odd(value) else str(value)

    def inner(one: Any) -> Any:
        return encode(one, export, depth + 1)

    if isinstance(value, list):
        return ["list", [inner(one) for one in value]]
    if isinstance(value, tuple):
        return ["tuple", [inner(one) for one in value]]
    if isinstance(value, dict):
        return ["dict", [[inner(key), inner(one)] for key, one in value.items()]]
    if isinstance(value, set):
        return ["set", [inner(one) for one in value]]
    if isinstance(value, frozenset):
        return ["frozenset", [inner(one) for one in value]]
    if isinstance(value, collections.deque):
        return ["deque", [inner(one) for one in value]]
    if isinstance(value, (bytes, bytearray)):
        return ["bytes" if isinstance(value, bytes) else "bytearray", bytes(value).hex()]
    if isinstance(value, complex):
        return ["complex", value.real.hex(), value.imag.hex()]
    if isinstance(value, range):
        return ["range", [value.start, value.stop, value.step]]
    if isinstance(value, (fractions.Fraction, decimal.Decimal)):
        return ["fraction" if isinstance(value, fractions.Fraction) else "decimal", str(value)]
    if isinstance(value, (datetime.datetime, datetime.date, datetime.time)):
        return [type(value).__name__, value.isoformat()]
    if isinstance(value, datetime.timedelta):
        return ["timedelta", [value.days, value.seconds, value.microseconds]]
    item = getattr(value, "item", None)
    if type(value).__module__ == "numpy" and getattr(value, "ndim", None) == 0 and item is not None:
        return inner(item())
    return export(value)


def _is_odd(text: str) -> bool:
    """Whether a text has half of a character, which JSON's bytes cannot carry."""
    try:
        str.encode(text)
    except UnicodeEncodeError:
        return True
    return False


_FROM_ITEMS: dict[str, Callable[[list[Any]], Any]] = {
    "list": list,
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
    "deque": collections.deque,
}
_FROM_TEXT: dict[str, Callable[[str], Any]] = {
    "float": float.fromhex,
    "int": lambda text: int(text, 16),
    "str": lambda text: bytes.fromhex(text).decode("utf-8", "surrogatepass"),
    "bytes": bytes.fromhex,
    "bytearray": bytearray.fromhex,
    "fraction": fractions.Fraction,
    "decimal": decimal.Decimal,
    "datetime": datetime.datetime.fromisoformat,
    "date": datetime.date.fromisoformat,
    "time": datetime.time.fromisoformat,
}


def decode(found: Any, refer: Callable[[list[Any]], Any]) -> Any:
    """Decodes JSON of `encode`; the value has exact types, even if the JSON was forged.

    Args:
        found: parsed JSON.
        refer: resolves a reference.

    Raises:
        NotPlain: it is none.
    """
    if found is None or isinstance(found, (bool, int, str)):
        return found
    try:
        kind, first, *rest = found
        if kind in _FROM_ITEMS:
            return _FROM_ITEMS[kind]([decode(one, refer) for one in first])
        if kind == "dict":
            return {decode(key, refer): decode(one, refer) for key, one in first}
        if kind in _FROM_TEXT and isinstance(first, str):
            return _FROM_TEXT[kind](first)
        if kind == "complex":
            return complex(float.fromhex(first), float.fromhex(rest[0]))
        if kind == "range":
            return range(*map(int, first))
        if kind == "timedelta":
            return datetime.timedelta(*map(int, first))
        return refer(found)
    except (TypeError, ValueError, LookupError, ArithmeticError, RecursionError) as error:
        raise NotPlain(f"a value cannot be read: {str(error)[:100]}") from None


# -- The connection ---------------------------------------------------------------------------------------------------


class Closed(Exception):
    """The other process has ended."""


class Channel:
    """Messages of JSON with their length before them."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    def send(self, message: Any) -> None:
        """Sends a message.

        Raises:
            NotPlain: it is too long.
        """
        data = json.dumps(message, separators=(",", ":")).encode()
        if len(data) > MAX_MESSAGE_BYTES:
            raise NotPlain(f"a value of {len(data)} bytes is too long")
        try:
            self._connection.sendall(len(data).to_bytes(4, "big") + data)
        except OSError:
            raise Closed from None

    def receive(self) -> Any:
        """Waits for a message; the warden ends processes that wait too long.

        Raises:
            Closed: the connection has ended, or sent no message.
        """
        size = int.from_bytes(self._bytes(4), "big")
        if size > MAX_MESSAGE_BYTES:
            raise Closed
        try:
            return json.loads(self._bytes(size))
        except (ValueError, RecursionError):
            raise Closed from None

    def _bytes(self, number: int) -> bytes:
        parts = bytearray()
        while len(parts) < number:
            try:
                part = self._connection.recv(min(number - len(parts), 2**20))
            except OSError:
                part = b""
            if not part:
                raise Closed
            parts += part
        return bytes(parts)


# -- Exceptions -------------------------------------------------------------------------------------------------------


class RemoteError(Exception):
    """Exception of the program without a counterpart in Python."""


def as_exception(kinds: Sequence[str], message: str, may_stop: bool = False) -> Exception:
    """An exception of the first of these classes that Python has.

    Args:
        kinds: names of the class and those it extends.
        message: of the exception.
        may_stop: whether it may be `StopIteration`, by which a function would end the loop of a test that maps it.
    """
    for kind in kinds:
        found = getattr(builtins, str(kind), None)
        if kind in ("StopIteration", "StopAsyncIteration") and not may_stop:
            continue
        if isinstance(found, type) and issubclass(found, Exception):
            with contextlib.suppress(TypeError):  # `UnicodeDecodeError` takes more
                return found(message)
    return RemoteError(f"{kinds[0] if kinds else 'an error'}: {message}")
