"""Plain values as JSON, for the arguments of a program's functions and for what they return.

Plain kinds are those whose values can equal a literal; expected values are literals. A `range` or a date equals none.
"""

from __future__ import annotations

import decimal
import fractions
from collections.abc import Callable
from typing import Any

MAX_DEPTH = 200  # of nested values
MAX_COLLISIONS = 1000  # of a set or dictionary
ITEMS: dict[Any, str] = {list: "list", tuple: "tuple", set: "set", frozenset: "frozenset"}


class NotPlain(TypeError):
    """An object that is no plain value, or JSON that describes none."""


def encode(value: Any, depth: int = 0) -> Any:
    """A value as JSON: a scalar, or a list that begins with its kind. Subclasses become their base class.

    Args:
        value: any object.
        depth: of nested values so far.

    Raises:
        NotPlain: it is no plain value, or nested too deeply.
    """
    if depth > MAX_DEPTH:
        raise NotPlain(f"a value is nested more than {MAX_DEPTH} levels deep")
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
        return encode(one, depth + 1)

    for kind, name in ITEMS.items():
        if isinstance(value, kind):
            return [name, [inner(one) for one in value]]
    if isinstance(value, dict):
        return ["dict", [[inner(key), inner(one)] for key, one in value.items()]]
    if isinstance(value, (bytes, bytearray)):
        return ["bytes" if isinstance(value, bytes) else "bytearray", bytes(value).hex()]
    if isinstance(value, complex):
        return ["complex", value.real.hex(), value.imag.hex()]
    if isinstance(value, (fractions.Fraction, decimal.Decimal)):
        return ["fraction" if isinstance(value, fractions.Fraction) else "decimal", str(value)]
    item = getattr(value, "item", None)
    if type(value).__module__ == "numpy" and getattr(value, "ndim", None) == 0 and item is not None:
        return inner(item())
    raise NotPlain(f"an object of the class {type(value).__name__}")


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
    "set": lambda items: set(_hashable(items)),
    "frozenset": lambda items: frozenset(_hashable(items)),
}
_FROM_TEXT: dict[str, Callable[[str], Any]] = {
    "float": float.fromhex,
    "int": lambda text: int(text, 16),
    "str": lambda text: bytes.fromhex(text).decode("utf-8", "surrogatepass"),
    "bytes": bytes.fromhex,
    "bytearray": bytearray.fromhex,
    # not of its text: that may be 1e999999999, and takes its digits
    "fraction": lambda text: fractions.Fraction(*map(int, text.split("/"))),
    "decimal": decimal.Decimal,
}


def _hashable(values: list[Any]) -> list[Any]:
    """The values, unless made to collide in a set, which takes the square of their number."""
    if len(values) > MAX_COLLISIONS and 2 * len(set(map(hash, values))) < len(values):
        raise ValueError("values with the same hash")
    return values


def decode(found: Any) -> Any:
    """Decodes JSON of `encode`; types are exact, even if the JSON was forged.

    Args:
        found: parsed JSON.

    Raises:
        NotPlain: it is none.
    """
    if found is None or isinstance(found, (bool, int, str)):
        return found
    try:
        kind, first, *rest = found
        if kind in _FROM_ITEMS:
            return _FROM_ITEMS[kind]([decode(one) for one in first])
        if kind == "dict":
            keys = _hashable([decode(key) for key, _ in first])
            return dict(zip(keys, [decode(one) for _, one in first], strict=True))
        if kind in _FROM_TEXT and isinstance(first, str):
            return _FROM_TEXT[kind](first)
        if kind == "complex":
            return complex(float.fromhex(first), float.fromhex(rest[0]))
    except (TypeError, ValueError, LookupError, ArithmeticError, RecursionError) as error:
        raise NotPlain(f"a value cannot be read: {str(error)[:100]}") from None
    raise NotPlain(f"no value of the kind {str(kind)[:100]!r}")
