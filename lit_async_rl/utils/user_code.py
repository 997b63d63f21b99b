"""Where in a user's own files an error was raised: rewards, environments, prompts, callbacks, in any thread.

An error of a reward goes through a worker, the producer's thread, the trainer's and Lightning: four chained tracebacks
of 130 lines, with the one that matters in the middle.
"""

from __future__ import annotations

import inspect
import linecache
import os
import sysconfig
import traceback
from collections.abc import Iterator
from itertools import dropwhile
from pathlib import Path
from types import FrameType, TracebackType

from lit_async_rl.errors import EnvironmentFailure, RewardError
from lit_async_rl.utils.secrets import without_secrets

PACKAGE = Path(__file__).parents[1]
TRACEBACK_FILE = "traceback.txt"  # in the folder of the run
_OWN = tuple({str(PACKAGE), str(PACKAGE.resolve()), str((PACKAGE / "callbacks").resolve())})
_OTHERS = (  # folders of code other than the user's
    *_OWN,
    *{os.path.realpath(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib")},
)


def wants_traceback() -> bool:
    """Whether LIT_ASYNC_RL_TRACEBACK=1 is set: errors then have the whole of their tracebacks."""
    return bool(os.environ.get("LIT_ASYNC_RL_TRACEBACK"))


def user_traceback(error: BaseException) -> TracebackType | None:
    """Frames of the user's own code, of the first error of a chain that has any; None if none has.

    Only code that this package has called, not a script that gave it a wrong setting.
    """
    for one in reversed(list(_chain(error))):
        called = dropwhile(lambda frame: not _is_ours(frame.tb_frame), _frames(one.__traceback__))
        frames = [frame for frame in called if _is_users(frame.tb_frame)]
        found: TracebackType | None = None
        for frame in reversed(frames):
            found = TracebackType(found, frame.tb_frame, frame.tb_lasti, frame.tb_lineno)
        if found is not None:
            return found
    return None


def explains_itself(error: BaseException) -> bool:
    """Whether a reward, environment or agent failed, whose message says all."""
    return any(isinstance(one, RewardError | EnvironmentFailure) for one in _chain(error))


def user_line(error: BaseException) -> str:
    """File, line, function and source of the user's code that raised an error, as in a traceback; empty if none."""
    frames = list(_frames(user_traceback(error)))
    return _shown(frames[-1].tb_frame, frames[-1].tb_lineno) if frames else ""


def running_line(innermost: FrameType | None) -> str:
    """As `user_line`, for a running thread; its innermost line if it runs none of the user's code."""
    frame = _users_frame(innermost) or innermost
    return "" if frame is None else _shown(frame, frame.f_lineno)


def _users_frame(innermost: FrameType | None) -> FrameType | None:
    frame = innermost
    while frame is not None and not _is_users(frame):
        frame = frame.f_back
    return frame


def _shown(frame: FrameType, number: int) -> str:
    code = frame.f_code
    source = linecache.getline(code.co_filename, number, frame.f_globals).strip()
    where = f'  File "{code.co_filename}", line {number}, in {code.co_name}'
    return f"{where}\n    {source}" if source else where


def write_traceback(error: BaseException, folder: str | os.PathLike[str] | None) -> str:
    """Writes the whole traceback into the folder of a run; returns the file's path, empty if it was not written.

    A refused run has no folder, and gets none for this.
    """
    if folder is None or not Path(folder).is_dir():
        return ""
    path = Path(folder) / TRACEBACK_FILE
    try:
        path.write_text(without_secrets("".join(traceback.format_exception(error))))
    except OSError:
        return ""
    return str(path)


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """An error and those that led to it, as Python prints them."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def _frames(of: TracebackType | None) -> Iterator[TracebackType]:
    while of is not None:
        yield of
        of = of.tb_next


def _is_ours(frame: FrameType) -> bool:
    # a context manager that caught the error stands first in its traceback, and has called nobody: it is a generator
    if frame.f_code.co_flags & inspect.CO_GENERATOR:
        return False
    return os.path.realpath(frame.f_code.co_filename).startswith(_OWN)


def _is_users(frame: FrameType) -> bool:
    file = frame.f_code.co_filename
    if file.startswith("<"):  # typed in, or made at run time, as the constructors of dataclasses are
        return frame.f_globals.get("__name__") == "__main__"
    real = os.path.realpath(file)
    return not real.startswith(tuple(f"{folder}{os.sep}" for folder in _OTHERS)) and not (
        {"site-packages", "dist-packages"} & set(Path(file).parts)
    )
