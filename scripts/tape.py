"""Looks at a rollout tape: `python scripts/tape.py list runs/x/tape`, `filter`, `sample` or `plot`."""

from lit_async_rl.cli.tape import main

if __name__ == "__main__":
    main()
