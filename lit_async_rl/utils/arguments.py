"""Argument parser of the small commands: errors are one line, and misspelt flags are suggested."""

from __future__ import annotations

import argparse
import re
import sys
from typing import NoReturn

from lit_async_rl.utils.suggestions import meant


class OneLineParser(argparse.ArgumentParser):
    """`argparse.ArgumentParser` whose flags are never abbreviated, and whose errors do not repeat the usage text."""

    def __init__(self, **settings: object) -> None:
        super().__init__(**{"allow_abbrev": False, **settings})  # type: ignore[arg-type]

    def error(self, message: str) -> NoReturn:
        """Ends the process with status 2."""
        flags = [flag for action in self._actions for flag in action.option_strings]
        if match := re.match(r"unrecognized arguments: (\S+)", message):
            message = f"there is no argument {match[1]}{meant(match[1].split('=')[0], flags)}"
        sys.stderr.write(f"error: {message}; --help lists the arguments\n")
        self.exit(2)
