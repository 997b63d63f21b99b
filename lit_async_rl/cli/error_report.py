"""Errors of the command line: one line that names the setting, instead of a traceback or the usage text."""

from __future__ import annotations

import ast
import inspect
import os
import pkgutil
import re
import sys
import traceback
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import lightning.pytorch.callbacks
import lightning.pytorch.loggers
import torch
from jsonargparse import Namespace
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.cli import LightningArgumentParser

import lit_async_rl
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
from lit_async_rl.utils.checks import closest, meant
from lit_async_rl.utils.config_files import without_base

# -- Suggestions for a Python file given where a setting expects the dotted path of a function or a class -------------


def meant_in_file(value: str, is_class: bool) -> str | None:
    """How to name what is in a file, as the end of a message; None if `value` is no file.

    Args:
        value: as it was written: `my_rewards.py`, `folder/my_rewards.py:judge`, or `my_rewards` without a function.
        is_class: whether a class is expected; otherwise a function or a class.
    """
    match = re.fullmatch(r"([\w./-]+?)(\.py(?=$|[.:]))?(?:[.:](\w+))?", value)
    if match is None:
        return None
    path = Path(f"{match[1]}.py")
    name = match[3]
    if not (match[2] or ":" in value or (name is None and path.is_file())):
        return None
    missing = "" if path.is_file() else f"; there is no file {path}"
    module = ".".join(path.with_suffix("").parts)
    known = name or next(iter(_defined(path, is_class)), None)
    what, name = ("class", known or "MyClass") if is_class else ("function", known or "my_function")
    if path.is_absolute() or ".." in path.parts:
        return f": write {path.stem}.{name}, and run in {path.parent} or set PYTHONPATH={path.parent}{missing}"
    if "-" in module:
        return f": rename the file, Python imports no {module}, and write {module.replace('-', '_')}.{name}{missing}"
    return f"; did you mean {module}.{name}?" if known else f": name a {what} in it, {module}.{name}{missing}"


def _defined(path: Path, is_class: bool) -> list[str]:
    """Public functions or classes of a file, in their order; none if it cannot be read."""
    try:
        body = ast.parse(path.read_text()).body
    except (OSError, SyntaxError, ValueError):
        return []
    kinds = (ast.ClassDef,) if is_class else (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    return [node.name for node in body if isinstance(node, kinds) and not node.name.startswith("_")]


# -- One sentence for an error of jsonargparse: the setting, what it must be, what it is, and what may have been meant


USUAL_NAMES = {  # of other programs
    "lr": "model.learning_rate",
    "batch_size": "data.groups_per_step",
    "seed": "seed_everything",
    "resume": "ckpt_path",
    "checkpoint": "ckpt_path",
}
REWARDS = ("exact_match", "share_correct", "IsolatedReward", "MathVerify")
OF_A_CLASS = ("class_path", "init_args")
MOST_LISTED = 12
PROMPT_FILES = {"jsonl": "JsonlPrompts", "parquet": "ParquetPrompts"}
NOISE = re.compile(
    r"(- )?(Does not validate against any of the Union subtypes|Subtypes: .*|Errors:|Given value type: .*"
    r"|Given value: .*|Expected a <class 'NoneType'>.*|Expected a path but .* either not accessible or invalid"
    r"|Not a valid subclass of .*|Subclass types expect one of:|a class path \(str\)|a dict with(out)? .*)"
)


def explain(message: str, settings: Iterable[str]) -> str:
    """Message of jsonargparse without the errors of each type of a union, with a suggestion.

    Args:
        message: of the parser.
        settings: full names of all settings.
    """
    known = list(settings)
    if found := _no_such_setting(message):
        return f"there is no setting {found}{_meant_setting(found, known)}"
    if match := re.match(r"argument \S+ --> (\S+):", message):
        return f"{match[1]} cannot be given here: it follows model.model"
    if "model.model" in message and message.rstrip().endswith("None"):
        return "model.model is not set: name a model, or a file that does (--config configs/quickstart.yaml)"
    if match := re.match(r"Unexpected config: (\w+):\s*$", message):
        return f"{match[1]} is empty in a configuration file: give it a value, or leave it out"
    key = ".".join(re.findall(r'Parser key "([^"]+)":', message))
    for rule in (_python_file, _unknown_argument, _missing_arguments, _unknown_class, _wrong_type):
        if key and (said := rule(key, message)):
            return said
    return _shortened(message)


def _no_such_setting(message: str) -> str | None:
    if match := re.match(r"(?i)unrecognized arguments: (\S+)", message):
        return match[1].lstrip("-").split("=")[0]
    if match := re.match(r"Group '(\S+)' does not accept option '(\S+)'", message):
        return f"{match[1]}.{match[2]}"
    if match := re.fullmatch(r"Option '(\S+)' is not accepted\s*", message):
        return match[1]
    return None


def _meant_setting(name: str, known: list[str]) -> str:
    if re.search(r"\.(ya?ml|json)$", name):
        return f"; did you mean --config {name}?"
    last = name.rpartition(".")[2]
    if last in USUAL_NAMES:
        return f"; did you mean {USUAL_NAMES[last]}?"
    if close := explain_meant(name, known):
        return close
    ends = [full for full in known if full.rpartition(".")[2] == last] or [
        full for full in known if full.startswith(name)
    ]
    return f"; did you mean {ends[0]}?" if ends else ""


def explain_meant(name: str, known: Iterable[str]) -> str:
    """`; did you mean ...?` where a known name is close; of dotted names the last part counts, too."""
    by_name = {full.lower(): full for full in known}
    by_name |= {_last(full): by_name[full] for full in list(by_name) if _last(full) not in by_name and "." not in name}
    close = closest(name, by_name, cutoff=0.7)
    return f"; did you mean {by_name[close]}?" if close else ""


def _unknown_argument(key: str, message: str) -> str | None:
    """An argument that the class does not have, in the wrong place, or of a class that is not chosen."""
    if "Option 'class_path' is not accepted" in message and (match := re.search(r"Given value: (\{.*\})", message)):
        beside = ", ".join(one for one in re.findall(r"'(\w+)':", match[1]) if one not in OF_A_CLASS)
        return f"{key}: {beside} must be in init_args, beside class_path: {{class_path: ..., init_args: {{...}}}}"
    nested = re.search(r"NestedArg\(key='([^']+)'", message)
    first = message[message.find("given class_path") :]  # of a union, the class that was named; then its bases
    chain = r"(?:given class_path '([\w.]+)':\s+(?:Parser key \"\w+\":\s+Problem with )?)+"
    if match := re.match(chain + r"Option '(\w+)' is not accepted", first):
        parameters = inspect.signature(pkgutil.resolve_name(match[1])).parameters
        return f"there is no setting {key}.{match[2]} of {_last(match[1])}{meant(match[2], parameters)}"
    if nested and "is abstract" in message:
        return f"{key}.{nested[1]} is a setting of no class yet: choose one first, --{key} NAME --{key}.{nested[1]} ..."
    if nested and "Dict must include a class_path" in message:
        return f"there is no setting {key}.{nested[1]}: {key} is a function"
    return None


def _missing_arguments(key: str, message: str) -> str | None:
    match = re.search(r"the following arguments are required: ([\w, ]+)", message)
    where = re.search(r"class_path '([\w.]+)'|Import path ([\w.]+)|class_path='([\w.]+)'", message)
    if match is None or where is None:
        return None
    needed = ", ".join(f"{key}.{name.strip()}" for name in match[1].split(","))
    return f"{key}: {_last(next(filter(None, where.groups())))} needs {needed}"


def _python_file(key: str, message: str) -> str | None:
    """A file instead of the dotted path of what is in it."""
    value = _given(message)
    if value is None or not re.search(r"import|No module named|there is no|attribute", message):
        return None
    kind = _classes_for(key, message)[0]
    explain_meant = meant_in_file(value, is_class="function" not in kind)
    return f"{key} must be {kind}, got {value}{meant}" if explain_meant else None


def _unknown_class(key: str, message: str) -> str | None:
    """A name that is no class, or one of another kind."""
    value = _given(message)
    missing = re.search(r"(?:module '([\w.]+)' has no|No ([\w.]+)) attribute '?(\w+)", message)
    if missing:
        module = missing[1] or missing[2]
        return f"{key}: there is no {missing[3]} in {module}{meant(missing[3], dir(pkgutil.resolve_name(module)))}"
    if match := re.search(r"No module named '([\w.]+)'", message):
        kind = PROMPT_FILES.get((value or "").rpartition(".")[2])
        hint = f"; for a file: --{key} {kind} --{key}.path {value}" if kind else ""
        return f"{key}={value}: there is no module {match[1]}{hint}"
    if "is not allowed, denied" in message:
        return f"{key} must not be {value}: its module is on the deny list of jsonargparse"
    if re.search(r"Unexpected import object", message):
        return f"{key} must be {_classes_for(key, message)[0]}, got {value}, which is neither"
    if "Spaces not allowed in keys" in message:  # code, which YAML reads as a dictionary
        return f"{key} must be {_classes_for(key, message)[0]}, got {value}"
    unknown = re.search(r"Expected a dot import path string: (.*)|Unexpected import path format: (.*)", message)
    if unknown is None and "does not correspond to a subclass" not in message:
        return None
    name = (unknown and (unknown[1] or unknown[2])) or value
    kind_name, names = _classes_for(key, message)
    close = explain_meant(_last(str(name)), names)
    listed = f"; there are {', '.join(names)}" if not close and len(names) <= MOST_LISTED else ""
    return f"{key} must be {kind_name}, got {name}{close or listed}"


def _classes_for(key: str, message: str) -> tuple[str, list[str]]:
    """Name of the kind of class that a setting expects, and the names that it may have."""
    if key == "data.reward":
        return "the dotted path of a function or a class", [f"lit_async_rl.rewards.{one}" for one in REWARDS]
    if key == "model.optimizer":
        return "an optimizer class", [name for name, one in vars(torch.optim).items() if inspect.isclass(one)]
    public = {name: getattr(lit_async_rl, name) for name in lit_async_rl.__all__}
    for module in (lightning.pytorch.callbacks, lightning.pytorch.loggers, torch.optim, torch.optim.lr_scheduler):
        public |= {name: one for name, one in vars(module).items() if inspect.isclass(one)}
    for base in _expected(key, message):
        kinds = [name for name, one in public.items() if inspect.isclass(one) and _is_kind(one, base)]
        return f"{'an' if base.__name__[0] in 'AEIO' else 'a'} {base.__name__}", kinds or list(public)
    return "a class", list(public)


def _expected(key: str, message: str) -> list[type]:
    """Classes of which a setting may be; of a class's argument, those of its annotation."""
    owners = re.findall(r"given class_path '([\w.]+)':\s+Parser key \"(\w+)\":", message)
    if owners and key.endswith(f".{owners[-1][1]}"):
        hint = typing.get_type_hints(pkgutil.resolve_name(owners[-1][0]).__init__).get(owners[-1][1])
        if found := [one for one in _parts(hint) if inspect.isclass(one) and one not in (list, tuple, str, type(None))]:
            return found
    paths = re.findall(r"[\w.]+\.[A-Z]\w+", "".join(re.findall(r"Subtypes: (.*)", message)[-1:]))
    return [one for path in paths if inspect.isclass(one := pkgutil.resolve_name(path))]  # none: typing.Union


def _parts(hint: Any) -> Iterator[Any]:
    """A type, those of which it is a union, and those of its items."""
    arguments = typing.get_args(hint)
    yield from [part for argument in arguments for part in _parts(argument)] or [hint]


def _is_kind(one: type, base: type) -> bool:
    try:
        return issubclass(one, base) and not (one is base and (inspect.isabstract(one) or one.__subclasses__()))
    except TypeError:  # a protocol with data
        return False


def _wrong_type(key: str, message: str) -> str | None:
    kinds = [kind for kind in re.findall(r"Expected a <class '(\w+)'>", message) if kind != "NoneType"]
    choices = [
        one.strip() for text in re.findall(r"Expected a typing\.Literal\[(.*?)\]", message) for one in text.split(",")
    ]
    if not (kinds or choices) or "does not correspond" in message:
        return None
    rule = (
        f"one of {', '.join(dict.fromkeys(choices))}"
        if choices
        else f"of type {' or '.join(dict.fromkeys(kinds)).replace('tuple', 'list')}"
    )
    return f"{key} must be {rule}, got {_given(message)}"


def _given(message: str) -> str | None:
    """The value that was refused, as it was written."""
    values = re.findall(r"(?:Given value:|Got value:) (.*)", message)
    nested = re.search(r"NestedArg\(key='[^']+', val='?(.*?)'?\)\s*$", message)
    plain = [value for value in values if not value.startswith(("NestedArg(", "Namespace("))]
    classes = re.findall(r"given class_path '([\w.]+)':", message)
    if len(classes) > 1 and plain and plain[0].startswith("{'class_path'"):  # one of its arguments
        return str(classes[-1])
    return plain[0].strip() if plain else nested[1] if nested else None


def _last(path: str) -> str:
    return path.rpartition(".")[2]


def _shortened(message: str) -> str:
    lines = [line.strip() for line in message.splitlines()]
    kept = [line.removeprefix("- ") for line in dict.fromkeys(lines) if line and not NOISE.fullmatch(line)]
    text = re.sub(r'^Parser key "([^"]+)":', r"\1:", " ".join(kept))
    text = re.sub(r"Type \S*Callable\[.*\] expects a function or a callable class: ", "", text)
    text = re.sub(r" Got value: Namespace\(.*\)$", "", text)
    return re.sub(r"Parser key \"(\w+)\":", r"\1:", text)


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

    def parse_string(self, content: str, path: str | os.PathLike[str] = "", *args: Any, **kwargs: Any) -> Namespace:
        """Parses a configuration; a file's `base` is left out: `files_first` has put those files before it."""
        return super().parse_string(without_base(content) if path else content, path, *args, **kwargs)

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
