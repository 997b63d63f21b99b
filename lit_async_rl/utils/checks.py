"""Range checks of settings, with one form of message: `data.max_staleness must be >= 0, got -1`.

torch is imported where it is asked: the processes of graders need this module, and not its seconds.
"""

from __future__ import annotations

import argparse
import difflib
import math
import os
import re
import sys
from collections.abc import Iterable, Mapping
from numbers import Integral
from typing import Any, NoReturn

MAX_REWARD = 3.4028234663852886e38  # of float32
_BOUND = re.compile(r"(>=|>|<=|<) (\S+)")
_INTERVAL = re.compile(r"in ([\[(])(\S+), (\S+)([\])])")


def check_range(owner: str, rule: str, **settings: int | float | None) -> None:
    """Refuses settings outside of a range. NaN is outside of every range; None (a setting left unset) passes.

    Example: `check_range("data", ">= 0", max_staleness=-1)` raises `data.max_staleness must be >= 0, got -1`.

    Args:
        owner: path in the YAML or name of the class that has the settings, such as `data` or `AdaptiveStaleness`; empty
            for a setting of the top level.
        rule: `positive` (and finite), `finite`, a bound (`>= 0`, `> 1`, `<= 1`, `< 1`), an interval (`in [0, 1]`,
            `in (0, 1]`), or several joined by ` and ` (`>= 0 and finite`). `integer` alone, or before one of these
            (`integer >= 0`), refuses floats.
        settings: values by name.

    Raises:
        ValueError: a value is outside of the range; the message names setting, rule and value.
    """
    is_integer = rule.startswith("integer")
    rule = rule.removeprefix("integer").strip()
    for name, value in settings.items():
        setting = f"{owner}.{name}" if owner else name
        if isinstance(value, str | type):
            raise ValueError(f"{setting} must be a number, {rule or 'an integer'}, got {value!r}")
        if is_integer and value is not None and not isinstance(value, Integral):
            raise ValueError(f"{setting} must be an integer, got {value}")
        if value is not None and rule and not all(_holds(part, value) for part in rule.split(" and ")):
            also = " and finite" if value == math.inf and "finite" not in rule else ""
            raise ValueError(f"{setting} must be {rule}{also}, got {value}")


def as_reward(value: Any) -> float:
    """A reward as a float: of a bool, a number of Python, `decimal` or `fractions`, or a single one of numpy or torch.

    A text is refused, even if it reads as a number: it is more often a judge's answer that was not parsed.

    Raises:
        TypeError: it is no real number.
        ValueError: it is not finite, or beyond float32, in which rewards are trained on.
    """
    shown = f"{value!r:.200}"
    is_number = hasattr(value, "__float__") or hasattr(value, "__index__")
    size = getattr(value, "size", 1)
    num_values = value.numel() if hasattr(value, "numel") else size
    if not is_number or num_values != 1 or isinstance(value, str | bytes):
        raise TypeError(f"{shown}, which is not a number")
    try:
        number = float(value.item() if hasattr(value, "item") else value)
    except OverflowError:
        raise ValueError("a number that is too large; a reward must be finite, and at most 3.4e38") from None
    except (TypeError, ValueError):
        raise TypeError(f"{shown}, which is not a number") from None
    if not math.isfinite(number):
        raise ValueError(f"{number}; a reward must be finite")
    if abs(number) > MAX_REWARD:
        raise ValueError(f"{number}; a reward must be finite in float32, and at most 3.4e38")
    return number


def check_objects(owner: str, **settings: object) -> None:
    """Refuses what is written in Python where an object is expected: its name, its class, or its settings.

    Example: `check_objects("data", engine="vllm")` raises `data.engine must be an object, got 'vllm'`.

    Args:
        owner: path in the YAML of the class that has the settings.
        settings: values by name; None passes.

    Raises:
        ValueError: names setting and value.
    """
    for name, value in settings.items():
        if isinstance(value, type):
            raise ValueError(f"{owner}.{name} must be an object, got the class: write {value.__name__}(...)")
        if isinstance(value, str | bytes | Mapping | list | tuple | int | float):
            raise ValueError(f"{owner}.{name} must be an object, got {str(value)[:100]!r}")


def check_token_shape(owner: str, name: str, values: object, shape: tuple[int, ...]) -> None:
    """Refuses what a custom part returns in another shape than that of the tokens: it would be broadcast, in silence.

    Args:
        owner: the setting that chose the part, with its class, such as `model.loss=MyLoss`.
        name: of the value.
        values: what the part returned.
        shape: of the tokens, (B, T).

    Raises:
        ValueError: names part, value and both shapes.
    """
    found = getattr(values, "shape", None)
    if found is None or tuple(found) != shape:
        got = repr(values)[:80] if found is None else f"shape {tuple(found)}"
        raise ValueError(
            f"{owner}: {name} must be a tensor with one value for each token, of shape {shape}, got {got}. Averaging "
            "is a separate choice, data.aggregation"
        )


def check_dtype(setting: str, name: str) -> None:
    """Refuses what is not the name of a floating-point dtype of torch.

    Raises:
        ValueError: names setting and value.
    """
    import torch

    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ValueError(f"{setting} must be the name of a torch dtype such as float32 or bfloat16, got {name!r}")


def check_device(setting: str, name: str) -> None:
    """Refuses a device that torch does not know, or that this machine does not have; `auto` passes.

    Raises:
        ValueError: names setting and value.
    """
    import torch

    if name == "auto":
        return
    try:
        kind = torch.device(name).type
    except RuntimeError:
        raise ValueError(f"{setting} must be auto, cpu or the name of another torch device, got {name!r}") from None
    if kind not in ("cpu", "meta"):
        accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        if accelerator is None or accelerator.type != kind:
            has = "none" if accelerator is None else accelerator.type
            raise ValueError(f"{setting}={name!r} is not available: this machine's accelerator is {has}")


def _holds(rule: str, value: int | float) -> bool:
    if rule == "positive":  # a count, a size, a rate or a time limit, and a wait without an end is none
        return 0 < value < math.inf
    if rule == "finite":
        return math.isfinite(value)
    if bound := _BOUND.fullmatch(rule):
        operator = bound[1]
        limit = float(bound[2])
        return {">=": value >= limit, ">": value > limit, "<=": value <= limit, "<": value < limit}[operator]
    if interval := _INTERVAL.fullmatch(rule):
        low = float(interval[2])
        high = float(interval[3])
        above = value >= low if interval[1] == "[" else value > low
        return above and (value <= high if interval[4] == "]" else value < high)
    raise ValueError(f"unknown rule {rule!r}")


# -- Suggestions for misspelt names -----------------------------------------------------------------------------------


def closest(name: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The known name that is most like this one, or None; letter case does not matter.

    Args:
        name: as it was typed.
        known: names that exist.
        cutoff: least similarity, between 0 and 1 (see `difflib.get_close_matches`).
    """
    by_name = {one.lower(): one for one in known}
    found = difflib.get_close_matches(name.lower(), by_name, n=1, cutoff=cutoff)
    return by_name[found[0]] if found else None


def meant(name: str, known: Iterable[str]) -> str:
    """`; did you mean ...?` where a known name is close, else nothing."""
    close = closest(name, known)
    return f"; did you mean {close}?" if close else ""


# -- Paths in the home folder -----------------------------------------------------------------------------------------


def with_home(text: str) -> str:
    """A path, or a flag with its path in one word, with the home folder for `~`: shells leave `--out=~/model` alone."""
    flag, equals, value = text.partition("=") if text.startswith("--") else ("", "", text)
    return flag + equals + os.path.expanduser(value) if value.startswith("~") else text


# -- Argument parser of the small commands: errors are one line, and misspelt flags are suggested ---------------------


class OneLineParser(argparse.ArgumentParser):
    """`argparse.ArgumentParser` whose flags are never abbreviated, and whose errors do not repeat the usage text."""

    def __init__(self, **settings: object) -> None:
        super().__init__(**{"allow_abbrev": False, **settings})  # type: ignore[arg-type]

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Expands `~` in each word."""
        words = sys.argv[1:] if args is None else args
        return super().parse_known_args([with_home(word) for word in words], namespace)

    def error(self, message: str) -> NoReturn:
        """Ends the process with status 2."""
        flags = [flag for action in self._actions for flag in action.option_strings]
        if match := re.match(r"unrecognized arguments: (\S+)", message):
            message = f"there is no argument {match[1]}{meant(match[1].split('=')[0], flags)}"
        sys.stderr.write(f"error: {message}; --help lists the arguments\n")
        self.exit(2)
