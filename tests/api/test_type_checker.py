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


@pytest.mark.slow
@pytest.mark.timeout(900)  # minutes of a processor that others use, too
def test_mypy_strict_knows_them(tmp_path):
    file = tmp_path / "sample.py"
    file.write_text(SAMPLE)
    command = [
        sys.executable,
        "-m",
        "mypy",
        "--strict",
        "--follow-imports=silent",
        "--config-file=",
        "--no-incremental",
    ]
    environment = {**os.environ, "MYPYPATH": str(ROOT)}
    flags = ["--disable-error-code=syntax", "--disable-error-code=name-defined", "--ignore-missing-imports"]
    done = subprocess.run([*command, *flags, str(file)], cwd=tmp_path, env=environment, capture_output=True, text=True)
    problems = [line.split("sample.py:")[-1] for line in done.stdout.splitlines() if "sample.py" in line]
    last = SAMPLE.count("\n")
    lines = {int(line.split(":")[0]) for line in problems}
    assert lines == {last - 3, last - 2, last - 1, last}, done.stdout
    assert "PolicyModule" in problems[0]
