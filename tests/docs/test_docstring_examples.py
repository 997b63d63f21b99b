"""Examples in the docstrings of the most used public names run as they stand, on a CPU."""

import inspect
import re
import textwrap

import pytest

import lit_async_rl as rl

BLOCK = re.compile(r"Example:\n\s*```python\n(.*?)```", re.S)
NAMES = [
    *("fit", "Trainer", "PolicyModule", "RolloutDataModule", "EmbeddedEngine", "AgentEngine"),
    *("ESSLearningRate", "GradientAlignmentControl", "PPOClip", "SequenceTruncatedIS", "JsonlPrompts"),
]


@pytest.mark.parametrize("name", NAMES)
def test_the_example_of_a_public_name_runs(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = BLOCK.search(inspect.getdoc(getattr(rl, name)) or "")
    assert found is not None, f"the docstring of {name} has no example"
    code = textwrap.dedent(found[1])
    assert f"rl.{name}" in code
    assert len(code.splitlines()) <= 16
    exec(compile(code, f"<example of {name}>", "exec"), {})
