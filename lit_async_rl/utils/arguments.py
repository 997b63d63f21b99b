"""Argument parser of the small commands: errors are one line, and misspelt flags are suggested."""

from __future__ import annotations

import argparse
import difflib
import re
import sys
from typing import NoReturn


class OneLineParser(argparse.ArgumentParser):
    """`argparse.ArgumentParser` whose flags are never abbreviated, and whose errors do not repeat the usage text."""

    def __init__(self, **settings: object) -> None:
        super().__init__(**{"allow_abbrev": False, **settings})  # type: ignore[arg-type]

    def error(self, message: str) -> NoReturn:
        """Ends the process with status 2."""
        flags = [flag for action in self._actions for flag in action.option_strings]
        if match := re.match(r"unrecognized arguments: (\S+)", message):
            close = difflib.get_close_matches(match[1].split("=")[0], flags, n=1, cutoff=0.6)
            message = f"there is no argument {match[1]}" + (f"; did you mean {close[0]}?" if close else "")
        sys.stderr.write(f"error: {message}; --help lists the arguments\n")
        self.exit(2)
