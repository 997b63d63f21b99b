"""Held-out accuracy of a checkpoint, with samples to look at.

    python scripts/evaluate.py --config configs/quickstart.yaml --ckpt_path runs/.../checkpoints/last.ckpt

`--data.validation.num_samples 8` adds pass@8. Without `--ckpt_path` the untrained model is measured.
"""

import sys

from lit_async_rl.cli.console import main

if __name__ == "__main__":
    main(["evaluate", *sys.argv[1:]])
