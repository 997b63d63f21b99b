"""Range checks of settings, with one form of message: `data.max_staleness must be >= 0, got -1`.

Only checks that need torch import it, which takes seconds: grader processes use this module, too.
"""

from __future__ import annotations

import argparse
import difflib
import functools
import inspect
import math
import os
import re
import sys
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Integral
from typing import Any, NoReturn

MANY = 1_000_000  # more items that each take memory, a thread or a process are a typing error
MAX_REWARD = 3.4028234663852886e38  # of float32
_BOUND = re.compile(r"(>=|>|<=|<) (\S+)")
_INTERVAL = re.compile(r"in ([\[(])(\S+), (\S+)([\])])")


def check_range(owner: str, rule: str, **settings: int | float | None) -> None:
    """Refuses settings outside of a range. NaN is outside of every range; None (a setting left unset) passes.

    Example: `check_range("data", ">= 0", max_staleness=-1)` raises `data.max_staleness must be >= 0, got -1`.

    Args:
        owner: path in the YAML or class of the settings, such as `data` or `AdaptiveStaleness`; empty at the top level.
        rule: `positive` (and finite), `finite`, a bound (`>= 0`, `> 1`, `<= 1`, `< 1`), an interval (`in [0, 1]`,
            `in (0, 1]`), or several joined by ` and ` (`>= 0 and finite`). `integer` alone, or before one of these
            (`integer >= 0`), refuses floats.
        settings: values by name of the setting.

    Raises:
        ValueError: a value is out of range; names setting, rule and value.
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


def check_choice(owner: str, choices: Sequence[str], or_number: bool = False, **settings: object) -> None:
    """Refuses names that a setting does not take.

    Example: `check_choice("model", ["a", "b"], kind="c")` raises `model.kind must be a or b, got 'c'`.

    Args:
        owner: path in the YAML or class of the settings.
        choices: names that each of them takes.
        or_number: whether a finite number does, too.
        settings: values by name of the setting.

    Raises:
        ValueError: names setting, choices and value.
    """
    *others, last = [*choices, "a number"] if or_number else choices
    for name, value in settings.items():
        if or_number and not isinstance(value, str):
            check_range(owner, "finite", **{name: value})  # type: ignore[arg-type]
        elif value not in choices:
            raise ValueError(f"{owner}.{name} must be {', '.join(others)} or {last}, got {value!r}")


NO_VALUE = "must have a value, got"
SECTIONS = {  # sections of a configuration file, by which messages name the settings
    "Limits": "data.limits",
    "PolicyModule": "model",
    "RayCluster": "cluster",
    "RolloutDataModule": "data",
    "Scoring": "data.scoring",
    "Trainer": "trainer",
    "Validation": "data.validation",
}
_PLAIN_TYPES = re.compile(r"[a-z][a-z_\[\], .|]*")  # numbers, texts, lists of them: nothing with None or a class


def refuse_none(kind: type) -> None:
    """Makes the constructor of a class refuse None for settings annotated with a plain type without None.

    Example: `PPOClip(clip_low=None)` raises `PPOClip.clip_low must have a value, got None: leave it out for its
    default`. Else comparisons would raise a `TypeError` later, or `check_range` take it for unset.

    Args:
        kind: the class; one with such a constructor stays as it is.
    """
    init: Any = kind.__init__  # type: ignore[misc]
    if (isinstance(kind, type) and issubclass(kind, BaseException)) or getattr(init, "refuses_none", False):
        return
    parameters = list(inspect.signature(init).parameters.values())[1:]
    refused = {one.name: one.default for one in parameters if one.default is not None and _is_plain(one.annotation)}
    names = [one.name for one in parameters if one.kind is one.POSITIONAL_OR_KEYWORD]

    @functools.wraps(init)
    def checked(self: Any, *args: Any, **kwargs: Any) -> None:
        for name, value in (*zip(names, args, strict=False), *kwargs.items()):
            if value is None and name in refused:
                owner = SECTIONS.get(kind.__name__, kind.__name__)
                hint = "" if refused[name] is inspect.Parameter.empty else ": leave it out for its default"
                raise ValueError(f"{owner}.{name} {NO_VALUE} None{hint}")
        init(self, *args, **kwargs)

    checked.refuses_none = True  # type: ignore[attr-defined]
    if refused:
        kind.__init__ = checked  # type: ignore[misc, method-assign]


def _is_plain(annotation: Any) -> bool:
    text = annotation if isinstance(annotation, str) else getattr(annotation, "__name__", str(annotation))
    return annotation is not inspect.Parameter.empty and bool(_PLAIN_TYPES.fullmatch(text))


def as_reward(value: Any) -> float:
    """A reward as a float. Takes a bool, a number, a `Decimal` or `Fraction`, or a single element of numpy or torch.

    Strings are refused, even numeric ones: they are more often a judge model's unparsed answer.

    Raises:
        TypeError: the value is not a real number.
        ValueError: it is not finite, or too large for float32, the precision of rewards in training.
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
        raise ValueError(
            "a number that is too large; a reward may be at most 3.4e38 in magnitude, the largest float32 number"
        ) from None
    except (TypeError, ValueError):
        raise TypeError(f"{shown}, which is not a number") from None
    if not math.isfinite(number):
        raise ValueError(f"{number}; a reward must be finite")
    if abs(number) > MAX_REWARD:
        raise ValueError(f"{number}; a reward may be at most 3.4e38 in magnitude, the largest float32 number")
    return number


def find_other_kind(values: Mapping[str, Any], kinds: Mapping[str, type]) -> str:
    """The first value that is not of exactly its kind, in words: `reward is 'x'`; empty if all are."""
    wrong = next((name for name, kind in kinds.items() if type(values.get(name)) is not kind), "")
    return f"{wrong} is {values.get(wrong)!r:.100}" if wrong else ""


@functools.cache
def wanted_classes(init: Callable[..., Any]) -> dict[str, tuple[type, bool, bool]]:
    """Settings of a constructor that are objects of this package: (class, whether None, whether functions will do)."""
    found = {}
    for name, hint in typing.get_type_hints(init).items():
        parts = typing.get_args(hint) or (hint,)
        if classes := [part for part in parts if _is_own_class(part)]:
            found[name] = (classes[0], type(None) in parts, any("Callable" in str(part) for part in parts))
    return found


@functools.cache
def wanted_lists(init: Callable[..., Any]) -> dict[str, type]:
    """Settings of a constructor that are lists of objects of this package: the objects' class."""
    parts = [(name, part) for name, hint in typing.get_type_hints(init).items() for part in typing.get_args(hint)]
    lists = {name: typing.get_args(part)[0] for name, part in parts if typing.get_origin(part) is list}
    return {name: kind for name, kind in lists.items() if _is_own_class(kind)}


def _is_own_class(hint: Any) -> bool:
    """Protocols, such as `Records`, are left out: lists fulfil them, too."""
    is_own = isinstance(hint, type) and hint.__module__.startswith("lit_async_rl.")
    return is_own and not getattr(hint, "_is_protocol", False)


def check_kinds(owner: str, init: Callable[..., Any], given: Mapping[str, object]) -> None:
    """Refuses objects of another class than a constructor's annotations want.

    Example: `data.sampling must be a SamplingParams, got 6`.

    Args:
        owner: path of the class in the YAML.
        init: its constructor.
        given: the arguments by name.

    Raises:
        ValueError: names the setting, its requirement, and its value.
    """
    for name, (kind, may_be_none, may_be_function) in wanted_classes(init).items():
        value = given.get(name)
        own_class = value if isinstance(value, type) and issubclass(value, kind) else None
        will_do = isinstance(value, kind) or (value is None and may_be_none) or (may_be_function and callable(value))
        if will_do and own_class is None:
            continue
        if own_class is not None:
            named = f"rl.{own_class.__name__}"
            raise ValueError(f"{owner}.{name} must be an instance, but {named} is a class: write {named}(...)")
        article = "an" if kind.__name__[0] in "AEIO" else "a"
        raise ValueError(f"{owner}.{name} must be {article} {kind.__name__}, got {_shown(value)}")
    for name, kind in wanted_lists(init).items():
        value = [] if given.get(name) is None else given[name]
        wrong = [one for one in value if not isinstance(one, kind)] if isinstance(value, list | tuple) else [value]
        if wrong:
            raise ValueError(f"{owner}.{name} must be a list of {kind.__name__} objects, got {_shown(wrong[0])}")


def _shown(value: object) -> str:
    is_short = isinstance(value, str | int | float | type) or value is None
    return (repr(value) if is_short else f"a {type(value).__name__}")[:100]


def check_token_shape(owner: str, name: str, values: object, shape: tuple[int, ...]) -> None:
    """Refuses values of a custom component that are not of shape (B, T); they would be broadcast without an error.

    Args:
        owner: setting and class of the component, such as `model.loss=MyLoss`.
        name: name of the values, for the message.
        values: return value of the component.
        shape: (B, T), the shape of the token tensors.

    Raises:
        ValueError: names component, values and both shapes.
    """
    actual = getattr(values, "shape", None)
    if actual is None or tuple(actual) != shape:
        got = repr(values)[:80] if actual is None else f"shape {tuple(actual)}"
        raise ValueError(
            f"{owner}: {name} must be a tensor with one value for each token, that is, of shape {shape}, got {got}. Do "
            "not average over the tokens: data.aggregation does that"
        )


def check_dtype(setting: str, name: str) -> None:
    """Refuses a name that is not one of torch's floating-point dtypes.

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
    if rule == "positive":  # and finite: an infinite size or rate is a mistake, and an infinite time limit is none
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


MIN_ABBREVIATION = 2  # letters
MAX_SUGGESTED = 3


def closest(name: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The most similar known name, or None if none is similar. Case-insensitive.

    Args:
        name: name as it was typed.
        known: valid names.
        cutoff: minimum similarity, between 0 and 1 (see `difflib.get_close_matches`).
    """
    by_lowercase = {one.lower(): one for one in known}
    matches = difflib.get_close_matches(name.lower(), by_lowercase, n=1, cutoff=cutoff)
    return by_lowercase[matches[0]] if matches else None


def similar(name: str, known: Iterable[str]) -> list[str]:
    """Known names that may have been meant: those that begin with the name, if few, else the closest.

    `temp` stands for `temperature`, though `stop` has more letters in common with it.
    """
    names = list(dict.fromkeys(known))
    begun = [one for one in names if len(name) >= MIN_ABBREVIATION and one.lower().startswith(name.lower())]
    if 0 < len(begun) <= MAX_SUGGESTED:
        return begun
    found = closest(name, names)
    return [] if found is None else [found]


def did_you_mean(names: Sequence[str]) -> str:
    """`; did you mean a, b or c?`, or an empty string for no names."""
    *others, last = names or [""]
    listed = f"{', '.join(others)} or {last}" if others else last
    return f"; did you mean {listed}?" if listed else ""


def meant(name: str, known: Iterable[str]) -> str:
    """`; did you mean ...?` if known names are similar, else an empty string."""
    return did_you_mean(similar(name, known))


# -- Paths in the home folder -----------------------------------------------------------------------------------------


def with_home(text: str) -> str:
    """A path, or a flag with its path, with the home folder for `~`: shells leave `--out=~/model` alone."""
    flag, equals, value = text.partition("=") if text.startswith("--") else ("", "", text)
    return flag + equals + os.path.expanduser(value) if value.startswith("~") else text


# -- Argument parser of the small commands: errors are one line, and misspelt flags are suggested ---------------------


class OneLineParser(argparse.ArgumentParser):
    """`argparse.ArgumentParser` without abbreviated flags, and with one-line errors that do not repeat the usage.

    Args:
        command: of `lit-async-rl`, which has this parser; empty where `settings` has `prog`.
        text: description of the command, which keeps its line breaks.
        settings: of `argparse.ArgumentParser`.
    """

    def __init__(self, command: str = "", text: str | None = None, **settings: Any) -> None:
        if command:
            settings |= {"prog": f"lit-async-rl {command}", "description": text}
            settings |= {"formatter_class": argparse.RawDescriptionHelpFormatter}
        super().__init__(**{"allow_abbrev": False, **settings})

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
