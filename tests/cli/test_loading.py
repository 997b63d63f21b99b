"""What is imported when, between Enter and the first line of training. Causes, and no times."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
UNUSED = "torchaudio torchvision pandas aiohttp wandb datasets peft tensorboard mlflow vllm reasoning_gym IPython"


def run(code, *options):
    command = [sys.executable, *options, "-c", code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=170)
    assert done.returncode == 0, done.stderr[-3000:]
    return done


@pytest.mark.slow
def test_the_notice_comes_before_torch_and_training_imports_no_optional_package(tmp_path):
    code = f"""
import sys
from lit_async_rl.cli.console import main
main(["train", "--config", "configs/quickstart.yaml", "--trainer.max_steps", "1", "--data.groups_per_step", "2",
      "--data.validation.prompts", "null", "--trainer.val_check_interval", "null",
      "--trainer.logger.save_dir", {str(tmp_path)!r}])
print("FOUND", [name for name in {UNUSED.split()!r} if name in sys.modules])
"""
    done = run(code, "-X", "importtime")
    lines = done.stderr.splitlines()
    notice = next(at for at, line in enumerate(lines) if line.startswith("loading torch, lightning and transformers"))
    torch = next(at for at, line in enumerate(lines) if line.split("|")[-1].strip() == "torch.version")
    assert notice < torch
    assert notice < 300  # modules of Python itself and of this package
    assert "FOUND []" in done.stdout


def test_garbage_is_collected_again_afterwards():
    run("""
import gc, sys
from lit_async_rl.utils.loading import loading
with loading("much"):
    assert not gc.isenabled()
assert gc.isenabled()
gc.disable()
with loading("much"):
    pass
assert not gc.isenabled()
sys.modules["lightning"] = None
gc.enable()
with loading("nothing"):
    assert gc.isenabled()
""")
