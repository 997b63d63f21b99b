"""Runs programs of models behind guards: no network, no files of the machine, nothing of the trainer, and limits.

| who | waits for | woken by |
|---|---|---|
| caller of `run` | its program, at most its limits and `ANSWER_S` | the warden |
| keeper thread | wardens to start | callers, `close` |
| warden (a process, see `warden`) | requests | callers; the end of the trainer |

A warden has imported common modules, and forks for each program. A caller has it to itself while its program runs. The
keeper starts them all, because the kernel ends a process with the *thread* that started it.
"""

from __future__ import annotations

import os
import shutil
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Literal

from lit_async_rl.errors import SetupError
from lit_async_rl.sandbox import room
from lit_async_rl.sandbox.processes import GuardError, Run, WardenProcess
from lit_async_rl.sandbox.program import Program, ProgramResult, SandboxError, SandboxLimits
from lit_async_rl.sandbox.programs import PATHS
from lit_async_rl.utils.checks import check_choice

NUM_TRIES = 2  # of a program, if its warden ends
MAX_IDLE = 16  # wardens waiting for programs
LEVELS: tuple[room.Level, ...] = ("bubblewrap", "namespace", "limits")
PRELOADED = (
    *("abc", "ast", "bisect", "collections", "copy", "datetime", "decimal", "enum", "fractions", "functools"),
    *("heapq", "io", "itertools", "json", "math", "operator", "queue", "random", "re", "statistics", "string"),
    *("threading", "time", "traceback", "typing", "dataclasses", "unittest"),
)


class Sandbox:
    r"""Runs programs, each in its own fork; nothing of one is left for the next.

    | `level` | isolation by |
    |---|---|
    | `bubblewrap` | namespaces made by `bwrap`; seccomp, Landlock and resource limits |
    | `namespace` | user, mount, pid, network, ipc and uts namespaces; seccomp, Landlock and resource limits |
    | `limits` | resource limits; seccomp and Landlock where the kernel has them. This is no sandbox |

    Example:
        ```python
        import lit_async_rl as rl

        with rl.Sandbox(allow_unsandboxed=True) as sandbox:
            result = sandbox.run("print(6 * 7)")
        assert (result.verdict, result.stdout) == ("ended", "42\n")
        ```

    Args:
        level: see above, or `auto`: the first that works here; for root `namespace` comes before `bubblewrap`.
        allow_unsandboxed: whether to accept `limits` where namespaces are unavailable.
        limits: of each program.
        readable: further readable folders and files, such as a compiler's; their subfolders `bin` are on the path.
        python_path: readable folders of modules for Python programs, such as `site-packages`.
        preload: modules imported once, before the forks; every program has their data.

    Raises:
        SetupError: no allowed level works on this machine.
        ValueError: a setting is out of range, or a folder does not exist.
    """

    def __init__(
        self,
        level: Literal["auto", "bubblewrap", "namespace", "limits"] = "auto",
        allow_unsandboxed: bool = False,
        limits: SandboxLimits = SandboxLimits(),  # noqa: B008  frozen
        readable: Sequence[str] = (),
        python_path: Sequence[str] = (),
        preload: Sequence[str] = (),
    ) -> None:
        check_choice("Sandbox", ("auto", *LEVELS), level=level)
        self.limits = limits
        self._readable = _folders("readable", readable)
        python_folders = _folders("python_path", python_path)
        self._settings: dict[str, Any] = {
            "readable": [*_python_folders(), *self._readable, *python_folders],
            "python_path": python_folders,
            "preload": [*PRELOADED, *preload],
            "scratch_bytes": limits.scratch_mb * 2**20,
            "parent": os.getpid(),
        }
        self._lock = threading.Lock()  # guards the next two
        self._idle: list[WardenProcess] = []
        self._busy: set[WardenProcess] = set()
        self._end = weakref.finalize(self, _close_all, self._idle)
        self.level, self.guards = self._choose(level, allow_unsandboxed)

    def _choose(
        self, level: Literal["auto", "bubblewrap", "namespace", "limits"], allow_unsandboxed: bool
    ) -> tuple[room.Level, tuple[str, ...]]:
        """The first level that works; its first warden becomes idle."""
        problems = []
        levels: tuple[room.Level, ...] = LEVELS if level == "auto" else (level,)
        if level == "auto" and os.geteuid() == 0:
            # under bwrap root keeps its uid, so a program could list the descriptors of the process that starts it
            levels = ("namespace", "bubblewrap", "limits")
        for one in levels:
            if one == "bubblewrap" and shutil.which("bwrap") is None:
                problems.append("bubblewrap: bwrap is not installed")
            elif one == "namespace" and sys.platform != "linux":
                problems.append("namespace: Linux only")
            elif one == "limits" and not allow_unsandboxed:
                problems.append("limits: needs allow_unsandboxed")
            else:
                self._settings["level"] = one
                try:
                    warden = WardenProcess(self._settings)
                except SandboxError as error:
                    problems.append(f"{one}: {error}")
                    continue
                self._idle.append(warden)
                return one, warden.guards
        raise SetupError(
            f"code cannot be run in a sandbox on this machine ({'; '.join(problems)}). Install bubblewrap, allow user "
            "namespaces, or set allow_unsandboxed: true, which gives the policy's programs access to your files and "
            "limits only their time and memory"
        )

    @property
    def description(self) -> str:
        """Active guards and limits, in one line."""
        limits = self.limits
        return (
            f"{self.level}: {', '.join(self.guards)}; {limits.wall_s:g} s, {limits.memory_mb} MB, "
            f"{limits.processes} processes, {limits.output_kb} KB of output"
        )

    def announce(self, owner: str) -> None:
        """Logs, at the start of a run, how the programs of `owner` are isolated."""
        from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

        say = rank_zero_warn if self.level == "limits" else rank_zero_info
        say(f"{owner} runs programs in a sandbox, {self.description}")

    def run(
        self,
        program: str | Program,
        limits: SandboxLimits | None = None,
        is_enough: Callable[[bytearray], bool] = lambda answers: False,
    ) -> ProgramResult:
        """Runs a program; a string is run as Python. Blocks; thread-safe.

        Args:
            program: Python source, or a program with its settings.
            limits: in place of the sandbox's own.
            is_enough: called with the answers so far; true ends a program with calls.

        Raises:
            SandboxError: two wardens failed to run it.
        """
        given = Program(source=program) if isinstance(program, str) else program
        num_failed = 0
        while True:
            warden: WardenProcess | None = None
            try:
                warden = self._take()
                result = Run(warden, given, limits=limits or self.limits, paths=self._paths).result(is_enough)
            except BaseException as error:
                if warden is not None:
                    self._kill(warden)
                if not isinstance(error, (SandboxError, OSError)):
                    raise
                num_failed += 1
                if num_failed == NUM_TRIES or isinstance(error, GuardError):
                    raise SandboxError(f"a program could not be run (sandbox level {self.level}): {error}") from error
            else:
                self._release(warden)
                return result

    def has_command(self, name: str) -> bool:
        """Whether a command is on the programs' path."""
        return shutil.which(name, path=":".join([PATHS, *self._paths])) is not None

    @property
    def _paths(self) -> list[str]:
        return [os.path.join(folder, "bin") for folder in self._readable]

    def close(self) -> None:
        """Ends the wardens and their programs. A later `run` starts new ones."""
        with self._lock:
            idle = list(self._idle)
            busy = list(self._busy)
            self._idle.clear()
            self._busy.clear()
        _close_all(idle)
        for warden in busy:
            warden.kill()

    def __enter__(self) -> Sandbox:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- wardens ------------------------------------------------------------------------------------------------------

    def _take(self) -> WardenProcess:
        """Takes an idle warden, or starts one."""
        warden: WardenProcess | None = None
        while warden is None:
            with self._lock:
                found = self._idle.pop() if self._idle else None
            if found is None:
                warden = WardenProcess(self._settings | {"parent": os.getpid()})  # of a fork, too
            elif found.is_there:
                warden = found
            else:
                found.kill()
        with self._lock:
            self._busy.add(warden)
        return warden

    def _release(self, warden: WardenProcess) -> None:
        with self._lock:
            is_kept = warden in self._busy and len(self._idle) < MAX_IDLE  # not after `close`
            self._busy.discard(warden)
            if is_kept:
                self._idle.append(warden)
        if not is_kept:
            warden.close()

    def _kill(self, warden: WardenProcess) -> None:
        with self._lock:
            self._busy.discard(warden)
        warden.kill()


def _close_all(idle: list[WardenProcess]) -> None:
    for warden in idle:
        warden.close()


def _folders(setting: str, paths: Sequence[str]) -> list[str]:
    found = []
    for path in paths:
        real = os.path.realpath(os.path.expanduser(path))
        if not os.path.exists(real):
            raise ValueError(f"Sandbox.{setting}: there is no {path!r}")
        if real == "/" or (real + "/").startswith(room.SCRATCH + "/"):
            raise ValueError(
                f"Sandbox.{setting}={path!r} cannot be mounted: it is the root folder, or lies in {room.SCRATCH}"
            )
        found.append(real)
    return found


def _python_folders() -> list[str]:
    """Folders of the interpreter and its standard library."""
    prefixes = {os.path.realpath(prefix) for prefix in (sys.base_prefix, sys.base_exec_prefix)}
    return sorted(prefix for prefix in prefixes if prefix not in ("/", "/usr"))
