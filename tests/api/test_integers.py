"""Settings that count things are integers: 2.5 is refused by name in Python and on the command line."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from preloaded import Preloaded

import lit_async_rl as rl
from lit_async_rl.cli.app import AsyncRLCLI
from lit_async_rl.simulation.latency import Constant
from lit_async_rl.utils.checks import check_range

DATA: dict[str, Any] = dict(prompts=[{"prompt": "a", "answer": "b"}], reward=rl.exact_match)
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def answers(process: Preloaded, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, str]]:
    folder = tmp_path_factory.mktemp("answers")
    script = str(ROOT / "tests/helpers/integer_settings.py")
    code = "import contextlib, runpy\nwith open('answers.json', 'w') as file, contextlib.redirect_stdout(file):\n"
    code += f"    runpy.run_path({script!r}, run_name='__main__')"
    done = process.run([], folder, code=code, limit_s=170.0)
    assert done.status == 0, done.said
    found: dict[str, dict[str, str]] = json.loads((folder / "answers.json").read_text())
    return found


@pytest.mark.slow
def test_no_setting_that_is_an_integer_takes_a_float(answers: dict[str, dict[str, str]]) -> None:
    assert len(answers["float"]) > 80
    for place, said in answers["float"].items():
        setting = place.split(".")[1]
        assert said.startswith("ValueError: "), f"{place}=2.5: {said or 'taken'}"
        assert said.endswith(f"{setting} must be an integer, got 2.5"), f"{place}: {said}"


@pytest.mark.slow
def test_no_number_that_is_not_optional_takes_none(answers: dict[str, dict[str, str]]) -> None:
    assert len(answers["none"]) > 350
    wrong = [
        f"{place}=None: {said or 'taken'}"
        for place, said in answers["none"].items()
        if not re.match(rf"ValueError: [\w.]+\.{place.split('.')[1]} must have a value, got None", said)
    ]
    assert wrong == [], "\n".join(wrong)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: rl.PPOClip(None), "PPOClip.clip_low must have a value, got None: leave it out for its default"),
        (lambda: rl.AsymRE(shift=None), "AsymRE.shift must have a value, got None: leave it out for its default"),
        (lambda: rl.RolloutDataModule(group_size=None), "data.group_size must have a value, got None: leave it out"),
        (lambda: rl.FixedLength(None), "FixedLength.max_tokens must have a value, got None"),
        (lambda: rl.EpisodeEngine(rl.EmbeddedEngine(seed=None), rl.Calculator()), "EmbeddedEngine.seed must have a"),
    ],
)
def test_none_is_refused_where_annotations_do_not_admit_it(make: Callable[[], object], said: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(said)}"):
        make()


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: rl.RolloutDataModule(**DATA, group_size=10**9), "data.group_size must be <= 1000000, got"),
        (lambda: rl.RolloutDataModule(**DATA, groups_per_step=10**9), "data.groups_per_step must be <= 1000000, got"),
        (
            lambda: rl.RolloutDataModule(**DATA, groups_per_step=10**5, group_size=10**5),
            "data.groups_per_step * group_size must be <= 1000000, got",
        ),
        (lambda: rl.EmbeddedEngine(num_slots=10**9), "data.engine.num_slots must be <= 1000000, got"),
        (lambda: rl.SimulatedEngine(Constant(1.0), num_slots=10**9), "data.engine.num_slots must be <= 1000000, got"),
        (lambda: rl.Scoring(workers=10**9), "data.scoring.workers must be <= 1000000, got"),
        (lambda: rl.Validation(num_samples=10**9), "data.validation.num_samples must be <= 1000000, got"),
        (lambda: rl.SamplingParams(head=10**9), "sampling.head must be <= 1000000, got"),
        (lambda: rl.ProcessAgent("a.b", processes=10**9), "ProcessAgent.processes must be <= 10000, got"),
        (lambda: rl.MentalArithmetic(largest=10**9), "MentalArithmetic.largest must be <= 1000, got"),
        (lambda: rl.VLLMEngine(max_num_seqs=10**9), "data.engine.max_num_seqs must be <= 1000000, got"),
    ],
)
def test_a_size_beyond_reason_is_refused_before_anything_of_it_is_made(make: Callable[[], object], said: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(said)} 10+$"):
        make()


def test_a_function_is_no_reward_of_another_process() -> None:
    init = inspect.unwrap(rl.IsolatedReward.__init__)  # the type checker of these tests would refuse it first
    with pytest.raises(ValueError, match=r"^IsolatedReward\.reward must be a dotted path, .*, got <function"):
        init(object.__new__(rl.IsolatedReward), lambda prompt, completion: 1.0)


def test_none_passes_where_annotations_admit_it() -> None:
    assert rl.PPOClip(dual_clip=None) == rl.PPOClip()
    assert rl.Scoring(tries=None, success_reward=None) == rl.Scoring()


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
