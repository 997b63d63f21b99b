"""Identities of rewards, environments, agents and filters: everything that determines their results.

Two identities are equal, in this process or another, only if the objects would give the same results. They include the
code of functions and classes with their bases, closures, defaults, the globals read, class attributes, the objects of
bound methods, and the values in an object, recursively. `docs/checkpoints.md` lists the exceptions. An identity names
values without such a form (a generator, an open file, a connection), and then equals no other.
"""

from __future__ import annotations

import copyreg
import dis
import functools
import hashlib
import inspect
import marshal
import os
import re
import secrets
import sys
from collections.abc import Iterable, Mapping
from importlib.machinery import PathFinder
from itertools import takewhile
from pathlib import Path
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from lit_async_rl.utils.elsewhere import Rebuildable, original_of

LIMIT_SETTINGS = ("timeout_s", "max_memory_gb", "latency_s", "max_batch_size", "max_concurrent")
OWN_PACKAGE = __name__.partition(".")[0]
MOVED = {  # modules by the names that they had when the first identities were saved
    "agents.calculator_agent": "tasks.calculator_agent",
    "agents.results": "agents.calls",
    **{f"judges.{name}": f"rewards.{name}" for name in ("judge", "judge_models", "judge_policy", "model")},
    "problem": "types",
    "prompts.records": "prompts.sources",
    "rewards.calls": "rewards.scorer",
    "rewards.reference_check": "rewards.references",
    "sampler_records": "types",
    "sandbox.code": "rewards.code",
    "sandbox.python_tool": "environments.python_tool",
}
UNKNOWN = ", and cannot be compared: "
PLAIN = (type(None), type(Ellipsis), bool, int, float, complex, str, bytes)
# Without influence on results: locks, and state of threads, event loops and connections.
WITHOUT_VALUE = ("_thread.lock", "_thread.RLock", "_thread._local", "weakref.ReferenceType", "ssl.SSLContext")
LARGE = 100  # containers of more items are digested as a whole where they hold nothing but plain values
MAX_SCRIPT_BYTES = 1 << 20
SHORT = 12  # hexadecimal digits of the digests that are shown
OF_EVERY_CLASS = re.compile(  # attributes that Python adds to a class
    "__(module|qualname|name|doc|dict|weakref|annotations|annotate\\w*|firstlineno|static_attributes|slots|parameters"
    "|orig_bases|abstractmethods|match_args|dataclass_fields|dataclass_params|hash|slotnames)__|_abc_\\w+"
)


def reward_identity(value: Any) -> str:
    """Name of a reward, environment, agent or filter, with digests of its settings and of its code.

    Settings are the arguments of a `functools.partial`, the defaults and closure of a function, and of an object the
    constructor's arguments, where known, and its present attributes. Limits of time and memory (`timeout_s` and the
    like), which do not change rewards, are excluded. Settings are digested because they may hold secret keys, and
    identities are stored in checkpoints and logged. Code is that of functions and classes, without comments, layout and
    docstrings, with class attributes and globals it refers to. Functions of this package have none, and its classes no
    attributes but the arguments: a release says if rewards change.
    """
    unknown: list[str] = []
    try:
        text = _described(_original(value), unknown)
    except Exception as error:  # nested too deeply, or a property of the user's that raises
        text = name_of(value)
        unknown.append(f"{text} ({type(error).__name__})")
    return text if not unknown else f"{text}{UNKNOWN}{', '.join(dict.fromkeys(unknown))}"


def without_code(identity: Any) -> Any:
    """An identity without the digests of code."""
    return re.sub(r" code [0-9a-f]{12}", "", identity) if isinstance(identity, str) else identity


def is_comparable(identity: Any) -> bool:
    """Whether an identity can be compared."""
    return not (isinstance(identity, str) and UNKNOWN in identity)


def digest_of(value: Any) -> str:
    """Digest of a value, the same in every process; random if it cannot be compared."""
    walk = _Walk([])
    walk.add(value, "")
    return walk.digest.hexdigest() if not walk.unknown else secrets.token_hex()


def name_of(value: Any) -> str:
    """Dotted name of a function or class, or of the class of another object."""
    owner = value if inspect.isroutine(value) or isinstance(value, type) else type(value)
    module = str(getattr(owner, "__module__", None))
    package, _, rest = module.partition(".")
    if package == OWN_PACKAGE:
        module = f"{package}.{MOVED.get(rest, rest)}"
    return f"{'__main__' if module == '__mp_main__' else module}.{owner.__qualname__}"


def _original(value: Any) -> Any:
    """Unwraps proxies of remote objects and functions wrapped by `functools.cache`."""
    value = original_of(value)
    is_cached = isinstance(value, type(functools.cache(name_of)))
    return value.__wrapped__ if is_cached else value


def _described(value: Any, unknown: list[str]) -> str:
    if isinstance(value, functools.partial):
        name = _described(_original(value.func), unknown)
        settings = {str(n): argument for n, argument in enumerate(value.args)} | value.keywords
        held: Mapping[str, Any] = {}
        code = None
    else:
        name = name_of(value)
        settings, held = _settings(value, unknown)
        code = _code_digest(value, unknown)
    given = {key: part for key, part in settings.items() if part is not None and not key.endswith(LIMIT_SETTINGS)}
    walk = _Walk(unknown)
    walk.add_named(given, name.rpartition(".")[2])
    walk.add_held(held)
    shown = ", ".join(given or held)
    text = f"{name}({shown}: {walk.digest.hexdigest()[:SHORT]})" if shown else name
    return text if code is None else f"{text} code {code}"


def _code_digest(value: Any, unknown: list[str]) -> str | None:
    """Digest of the code of a function or an object's class; None for those of this package and of Python."""
    owner = getattr(value, "__func__", value)
    owner = owner if isinstance(owner, FunctionType | type) else type(owner)
    module = str(owner.__module__)
    if _is_known(module):
        return None
    walk = _Walk(unknown, root=module.partition(".")[0])
    if isinstance(owner, type):
        walk.add(owner, owner.__name__)
    else:
        walk.add_code(owner.__code__, owner)
    return walk.digest.hexdigest()[:SHORT]


def _settings(value: Any, unknown: list[str]) -> tuple[dict[str, Any], Mapping[str, Any]]:
    """(values that determine results, by name; attributes derived from them, for use if they are unknown)."""
    if isinstance(value, MethodType):
        return {"self": value.__self__, **_settings(value.__func__, unknown)[0]}, {}
    if isinstance(value, FunctionType):
        return ({} if _is_named(value) else _of_function(value)), {}
    kind: Any = type(value)
    if isinstance(value, type):
        return {}, {}
    if kind.__module__.partition(".")[0] == OWN_PACKAGE:
        return _arguments(value), {}
    if isinstance(value, Rebuildable):
        args, kwargs = value._arguments
        held = {name: part for name, part in vars(value).items() if name not in ("_arguments", "_once_made")}
        try:
            bound = inspect.signature(kind).bind(*args, **kwargs)
        except (TypeError, ValueError):
            return {str(n): part for n, part in enumerate(args)} | kwargs, held
        bound.apply_defaults()
        return dict(bound.arguments), held
    return _state(value, unknown), {}


def _arguments(value: Any) -> dict[str, Any]:
    """Constructor arguments stored under the same names, and additions of `identified_by`."""
    names = inspect.signature(type(value).__init__).parameters
    given = {name: getattr(value, name) for name in names if hasattr(value, name)}
    return given | (value.identified_by() if hasattr(value, "identified_by") else {})


def module_code(path: str) -> CodeType | None:
    """Code of the module of a dotted path, without importing it; None for this package's."""
    folders: Any = None
    file = None
    names = path.split(".")
    for n in range(1, len(names)):
        spec = PathFinder.find_spec(".".join(names[:n]), folders)
        if spec is None:
            break
        file = spec.origin
        folders = spec.submodule_search_locations
        if folders is None:
            break
    if file is None or not file.endswith(".py") or _is_known(path):
        return None
    try:
        return compile(Path(file).read_bytes(), "", "exec", dont_inherit=True)
    except (OSError, SyntaxError, ValueError):  # reported by the process that imports it
        return None


def file_contents(words: Iterable[str]) -> dict[str, bytes]:
    """Contents of files that a command names, but for large ones, which are no scripts."""
    files = [word for word in words if Path(word).is_file() and Path(word).stat().st_size <= MAX_SCRIPT_BYTES]
    return {word: Path(word).read_bytes() for word in files if os.access(word, os.R_OK)}


def _of_function(function: FunctionType) -> dict[str, Any]:
    parameters = inspect.signature(function, follow_wrapped=False).parameters.values()
    given = {one.name: one.default for one in parameters if one.default is not one.empty}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            given[name] = cell.cell_contents
        except ValueError:  # not assigned yet
            given[name] = None
    return given | {f".{name}": part for name, part in vars(function).items() if not name.startswith("__")}


def _state(value: Any, unknown: list[str]) -> dict[str, Any]:
    """State of an object as pickle would store it, by name; what cannot be pickled goes to `unknown`."""
    kind = type(value)
    try:
        reduce = copyreg.dispatch_table.get(kind)
        found: Any = reduce(value) if reduce is not None else value.__reduce_ex__(4)
    except Exception:  # whatever the object's own methods raise
        unknown.append(name_of(value))
        return {}
    if isinstance(found, str):
        return {"name": found}
    parts = dict(zip(("made by", "made of", "its state", "its items", "its entries"), found, strict=False))
    given: dict[str, Any] = {}
    if parts["made by"] is not copyreg.__newobj__ or parts["made of"] != (kind,):  # type: ignore[attr-defined]
        given = {name: parts[name] for name in ("made by", "made of")}
    state = parts.get("its state")
    for part in state if isinstance(state, tuple) and len(state) == 2 else (state,):  # with slots
        given |= part if isinstance(part, dict) and all(isinstance(key, str) for key in part) else {"its state": part}
    return given | {name: list(parts[name]) for name in ("its items", "its entries") if parts.get(name) is not None}


def _is_known(module: str) -> bool:
    """Whether functions of a module are compared by name: those of this package and of Python."""
    top = module.partition(".")[0]
    return top in (OWN_PACKAGE, "builtins") or (top in sys.stdlib_module_names and top != "__main__")


def _is_named(function: FunctionType) -> bool:
    """Whether a function of this package or of Python is fully determined by its name."""
    return _is_known(function.__module__ or "") and "<locals>" not in function.__qualname__


def _is_library(module: str) -> bool:
    file = getattr(sys.modules.get(module), "__file__", None) or ""
    return not {"site-packages", "dist-packages"}.isdisjoint(Path(file).parts)


class _Walk:
    """Digests values in an order that depends on them alone.

    Args:
        unknown: receives the names of values that cannot be compared.
        root: package whose classes are included although it is a library.
    """

    def __init__(self, unknown: list[str], root: str = "") -> None:
        self.digest = hashlib.sha256()
        self.unknown = unknown
        self._root = root
        self._seen: dict[int, int] = {}
        self._kept: list[Any] = []  # keeps seen objects alive, so that their ids stay unique

    def add(self, value: Any, path: str) -> None:
        """Adds any value; `path` names it where it cannot be compared."""
        value = _original(value)
        kind = type(value)
        if kind in PLAIN:
            self._put(kind.__name__, repr(value))
        elif isinstance(value, ModuleType) or name_of(value) in WITHOUT_VALUE:
            self._put(kind.__name__)
        elif kind not in (tuple, frozenset) and id(value) in self._seen:
            self._put("seen", str(self._seen[id(value)]))
        else:
            self._seen[id(value)] = len(self._seen)
            self._kept.append(value)
            self._add_new(value, path)

    def _add_new(self, value: Any, path: str) -> None:
        kind = type(value)
        if kind in (list, tuple, set, frozenset, dict):
            self._add_container(value, path)
        elif _is_tensor(value):
            self._put(str(value.dtype), str(tuple(value.shape)))
            self.digest.update(value.detach().cpu().contiguous().reshape(-1).view(sys.modules["torch"].uint8).numpy())
        elif isinstance(value, CodeType):
            self.add_code(value, None)
        elif isinstance(value, type):
            self._add_class(value, path)
        elif isinstance(value, FunctionType):
            self._put(name_of(value))
            if not _is_named(value):
                self.add_named(_of_function(value), path)
                self.add_code(value.__code__, value)
        elif isinstance(value, BuiltinFunctionType) and isinstance(value.__self__, ModuleType | type(None)):
            self._put(name_of(value))
        elif inspect.isgetsetdescriptor(value) or inspect.ismemberdescriptor(value):
            self._put(value.__qualname__)
        elif isinstance(value, functools.partial):
            self.add(value.func, path)
            self.add_named({str(n): part for n, part in enumerate(value.args)} | value.keywords, path)
        elif isinstance(value, staticmethod | classmethod | property | MethodType):
            parts = {name: getattr(value, name, None) for name in ("__func__", "__self__", "fget", "fset", "fdel")}
            self.add_named(parts, path)
        else:
            self._add_object(value, path)

    def add_named(self, parts: Mapping[str, Any], path: str) -> None:
        """Adds values by name, in any order, except limits."""
        for name, part in sorted(parts.items()):
            if part is not None and not name.endswith(LIMIT_SETTINGS):
                self._put(name)
                self.add(part, f"{path}.{name}")

    def add_held(self, parts: Mapping[str, Any]) -> None:
        """As `add_named`, for values that follow from others; skips those that cannot be compared."""
        named = self.unknown
        self.unknown = []
        self.add_named(parts, "")
        self.unknown = named

    def add_code(self, code: CodeType, function: FunctionType | None) -> None:
        """Adds instructions with their constants and names, and the globals of `function` that they read."""
        count = code.co_argcount + code.co_kwonlyargcount
        self._put(repr((code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags)))
        self._put(repr((code.co_varnames[:count], code.co_freevars)), getattr(code, "co_exceptiontable", b"").hex())
        instructions = list(dis.get_instructions(code))
        for n, one in enumerate(instructions):
            self._put(one.opname)
            if isinstance(one.argval, CodeType):
                self.add_code(one.argval, function)
            elif one.opcode in dis.hasconst:
                self.add(one.argval, "")
            else:
                self._put(repr(one.argval))
            if function is not None and one.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
                then = takewhile(lambda step: step.opname in ("LOAD_ATTR", "LOAD_METHOD"), instructions[n + 1 :])
                self._add_global(function, one.argval, attributes=(step.argval for step in then))

    def _add_global(self, function: FunctionType, path: str, attributes: Iterable[str]) -> None:
        """Adds the value of a global or a module's attribute, with its dependencies."""
        if _is_library(function.__module__ or ""):
            return
        value = function.__globals__.get(path)
        for name in attributes:
            if not isinstance(value, ModuleType):
                break
            if _is_known(value.__name__) or _is_library(value.__name__):  # its names are known, and may be loaded late
                return
            path = f"{path}.{name}"
            value = vars(value).get(name)
        if isinstance(value, ModuleType) or value is None:
            return
        kind = type(value)
        owner = value if isinstance(value, type | FunctionType) else kind
        is_number = _is_tensor(value) or kind.__module__ == "numpy" or kind in copyreg.dispatch_table
        if is_number or not _is_library(str(owner.__module__)):
            self.add(value, path)
        else:
            self._put(name_of(value))  # of a library: its object may be large, or a client

    def _add_class(self, kind: type, path: str) -> None:
        """Adds the name of a class; outside libraries also its content and bases."""
        self._put(name_of(kind))
        module = str(kind.__module__)
        if _is_known(module) or (_is_library(module) and module.partition(".")[0] != self._root):
            return
        parts = {name: part for name, part in vars(kind).items() if not OF_EVERY_CLASS.fullmatch(name)}
        if _is_library(module):
            parts = {name: part for name, part in parts.items() if isinstance(part, FunctionType)}
        self.add_named(parts, path)
        for base in kind.__bases__:
            self.add(base, base.__name__)

    def _add_object(self, value: Any, path: str) -> None:
        self.add(type(value), type(value).__name__)
        unknown: list[str] = []
        settings, held = _settings(value, unknown)
        self.unknown += [f"{path.lstrip('.')} ({name})" for name in unknown]
        self.add_named(settings, path)
        self.add_held(held)

    def _add_container(self, value: Any, path: str) -> None:
        kind = type(value)
        self._put(kind.__name__, str(len(value)))
        if len(value) > LARGE:
            try:
                # version 0: neither references nor interned strings, which depend on more than the values
                self.digest.update(marshal.dumps(value if kind in (list, tuple) else sorted(value), 0))
                if kind is dict:
                    self.digest.update(marshal.dumps([value[key] for key in sorted(value)], 0))
                return
            except (ValueError, TypeError):
                pass
        if kind in (list, tuple):
            for n, item in enumerate(value):
                self.add(item, f"{path}[{n}]")
            return
        pairs = value.items() if kind is dict else ((item, None) for item in value)
        known = sorted(((self._alone(key), repr(key)[:40], item) for key, item in pairs), key=lambda entry: entry[0])
        for digest, key, item in known:
            self._put(digest)
            self.add(item, f"{path}[{key}]")

    def _alone(self, value: Any) -> str:
        walk = _Walk(self.unknown, self._root)
        walk.add(value, "a key")
        return walk.digest.hexdigest()

    def _put(self, *texts: str) -> None:
        for text in texts:
            encoded = text.encode("utf-8", "surrogatepass")
            self.digest.update(b"%d:%b" % (len(encoded), encoded))


def _is_tensor(value: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor) and value.layout is torch.strided
