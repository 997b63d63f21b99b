"""The console script: `lit-async-rl train --config ...`. Each command is imported when it is called."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

from lit_async_rl import __version__
from lit_async_rl.utils.checks import meant

COMMANDS = {
    "train": ("lit_async_rl.cli.app", "main", "train a policy: --config file.yaml, see --help for all settings"),
    "evaluate": ("lit_async_rl.cli.app", "evaluate", "held-out accuracy of a checkpoint, with samples"),
    "export": ("lit_async_rl.cli.app", "export", "write a checkpoint as a Hugging Face folder"),
    "chat": ("lit_async_rl.cli.chat", "main", "type prompts at a trained policy"),
    "fetch": ("lit_async_rl.cli.fetch", "main", "download a small pretrained model as a Hugging Face folder"),
    "convert": ("lit_async_rl.cli.convert", "main", "turn a configuration of TRL into one of this trainer"),
    "serve": ("lit_async_rl.engines.vllm.serve", "main", "start a vLLM server for a trainer"),
    "report": ("lit_async_rl.cli.report", "main", "write a run, or two side by side, to one HTML file"),
    "watch": ("lit_async_rl.cli.report", "watch", "serve a run's report on this machine while the run goes on"),
    "tape": ("lit_async_rl.cli.tape", "main", "list, filter, sample or plot a rollout tape"),
    "env": ("lit_async_rl.cli.env", "main", "print versions and machine, for a report of a bug"),
}


def main(args: Sequence[str] | None = None) -> None:
    """Runs the command named by the first argument with the remaining arguments.

    `sys.argv` stays as it is, because Lightning starts further processes with it.
    """
    command, *rest = list(sys.argv[1:] if args is None else args) or ["--help"]
    if command in ("-h", "--help", "help"):
        print(usage())
    elif command == "--version":
        print(f"lit-async-rl {__version__}")
    elif command in COMMANDS:
        module, function, _ = COMMANDS[command]
        getattr(importlib.import_module(module), function)(rest)
    else:
        known = f"{', '.join(COMMANDS)} and --version"
        sys.exit(f"error: there is no command {command!r}{meant(command, COMMANDS)} (commands: {known})")


def usage() -> str:
    """A line for each command."""
    lines = [f"  {name:10} {summary}" for name, (_, _, summary) in COMMANDS.items()]
    return "\n".join(["usage: lit-async-rl COMMAND [--help] ...", "", *lines, "  --version"])
