"""Errors of the command line: one line that names the setting, instead of a traceback or the usage text."""

from __future__ import annotations

import difflib
import inspect
import os
import pkgutil
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from jsonargparse import Namespace
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.cli import LightningArgumentParser

from lit_async_rl.errors import (
    EngineError,
    EnvironmentFailure,
    NonFiniteError,
    ProducerError,
    RankError,
    RewardError,
    StalledError,
    describe,
)

EXPECTED = (
    *(ValueError, OSError, ModuleNotFoundError, MisconfigurationException),
    *(EngineError, NonFiniteError, ProducerError, RankError, RewardError, EnvironmentFailure, StalledError),
)
NOISE = re.compile(
    r"Does not validate against any of the Union subtypes|Subtypes: .*|Errors:|Given value type: .*|Given value: .*"
    r"|- Expected a <class 'NoneType'>.*|- Expected a path but .* either not accessible or invalid"
)
MOST = 600  # characters


def wants_traceback() -> bool:
    """Whether LIT_ASYNC_RL_TRACEBACK=1 is set."""
    return bool(os.environ.get("LIT_ASYNC_RL_TRACEBACK"))


@contextmanager
def one_line_errors(folder: Callable[[], str | None] = lambda: None) -> Iterator[None]:
    """Ends the process with `error: ...` and status 1 where an exception would end it with a traceback.

    The traceback of an exception that no setting is known to cause goes to `traceback.txt`.

    Args:
        folder: of the run, asked for when something was raised; None if there is none yet.
    """
    try:
        yield
    except Exception as error:
        if wants_traceback():
            raise
        if type(error).__module__.startswith("wandb"):  # not imported for its name
            without = "WANDB_MODE=offline logs without an account"
            sys.exit(f"error: trainer.logger (WandbLogger): {shorten(str(error))} {without}")
        sys.exit(f"error: {shorten(describe(error))}{_hint(error, folder)}")


def shorten(text: str) -> str:
    """Text on one line of at most `MOST` characters, printable in any terminal."""
    line = re.sub(r"\s+", " ", text).strip().encode("utf-8", "backslashreplace").decode()
    return line if len(line) <= MOST else f"{line[: MOST - 100]} ... {line[-90:]}"


def _hint(error: Exception, folder: Callable[[], str | None]) -> str:
    if isinstance(error, EXPECTED):
        return ""
    hint = "\nLIT_ASYNC_RL_TRACEBACK=1 shows where it was raised"
    if (found := folder()) is None:
        return hint
    path = Path(found) / "traceback.txt"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(traceback.format_exception(error)))
    except OSError:
        return hint
    return f"\n{path} says where it was raised"


class Parser(LightningArgumentParser):
    """Lightning's parser with one-line errors, a suggested setting, and no usage text."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Ends the process with status 2; parsers of nested values raise instead, as jsonargparse does."""
        if not self.exit_on_error or wants_traceback():
            super().error(message, ex)
        sys.stderr.write(f"error: {shorten(explain(message, [action.dest for action in self._actions]))}\n")
        self.exit(2)

    def instantiate_classes(self, cfg: Any, **kwargs: Any) -> Any:
        """Makes all objects; an error of a constructor is raised as it is, or with the setting that chose the class.

        Raises:
            ValueError: a constructor raised something that no setting is known to cause (a `TypeError`, say).
        """
        raised: list[Exception] = []

        def make(kind: type, *args: Any, **kwargs: Any) -> Any:
            try:
                return kind(*args, **kwargs)
            except Exception as error:
                if not isinstance(error, EXPECTED):
                    where = find_setting(cfg, f"{kind.__module__}.{kind.__qualname__}")
                    error = ValueError(f"{where} {kind.__name__} cannot be made: {describe(error)}").with_traceback(
                        error.__traceback__
                    )
                raised.append(error)
                raise error from None

        self.add_instantiator(make, object)
        try:
            return super().instantiate_classes(cfg, **kwargs)
        except Exception as error:
            if raised and str(raised[-1]) in str(error):  # jsonargparse adds what it tried, for each type of a union
                raise raised[-1] from None
            raise


def find_setting(config: Any, class_path: str, setting: str = "") -> str:
    """Name of the setting whose `class_path` is a class, with a colon; empty if there is none."""
    config = vars(config) if isinstance(config, Namespace) else config
    if isinstance(config, Mapping):
        if config.get("class_path") == class_path:
            return f"{setting}:"
        pairs = [(name if not setting else f"{setting}.{name}", value) for name, value in config.items()]
    else:
        pairs = [(setting, value) for value in config] if isinstance(config, list) else []
    return next((found for name, value in pairs if (found := find_setting(value, class_path, name))), "")


def explain(message: str, settings: Iterable[str]) -> str:
    """Message of jsonargparse without the errors of each type of a union, with a suggestion.

    Args:
        message: of the parser.
        settings: full names of all settings.
    """
    known = list(settings)
    if match := re.match(r"(?i)unrecognized arguments: (\S+)", message):
        name = match[1].lstrip("-").split("=")[0]
        return f"there is no setting {name}{_meant(name, known)}"
    if match := re.match(r"Group '(\S+)' does not accept option '(\S+)'", message):
        name = f"{match[1]}.{match[2]}"
        return f"there is no setting {name}{_meant(name, known)}"
    if match := re.fullmatch(r"Option '(\S+)' is not accepted\s*", message):
        return f"there is no setting {match[1]}{_meant(match[1], known)}"
    lines = [line.strip() for line in message.splitlines()]
    kept = [line.removeprefix("- ") for line in dict.fromkeys(lines) if line and not NOISE.fullmatch(line)]
    text = " ".join(kept)
    text = re.sub(r'^Parser key "([^"]+)":', r"\1:", text)
    text = re.sub(r"Type \S*Callable\[.*\] expects a function or a callable class: ", "", text)
    text = re.sub(r" Got value: Namespace\(.*\)$", "", text)
    text = re.sub(r"Expected a <class '(\w+)'>\.? Got value: ", r"must be of type \1, got ", text)
    return text + _meant_in_class(text)


def _meant(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.7)
    return f"; did you mean {close[0]}?" if close else ""


def _meant_in_class(text: str) -> str:
    """Suggestion for a misspelt argument of a class, or a misspelt class."""
    argument = re.search(r"given class_path '([\w.]+)': Option '(\w+)' is not accepted", text)
    missing = re.search(r"module '([\w.]+)' has no attribute '(\w+)'", text)
    try:
        if argument:
            return _meant(argument[2], inspect.signature(pkgutil.resolve_name(argument[1])).parameters)
        if missing:
            return _meant(missing[2], dir(pkgutil.resolve_name(missing[1])))
    except (ImportError, AttributeError, ValueError, TypeError):
        pass
    return ""
