"""Looks at a rollout tape: `python scripts/tape.py list runs/x/tape`, `filter`, `sample` or `plot`."""

import sys

from lit_async_rl.cli.console import main

if __name__ == "__main__":
    main(["tape", *sys.argv[1:]])
