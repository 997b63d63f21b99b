"""Settings that count things are integers: 2.5 is refused by name in Python and on the command line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from lit_async_rl.cli.app import AsyncRLCLI
from lit_async_rl.utils.checks import check_range

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_no_setting_that_is_an_integer_takes_a_float() -> None:
    command = [sys.executable, str(ROOT / "tests/helpers/integer_settings.py"), "2.5"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=150, env=environment)
    answers = json.loads(done.stdout)
    assert len(answers) > 80
    for place, said in answers.items():
        setting = place.split(".")[1]
        assert said.startswith("ValueError: "), f"{place}=2.5: {said or 'taken'}"
        assert said.endswith(f"{setting} must be an integer, got 2.5"), f"{place}: {said}"


@pytest.mark.parametrize("value", [2.0, 1e18, float("nan"), float("inf")])
def test_no_float_is_an_integer(value: float) -> None:
    with pytest.raises(ValueError, match=r"data\.seed must be an integer, got "):
        check_range("data", "integer", seed=value)


def test_bounds_hold_for_integers() -> None:
    check_range("data", "integer >= 1", groups_per_step=3, group_size=None)
    check_range("data", "integer", seed=-3)
    with pytest.raises(ValueError, match=r"data\.groups_per_step must be >= 1, got 0"):
        check_range("data", "integer >= 1", groups_per_step=0)


@pytest.mark.parametrize(
    "setting", ["data.max_staleness", "data.group_size", "data.sampling.max_tokens", "trainer.max_steps", "num_threads"]
)
def test_the_command_line_names_it_too(setting: str, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit):
        AsyncRLCLI(["--config", str(ROOT / "configs/quickstart.yaml"), f"--{setting}", "2.5"])
    said = capsys.readouterr().err
    assert setting in said
    assert "2.5" in said
