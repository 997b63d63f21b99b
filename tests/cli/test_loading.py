"""What is imported when, between Enter and the first line of training. Causes, and no times."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
UNUSED = "torchmetrics.functional torchmetrics.text sklearn.base scipy.optimize._optimize matplotlib torchaudio "
UNUSED += "torchvision pandas aiohttp wandb datasets peft tensorboard mlflow vllm reasoning_gym IPython"


def run(code, *options):
    command = [sys.executable, *options, "-c", code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=170)
    assert done.returncode == 0, done.stderr[-3000:]
    return done


@pytest.mark.slow
def test_the_notice_comes_before_torch_and_training_imports_nothing_that_it_does_not_use(tmp_path):
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


@pytest.mark.slow
def test_what_was_put_off_is_there_when_it_is_asked_for():
    run("""
import sys
from lit_async_rl.cli.deferred_imports import deferred_imports
deferred_imports()
deferred_imports()  # the second does nothing
from torchmetrics import MeanMetric, Metric
import torchmetrics
assert issubclass(MeanMetric, Metric) and "torchmetrics.functional" not in sys.modules
assert torchmetrics.__version__[0].isdigit()
assert not hasattr(torchmetrics, "__nothing__")
from torchmetrics import Accuracy
assert torchmetrics.MeanMetric is MeanMetric
assert torchmetrics.functional.accuracy is not None
try:
    torchmetrics.no_such_metric
except AttributeError as error:
    assert "no_such_metric" in str(error)
else:
    raise SystemExit("an attribute that is none was found")
""")


def test_a_function_that_was_put_off_is_called_as_usual(tmp_path):
    package = tmp_path / "slow_library"
    package.mkdir()
    (package / "__init__.py").write_text("from slow_library.inner import double\nSTATE = 'executed'\n")
    (package / "inner.py").write_text("def double(x):\n    return 2 * x\n")
    run(f"""
import sys
sys.path.insert(0, {str(tmp_path)!r})
from lit_async_rl.cli import deferred_imports as deferred
sys.meta_path.insert(0, deferred._Finder({{"slow_library": deferred._Deferred(functions=("double",))}}))
from slow_library import double
import slow_library
assert "slow_library.inner" not in sys.modules
assert double(4) == 8 and "slow_library.inner" in sys.modules
assert slow_library.double is slow_library.inner.double and slow_library.STATE == "executed"
""")


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
