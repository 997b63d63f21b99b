"""All settings of a run, with defaults and choices: the file `settings.json`, for fast help.

Reading it takes a thousandth of the time that importing the classes takes. After a change of settings

    python -m lit_async_rl.cli.settings

writes the file again; a test compares it with the classes.
"""

from __future__ import annotations

import json
import typing
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import argparse

FILE = Path(__file__).with_name("settings.json")
HIDDEN = ("help", "print_config")


@cache
def all_settings() -> Mapping[str, Mapping[str, Any]]:
    """`default` of each setting by its full name, and `choices` where the values have names."""
    content: dict[str, dict[str, Any]] = json.loads(FILE.read_text())
    for entry in content.values():
        if isinstance(same := entry.get("choices"), str):
            entry["choices"] = content[same]["choices"]
    return content


def from_classes() -> dict[str, dict[str, Any]]:
    """Content of the file, from the classes; repeated choices refer to the first setting with them."""
    found = {}
    known: dict[tuple[str, ...], str] = {}
    for action in setting_actions(train_parser()):
        entry: dict[str, Any] = {"default": plain_default(action.default)}
        if chosen := choices(getattr(action, "_typehint", None)):
            first = known.setdefault(tuple(chosen), action.dest)
            entry["choices"] = chosen if first == action.dest else first
        found[action.dest] = entry
    return found


def train_parser() -> argparse.ArgumentParser:
    """The parser of `lit-async-rl train`."""
    from lit_async_rl.cli.app import AsyncRLCLI

    class Found(Exception):
        """Ends the command before it parses."""

    class Finder(AsyncRLCLI):
        def parse_arguments(self, parser: Any, args: Any) -> None:
            raise Found(parser)

    try:
        Finder([])
    except Found as found:
        parser: argparse.ArgumentParser = found.args[0]
        return parser
    raise RuntimeError("AsyncRLCLI has not parsed its arguments")


def setting_actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """Actions of settings, without those that load files or print help."""
    for action in parser._actions:
        if getattr(action, "_typehint", None) is not None and not action.dest.endswith(".help"):
            yield action


def plain_default(value: Any) -> Any:
    """A default as a JSON value; for a class its name, with any arguments."""
    path = getattr(value, "class_path", None)
    if path is None:
        return list(value) if isinstance(value, tuple) else value
    arguments = getattr(value, "init_args", None)
    given = {} if arguments is None else {name: one for name, one in vars(arguments).items() if one is not None}
    name = path.rpartition(".")[2]
    return f"{name}({', '.join(f'{key}={one!r}' for key, one in given.items())})" if given else name


def choices(hint: Any) -> list[str]:
    """Names that a value can have: members of a literal, booleans, this package's classes, Lightning's loggers."""
    import lightning.pytorch.loggers

    import lit_async_rl
    from lit_async_rl.cli.error_report import classes_in, known_names

    public = {*lit_async_rl.NAMES, *lightning.pytorch.loggers.__all__}  # torch's differ between its releases
    names = dict.fromkeys(_literals(hint))
    for base in classes_in(hint):
        names |= dict.fromkeys(name for name in known_names([base]) if name in public)
    return list(names)


def _literals(hint: Any) -> Iterator[str]:
    if hint is bool:
        yield from ("true", "false")
    elif typing.get_origin(hint) is typing.Literal:
        yield from (str(value) for value in typing.get_args(hint))
    else:
        for part in typing.get_args(hint):
            yield from _literals(part)


def as_json(settings: Mapping[str, Mapping[str, Any]]) -> str:
    """A line for each setting, so that changes of two people merge."""
    lines: Iterable[str] = (f"{json.dumps(name)}: {json.dumps(entry)}" for name, entry in settings.items())
    return "{\n" + ",\n".join(lines) + "\n}\n"


if __name__ == "__main__":
    FILE.write_text(as_json(from_classes()))
