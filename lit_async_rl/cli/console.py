"""The console script: `lit-async-rl train --config ...`. Each command is imported when it is called.

Commands whose imports take seconds say so first.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import os
import select
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from types import ModuleType

from lit_async_rl import __version__
from lit_async_rl.cli import help_pages
from lit_async_rl.utils.checks import meant
from lit_async_rl.utils.loading import loading

CONFIGURED = "lit_async_rl.cli.app"  # module of the commands that read a configuration
QUICK = ("convert", "report", "watch", "grade", "env")  # begin within half a second: no notice
INTERRUPTED = 128 + 2  # status of a program that SIGINT ends
WITHOUT_READER = 128 + 13  # SIGPIPE
COMMANDS = {
    "train": (CONFIGURED, "main", "train a policy: --config file.yaml, see train --help"),
    "sft": ("lit_async_rl.supervised.command", "main", "fine-tune a model on records before RL: --config file.yaml"),
    "evaluate": (CONFIGURED, "evaluate", "held-out accuracy of a checkpoint, with samples"),
    "export": (CONFIGURED, "export", "write a checkpoint as a Hugging Face folder"),
    "chat": ("lit_async_rl.cli.chat", "main", "type prompts at a trained policy"),
    "fetch": ("lit_async_rl.lab.fetch", "main", "download a small pretrained model as a Hugging Face folder"),
    "convert": ("lit_async_rl.lab.convert", "main", "turn a configuration of TRL into one of this trainer"),
    "plan": ("lit_async_rl.lab.plan", "main", "predict the best split of devices between trainer and engines"),
    "report": ("lit_async_rl.report.commands", "main", "write a run, or two side by side, to one HTML file"),
    "watch": ("lit_async_rl.report.commands", "watch", "serve a run's report on this machine while the run goes on"),
    "grade": ("lit_async_rl.lab.grade", "main", "show what a reward makes of a file of references and answers"),
    "tape": ("lit_async_rl.lab.tape", "main", "list, filter, sample or plot a rollout tape"),
    "env": ("lit_async_rl.cli.env", "main", "print versions and machine, for a report of a bug"),
}


def main(args: Sequence[str] | None = None) -> None:
    """Runs the command named by the first argument with the remaining arguments.

    `sys.argv` stays as it is, because Lightning starts further processes with it. Ctrl-C, or the end of a program that
    reads the output, ends it without a traceback, with the status of SIGINT or SIGPIPE.
    """
    try:
        _run(args)
        if sys.stdout is not None:
            sys.stdout.flush()
    except KeyboardInterrupt:  # while it imports, say
        sys.exit(INTERRUPTED)
    except (BrokenPipeError, SystemExit) as error:
        has_failed = isinstance(error, BrokenPipeError) or isinstance(error.__context__, BrokenPipeError)
        is_lost = _has_lost_its_reader(has_failed)
        if not is_lost or (isinstance(error, SystemExit) and error.code and not has_failed):
            raise
        sys.exit(WITHOUT_READER)


def _has_lost_its_reader(has_failed: bool) -> bool:
    """Whether nobody reads standard output any more (`| head`); then nothing more is written to it.

    Args:
        has_failed: whether a pipe is broken, which may be another one.
    """
    if sys.stdout is None:
        return False
    try:
        sys.stdout.flush()
        if not has_failed or not _is_without_reader(sys.stdout.fileno()):
            return False
    except BrokenPipeError:
        pass
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return True


def _is_without_reader(descriptor: int) -> bool:
    """Whether a write to a pipe would fail."""
    if not hasattr(select, "poll"):  # Windows
        return False
    poll = select.poll()
    poll.register(descriptor, select.POLLOUT)
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))


def _run(args: Sequence[str] | None) -> None:
    command, *rest = list(sys.argv[1:] if args is None else args) or ["--help"]
    if command in ("-h", "--help", "help"):
        print(usage())
    elif command == "--version":
        print(f"lit-async-rl {__version__}")
    elif command in COMMANDS:
        module, function, _ = COMMANDS[command]
        if module == CONFIGURED:
            _run_configured(command, rest)
        else:
            with nullcontext() if command in QUICK else loading():
                imported = importlib.import_module(module)
            getattr(imported, function)(rest)
    else:
        known = f"{', '.join(COMMANDS)} and --version"
        sys.exit(f"error: there is no command {command!r}{meant(command, COMMANDS)} (commands: {known})")


def _run_configured(command: str, words: Sequence[str]) -> None:
    """Runs a command that reads a configuration; pages of help of the one that trains need no import."""
    topic = help_pages.asked_for(words) if command == "train" else None
    if topic is not None:
        help_pages.show(topic, _train_parser)
        return
    getattr(_app(), COMMANDS[command][1])(words)


def _train_parser() -> argparse.ArgumentParser:
    _app()
    from lit_async_rl.cli.settings import train_parser

    return train_parser()


def _app() -> ModuleType:
    """The module of these commands; announces its import, unless it is loaded."""
    if "lightning" not in sys.modules:
        with loading():
            importlib.import_module(CONFIGURED)
        gc.freeze()  # imported objects stay: collections need not scan them again
    return importlib.import_module(CONFIGURED)


def usage() -> str:
    """A line for each command."""
    lines = [f"  {name:10} {summary}" for name, (_, _, summary) in COMMANDS.items()]
    return "\n".join(["usage: lit-async-rl COMMAND [--help] ...", "", *lines, "  --version"])
