"""A type checker sees the public names, which are imported lazily."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SAMPLE = """
import lit_async_rl as rl


def reward(prompt: rl.Prompt, completion: str) -> float:
    return float(completion == prompt.answer)


async def slow_reward(prompt: rl.Prompt, completion: str) -> float:
    return 1.0


texts = ["1 + 1 =", "2 + 2 ="]
trainer: rl.Trainer = rl.fit("model", texts, reward, max_steps=1, callbacks=rl.SampleLogger(every_n_steps=5))
rl.fit("model", "my.jsonl", reward, max_steps=1, sampling={"max_tokens": 3}, validation=texts, learning_rate=1e-6)
rl.Trainer(max_steps=3, defaults={"gradients": None})
rl.RolloutDataModule(prompts=[{"prompt": "1 + 1 =", "answer": "2"}], reward=slow_reward)
reveal_type(rl.PolicyModule)
rl.fit(3, texts)
rl.fit("model", texts, reward, max_steps=1, max_stalenes=2)
rl.Trainr()
"""


STRICT = """
[[tool.mypy.overrides]]
module = "sample"
disable_error_code = []
check_untyped_defs = true
disallow_any_generics = true
disallow_incomplete_defs = true
disallow_subclassing_any = true
disallow_untyped_calls = true
disallow_untyped_decorators = true
disallow_untyped_defs = true
extra_checks = true
implicit_reexport = false
strict_equality = true
warn_return_any = true
warn_unused_ignores = true
"""  # what --strict sets for one module


@pytest.mark.slow
@pytest.mark.timeout(900)  # minutes of a processor that others use, too
def test_mypy_strict_knows_them(tmp_path):
    """With the settings of `make types`, strict for the sample only, since mypy's cache holds for the same settings."""
    file = tmp_path / "sample.py"
    file.write_text(SAMPLE)
    settings = tmp_path / "pyproject.toml"
    settings.write_text((ROOT / "pyproject.toml").read_text() + STRICT)
    command = [sys.executable, "-m", "mypy", "--config-file", str(settings), "--warn-redundant-casts", str(file)]
    environment = {**os.environ, "MYPYPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    problems = [line.split("sample.py:")[-1] for line in done.stdout.splitlines() if "sample.py" in line]
    last = SAMPLE.count("\n")
    lines = {int(line.split(":")[0]) for line in problems}
    assert lines == {last - 3, last - 2, last - 1, last}, done.stdout
    assert "PolicyModule" in problems[0]
