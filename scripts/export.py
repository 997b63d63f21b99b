"""Writes a checkpoint as a Hugging Face folder, which transformers and vLLM load.

python scripts/export.py --config configs/quickstart.yaml --ckpt_path runs/.../last.ckpt --out runs/my_policy
"""

from lit_async_rl.cli.app import export

if __name__ == "__main__":
    export()
