"""Errors in settings: one line that names the setting, instead of jsonargparse's messages or the usage text."""

from __future__ import annotations

import ast
import collections.abc
import importlib.util
import inspect
import logging
import os
import pkgutil
import re
import sys
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import jsonargparse._typehints
import lightning.pytorch.callbacks
import lightning.pytorch.loggers
import torch
from jsonargparse import Namespace
from lightning.pytorch.cli import LightningArgumentParser

import lit_async_rl
from lit_async_rl.cli.config_checks import expand_home_folders, name_prompt_classes, write_out_rewards
from lit_async_rl.cli.one_line_errors import explains_itself, sentence, shorten
from lit_async_rl.errors import describe
from lit_async_rl.prompts.records import Records
from lit_async_rl.prompts.sources import FILE_SOURCES
from lit_async_rl.utils.checks import closest, did_you_mean, meant, similar
from lit_async_rl.utils.config_files import own_settings
from lit_async_rl.utils.public_names import public
from lit_async_rl.utils.user_code import wants_traceback

log = logging.getLogger(__name__)

NEGATIVE_NUMBER = re.compile(r"^-(\d+|\d*\.\d+)([eE][-+]?\d+)?$")  # argparse takes `-1e-4` for an option
COMPARED_TYPES = (str, int, float, bool)


# `Trainer(limit_val_batches=1)` is one batch, 1.0 all of them. jsonargparse tries the types of a union in the order in
# which they are written, but `typing` keeps the order of the first equal union that any module has made.
def _integers_first(tried: Callable[[Any], float], subtype: Any) -> float:
    return -0.5 if subtype is int else float(tried(subtype))


jsonargparse._typehints.union_subtype_sort_key = partial(  # type: ignore[assignment]
    _integers_first, jsonargparse._typehints.union_subtype_sort_key
)


class Parser(LightningArgumentParser):
    """Lightning's parser with one-line errors, a suggested setting, and no usage text."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._negative_number_matcher = NEGATIVE_NUMBER

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Ends the process with status 2; parsers of nested values raise instead, as jsonargparse does."""
        if not self.exit_on_error or wants_traceback():
            super().error(message, ex)
        types = {action.dest: getattr(action, "_typehint", None) for action in self._actions}
        sys.stderr.write(f"error: {shorten(explain(message, types))}\n")
        self.exit(2)

    def parse_string(self, content: str, path: str | os.PathLike[str] = "", *args: Any, **kwargs: Any) -> Namespace:
        """Parses a configuration without a file's `base`: `files_first` has put those files before it.

        File names of prompts get the class that reads them, several rewards the one that combines them, and paths the
        home folder for `~/`.
        """
        if path:
            content = own_settings(content, expand_home_folders, name_prompt_classes, write_out_rewards)
        return super().parse_string(content, path, *args, **kwargs)

    def instantiate_classes(self, cfg: Any, **kwargs: Any) -> Any:
        """Makes all objects; raises a constructor's error as it is, or with the setting that chose the class.

        Raises:
            ValueError: a constructor raised something that no setting is known to cause.
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
            # jsonargparse wraps the error in a message about each type of a union
            if raised and _on_one_line(raised[-1]) in _on_one_line(error):
                raise raised[-1] from None
            raise


def _with_setting(error: Exception, where: str, kind: type) -> Exception:
    """A constructor's error, with the setting that chose its class where the message does not name it."""
    if explains_itself(error):
        message = sentence(error)
        named = (where.rpartition(".")[0], where, f"{kind.__name__}.")
        if not where or any(name and message.startswith(name) for name in named):
            return error
        return ValueError(f"{where}: {message}").with_traceback(error.__traceback__)
    return ValueError(f"{where}: {kind.__name__} cannot be made: {describe(error)}").with_traceback(error.__traceback__)


def _on_one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def find_setting(config: Any, class_path: str, arguments: Mapping[str, Any], setting: str = "") -> str:
    """Full name of the setting with such a class and arguments as its value; empty if there is none.

    Args:
        config: as parsed.
        class_path: of the class.
        arguments: of its constructor; objects are not compared.
        setting: full name of `config`.
    """
    config = vars(config) if isinstance(config, Namespace) else config
    if isinstance(config, Mapping):
        if config.get("class_path") and _same_class(config["class_path"], class_path):
            given = config.get("init_args")
            given = vars(given) if isinstance(given, Namespace) else given or {}
            compared = {name: value for name, value in arguments.items() if isinstance(value, COMPARED_TYPES)}
            if all(given.get(name, value) == value for name, value in compared.items()):
                return setting
        pairs = [(name if not setting else f"{setting}.{name}", value) for name, value in config.items()]
    else:
        pairs = [(setting, value) for value in config] if isinstance(config, list) else []
    return next(
        (found for name, value in pairs if (found := find_setting(value, class_path, arguments, setting=name))), ""
    )


def _same_class(path: str, class_path: str) -> bool:
    """Whether both paths name one class, which another module may re-export."""
    found = pkgutil.resolve_name(path)
    return f"{found.__module__}.{found.__qualname__}" == class_path


# -- One sentence for a message of jsonargparse ------------------------------------------------------------------------


USUAL_NAMES = {  # in other programs, and here
    "lr": "model.learning_rate",
    "batch_size": "data.groups_per_step",
    "train_batch_size": "data.groups_per_step",
    "seed": "seed_everything",
    "resume": "ckpt_path",
    "checkpoint": "ckpt_path",
    "resume_from_checkpoint": "ckpt_path",
    "num_generations": "data.group_size",
    "n": "data.group_size",
    "max_new_tokens": "data.sampling.max_tokens",
    "max_length": "data.sampling.max_tokens",
    "max_completion_length": "data.sampling.max_tokens",
    "beta": "model.kl_coefficient",
    "kl_coef": "model.kl_coefficient",
    "steps": "trainer.max_steps",
    "epochs": "trainer.max_epochs",
    "num_train_epochs": "trainer.max_epochs",
    "gpus": "trainer.devices",
    "num_gpus": "trainer.devices",
    "output_dir": "trainer.logger.save_dir",
    "model_name_or_path": "model.model",
    "dataset": "data.prompts",
    "dataset_name": "data.prompts",
    "reward_funcs": "data.reward",
    "total_training_steps": "trainer.max_steps",
    "gradient_accumulation_steps": "data.micro_batches_per_step",
    "checkpoint_callback": "trainer.enable_checkpointing",
    "progress_bar_refresh_rate": "trainer.enable_progress_bar",
    "use_vllm": "data.engine",
    "wandb": "trainer.logger",
    "report_to": "trainer.logger",
    "bf16": "trainer.precision",
    "fp16": "trainer.precision",
    "adv_estimator": "data.advantage",
}
USUAL_CLASSES = {  # names of methods, in lower case, and the class that stands for them, by setting
    "model.loss": {"grpo": "PPOClip", "dapo": "PPOClip", "ppo": "PPOClip", "rloo": "Reinforce"},
    "model.correction": {"tis": "TokenTruncatedIS"},
    "data.advantage": {"grpo": "GroupMeanStd", "rloo": "LeaveOneOut"},
}
SYNONYMS = (  # names of one argument in different classes
    {"lr", "learning_rate", "rate"},
    {"weight_decay", "wd", "decay"},
    {"rank", "r"},
    {"path", "file", "filename", "data_files"},
    {"save_dir", "folder", "dir", "out"},
    {"prompt_field", "prompt_column", "prompt_key", "question_field"},
    {"answer_field", "answer_column", "answer_key", "solution_field", "target_field"},
)
REWARDS = ("exact_match", "share_correct", "IsolatedReward", "MathVerify")
MAX_LISTED_CLASSES = 12


def explain(message: str, types: Mapping[str, Any]) -> str:
    """One sentence for a message of jsonargparse: setting, allowed values, value, suggestion.

    Unknown messages keep the words of jsonargparse, without what it tried for each type of a union.
    `tests/cli/test_error_report.py` fails when the words change that this looks for.

    Args:
        message: of the parser.
        types: of all settings by their full names; None for groups of settings.
    """
    if match := re.match(r"(?i)unrecognized arguments: (\S+)|Option '(\S+)' is not accepted\s*$", message):
        name = (match[1] or match[2]).lstrip("-").split("=")[0]
        return f"there is no setting {name}{_suggested_setting(name, types)}"
    if match := re.match(r"Group '(\S+)' does not accept option '(\S+)'", message):
        name = f"{match[1]}.{match[2]}"
        return f"there is no setting {name}{_suggested_setting(name, types)}"
    if match := re.match(r"argument \S+ --> (\S+):", message):
        return f"{match[1]} cannot be given here: it follows model.model"
    if match := re.match(r"Unexpected config: (\w+):\s*$", message):
        return f"{match[1]} is empty in a configuration file: give it a value, or leave it out"
    refusals = _refusals(message)
    if not refusals:
        return message
    first = refusals[0]
    if first.setting == "model.model" and first.value == "None":
        return "model.model is not set: name a model, or a file that does (--config configs/quickstart.yaml)"
    explained = None
    try:
        hint = _type_of(first, types)
        explained = (
            _missing_arguments(refusals, message)
            or _unknown_argument(_of_an_option(refusals) or first, hint)
            or _wrong_type(refusals)
            or _wrong_class(first, hint)
        )
    except Exception as error:  # annotations or imports of a user's class: a missing suggestion must not hide the error
        log.debug("no explanation of %s: %s", first.setting, describe(error))
    return explained or f"{first.setting}: {first.reason}"


@dataclass
class _Refusal:
    """Why jsonargparse refuses a value for one type of a setting.

    Attributes:
        keys: of the setting: its full name, then names of arguments.
        owner: class path of the class whose argument the last key is, if it is one.
        chosen: class path that was given as the value.
        reason: in the words of jsonargparse.
        value: as text; None if the message does not repeat it.
        argument: of the value's class, set by its own flag.
        made_by: class path of a value that may be a function, too; the base's if none was chosen.
    """

    keys: list[str]
    owner: str | None
    chosen: str | None
    reason: str
    value: str | None
    argument: str | None = None
    made_by: str | None = None

    @property
    def setting(self) -> str:
        """Full name of the setting."""
        return ".".join(self.keys)


NODE = re.compile(r"(?:Parser key \"(?P<key>[^\"]+)\"|Problem with given class_path '(?P<path>[^']+)'):\s*(?P<rest>.*)")
VALUE = re.compile(r"(?:path string: |path format: |Got value: (?!Namespace\())(.*)")
NESTED_VALUE = re.compile(r"NestedArg\(key='([^']+)', val='?(.*?)'?\)$")
NO_REASON = re.compile(
    r"Does not validate against any of the Union subtypes|Subtypes: .*|Errors:|Given value type: .*"
    r"|Expected a <class 'NoneType'>.*|Expected a path but .* either not accessible or invalid"
    r"|Not a valid subclass of .*|Subclass types expect one of:|a class path \(str\)|a dict with(out)? .*"
)


def _refusals(message: str) -> list[_Refusal]:
    """The leaves of a message, a tree by indentation: settings, classes, and types of a union."""
    found: list[_Refusal] = []
    above: list[tuple[int, str | None, str | None]] = []  # indentation, setting, class path
    for line in message.splitlines():
        text = line.strip().removeprefix("- ")
        indentation = len(line) - len(line.lstrip())
        if not text:
            continue
        while above and above[-1][0] >= indentation:
            above.pop()
        text = re.sub(r"^Type .* expects a function or a callable class: ", "", text)
        made_by = re.search(r" Got value: Namespace\(class_path='([\w.]+)'", text)
        text = re.sub(r"\.? Got value: Namespace\(.*\)$", "", text)  # the surrounding settings
        if node := NODE.match(text):
            above.append((indentation, node["key"], node["path"]))
            text = node["rest"]
        if text.startswith("Given value: "):
            value = text.removeprefix("Given value: ")
            for refusal in found:
                if refusal.value is None:
                    nested = NESTED_VALUE.match(value)
                    refusal.value = nested[2] if nested else value
                    is_argument = nested and nested[1] != "class_path" and len(refusal.keys) == 1
                    refusal.argument = nested[1] if nested and is_argument else None
        elif text and not NO_REASON.fullmatch(text) and above:
            last_key = max((n for n, (_, key, _) in enumerate(above) if key), default=0)
            value_found = VALUE.search(text)
            found.append(
                _Refusal(
                    keys=[key for _, key, _ in above if key],
                    owner=next((path for _, _, path in reversed(above[:last_key]) if path), None),
                    chosen=next((path for _, _, path in above[last_key:] if path), None),
                    reason=text,
                    value=value_found[1].strip() if value_found else None,
                    made_by=made_by[1] if made_by else None,
                )
            )
    return found


def _type_of(refusal: _Refusal, types: Mapping[str, Any]) -> Any:
    """Annotation of a setting, or of a class's argument."""
    if refusal.owner is None:
        return types.get(refusal.setting)
    return typing.get_type_hints(pkgutil.resolve_name(refusal.owner).__init__).get(refusal.keys[-1])


def _missing_arguments(refusals: Iterable[_Refusal], message: str) -> str | None:
    for refusal in refusals:
        if match := re.search(r"the following arguments are required: ([\w, ]+)", refusal.reason):
            path = re.search(r"class_path='([\w.]+)'", message)
            name = _last(refusal.chosen or (path[1] if path else "it"))
            needed = ", ".join(f"{refusal.setting}.{argument.strip()}" for argument in match[1].split(","))
            return f"{refusal.setting}: {name} needs {needed}"
    return None


def _of_an_option(refusals: Sequence[_Refusal]) -> _Refusal | None:
    """The refusal by a union's types that names an argument and the class without it."""
    return next((one for one in refusals if one.made_by and one.reason.startswith("Option '")), None)


def _unknown_argument(refusal: _Refusal, hint: Any) -> str | None:
    """An argument that the class lacks, that is in the wrong place, or that is of no class yet."""
    match = re.match(r"Option '(\S+)' is not accepted", refusal.reason)
    if match and match[1] == "class_path":
        names = dict.fromkeys(re.findall(r"'(\w+)':", refusal.value or ""))
        beside = ", ".join(name for name in names if name not in ("class_path", "init_args"))
        form = "{class_path: ..., init_args: {...}}"
        return f"{refusal.setting}: {beside} must be in init_args, beside class_path: {form}"
    made_by = refusal.made_by
    if made_by and (made_by.startswith("typing.") or pkgutil.resolve_name(made_by) in set(classes_in(hint))):
        made_by = None  # that of the annotation
    chosen = refusal.chosen or made_by
    if match and chosen:
        kind = pkgutil.resolve_name(chosen)
        parameters = inspect.signature(kind).parameters
        same = next((name for names in SYNONYMS if match[1] in names for name in parameters if name in names), None)
        suggestion = f"; did you mean {same}?" if same else meant(match[1], parameters)
        return f"there is no setting {refusal.setting}.{match[1]} of {_last(chosen)}{suggestion}"
    if refusal.argument is None or refusal.chosen:
        return None
    name = f"{refusal.setting}.{refusal.argument}"
    if list(classes_in(hint)):
        return f"{name} is a setting of no class yet: choose one first, --{refusal.setting} NAME --{name} ..."
    return f"there is no setting {name}: {refusal.setting} is a function"


def _wrong_type(refusals: Sequence[_Refusal]) -> str | None:
    """A value that is no number, list or choice."""
    same = [one.reason for one in refusals if one.keys == refusals[0].keys]  # not those of the enclosing setting
    kinds = [re.match(r"Expected a (?:<class '(\w+)'>|typing\.Literal\[(.*?)\])", reason) for reason in same]
    if kinds[0] is None:
        return None
    types = dict.fromkeys(kind[1].replace("tuple", "list") for kind in kinds if kind and kind[1])
    choices = dict.fromkeys(kind[2] for kind in kinds if kind and kind[2])
    rule = f"one of {', '.join(choices)}" if choices else f"of type {' or '.join(types)}"
    return f"{refusals[0].setting} must be {rule}, got {refusals[0].value}"


def _wrong_class(refusal: _Refusal, hint: Any) -> str | None:
    """A file, a name of no class, or a class of another kind, where a class or function is expected."""
    value = refusal.chosen or refusal.value
    bases = list(classes_in(hint))
    takes_functions = "Callable" in str(hint)
    if value is None or not (bases or takes_functions):
        return None
    known = known_names(bases)
    kind = _with_article(bases[0].__name__) if bases else "the dotted path of a function or a class"
    if Records in bases:
        kind = f"a file ({', '.join(FILE_SOURCES)}), a dataset of the Hugging Face hub (org/name) or a class of prompts"
        if value[:1] in "[{":
            return f"{refusal.setting} must be {kind}, got {value}: write records into a file, one JSON object a line"
    rule = f"{refusal.setting} must be {kind}, got {value}"
    if suggestion := _suggested_path(value, is_class=bool(bases)):
        return f"{rule}{suggestion}"
    if not re.fullmatch(r"\w+(\.\w+)+", value):
        usual = USUAL_CLASSES.get(refusal.setting, {}).get(value.lower())
        close = f"; did you mean {usual}?" if usual else _suggested_setting(_last(value), known)
        listed = f"; there are {', '.join(known)}" if not close and 0 < len(known) <= MAX_LISTED_CLASSES else ""
        return f"{rule}{close or listed}"
    top, *names = value.split(".")
    is_file = len(names) == 1 and names[0].islower()  # of another kind, more likely than a class
    if Records in bases and is_file and importlib.util.find_spec(top) is None:
        return rule
    if top not in sys.modules and importlib.util.find_spec(top) is None:
        return f"{refusal.setting}={value}: there is no module {top}"
    found: Any = sys.modules.get(top)  # jsonargparse has imported it, unless that failed or is denied
    for name in names:
        if found is not None and not hasattr(found, name):
            names_there = lit_async_rl.NAMES if found is lit_async_rl else dir(found)
            return f"{refusal.setting}: there is no {name} in {found.__name__}{meant(name, names_there)}"
        found = getattr(found, name, None)
    return rule if found is not None and ((bases and not takes_functions) or not callable(found)) else None


def classes_in(hint: Any) -> Iterator[type]:
    """Classes of an annotation: in a union, of a list's items, and of what a callable makes."""
    if arguments := typing.get_args(hint):
        is_callable = typing.get_origin(hint) is collections.abc.Callable
        for argument in arguments[-1:] if is_callable else arguments:
            yield from classes_in(argument)
    elif inspect.isclass(hint) and hint.__module__.partition(".")[0] in ("lit_async_rl", "lightning", "torch"):
        yield hint


def known_names(bases: Sequence[type]) -> list[str]:
    """Allowed class names for a setting with one of some base classes; for rewards, dotted paths."""
    if not bases:
        return [f"lit_async_rl.rewards.{name}" for name in REWARDS]
    found = {name: public(name) for name in lit_async_rl.NAMES}
    for module in (lightning.pytorch.callbacks, lightning.pytorch.loggers, torch.optim, torch.optim.lr_scheduler):
        found |= vars(module)
    return [name for name, one in found.items() if inspect.isclass(one) and _is_kind(one, bases[0])]


def _is_kind(found: type, base: type) -> bool:
    if found is base and (inspect.isabstract(found) or (found.__subclasses__() and not is_dataclass(found))):
        return False  # a base of those that can be chosen
    try:
        return issubclass(found, base)
    except TypeError:  # a protocol with data
        return False


def _with_article(name: str) -> str:
    return f"{'an' if name[0] in 'AEIO' else 'a'} {name}"


def _last(path: str) -> str:
    return path.rpartition(".")[2]


def _suggested_setting(name: str, known: Iterable[str]) -> str:
    """`; did you mean ...?` where a known name is similar.

    Tries names of the same group, then those with the same last part, a misspelt group, and longer names.
    """
    if re.search(r"\.(ya?ml|json)$", name):
        return f"; did you mean --config {name}?"
    group, _, last = name.rpartition(".")
    names = list(known)
    if (usual := USUAL_NAMES.get(last)) and any(usual.startswith(full) for full in names):
        return f"; did you mean {usual}?"
    parts: dict[str, str] = {}
    for full in names:
        if not group or full.rpartition(".")[0] == group:
            parts.setdefault(_last(full), full)
    ends = [full for full in names if _last(full) == last]
    whole = closest(name, names, cutoff=0.8)
    is_close = whole is not None and closest(last, [_last(whole)]) is not None
    begins = [full for full in names if full.startswith(name)]
    found = [parts[one] for one in similar(last, parts)] or ends[:1] or ([str(whole)] if is_close else begins[:1])
    return did_you_mean(found)


def _suggested_path(value: str, is_class: bool) -> str | None:
    """Dotted path of a function or class in a file, as the end of a message; None if it is no file.

    Args:
        value: as written: `my_rewards.py`, `folder/my_rewards.py:judge`, or `my_rewards` without a function.
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
    kind = "class" if is_class else "function"
    name = known or ("MyClass" if is_class else "my_function")
    if path.is_absolute() or ".." in path.parts:
        return f": write {path.stem}.{name}, and run in {path.parent} or set PYTHONPATH={path.parent}{missing}"
    if "-" in module:
        return f": rename the file, Python imports no {module}, and write {module.replace('-', '_')}.{name}{missing}"
    return f"; did you mean {module}.{name}?" if known else f": name a {kind} in it, {module}.{name}{missing}"


def _defined(path: Path, is_class: bool) -> list[str]:
    """Public functions or classes of a file, in order; none if it cannot be read."""
    try:
        body = ast.parse(path.read_text()).body
    except (OSError, SyntaxError, ValueError):
        return []
    kinds = (ast.ClassDef,) if is_class else (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    return [node.name for node in body if isinstance(node, kinds) and not node.name.startswith("_")]
