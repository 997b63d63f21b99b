"""Completion of commands, settings and values in a shell.

    eval "$(lit-async-rl completion bash)"          # in ~/.bashrc; zsh: the same, with `zsh`, in ~/.zshrc

The script has all names in it, so that a shell starts no Python to complete a word. Values that are no names, and
`--config`, are completed by files.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from lit_async_rl.cli.settings import all_settings
from lit_async_rl.utils.checks import OneLineParser

CONFIGURED = ("train", "evaluate", "export")  # commands that read settings
BASH = """\
_lit_async_rl() {
    local word previous command i
    word=${COMP_WORDS[COMP_CWORD]}
    previous=${COMP_WORDS[COMP_CWORD-1]}
    if [ "$word" = "=" ]; then word=; elif [ "$previous" = "=" ]; then previous=${COMP_WORDS[COMP_CWORD-2]}; fi
    command=${COMP_WORDS[1]}
    COMPREPLY=()
    if [ "$COMP_CWORD" -eq 1 ]; then
        COMPREPLY=( $(compgen -W "COMMANDS" -- "$word") )
        return
    fi
    case "$command" in CONFIGURED) ;; *) COMPREPLY=( $(compgen -f -- "$word") ); return ;; esac
    case "$previous" in
        --help) COMPREPLY=( $(compgen -W "all SETTINGS" -- "$word") ); return ;;
VALUES
    esac
    case "$word" in
        -*) COMPREPLY=( $(compgen -W "--config --help --print_config FLAGS" -- "$word") ) ;;
        *) COMPREPLY=( $(compgen -f -- "$word") ) ;;
    esac
}
complete -o filenames -o bashdefault -F _lit_async_rl lit-async-rl
"""
VALUE = '        FLAGS) COMPREPLY=( $(compgen -W "WORDS" -- "$word") $(compgen -f -- "$word") ); return ;;'
ZSH = "autoload -U +X bashcompinit && bashcompinit\nautoload -U +X compinit && compinit -u\n"


def main(args: Sequence[str] | None = None) -> None:
    """Command line of the completion command."""
    parser = OneLineParser(
        prog="lit-async-rl completion", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("shell", choices=("bash", "zsh"))
    shell = parser.parse_args(args).shell
    from lit_async_rl.cli.console import COMMANDS

    sys.stdout.write((ZSH if shell == "zsh" else "") + script(list(COMMANDS)))


def script(commands: Sequence[str]) -> str:
    """The function that completes, for bash; zsh reads it by `bashcompinit`."""
    by_choices: dict[str, list[str]] = {}
    for name, entry in all_settings().items():
        if chosen := entry.get("choices"):
            by_choices.setdefault(" ".join(chosen), []).append(f"--{name}")
    values = [VALUE.replace("FLAGS", "|".join(flags)).replace("WORDS", words) for words, flags in by_choices.items()]
    return (
        BASH.replace("COMMANDS", " ".join(commands))
        .replace("CONFIGURED", "|".join(CONFIGURED))
        .replace("SETTINGS", " ".join(all_settings()))
        .replace("FLAGS", " ".join(f"--{name}" for name in all_settings()))
        .replace("VALUES", "\n".join(values))
    )
