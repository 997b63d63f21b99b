"""Trains a policy: `python scripts/train.py --config configs/quickstart.yaml [--config b.yaml] [--data.x 1]`."""

from lit_async_rl.cli.app import main

if __name__ == "__main__":
    main()
