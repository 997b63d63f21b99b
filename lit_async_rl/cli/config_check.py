"""Checks of configurations before and after jsonargparse: readable files, real classes."""

from __future__ import annotations

import argparse
import inspect
import json
import logging
import os
import pkgutil
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import Namespace

from lit_async_rl.cli.config_words import config_files
from lit_async_rl.utils.suggestions import meant

log = logging.getLogger(__name__)
_NO_VALUE = "must have a value, got null: leave it out for its default"
MOST_BYTES, MOST_NODES, MOST_LEVELS = 10_000_000, 1_000_000, 100


def check_config_files(args: Sequence[str]) -> None:
    """Refuses files that are not YAML, or that expand beyond limits.

    Args:
        args: of the command line.

    Raises:
        ValueError: names the file.
    """
    for argument in args:
        if re.match(r"-(config|ckpt_path|data|defaults|help|model|seed_everything|trainer)\b", argument):
            raise ValueError(f"{argument}: settings begin with two dashes, -{argument}")
    for file in config_files(args):
        if file.is_dir():
            inside = file / "config.yaml"
            hint = f"; did you mean {inside}?" if inside.is_file() else ""
            raise ValueError(f"config={str(file)!r} is a folder, not a file{hint}")
        if not file.is_file():
            raise ValueError(f"config={str(file)!r}: there is no such file{_meant_file(file)}")
        _check_yaml(file)
    _warn_of_overlays_that_come_first(list(config_files(args)))


def _meant_file(file: Path) -> str:
    if all(Path(one).is_file() for one in str(file).split(",")):
        return "; each file needs a --config of its own"
    shipped = [one for one in Path("configs").rglob("*.yaml") if file.stem == one.stem]
    if shipped:
        return f"; did you mean {shipped[0]}?"
    return meant(str(file), [str(one) for one in file.parent.glob("*.yaml")])


def _warn_of_overlays_that_come_first(files: Sequence[Path]) -> None:
    """Says which settings of a file are lost to a later one that names the model: a base behind its overlay."""
    if os.environ.get("LOCAL_RANK", "0") != "0":
        return
    try:
        found = [(file, dict(_leaves(yaml.safe_load(file.read_bytes())))) for file in files]
    except yaml.YAMLError:  # a tag: the parser refuses it
        return
    for number, (file, own) in enumerate(found):
        for later, others in found[number + 1 :]:
            lost = [name for name, value in own.items() if name in others and others[name] != value]
            if "model.model" in others and "model.model" not in own and lost:
                some = ", ".join(lost[:3]) + (f" and {len(lost) - 3} more" if len(lost) > 3 else "")
                log.warning("%s sets %s again, behind %s: the last file wins, overlays come last", later, some, file)


def places_of_callback(name: str, args: Sequence[str]) -> str:
    """Configuration files, and options of the command line, that add a callback to `trainer.callbacks`.

    Args:
        name: of its class.
        args: of the command line.
    """
    is_named = re.compile(rf"(^|\W){re.escape(name)}($|\W)").search
    places = []
    for file in config_files(args):
        trainer = (yaml.safe_load(file.read_bytes()) or {}).get("trainer") or {}
        for key in ("callbacks", "callbacks+"):
            places += [f"by {key} in {file}"] * sum(map(bool, map(is_named, _class_names(trainer.get(key)))))
    for option, value in zip(args, [*args[1:], ""], strict=True):
        if option.startswith("--trainer.callbacks") and is_named(option if "=" in option else value):
            places.append(f"by {option.partition('=')[0]}")
    return " and ".join(places)


def _class_names(callbacks: Any) -> list[str]:
    """Class paths of callbacks as a file has them: one or a list, each a name or a mapping."""
    entries = callbacks if isinstance(callbacks, list) else [callbacks]
    return [str(entry.get("class_path", "")) if isinstance(entry, Mapping) else str(entry) for entry in entries]


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Full names and values of the settings of a file; a class with its arguments is one value."""
    for name, value in tree.items():
        if isinstance(value, Mapping) and "class_path" not in value:
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _check_yaml(file: Path) -> None:
    if file.stat().st_size > MOST_BYTES:
        raise ValueError(f"config={str(file)!r} is not a configuration: it has more than {MOST_BYTES:,} bytes")
    try:
        text = file.read_bytes().decode()
        is_mapping = _measure(text)
        _check_keys(yaml.compose(text, Loader=yaml.SafeLoader))
    except UnicodeDecodeError as error:
        raise ValueError(f"config={str(file)!r} is not UTF-8: {error.reason} at byte {error.start}") from None
    except yaml.MarkedYAMLError as error:
        line = "" if error.problem_mark is None else f", line {error.problem_mark.line + 1}"
        raise ValueError(f"config={str(file)!r}{line} is not YAML: {error.problem}") from None
    except (yaml.YAMLError, ValueError) as error:
        raise ValueError(f"config={str(file)!r} cannot be used: {error}") from None
    if not is_mapping:
        raise ValueError(f"config={str(file)!r} holds no settings (`name: value`)")


def _measure(text: str) -> bool:
    """Whether a document is a mapping. Counts its nodes with aliases expanded, without expanding them.

    Raises:
        ValueError: too many nodes or levels.
    """
    sizes: dict[str, int] = {}  # of what has an anchor
    is_mapping = None
    open_nodes: list[tuple[str | None, int]] = []  # anchor, and nodes inside so far
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        size = 0
        if isinstance(event, (yaml.MappingStartEvent, yaml.SequenceStartEvent)):
            is_mapping = isinstance(event, yaml.MappingStartEvent) if is_mapping is None else is_mapping
            open_nodes.append((event.anchor, 1))
        elif isinstance(event, (yaml.MappingEndEvent, yaml.SequenceEndEvent)):
            anchor, size = open_nodes.pop()
            sizes |= {} if anchor is None else {anchor: size}
        elif isinstance(event, yaml.AliasEvent):
            if any(anchor == event.anchor for anchor, _ in open_nodes):
                raise ValueError(f"*{event.anchor} stands within &{event.anchor}")
            size = sizes.get(event.anchor, 1)
        elif isinstance(event, yaml.ScalarEvent):
            size = 1
            sizes |= {} if event.anchor is None else {event.anchor: 1}
        if size and open_nodes:
            anchor, inside = open_nodes.pop()
            open_nodes.append((anchor, inside + size))
        if len(open_nodes) > MOST_LEVELS or (open_nodes and open_nodes[-1][1] > MOST_NODES):
            raise ValueError(f"more than {MOST_LEVELS} levels, or {MOST_NODES:,} values with its aliases written out")
    return bool(is_mapping)


def _check_keys(root: yaml.Node | None) -> None:
    """Refuses a key that is there twice, of which YAML readers take the last.

    Raises:
        ValueError: names key and lines.
    """
    nodes, seen = [root], set()
    while nodes:
        node = nodes.pop()
        if id(node) in seen:  # an alias
            continue
        seen.add(id(node))
        if isinstance(node, yaml.SequenceNode):
            nodes += node.value
        elif isinstance(node, yaml.MappingNode):
            lines: dict[str, int] = {}
            for key, value in node.value:
                name, line = str(key.value), key.start_mark.line + 1
                if name in lines and name != "<<":
                    raise ValueError(f"{name} is there twice, in lines {lines[name]} and {line}")
                lines[name] = line
                nodes.append(value)


def check_class_paths(config: Any, setting: str = "") -> None:
    """Refuses a `class_path` that is not a class, before anything is called.

    jsonargparse checks subclasses; for types that are callables (`model.scheduler`, `data.reward`) it would accept any
    function as a class and call it with `init_args`.

    Args:
        config: as parsed.
        setting: its full name.

    Raises:
        ValueError: names the setting.
    """
    if isinstance(config, Namespace):
        config = vars(config)
    if isinstance(config, Mapping):
        path = config.get("class_path")
        if isinstance(path, str) and not inspect.isclass(pkgutil.resolve_name(path)):
            raise ValueError(f"{setting}.class_path must be a class, got {path}, which is none; nothing was called")
        if isinstance(path, str):
            _check_arguments(path, config.get("init_args"), setting)
        for name, value in config.items():
            check_class_paths(value, f"{setting}.{name}" if setting else str(name))
    elif isinstance(config, (list, tuple)):
        for number, value in enumerate(config):
            check_class_paths(value, f"{setting}.{number}")


def _check_arguments(path: str, given: Any, setting: str) -> None:
    """Refuses null for an argument without a default, or of a type without None: jsonargparse passes it in silence.

    Raises:
        ValueError: names it.
    """
    if not isinstance(given, Namespace):
        return
    for name, parameter in inspect.signature(pkgutil.resolve_name(path)).parameters.items():
        if parameter.default is None or name not in given or given[name] is not None:
            continue
        if parameter.annotation is parameter.empty and parameter.default is parameter.empty:
            raise ValueError(f"{setting}.init_args.{name} must be given: {path} has no default for it, got null")
        if parameter.annotation is not parameter.empty and not _takes_none(parameter.annotation):
            raise ValueError(f"{setting}.init_args.{name} {_NO_VALUE}")


def check_values(config: Namespace, actions: Iterable[argparse.Action]) -> None:
    """Refuses an empty value (`max_staleness:`) where there must be one, and a value in the place of settings.

    jsonargparse checks neither in configuration files.

    Args:
        config: as parsed.
        actions: of the parser: one for each setting, and one for each group of them.

    Raises:
        ValueError: names the setting.
    """
    kinds = {action.dest: getattr(action, "_typehint", None) for action in actions}
    parents = {name.rpartition(".")[0] for name in kinds}
    for group in sorted(name for name, kind in kinds.items() if kind is None and name in parents):
        if not isinstance(value := config.get(group), Namespace):
            raise ValueError(f"{group} must hold settings (`name: value`), got {json.dumps(value, default=str)}")
    for action in actions:
        kind = kinds[action.dest]
        if kind is None or action.default is None or _takes_none(kind) or action.dest not in config:
            continue
        if config[action.dest] is None:
            raise ValueError(f"{action.dest} {_NO_VALUE}")


def _takes_none(kind: Any) -> bool:
    return any(word in str(kind) for word in ("None", "Optional", "Any"))
