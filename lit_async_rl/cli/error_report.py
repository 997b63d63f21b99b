"""Errors of the command line: one line that names the setting, instead of a traceback or the usage text."""

from __future__ import annotations

import os
import pkgutil
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from jsonargparse import Namespace
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.cli import LightningArgumentParser

from lit_async_rl.cli.explain import explain
from lit_async_rl.errors import (
    EngineError,
    EnvironmentFailure,
    NonFiniteError,
    ProducerError,
    RankError,
    RewardError,
    SetupError,
    StalledError,
    describe,
)

EXPECTED = (
    *(ValueError, OSError, ImportError, MisconfigurationException),
    *(EngineError, NonFiniteError, ProducerError, RankError, RewardError, EnvironmentFailure, SetupError, StalledError),
)
MOST = 600  # characters
PLAIN = (str, int, float, bool)


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
        sys.exit(f"error: {shorten(_sentence(error))}{_hint(error, folder)}")


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
                where = find_setting(cfg, f"{kind.__module__}.{kind.__qualname__}", kwargs)
                raised.append(_with_setting(error, where, kind))
                raise raised[-1] from None

        self.add_instantiator(make, object)
        try:
            return super().instantiate_classes(cfg, **kwargs)
        except Exception as error:
            if raised and _words(raised[-1]) in _words(
                error
            ):  # jsonargparse adds what it tried, for each type of a union
                raise raised[-1] from None
            raise


def _with_setting(error: Exception, where: str, kind: type) -> Exception:
    """The error of a constructor, with the setting that chose its class where the message does not name it."""
    if isinstance(error, EXPECTED):
        said = _sentence(error)
        named = (where.rpartition(".")[0], where, f"{kind.__name__}.")
        if not where or any(name and said.startswith(name) for name in named):
            return error
        return ValueError(f"{where}: {said}").with_traceback(error.__traceback__)
    return ValueError(f"{where}: {kind.__name__} cannot be made: {describe(error)}").with_traceback(error.__traceback__)


def _sentence(error: Exception) -> str:
    if isinstance(error, RuntimeError) and "by peer" in str(error):  # gloo's, within a collective of torch
        return "the connection to another rank broke: it has ended, was killed, or its machine is lost"
    return re.sub(r"^(MisconfigurationException: |ModuleNotFoundError: |\[Errno \d+\] )", "", describe(error))


def _words(error: Exception) -> str:
    return " ".join(str(error).split())


def find_setting(config: Any, class_path: str, arguments: Mapping[str, Any], setting: str = "") -> str:
    """Name of the setting that has a class with these arguments; empty if there is none.

    Args:
        config: as parsed.
        class_path: of the class.
        arguments: of its constructor; those that are objects themselves are not compared.
        setting: full name of `config`.
    """
    config = vars(config) if isinstance(config, Namespace) else config
    if isinstance(config, Mapping):
        if config.get("class_path") and _same_class(config["class_path"], class_path):
            given = config.get("init_args")
            given = vars(given) if isinstance(given, Namespace) else given or {}
            if all(given.get(name, value) == value for name, value in arguments.items() if isinstance(value, PLAIN)):
                return setting
        pairs = [(name if not setting else f"{setting}.{name}", value) for name, value in config.items()]
    else:
        pairs = [(setting, value) for value in config] if isinstance(config, list) else []
    return next((found for name, value in pairs if (found := find_setting(value, class_path, arguments, name))), "")


def _same_class(path: str, class_path: str) -> bool:
    """Whether a class that may be named by another module that offers it is this one."""
    found = pkgutil.resolve_name(path)
    return f"{found.__module__}.{found.__qualname__}" == class_path
