"""Configuration files of a command line, and checks that jsonargparse does not make."""

from __future__ import annotations

import argparse
import contextlib
import inspect
import json
import pkgutil
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import reduce
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import Namespace

from lit_async_rl.prompts.sources import FILE_SOURCES, source_class
from lit_async_rl.utils.checks import NO_VALUE, meant, with_home
from lit_async_rl.utils.config_files import with_bases

# -- Configuration files on a command line, and its other words -------------------------------------------------------


FILE_IN_WORD = re.compile(r"^(--config=|-c=?(?=.))")  # an option and its file in one word


def config_files(args: Sequence[str]) -> list[Path]:
    """Files of `--config` on a command line, in their order."""
    return _divided(args)[0]


def files_first(args: Sequence[str]) -> list[str]:
    """The words of a command line, files of `--config` first: flags override files wherever they stand.

    A file with `base` follows the files that it builds on.
    """
    files, flags = _divided(args)
    files_of_all = [f"--config={part}" for file in files for part in with_bases(file)]
    return files_of_all + write_out_flags(flags)


def trees_of(files: Iterable[Path]) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Files and their bases with their settings; without those with tags, which the parser refuses."""
    for part in (part for file in files for part in with_bases(file)):
        with contextlib.suppress(yaml.YAMLError):
            yield part, yaml.safe_load(part.read_bytes())


STAGES = {"sft": "records", "train": "prompts"}  # by command: the setting of `data` that its configurations have


def stage_of(args: Sequence[str]) -> str | None:
    """The command that a configuration was written for; None if it names no data."""
    files, flags = _divided(args)
    data = [tree.get("data") for _, tree in trees_of(file for file in files if file.is_file())]
    for command, name in STAGES.items():
        setting = re.compile(rf"--data\.{name}([.=]|$)")
        if any(isinstance(one, Mapping) and name in one for one in data) or any(map(setting.match, flags)):
            return command
    return None


def check_stage(args: Sequence[str], command: str) -> None:
    """Refuses a configuration of another stage.

    Raises:
        ValueError: names the command that reads it.
    """
    stage = stage_of(args)
    if stage not in (None, command):
        raise ValueError(f"data.{STAGES[stage]} is a setting of `lit-async-rl {stage}`, not of `{command}`")


# -- Short forms: prompts as the name of a file or data set, in place of a class, and several rewards by name ----------


PROMPT_SETTINGS = ("data.prompts", "data.validation.prompts")
RECORD_SETTINGS = ("data.records", "data.validation_records")  # of supervised fine-tuning; the first may be a list
REWARD = "data.reward"


def write_out_flags(flags: Sequence[str]) -> list[str]:
    """The words of a command line, with short forms written out as in a file; no `~`."""
    words: list[str] = []
    left = [with_home(word) for word in flags]
    while left:
        word = left.pop(0)
        flag, has_value, value = word.partition("=")
        setting = flag.removeprefix("--")
        if setting in (*PROMPT_SETTINGS, *RECORD_SETTINGS, REWARD) and (has_value or left):
            words += [flag, _written_out(setting, value if has_value else left.pop(0))]
        else:
            words.append(word)
    return words


def _written_out(setting: str, value: str) -> str:
    """The value of a flag; a tree of values is JSON.

    Raises:
        ValueError: prompts are a file of another kind.
    """
    names = setting.split(".")
    is_tree = value.startswith(("[", "{")) and setting not in PROMPT_SETTINGS
    root: yaml.Node = yaml.compose(value, Loader=yaml.SafeLoader) if is_tree else _text(value)
    for name in reversed(names):
        root = yaml.MappingNode("tag:yaml.org,2002:map", [(_text(name), root)])
    name_prompt_classes(root)
    write_out_rewards(root)
    written = reduce(_entry, names, root)
    if not isinstance(written, yaml.ScalarNode):
        return json.dumps(yaml.safe_load(yaml.serialize(written)))
    if setting in PROMPT_SETTINGS and Path(value).is_file():
        raise ValueError(f"{setting}={value!r}: a file must end in {', '.join(FILE_SOURCES)}")
    return value


def name_prompt_classes(root: yaml.Node | None) -> None:
    """Gives `prompts: my.jsonl` the class that reads the file, and so for records."""
    for setting in PROMPT_SETTINGS + RECORD_SETTINGS:
        *groups, name = setting.split(".")
        node = reduce(_entry, groups, root)
        if isinstance(node, yaml.MappingNode):
            node.value = [(key, _as_source(one, setting) if key.value == name else one) for key, one in node.value]


def _as_source(node: yaml.Node, setting: str) -> yaml.Node:
    """The class that reads a file or data set, for its name; also in a list of records."""
    if isinstance(node, yaml.SequenceNode) and setting in RECORD_SETTINGS:
        node.value = [_as_source(one, setting) for one in node.value]
    if not isinstance(node, yaml.ScalarNode) or (source := source_class(node.value)) is None:
        return node
    kind = source.__name__ if setting in PROMPT_SETTINGS else "lit_async_rl.RecordFile"
    return yaml.compose(json.dumps({"class_path": kind, "init_args": {"path": node.value}}), Loader=yaml.SafeLoader)


def write_out_rewards(root: yaml.Node | None) -> None:
    """Writes several rewards by name out as a `CombinedReward`.

    `data: {reward: {answer: ..., format: ...}}` is short for it; the parser cannot write mappings of functions back.
    """
    rewards = reduce(_entry, REWARD.split("."), root)
    if not isinstance(rewards, yaml.MappingNode) or _entry(rewards, "class_path") or _entry(rewards, "init_args"):
        return
    # a node of its own inside, and the present one around it: its parent keeps it
    inner = yaml.MappingNode(rewards.tag, rewards.value, flow_style=False)
    arguments = yaml.MappingNode(rewards.tag, [(_text("rewards"), inner)], flow_style=False)
    rewards.value = [(_text("class_path"), _text("lit_async_rl.CombinedReward")), (_text("init_args"), arguments)]


def _text(value: str) -> yaml.ScalarNode:
    return yaml.ScalarNode("tag:yaml.org,2002:str", value)


# -- Paths in the home folder -----------------------------------------------------------------------------------------


PATHS = re.compile(r"model|prompts|(\w+_)?(path|file|folder|dir)|dirpath|out")  # settings that hold one


def expand_home_folders(root: yaml.Node | None) -> None:
    """Replaces `~/` in paths by the home folder."""
    nodes = [root]
    while nodes:
        node = nodes.pop()
        if isinstance(node, yaml.SequenceNode):
            nodes += node.value
        for key, value in node.value if isinstance(node, yaml.MappingNode) else []:
            nodes.append(value)
            if isinstance(value, yaml.ScalarNode) and value.value.startswith("~/") and PATHS.fullmatch(key.value):
                value.value = with_home(value.value)


def _entry(node: yaml.Node | None, name: str) -> yaml.Node | None:
    """The value of a key of a mapping; None if there is none."""
    pairs = node.value if isinstance(node, yaml.MappingNode) else []
    return next((value for key, value in pairs if key.value == name), None)


def _divided(args: Sequence[str]) -> tuple[list[Path], list[str]]:
    """The files of `--config FILE`, `--config=FILE` and the like, and all other words."""
    files: list[str] = []
    flags: list[str] = []
    left = list(args)
    while left:
        word = left.pop(0)
        if word in ("--config", "-c") and left:
            files.append(left.pop(0))
        elif FILE_IN_WORD.match(word):
            files.append(FILE_IN_WORD.sub("", word))
        else:
            flags.append(word)
    return [Path(file).expanduser() for file in files], flags


# -- Before parsing: files that are there, and are YAML ----------------------------------------------------------------


def check_config_files(args: Sequence[str]) -> None:
    """Refuses files that are missing, are no YAML, or expand beyond limits.

    Args:
        args: of the command line.

    Raises:
        ValueError: names the file.
    """
    for argument in args:
        if re.match(r"-(config|ckpt_path|cluster|data|defaults|help|model|seed_everything|trainer)\b", argument):
            raise ValueError(f"{argument}: settings begin with two dashes, -{argument}")
    for file in config_files(args):
        if file.is_dir():
            inside = file / "config.yaml"
            hint = f"; did you mean {inside}?" if inside.is_file() else ""
            raise ValueError(f"config={str(file)!r} is a folder, not a file{hint}")
        if not file.is_file():
            raise ValueError(f"config={str(file)!r}: there is no such file{_suggested_file(file)}")
        with_bases(file)


def _suggested_file(file: Path) -> str:
    if all(Path(one).is_file() for one in str(file).split(",")):
        return "; each file needs a --config of its own"
    shipped = [one for one in Path("configs").rglob("*.yaml") if file.stem == one.stem]
    if shipped:
        return f"; did you mean {shipped[0]}?"
    return meant(str(file), [str(one) for one in file.parent.glob("*.yaml")])


# -- After parsing: classes that are classes, and values where there must be one --------------------------------------


_NO_VALUE = f"{NO_VALUE} null: leave it out for its default"


def check_sections(args: Sequence[str], actions: Iterable[argparse.Action]) -> None:
    """Refuses a list, text or number in place of settings in a file: the parser would crash or ignore it.

    Args:
        args: of the command line.
        actions: of the parser.

    Raises:
        ValueError: names the section, its content, and the file.
    """
    sections = set(_sections(actions))
    for part, tree in trees_of(config_files(args)):
        for name, value in _places(tree):
            is_section = name in sections or name.endswith(".init_args")
            is_file = isinstance(value, str) and Path(value).is_file()  # of the section's settings
            if is_section and not isinstance(value, Mapping) and value is not None and not is_file:
                shown = json.dumps(value, default=str)[:80]
                raise ValueError(
                    f"in the file {part}, the section {name} must hold settings (`name: value`), got {shown}"
                )


def _places(tree: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Full names and values of all that a file holds."""
    pairs = tree.items() if isinstance(tree, Mapping) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in pairs:
        yield f"{prefix}{key}", value
        yield from _places(value, f"{prefix}{key}.")


def _sections(actions: Iterable[argparse.Action]) -> list[str]:
    """Names of the groups of settings, which are no settings themselves."""
    kinds = {action.dest: getattr(action, "_typehint", None) for action in actions}
    parents = {name.rpartition(".")[0] for name in kinds}
    return sorted(name for name in parents - {""} if kinds.get(name) is None)


def check_class_paths(config: Any, setting: str = "") -> None:
    """Refuses a `class_path` that is not a class, before anything is called.

    jsonargparse checks subclasses; for callables (`model.scheduler`, `data.reward`) it would call any function with
    `init_args`.

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
            raise ValueError(f"{setting}.class_path must name a class, but {path} is not a class")
        if isinstance(path, str):
            _check_arguments(path, config.get("init_args"), setting)
        for name, value in config.items():
            check_class_paths(value, f"{setting}.{name}" if setting else str(name))
    elif isinstance(config, (list, tuple)):
        for number, value in enumerate(config):
            check_class_paths(value, f"{setting}.{number}")


def _check_arguments(path: str, given: Any, setting: str) -> None:
    """Refuses null for an argument without a default, or of a type without None, which jsonargparse passes.

    Raises:
        ValueError: names it.
    """
    if not isinstance(given, Namespace):
        return
    for name, parameter in inspect.signature(pkgutil.resolve_name(path)).parameters.items():
        if parameter.default is None or name not in given or given[name] is not None:
            continue
        if parameter.annotation is parameter.empty and parameter.default is parameter.empty:
            raise ValueError(f"{setting}.init_args.{name} is null, but needs a value: {path} has no default for it")
        if parameter.annotation is not parameter.empty and not _takes_none(parameter.annotation):
            raise ValueError(f"{setting}.init_args.{name} {_NO_VALUE}")


def check_values(config: Namespace, actions: Iterable[argparse.Action]) -> None:
    """Refuses an empty value (`max_staleness:`) where there must be one, and a value in place of settings.

    jsonargparse checks neither in configuration files.

    Args:
        config: as parsed.
        actions: of the parser: one for each setting.

    Raises:
        ValueError: names the setting.
    """
    actions = list(actions)
    for group in _sections(actions):
        if not isinstance(value := config.get(group), Namespace):
            raise ValueError(f"{group} must hold settings (`name: value`), got {json.dumps(value, default=str)}")
    for action in actions:
        kind = getattr(action, "_typehint", None)
        if kind is None or action.default is None or _takes_none(kind) or action.dest not in config:
            continue
        if config[action.dest] is None:
            raise ValueError(f"{action.dest} {_NO_VALUE}")


def _takes_none(kind: Any) -> bool:
    return any(word in str(kind) for word in ("None", "Optional", "Any"))
