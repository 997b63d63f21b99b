"""Held-out accuracy of a checkpoint, with samples to look at.

    python scripts/evaluate.py --config configs/quickstart.yaml --ckpt_path runs/.../checkpoints/last.ckpt

`--data.validation.num_samples 8` adds pass@8. Without `--ckpt_path` the untrained model is measured.
"""

from lit_async_rl.cli.app import evaluate

if __name__ == "__main__":
    evaluate()
