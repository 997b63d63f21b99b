"""Refuses several things written as one, and docstrings that begin as a riddle; part of `make lint`.

    python scripts/lint_style.py lit_async_rl callbacks

| rule | refused | write |
|---|---|---|
| tuple-assignment | `a, b = 1, 2` | `a = 1` and `b = 2`; swaps (`a, b = b, a`) and `a, b = f()` are fine |
| splatted-local | `options = {"x": 1}` and then `f(**options)`, its only use | `f(x=1)` |
| positional-arguments | `f(1, 2, 3, 4)`, where `f` is defined in the folders | `f(1, 2, 3, x=4)` |
| docstring-opener | a docstring that begins with What, Whose or Whoever | a noun or an imperative verb |
| event-loop | `asyncio.run(f())`, in the package outside of `runtime` | a class of `lit_async_rl.runtime.loop` |
| runtime | a thread, process, socket or `struct.pack(...)`, likewise | a function of `lit_async_rl.runtime` |

(Two statements in one line are ruff's E701 and E702.) Calls are traced to definitions through imports, base classes,
`self`, `cls` and `super()`, without running anything; calls that cannot be traced are not examined, nor are functions
that take `*args`. Docstrings are those of modules, classes and functions.
"""

from __future__ import annotations

import argparse
import ast
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from house import Documented, Function, module_names, module_of, source_of, tuple_assignments

MAX_POSITIONAL = 3
REFUSED_OPENERS = ("What", "Whose", "Whoever")
Scope = Function | ast.Lambda
Loop = ast.For | ast.AsyncFor | ast.While | ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp


def is_swap(node: ast.Assign) -> bool:
    """True if a value names the target of another one, so that the order of separate assignments would matter."""
    target = node.targets[0]
    assert isinstance(target, ast.Tuple | ast.List)
    assert isinstance(node.value, ast.Tuple | ast.List)
    names = [ast.unparse(x) for x in target.elts]
    for number, value in enumerate(node.value.elts):
        others = {name for place, name in enumerate(names) if place != number}
        if any(isinstance(x, ast.expr) and ast.unparse(x) in others for x in ast.walk(value)):
            return True
    return False


# -- splatted locals ---------------------------------------------------------------------------------------------------


def is_argument_display(value: ast.expr | None) -> bool:
    """True for a tuple, list or dictionary whose items could stand in a call as arguments."""
    if isinstance(value, ast.Dict):
        return all(isinstance(x, ast.Constant) and str(x.value).isidentifier() for x in value.keys)
    if isinstance(value, ast.Call):
        return ast.unparse(value.func) == "dict" and not value.args
    return isinstance(value, ast.Tuple | ast.List)


def splats(node: ast.AST) -> Iterator[tuple[str, ast.Call]]:
    """Names splatted into calls, and the calls; nested functions and loops, where a call may run often, left out."""
    if isinstance(node, ast.Call):
        starred = [x.value for x in node.args if isinstance(x, ast.Starred)]
        doubly = [x.value for x in node.keywords if x.arg is None]
        yield from ((x.id, node) for x in starred + doubly if isinstance(x, ast.Name))
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, Scope | Loop):
            yield from splats(child)


def splatted_locals(function: Function) -> Iterator[tuple[str, ast.Call]]:
    """Local displays whose only use is to be splatted into one call that is made whenever the display is."""
    uses: dict[str, int] = {}
    for node in ast.walk(function):
        if isinstance(node, ast.Name):
            uses[node.id] = uses.get(node.id, 0) + 1
    for node in ast.walk(function):
        for block in (getattr(node, name, []) for name in ("body", "orelse", "finalbody")):
            built: set[str] = set()
            for statement in block if isinstance(block, list) else []:
                if not isinstance(statement, Scope | Loop):
                    yield from ((name, call) for name, call in splats(statement) if name in built and uses[name] == 2)
                targets = getattr(statement, "targets", None) or [getattr(statement, "target", None)]
                if isinstance(statement, ast.Assign | ast.AnnAssign) and is_argument_display(statement.value):
                    built.update(x.id for x in targets if isinstance(x, ast.Name))


# -- positional arguments ----------------------------------------------------------------------------------------------


@dataclass
class Module:
    """A parsed file; `names` are its functions, classes and imports at any depth outside of functions and classes."""

    path: Path
    name: str
    tree: ast.Module
    names: dict[str, ast.stmt]


@dataclass
class Definition:
    """A function, class or module, and where it stands."""

    module: Module
    node: Function | ast.ClassDef | ast.Module


class Definitions:
    """Finds the definitions of what is called in the modules of some folders."""

    def __init__(self, trees: dict[Path, ast.Module], names: dict[Path, str]) -> None:
        self.paths = {name: path for path, name in names.items()}
        self.modules: dict[Path, Module] = {}
        for path, tree in trees.items():
            bodies = [tree]
            if (stub := path.with_suffix(".pyi")).exists():  # of a package that imports lazily
                bodies.append(ast.parse(stub.read_text(encoding="utf-8")))
            found = {name: node for body in bodies for name, node in named_statements(body)}
            self.modules[path] = Module(path, names[path], tree, names=found)

    def module(self, name: str) -> Module | None:
        """The module of this name."""
        found = module_of(name, self.paths)
        is_it = found is not None and (found == name or found == name.partition(".")[2])
        return self.modules[self.paths[found]] if found is not None and is_it else None

    def named(self, module: Module, name: str, statement: ast.stmt | None = None) -> Definition | None:
        """Definition that a name has in a module, or that `statement`, in one of its functions, gives it."""
        node = statement or module.names.get(name)
        if isinstance(node, Function | ast.ClassDef):
            return Definition(module, node)
        if isinstance(node, ast.Import):
            full = next(x.name if x.asname else name for x in node.names if name in (x.asname, x.name.split(".")[0]))
            other = self.module(full)
            return other and Definition(other, other.tree)
        if isinstance(node, ast.ImportFrom):
            source = source_of(node, module.path, module.name)
            original = next(x.name for x in node.names if name in (x.asname, x.name))
            return self.member(source, original)
        return None

    def member(self, source: str, name: str) -> Definition | None:
        """Definition that `from source import name` reads."""
        below = self.module(f"{source}.{name}")
        if below is not None:
            return Definition(below, below.tree)
        above = self.module(source)
        return above and self.named(above, name)

    def attribute(self, owner: Definition | None, name: str) -> Definition | None:
        """Definition of an attribute of a module or, base classes included, of a class."""
        if owner is None or isinstance(owner.node, Function):
            return None
        if isinstance(owner.node, ast.Module):
            return self.member(owner.module.name, name)
        for node in owner.node.body:
            if isinstance(node, Function) and node.name == name:
                return Definition(owner.module, node)
        return self.inherited(owner, name)

    def inherited(self, owner: Definition, name: str) -> Definition | None:
        """Definition of an attribute in the base classes of a class."""
        assert isinstance(owner.node, ast.ClassDef)
        bases = [self.expression(owner.module, x, {}) for x in owner.node.bases]
        return next((found for base in bases if (found := self.attribute(base, name)) is not None), None)

    def expression(self, module: Module, node: ast.expr, scope: dict[str, ast.stmt | None]) -> Definition | None:
        """Definition of a name, an attribute, or `super()`; `scope` has the names of the functions around it."""
        if isinstance(node, ast.Subscript):  # a generic class
            return self.expression(module, node.value, scope)
        if isinstance(node, ast.Attribute):
            owner = self.expression(module, node.value, scope)
            if isinstance(node.value, ast.Call) and owner is not None:
                return self.inherited(owner, node.attr)
            return self.attribute(owner, node.attr)
        if isinstance(node, ast.Call) and ast.unparse(node) == "super()":
            return self.expression(module, ast.Name("self"), scope)
        if not isinstance(node, ast.Name) or (node.id in scope and scope[node.id] is None):
            return None
        return self.named(module, node.id, scope.get(node.id))

    def max_positional(self, called: Definition | None) -> int | None:
        """Number of arguments that a call may give by position; None if anything goes."""
        if called is not None and isinstance(called.node, ast.ClassDef):
            made = self.attribute(called, "__init__") or self.attribute(called, "__new__")
            heads = [*called.node.decorator_list, *called.node.bases]
            if made is None and any(ast.unparse(x).split("(")[0].endswith(("dataclass", "NamedTuple")) for x in heads):
                return MAX_POSITIONAL
            called = made
        if called is None or not isinstance(called.node, Function) or called.node.args.vararg:
            return None
        return max(MAX_POSITIONAL, len(called.node.args.posonlyargs))


def named_statements(tree: ast.AST) -> Iterator[tuple[str, ast.stmt]]:
    """Functions, classes and imports of a scope, and their names."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, Function | ast.ClassDef):
            yield node.name, node
        elif isinstance(node, ast.Import | ast.ImportFrom):
            yield from ((x.asname or x.name.split(".")[0], node) for x in node.names)
        elif not isinstance(node, ast.Lambda):
            yield from named_statements(node)


def scope_of(function: Scope) -> dict[str, ast.stmt | None]:
    """Names that a function binds; None for those that are variables."""
    arguments = function.args
    every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg]
    names: dict[str, ast.stmt | None] = {x.arg: None for x in every if x is not None}
    names |= {x.id: None for x in ast.walk(function) if isinstance(x, ast.Name) and isinstance(x.ctx, ast.Store)}
    return names | dict(named_statements(function))


def long_calls(
    definitions: Definitions,
    module: Module,
    node: ast.AST,
    *,
    scope: dict[str, ast.stmt | None],
    owner: ast.ClassDef | None = None,
) -> Iterator[ast.Call]:
    """Calls below `node` that give more arguments by position than they should.

    Args:
        definitions: of the folders.
        module: the file that has the node.
        node: where the search begins.
        scope: names of the functions around the node.
        owner: the class around it.
    """
    for child in ast.iter_child_nodes(node):
        inner = scope
        if isinstance(child, Scope):
            inner = scope | scope_of(child)
        if isinstance(child, Function) and isinstance(node, ast.ClassDef):
            inner |= {"self": owner, "cls": owner}
        if isinstance(child, ast.Call) and len(child.args) > MAX_POSITIONAL:
            allowed = definitions.max_positional(definitions.expression(module, child.func, inner))
            is_plain = not any(isinstance(x, ast.Starred) for x in child.args)
            if allowed is not None and is_plain and len(child.args) > allowed:
                yield child
        within = child if isinstance(child, ast.ClassDef) else owner
        yield from long_calls(definitions, module, child, scope=inner, owner=within)


# -- docstrings -------------------------------------------------------------------------------------------------------


def refused_openers(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Lines and first words of docstrings that begin with a refused word."""
    for node in ast.walk(tree):
        if isinstance(node, Documented) and (docstring := ast.get_docstring(node)):
            word = docstring.split()[0]
            if word in REFUSED_OPENERS:
                yield node.body[0].lineno, word


# -- event loops ------------------------------------------------------------------------------------------------------


LOOP_MAKERS = ("asyncio.run", "asyncio.Runner", "new_event_loop", "run_forever", "run_until_complete")
LOOP_MODULES = {  # and the reason why each may make one
    "lit_async_rl.runtime.loop": "the place for it: with a clock, time limits, a watchdog and an end",
    "lit_async_rl.sandbox.tests": "runs in the process of a sandbox: a test of a program may be a coroutine",
}


def event_loops(tree: ast.Module, module: str) -> Iterator[ast.Call]:
    """Calls that make or run an event loop in a module of the package that has no reason to."""
    if module.split(".")[0] != "lit_async_rl" or module in LOOP_MODULES:
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            if called in LOOP_MAKERS or called.split(".")[-1] in LOOP_MAKERS:
                yield node


# -- threads, processes, sockets and frames ---------------------------------------------------------------------------


STARTERS = {
    "thread": (
        *("threading.Thread", "threading.Timer", "_thread.start_new_thread"),
        "concurrent.futures.ThreadPoolExecutor",
    ),
    "process": (
        *("subprocess.Popen", "subprocess.run", "subprocess.call", "subprocess.check_call", "subprocess.check_output"),
        *("asyncio.create_subprocess_exec", "asyncio.create_subprocess_shell", "os.fork", "os.system", "os.popen"),
        *("os.posix_spawn", "os.posix_spawnp", "multiprocessing.Process", "multiprocessing.Pool"),
        *("multiprocessing.get_context", "concurrent.futures.ProcessPoolExecutor"),
    ),
    "socket": (
        *("socket.socket", "socket.socketpair", "socket.create_connection", "socket.create_server", "os.pipe"),
        *("asyncio.start_server", "asyncio.open_unix_connection", "http.server.HTTPServer"),
        "http.server.ThreadingHTTPServer",
    ),
    "frame": ("struct.pack", "struct.pack_into", "struct.unpack", "struct.unpack_from", "struct.Struct"),
}
RUNTIME = ("lit_async_rl", "callbacks")  # packages that start and frame in one place
RUNTIME_PLACE = "lit_async_rl.runtime"
STARTING_MODULES = {  # what each of them starts all the same, and the reason
    "lit_async_rl.ray.supervise": ("process", "an actor of Ray starts a rank, whose output its event loop reads"),
    "lit_async_rl.report.server": ("socket", "serves a page, with the standard library alone"),
    # a sandbox: its warden imports nothing of the package
    "lit_async_rl.sandbox.kernel": ("frame", "structures of system calls"),
    "lit_async_rl.sandbox.processes": ("process socket", "a warden, started by the lasting thread, and its connection"),
    "lit_async_rl.sandbox.programs": ("socket", "a program of a sandbox answers its warden"),
    "lit_async_rl.sandbox.room": ("process socket", "a warden builds its room"),
    "lit_async_rl.sandbox.warden": ("process socket", "a warden forks for each program"),
}


def starts(tree: ast.Module) -> Iterator[tuple[int, str, str]]:
    """Lines at which a thread or process is started, a socket opened or a message framed: kind, and full name."""
    imported: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for one in node.names:
                name = one.asname or one.name.split(".")[0]
                imported[name] = one.name if one.asname else name
        elif isinstance(node, ast.ImportFrom) and not node.level:
            imported |= {one.asname or one.name: f"{node.module}.{one.name}" for one in node.names}
    kinds = {name: kind for kind, names in STARTERS.items() for name in names}
    for node in ast.walk(tree):
        uses = [node.func] if isinstance(node, ast.Call) else node.bases if isinstance(node, ast.ClassDef) else []
        for use in uses:
            first, _, rest = ast.unparse(use).partition(".")
            name = f"{imported.get(first, first)}.{rest}".rstrip(".")
            if name in kinds:
                yield use.lineno, kinds[name], name


def starts_elsewhere(tree: ast.Module, module: str) -> Iterator[tuple[int, str]]:
    """Lines of a module that start what it has no reason to, and the reasons that hold no longer."""
    if module.split(".")[0] not in RUNTIME or f"{module}.".startswith(f"{RUNTIME_PLACE}."):
        return
    allowed = set(STARTING_MODULES.get(module, ("", ""))[0].split())
    for line, kind, name in starts(tree):
        if kind not in allowed:
            yield line, f"use lit_async_rl.runtime, not {name}(...), or give {module} a reason in STARTING_MODULES"
    for kind in sorted(allowed - {kind for _, kind, _ in starts(tree)}):
        yield 1, f"{module} needs no reason in STARTING_MODULES for a {kind} any more"


# -- command line ------------------------------------------------------------------------------------------------------


def problems(folders: list[Path]) -> list[str]:
    """One line for each place: file, line, rule, and what to write."""
    names = module_names(folders)
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in names}
    definitions = Definitions(trees, names)
    found: list[tuple[str, int, str]] = []
    for path, tree in trees.items():
        place = os.path.relpath(path)
        for node in tuple_assignments(tree):
            if not is_swap(node):
                found.append((place, node.lineno, "tuple-assignment: write one assignment a line"))
        for function in (x for x in ast.walk(tree) if isinstance(x, Function)):
            for name, call in splatted_locals(function):
                what = f"splatted-local: write the items of {name!r} as arguments of {ast.unparse(call.func)}(...)"
                found.append((place, call.lineno, what))
        for line, word in refused_openers(tree):
            found.append((place, line, f"docstring-opener: begin with a noun or an imperative verb, not {word!r}"))
        for call in event_loops(tree, names[path]):
            what = f"event-loop: use lit_async_rl.runtime.loop, not {ast.unparse(call.func)}(...)"
            found.append((place, call.lineno, what))
        for line, what in starts_elsewhere(tree, names[path]):
            found.append((place, line, f"runtime: {what}"))
        for call in long_calls(definitions, definitions.modules[path], tree, scope={}):
            what = (
                f"{ast.unparse(call.func)}(...) has {len(call.args)} arguments by position; name those after the third"
            )
            found.append((place, call.lineno, f"positional-arguments: {what}"))
    return [f"{place}:{line}: {what}" for place, line, what in sorted(set(found))]


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", type=Path, nargs="+")
    found = problems(parser.parse_args().folders)
    print("\n".join(found) if found else "no problems of style")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
