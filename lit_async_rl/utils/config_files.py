"""Configuration files: YAML of limited size that can build on others, with `base: file.yaml` or a list of files.

Bases are read first, in order, as if each were an earlier `--config`. Their paths are relative to the folder of the
file that names them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf

BASE = "base"
MAX_BYTES = 10_000_000
MAX_NODES = 1_000_000  # with aliases expanded: nested aliases grow exponentially, and omegaconf expands them
MAX_LEVELS = 100  # the parsers recurse into each level


def with_bases(file: Path, chain: Sequence[Path] = ()) -> list[Path]:
    """A configuration file preceded by its bases, in reading order.

    Args:
        file: configuration file; checked before it is read.
        chain: files that led to this one through `base`, outermost first.

    Raises:
        ValueError: a file is not a configuration, `base` is not a path or a list of paths, or a base does not exist or
            builds on itself.
        OSError: `file` cannot be read.
    """
    if chain and not file.is_file():
        raise ValueError(f"config={str(chain[-1])!r}: its base {file} does not exist")
    if file.resolve() in {other.resolve() for other in chain}:
        raise ValueError(f"config={str(chain[-1])!r}: base={str(file)!r} builds on itself")
    check_yaml(file)
    root = yaml.compose(file.read_bytes(), Loader=yaml.SafeLoader)  # nodes only: the configuration parser resolves tags
    names = [yaml.safe_load(yaml.serialize(value)) for key, value in root.value if key.value == BASE]
    names = names[0] if names and isinstance(names[0], list) else names
    if not all(isinstance(name, str) for name in names):
        raise ValueError(f"config={str(file)!r}: base must be a path or a list of paths, got {names}")
    bases = [base for name in names for base in with_bases(file.parent / name, [*chain, file])]
    return [*bases, file]


def own_settings(text: str, *changes: Callable[[yaml.Node], None]) -> str:
    """Text of a configuration file without the key `base`.

    Args:
        text: of the file.
        changes: made to its nodes in turn, so that a file is parsed once.
    """
    root = yaml.compose(text, Loader=yaml.SafeLoader)
    if not isinstance(root, yaml.MappingNode):
        return text
    root.value = [(key, value) for key, value in root.value if key.value != BASE]
    for change in changes:
        change(root)
    return yaml.serialize(root)


def load_config(file: Path) -> dict[str, Any]:
    """The settings of a configuration file merged over those of its bases; `${...}` is not resolved.

    Raises:
        ValueError: see `with_bases`.
        OSError: the file cannot be read.
    """
    merged = OmegaConf.merge(*(OmegaConf.create(own_settings(part.read_text())) for part in with_bases(file)))
    content: Any = OmegaConf.to_container(merged)
    return {str(name): value for name, value in content.items()}


def check_yaml(file: Path) -> None:
    """Refuses a file that is no YAML mapping, has duplicate keys, or is too large.

    Raises:
        ValueError: names the file.
    """
    if file.stat().st_size > MAX_BYTES:
        raise ValueError(f"config={str(file)!r} is not a configuration: it has more than {MAX_BYTES:,} bytes")
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
    """Whether a document is a mapping. Counts the nodes with all aliases expanded, without expanding them.

    Raises:
        ValueError: too many nodes or levels.
    """
    sizes: dict[str, int] = {}  # number of nodes by anchor
    is_mapping = None
    open_nodes: list[tuple[str | None, int]] = []  # anchor, and number of nodes inside so far
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
                raise ValueError(f"*{event.anchor} is used inside &{event.anchor}")
            size = sizes.get(event.anchor, 1)
        elif isinstance(event, yaml.ScalarEvent):
            size = 1
            sizes |= {} if event.anchor is None else {event.anchor: 1}
        if size and open_nodes:
            anchor, inside = open_nodes.pop()
            open_nodes.append((anchor, inside + size))
        if len(open_nodes) > MAX_LEVELS or (open_nodes and open_nodes[-1][1] > MAX_NODES):
            raise ValueError(
                f"the file has more than {MAX_LEVELS} levels, or more than {MAX_NODES:,} values once its aliases are "
                "expanded"
            )
    return bool(is_mapping)


def _check_keys(root: yaml.Node | None) -> None:
    """Refuses duplicate keys; a YAML parser would silently use the last one.

    Raises:
        ValueError: names the key and both lines.
    """
    nodes = [root]
    seen = set()
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
                name = str(key.value)
                line = key.start_mark.line + 1
                if name in lines and name != "<<":
                    raise ValueError(f"{name} appears twice, in lines {lines[name]} and {line}")
                lines[name] = line
                nodes.append(value)
