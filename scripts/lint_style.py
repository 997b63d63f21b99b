"""Refuses several things written as one, and docstrings that begin as a riddle; part of `make lint`.

    python scripts/lint_style.py lit_async_rl callbacks

| rule | refused | write |
|---|---|---|
| tuple-assignment | `a, b = 1, 2` | `a = 1` and `b = 2`; swaps (`a, b = b, a`) and `a, b = f()` are fine |
| docstring-opener | a docstring that begins with What, Whose or Whoever | a noun or an imperative verb |
| event-loop | `asyncio.run(f())`, in the package outside of `runtime` | a class of `lit_async_rl.runtime.loop` |
| runtime | a thread, process, socket or `struct.pack(...)`, likewise | a function of `lit_async_rl.runtime` |

(Two statements in one line are ruff's E701 and E702.) Docstrings are those of modules, classes and functions.
"""

from __future__ import annotations

import argparse
import ast
import os
import sys
from collections.abc import Iterator
from pathlib import Path

REFUSED_OPENERS = ("What", "Whose", "Whoever")
Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def module_names(folders: list[Path]) -> dict[Path, str]:
    """Python files below the folders, links followed, with their modules' names; the longest of several."""
    names: dict[Path, tuple[str, ...]] = {}
    for folder in folders:
        start = folder.resolve().parent if (folder / "__init__.py").exists() else folder.resolve()
        for root, subfolders, files in os.walk(folder.resolve(), followlinks=True):
            subfolders[:] = sorted(name for name in subfolders if not name.startswith("."))
            for path in (Path(root, name) for name in files if name.endswith(".py")):
                parts = path.relative_to(start).with_suffix("").parts
                parts = parts[:-1] if parts[-1] == "__init__" else parts
                names[path.resolve()] = max(names.get(path.resolve(), ()), parts, key=len)
    return {path: ".".join(parts) for path, parts in names.items()}


# -- assignments -------------------------------------------------------------------------------------------------------


def tuple_assignments(tree: ast.AST) -> list[ast.Assign]:
    """Assignments of several values written out to several targets, `a, b = 1, 2`; swaps are among them."""
    displays = ast.Tuple | ast.List
    return [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and isinstance(node.value, displays) and isinstance(node.targets[0], displays)
    ]


def is_swap(node: ast.Assign) -> bool:
    """True if a value names another's target, so that the order of separate assignments would matter."""
    target = node.targets[0]
    assert isinstance(target, ast.Tuple | ast.List)
    assert isinstance(node.value, ast.Tuple | ast.List)
    names = [ast.unparse(x) for x in target.elts]
    for number, value in enumerate(node.value.elts):
        others = {name for place, name in enumerate(names) if place != number}
        if any(isinstance(x, ast.expr) and ast.unparse(x) in others for x in ast.walk(value)):
            return True
    return False


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


STARTERS = {  # by full name
    # not `asyncio.to_thread` and `run_in_executor`: their threads are of the pool that `runtime.loop` gives a loop
    "thread": (
        *("threading.Thread", "threading.Timer", "_thread.start_new_thread"),
        "concurrent.futures.ThreadPoolExecutor",
    ),
    "process": (
        *("subprocess.Popen", "subprocess.run", "subprocess.call", "subprocess.check_call", "subprocess.check_output"),
        *("asyncio.create_subprocess_exec", "asyncio.create_subprocess_shell", "os.fork", "os.system", "os.popen"),
        *("os.posix_spawn", "os.posix_spawnp", "os.execl", "os.execle", "os.execlp", "os.execlpe"),
        *("os.execv", "os.execve", "os.execvp", "os.execvpe"),
        *("multiprocessing.Process", "multiprocessing.Pool", "multiprocessing.get_context"),
        *("torch.multiprocessing.Process", "torch.multiprocessing.Pool", "torch.multiprocessing.get_context"),
        *("torch.multiprocessing.spawn", "torch.multiprocessing.start_processes"),
        "concurrent.futures.ProcessPoolExecutor",
    ),
    "socket": (
        *("socket.socket", "socket.socketpair", "socket.create_connection", "socket.create_server", "os.pipe"),
        *("asyncio.open_connection", "asyncio.open_unix_connection"),
        *("asyncio.start_server", "asyncio.start_unix_server"),
        *("http.server.HTTPServer", "http.server.ThreadingHTTPServer"),
        *("socketserver.TCPServer", "socketserver.ThreadingTCPServer", "socketserver.UnixStreamServer"),
        *("socketserver.UDPServer", "socketserver.ThreadingUDPServer", "socketserver.UnixDatagramServer"),
        *("http.client.HTTPConnection", "http.client.HTTPSConnection"),
        *("urllib.request.urlopen", "urllib.request.urlretrieve"),
        *("uvicorn.run", "uvicorn.Server", "grpc.insecure_channel", "grpc.secure_channel"),
        *("grpc.aio.insecure_channel", "grpc.aio.secure_channel"),
    ),
    "frame": ("struct.pack", "struct.pack_into", "struct.unpack", "struct.unpack_from", "struct.Struct"),
}
LOOP_STARTERS = {  # methods of an event loop
    **dict.fromkeys(("subprocess_exec", "subprocess_shell"), "process"),
    **dict.fromkeys(("create_server", "create_unix_server", "create_connection", "create_unix_connection"), "socket"),
    "create_datagram_endpoint": "socket",
}
RUNTIME = ("lit_async_rl", "callbacks")  # packages that start and frame in one place
RUNTIME_PLACE = "lit_async_rl.runtime"
STARTING_MODULES = {  # what each of them starts all the same, and the reason
    "lit_async_rl.agents.endpoint.app": ("socket", "uvicorn's server, on a socket of `ports`, in a `LoopThread`"),
    "lit_async_rl.ray.security": ("socket", "asks a head node in gRPC, which is Ray's protocol, before a start of Ray"),
    "lit_async_rl.ray.supervise": ("process", "an actor of Ray starts a rank, whose output its event loop reads"),
    "lit_async_rl.report.server": ("socket", "serves a page, with the standard library alone"),
    # a sandbox: its warden imports nothing of the package
    "lit_async_rl.sandbox.kernel": ("frame", "structures of system calls"),
    "lit_async_rl.sandbox.processes": ("process socket", "a warden, started by the lasting thread, and its connection"),
    "lit_async_rl.sandbox.programs": ("process socket", "a sandbox's process becomes a program, or answers its warden"),
    "lit_async_rl.sandbox.room": ("process socket", "a warden builds its room"),
    "lit_async_rl.sandbox.warden": ("process socket", "a warden forks for each program"),
}


def starts(tree: ast.Module) -> Iterator[tuple[int, str, str]]:
    """Lines that start a thread or process, open a socket or frame a message: kind, and full name."""
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
            method = use.attr if isinstance(use, ast.Attribute) else ""
            if name in kinds:
                yield use.lineno, kinds[name], name
            elif method in LOOP_STARTERS:
                yield use.lineno, LOOP_STARTERS[method], method


def starts_elsewhere(tree: ast.Module, module: str) -> Iterator[tuple[int, str]]:
    """Lines of a module that start what it has no reason to, and reasons that hold no longer."""
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
    found: list[tuple[str, int, str]] = []
    for path, tree in trees.items():
        place = os.path.relpath(path)
        for node in tuple_assignments(tree):
            if not is_swap(node):
                found.append((place, node.lineno, "tuple-assignment: write one assignment a line"))
        for line, word in refused_openers(tree):
            found.append((place, line, f"docstring-opener: begin with a noun or an imperative verb, not {word!r}"))
        for call in event_loops(tree, names[path]):
            what = f"event-loop: use lit_async_rl.runtime.loop, not {ast.unparse(call.func)}(...)"
            found.append((place, call.lineno, what))
        for line, what in starts_elsewhere(tree, names[path]):
            found.append((place, line, f"runtime: {what}"))
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
