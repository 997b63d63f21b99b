"""A process that has imported everything and starts no thread: each command runs in a fork of it, within a second.

The fork takes the place of `lit-async-rl` in a new process: arguments, folder, environment, input and output are its
own, and it ends as Python ends. Run as a script this is that process; `Preloaded` starts it and talks to it.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import io
import json
import logging
import os
import select
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Done:
    """How a command ended: exit status, output and errors as a terminal shows them, seconds, processor seconds."""

    status: int
    said: str
    seconds: float
    processor_s: float
    timed_out: bool


class Preloaded:
    """Runs commands in forks, one at a time. Close it when done."""

    def __init__(self) -> None:
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        environment |= {"TOKENIZERS_PARALLELISM": "false", "COLUMNS": "100"}
        command = [sys.executable, __file__]
        self._number = 0
        self._process = subprocess.Popen(
            command, env=environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )

    def run(
        self,
        words: Sequence[str],
        folder: Path,
        environment: Mapping[str, str | None] | None = None,
        typed: str = "",
        limit_s: float = 60.0,
        code: str | None = None,
    ) -> Done:
        """Runs `lit-async-rl WORDS` (or Python code, with these arguments) in a folder, from start to end.

        Args:
            environment: variables to change; None deletes one.
            typed: standard input.
            limit_s: seconds until it is killed, with all of its processes.
            code: to run instead of the command.
        """
        self._number += 1
        asked = dict(
            number=self._number, words=list(words), folder=str(folder), typed=typed, limit_s=limit_s, code=code
        )
        self._process.stdin.write(json.dumps(asked | {"environment": dict(environment or {})}) + "\n")
        self._process.stdin.flush()
        while answer := self._process.stdout.readline():
            number, *done = json.loads(answer)
            if number == self._number:  # not what a test asked that ran out of time while it waited
                return Done(*done)
        raise AssertionError("the preloaded process has ended")

    def script(self, path: str, words: Sequence[str], folder: Path, **how: Any) -> Done:
        """Runs `python PATH WORDS` in the root of the repository; `folder` gets its output beside it."""
        code = f"import os, runpy, sys; os.chdir({str(ROOT)!r}); sys.path[0] = {str((ROOT / path).parent)!r}; "
        code += f"sys.argv[0] = {path!r}; runpy.run_path({path!r}, run_name='__main__')"
        return self.run(words, folder, code=code, **how)

    def close(self) -> None:
        """Ends the process."""
        self._process.stdin.close()
        self._process.wait(timeout=30)


def serve() -> dict | None:
    """Answers requests until there are none; in a fork it returns the request."""
    for line in sys.stdin:
        asked = json.loads(line)
        said = Path(asked["folder"]).with_suffix(".said")
        sys.stdout.flush()
        began = time.monotonic()
        if (child := os.fork()) == 0:
            os.setsid()
            _enter(asked, said)
            return asked
        status, used, timed_out = _wait(child, began + asked["limit_s"])
        seconds = time.monotonic() - began
        text = said.read_bytes().decode(errors="replace")
        print(json.dumps([asked["number"], status, text, seconds, used, timed_out]), flush=True)
    return None


def _wait(child: int, deadline: float) -> tuple[int, float, bool]:
    timed_out = False
    while True:
        pid, status, usage = os.wait4(child, os.WNOHANG)
        if pid:
            break
        if time.monotonic() > deadline and not timed_out:
            timed_out = True
            os.killpg(child, signal.SIGKILL)
        select.select([], [], [], 0.01)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)  # nothing that it started outlives it
    return os.waitstatus_to_exitcode(status), usage.ru_utime + usage.ru_stime, timed_out


def _enter(asked: dict, said: Path) -> None:
    """Makes the fork a process of its own."""
    typed = said.with_suffix(".typed")
    typed.write_text(asked["typed"])
    os.dup2(os.open(typed, os.O_RDONLY), 0)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115  for the process's life
    variables = {name: value for name, value in {**os.environ, **asked["environment"]}.items() if value is not None}
    become(["lit-async-rl", *asked["words"]], asked["folder"], variables, said=str(said))
    sys.path[0] = asked["folder"] if asked["code"] else str(Path(sys.executable).parent)  # that of the console script


def become(argv: list[str], folder: str, variables: Mapping[str, str], said: str) -> None:
    """Gives a fork arguments, folder, environment and output of its own."""
    output = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(variables)
    sys.argv = argv
    if (media := sys.modules.get("wandb.sdk.data_types._private")) is not None:
        os.makedirs(media.MEDIA_TMP.name, exist_ok=True)  # made at its import, and removed by the first fork that ended


def wind_up() -> None:
    """Ends a process as the interpreter does: waits for threads, then calls exit handlers."""
    threading._shutdown()
    atexit._run_exitfuncs()


def preload() -> None:
    """Imports what every command imports."""
    import lit_async_rl.api.run
    import lit_async_rl.cli.app
    import lit_async_rl.cli.chat
    import lit_async_rl.lab.tape  # noqa: F401

    _parse_once()
    gc.collect()
    gc.freeze()


def _parse_once() -> None:
    """Fills the caches of jsonargparse and transformers by a command that is refused before a thread starts."""
    import quick_parsing

    from lit_async_rl.cli.console import main

    quick_parsing.remember()
    folder = os.getcwd()
    path = list(sys.path)
    variables = dict(os.environ)
    os.chdir(ROOT)
    logging.disable()
    with contextlib.redirect_stderr(io.StringIO()) as said, contextlib.suppress(SystemExit):
        main(["train", "--config", "configs/quickstart.yaml", "--data.max_staleness", "-1"])
    logging.disable(logging.NOTSET)
    os.chdir(folder)
    sys.path[:] = path
    os.environ.clear()
    os.environ.update(variables)
    deadline = time.monotonic() + 60.0
    while threading.active_count() > 1 and time.monotonic() < deadline:  # a notice of slow loading, which is ending
        time.sleep(0.01)
    assert threading.active_count() == 1, threading.enumerate()
    assert said.getvalue().count("\n") <= 1, said.getvalue()  # nothing that a process says only once was said


def run(asked: dict) -> int:
    """Runs a request as the interpreter would, and returns its exit status."""
    try:
        if asked["code"] is None:
            from lit_async_rl.cli.console import main

            main()
        else:
            exec(compile(asked["code"], "<typed>", "exec"), {"__name__": "__main__"})
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except KeyboardInterrupt:
        traceback.print_exc()
        return 130
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


if __name__ == "__main__":
    preload()
    request = serve()
    if request is not None:
        status = run(request)
        wind_up()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)  # without the third of a second that freeing all modules takes
