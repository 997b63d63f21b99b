"""`error: ...` on one line, in place of a traceback, where a command fails.

Imports neither torch nor Lightning, for commands that train nothing.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

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
from lit_async_rl.utils.secrets import without_secrets
from lit_async_rl.utils.user_code import user_line, wants_traceback, write_traceback

SELF_EXPLAINING_ERRORS = (
    *(ValueError, OSError, ImportError),
    *(EngineError, NonFiniteError, ProducerError, RankError, RewardError, EnvironmentFailure, SetupError, StalledError),
)
MAX_ERROR_CHARS = 600


@contextmanager
def one_line_errors(folder: Callable[[], str | None] = lambda: None) -> Iterator[None]:
    """Ends the process with `error: ...` and status 1 where an exception would end it with a traceback.

    The traceback of an exception that no setting is known to cause, or that the user's code raised, goes to
    `traceback.txt`. The line of that code comes last on the screen.

    Args:
        folder: of the run, asked for when something was raised; None if there is none yet.
    """
    try:
        yield
    except Exception as error:
        if wants_traceback():
            raise
        if type(error).__module__.startswith("wandb"):  # compared by name: wandb need not be imported
            without = "WANDB_MODE=offline logs without an account"
            sys.exit(f"error: trainer.logger (WandbLogger): {shorten(str(error))} {without}")
        if type(error).__module__.startswith("pydantic") and " for Settings" in str(error):  # of wandb, from WANDB_MODE
            reason = re.sub(r"\[type=.*", "", str(error).partition("\n")[2], flags=re.S)
            sys.exit(f"error: a variable WANDB_* of the environment is refused by W&B: {shorten(reason)}")
        line = user_line(error)
        hint = _hint(error, folder, is_users=bool(line))
        sys.exit("\n".join(part for part in (f"error: {shorten(sentence(error))}{hint}", line) if part))


def shorten(text: str) -> str:
    """Text on one line of at most `MAX_ERROR_CHARS` characters, printable in any terminal, without keys."""
    line = re.sub(r"\s+", " ", without_secrets(text)).strip().encode("utf-8", "backslashreplace").decode()
    return line if len(line) <= MAX_ERROR_CHARS else f"{line[: MAX_ERROR_CHARS - 100]} ... {line[-90:]}"


def _hint(error: Exception, folder: Callable[[], str | None], is_users: bool) -> str:
    """Location of the full traceback, if it adds to the message."""
    if explains_itself(error) and not is_users:
        return ""
    found = folder()
    if is_users and found is not None and not Path(found).is_dir():
        found = None  # of a run that has not trained yet nothing is kept
    if path := write_traceback(error, found):
        return f"\n{path} says where it was raised"
    return f"\nLIT_ASYNC_RL_TRACEBACK=1 shows {'the whole traceback' if is_users else 'where it was raised'}"


def explains_itself(error: Exception) -> bool:
    """Whether the message of an error is all that a user needs."""
    # Lightning's is compared by name: Lightning need not be imported
    return isinstance(error, SELF_EXPLAINING_ERRORS) or type(error).__name__ == "MisconfigurationException"


def sentence(error: Exception) -> str:
    """The message of an error, without names of errors of other packages."""
    if isinstance(error, RuntimeError) and "by peer" in str(error):  # gloo's, within a collective of torch
        return "the connection to another rank broke: it has ended, was killed, or its machine is lost"
    return re.sub(r"^(MisconfigurationException: |ModuleNotFoundError: |\[Errno \d+\] )", "", describe(error))
