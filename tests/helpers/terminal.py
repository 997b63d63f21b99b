"""Commands typed into a terminal of some width, and what a person would see of them.

The terminal is emulated (pyte). Commands run as they are, or in forks of a process that has imported everything.
"""

from __future__ import annotations

import base64
import fcntl
import json
import os
import pty
import select
import signal
import struct
import sys
import termios
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from preloaded import ROOT, Preloaded

LINES = 30
COMMAND = "import sys; from lit_async_rl.cli.console import main; main(['train', *sys.argv[1:]])"
TERMINAL = {"TERM": "xterm-256color", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


@dataclass
class Seen:
    """Output of a terminal.

    Attributes:
        text: all lines, those that have left the screen first.
        view: the last whole drawing of a run that had a verdict; empty if there was none.
    """

    columns: int
    status: int
    text: list[str] = field(default_factory=list)
    view: list[str] = field(default_factory=list)


def type_in_fork(process: Preloaded, words: Sequence[str], columns: int, folder: Path, code: str | None = None) -> Seen:
    """Runs `python scripts/train.py WORDS`, or code, in a fork of a process that has imported everything."""
    asked = dict(words=list(words), columns=columns, folder=str(folder), code=code or COMMAND)
    helpers = str(Path(__file__).parent)
    typed = f"import sys; sys.path.append({helpers!r}); from terminal import type_here; type_here({asked!r})"
    done = process.run([], folder, code=typed, limit_s=150.0)
    assert done.status == 0, done.said
    status, parts = json.loads(done.said)
    return emulated([base64.b64decode(part) for part in parts], columns, status)


def type_command(argv: Sequence[str], columns: int, folder: Path, limit_s: float = 240.0) -> Seen:
    """Runs a program."""
    status, parts = _in_terminal(columns, str(folder), limit_s, run=lambda: os.execvpe(argv[0], list(argv), os.environ))
    return emulated(parts, columns, status)


def emulated(parts: Sequence[bytes], columns: int, status: int) -> Seen:
    """Shows what was written, part by part."""
    import pyte

    screen = pyte.HistoryScreen(columns, LINES, history=10_000, ratio=0.5)
    stream = pyte.ByteStream(screen)
    seen = Seen(columns, status)
    for part in parts:
        stream.feed(part)
        if view := _view(screen.display):
            seen.view = view
    above = ["".join(line[x].data for x in range(columns)) for line in screen.history.top]
    seen.text = [line.rstrip() for line in [*above, *screen.display]]
    while seen.text and not seen.text[-1]:
        seen.text.pop()
    return seen


def _view(display: Sequence[str]) -> list[str]:
    """The drawing, once its last border is whole: what a program writes at once comes in several parts."""
    tops = [at for at, line in enumerate(display) if line.startswith("╭") and "lit-async-rl" in line]
    ends = [at for at, line in enumerate(display) if line.startswith("╰") and line.rstrip().endswith("╯")]
    if not tops or not ends or ends[-1] < tops[-1]:
        return []
    lines = [line.rstrip() for line in display[tops[-1] : ends[-1] + 1]]
    return lines if any("verdict" in line and " after " not in line for line in lines) else []


def _in_terminal(columns: int, folder: str, limit_s: float, run) -> tuple[int, list[bytes]]:
    child, descriptor = pty.fork()
    if child == 0:
        fcntl.ioctl(0, termios.TIOCSWINSZ, struct.pack("HHHH", LINES, columns, 0, 0))
        os.chdir(folder)
        os.environ.update(TERMINAL)
        for name in ("COLUMNS", "LINES"):  # stronger than the terminal's size
            os.environ.pop(name, None)
        run()
    parts = []
    deadline = time.monotonic() + limit_s
    while True:
        ready, _, _ = select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            os.kill(child, signal.SIGKILL)
            break
        try:
            part = os.read(descriptor, 65536)
        except OSError:  # the other end is closed
            break
        if not part:
            break
        parts.append(part)
    os.close(descriptor)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), parts


def type_here(asked: dict) -> None:
    """In the fork: prints the status of the command, which a fork of its own runs, and what its terminal got."""
    import preloaded

    def run() -> None:
        sys.stdin = open(0, closefd=False)  # noqa: SIM115  for the process's life
        sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
        sys.stderr = sys.__stderr__ = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
        sys.argv = ["scripts/train.py", *asked["words"]]
        status = preloaded.run(asked)
        preloaded.wind_up()
        sys.stdout.flush()
        os._exit(status)

    status, parts = _in_terminal(asked["columns"], asked["folder"], 200.0, run=run)
    print(json.dumps([status, [base64.b64encode(part).decode() for part in parts]]))
