"""Writes a checkpoint as a Hugging Face folder, which transformers and vLLM load.

python scripts/export.py --config configs/quickstart.yaml --ckpt_path runs/.../last.ckpt --out runs/my_policy
"""

import sys

from lit_async_rl.cli.console import main

if __name__ == "__main__":
    main(["export", *sys.argv[1:]])
