"""Writes `lit_async_rl/api/fit_settings.py`: the keyword arguments of `fit` with their types, for editors.

They are those of `PolicyModule`, `RolloutDataModule` and Lightning's `Trainer`, as annotated there. Run it after one of
the three has changed; `tests/api/test_fit_settings.py` compares the file with what it would write.
"""

from __future__ import annotations

import ast
import builtins
import importlib
import inspect
import subprocess
import sys
from pathlib import Path

from lightning.pytorch import Trainer

from lit_async_rl.data.module import RolloutDataModule
from lit_async_rl.training.module import PolicyModule

TARGET = Path(__file__).parents[1] / "lit_async_rl" / "api" / "fit_settings.py"
ALSO = {  # what `fit` takes besides, and makes objects of
    "sampling": "Mapping[str, Any]",
    "scoring": "Mapping[str, Any]",
    "limits": "Mapping[str, Any]",
    "validation": "Mapping[str, Any] | Records",
    "lora": "Mapping[str, Any] | peft.LoraConfig",
    "sharding": "Mapping[str, Any]",
}
OWN = ("model", "prompts", "reward", "max_steps")  # arguments of `fit` itself
DEFAULTS = "Mapping[str, Callback | None] | None"
HEAD = '''\
"""Keyword arguments of `fit` with their types, for editors and type checkers; nothing imports this when it runs.

Written by `scripts/write_fit_settings.py` from the classes that have them; not to be edited.
"""

# ruff: noqa: UP007, UP045  (as Lightning writes its annotations)

from __future__ import annotations

{imports}


class TrainerSettings(TypedDict, total=False):
    """Of `lightning.pytorch.Trainer`, and `defaults` of this package's."""

{trainer}


class DataSettings(TrainerSettings, total=False):
    """Of `RolloutDataModule`, too."""

{data}


class FitSettings(DataSettings, total=False):
    """Of `PolicyModule`, too."""

{model}
'''


def annotations_of(kind: type) -> tuple[dict[str, str], dict[str, str]]:
    """(annotations of the constructor's arguments as text, the module that each name in them comes from)."""
    module = importlib.import_module(kind.__module__)
    tree = ast.parse(inspect.getsource(module))
    places = {
        alias.asname or alias.name: node.module
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module
        for alias in node.names
    }
    body = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == kind.__name__)
    init = next(node for node in body.body if isinstance(node, ast.FunctionDef) and node.name == "__init__")
    arguments = [one for one in (*init.args.args, *init.args.kwonlyargs) if one.annotation is not None]
    found = {one.arg: ast.unparse(one.annotation) for one in arguments if one.arg not in OWN}
    names = {name.id for one in arguments for name in ast.walk(one.annotation) if isinstance(name, ast.Name)}
    return found, {name: places.get(name, kind.__module__) for name in names if not hasattr(builtins, name)}


def text() -> str:
    """The file's content."""
    sections = {}
    places = {
        "TypedDict": "typing",
        "TYPE_CHECKING": "typing",
        "Any": "typing",
        "Mapping": "collections.abc",
        "Callback": "lightning.pytorch",
    }
    places["Records"] = "lit_async_rl.prompts.records"
    used = ""
    for section, kind in (("trainer", Trainer), ("data", RolloutDataModule), ("model", PolicyModule)):
        found, names = annotations_of(kind)
        places = names | places
        if section == "trainer":
            found["defaults"] = DEFAULTS
        for name in found.keys() & ALSO.keys():
            own = found[name].removesuffix(" | None")
            found[name] = f"{own} | {ALSO[name]}" + (" | None" if own != found[name] else "")
        sections[section] = "\n".join(f"    {name}: {kind}" for name, kind in found.items())
        used += sections[section]
    words = {node.id for node in ast.walk(ast.parse(HEAD.format(imports="", **sections))) if isinstance(node, ast.Name)}
    words.add("TYPE_CHECKING")
    lines = [f"from {module} import {name}" for name, module in places.items() if name in words]
    imports = "\n".join([*sorted(lines), "if TYPE_CHECKING:", "    import peft"])
    made = HEAD.format(imports=imports, **sections)
    for command in (["check", "--select", "I", "--fix", "--quiet"], ["format", "--quiet"]):
        ruff = [sys.executable, "-m", "ruff", *command, "--stdin-filename", str(TARGET), "-"]
        made = subprocess.run(ruff, input=made, capture_output=True, text=True, check=True).stdout
    return made


if __name__ == "__main__":
    TARGET.write_text(text())
