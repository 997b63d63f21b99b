"""Trains a policy: `python scripts/train.py --config configs/quickstart.yaml [--config b.yaml] [--data.x 1]`."""

import sys

from lit_async_rl.cli.console import main

if __name__ == "__main__":
    main(["train", *sys.argv[1:]])
