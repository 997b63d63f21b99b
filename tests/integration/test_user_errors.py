"""Rewards and engines that fail, hang or are stopped end the run with one clear message, and leave no thread behind.

Mistakes that are refused before a run begins are in `tests/product/misuses`.
"""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from lit_async_rl.assets import asset
from lit_async_rl.cli.app import main
from lit_async_rl.engines.embedded.engine import EmbeddedEngine

ROOT = Path(__file__).parents[2]
BASE = [
    *("--config", "configs/quickstart.yaml", "--trainer.max_steps", "3", "--trainer.enable_progress_bar", "false"),
    *("--data.groups_per_step", "2", "--data.group_size", "2", "--data.validation.prompts", "null"),
    *("--trainer.val_check_interval", "3", "--model.scheduler", "null"),
]
UNTIL_IT_BREAKS = ["--trainer.max_steps", "99", "--data.limits.engine_restarts", "0"]
pytestmark = pytest.mark.timeout(90)


@pytest.fixture(autouse=True)
def _from_the_root(monkeypatch, tmp_path):
    monkeypatch.chdir(ROOT)
    monkeypatch.syspath_prepend(str(tmp_path))
    before = set(threading.enumerate())
    yield
    deadline = time.monotonic() + 15
    while left := {t for t in threading.enumerate() if t.name == "producer"} - before:
        assert time.monotonic() < deadline, f"threads left over: {left}"
        time.sleep(0.05)


def message(capsys, tmp_path, *flags: str) -> str:
    """What the user reads when a run with these flags ends."""
    with pytest.raises(SystemExit) as error:
        main([*BASE, "--trainer.logger.init_args.save_dir", str(tmp_path / "runs"), *flags])
    assert error.value.code not in (0, None)
    said = str(error.value.code) if isinstance(error.value.code, str) else capsys.readouterr().err
    assert "Traceback" not in said
    return said


def test_a_reward_class_without_an_argument_that_it_needs_is_refused(capsys, tmp_path):
    body = "    def __init__(self, least):\n        self.least = least\n    def __call__(self, prompt, text): pass\n"
    (tmp_path / "needy_reward.py").write_text("class Needy:\n" + body)
    said = message(capsys, tmp_path, "--data.reward", "needy_reward.Needy")
    assert "data.reward.init_args.least is null, but needs a value" in said


@pytest.mark.slow
def test_a_reward_that_hangs_on_held_out_prompts_ends_the_run(capsys, tmp_path):
    (tmp_path / "hangs_held_out.py").write_text("def judge(prompt, completion):\n    import time; time.sleep(120)\n")
    prompts = '{"class_path": "lit_async_rl.tasks.SortDigits", "init_args": {"num_digits": 8, "size": 4}}'
    flags = ["--data.reward", "hangs_held_out.judge", "--data.scoring.timeout_s", "1"]
    flags += ["--data.validation.prompts", prompts]
    began = time.monotonic()
    said = message(capsys, tmp_path, *flags)
    named = r"reward hangs_held_out\.judge did not return within data\.scoring\.timeout_s=1 on prompt '.*='"
    assert re.search(named, said)
    assert time.monotonic() - began < 60.0, "beside the time that it takes to start"


@pytest.mark.slow
def test_a_reward_that_always_raises_ends_the_run_though_there_are_tries(capsys, tmp_path, caplog):
    (tmp_path / "always_raises.py").write_text("def judge(prompt, completion):\n    raise KeyError('gold')\n")
    said = message(capsys, tmp_path, "--data.reward", "always_raises.judge", "--data.scoring.tries", "3")
    assert "10 prompts in a row could not be scored, although each was tried up to data.scoring.tries=3 times" in said
    assert "always_raises.judge" in said
    assert "KeyError" in said
    assert sum("data.scoring.tries=3" in record.message for record in caplog.records) <= 30


class DyingEngine(EmbeddedEngine):
    """Breaks in the middle."""

    def poll(self, timeout_s: float):
        if self.num_tokens > 40:
            raise MemoryError("the engine ran out of memory")
        return super().poll(timeout_s)


class HangingEngine(EmbeddedEngine):
    """Stops answering in the middle."""

    def poll(self, timeout_s: float):
        if self.num_tokens > 40:
            time.sleep(timeout_s)
            return []
        return super().poll(timeout_s)


@pytest.mark.slow
def test_a_dying_engine_ends_the_run_with_its_error(capsys, tmp_path):
    said = message(capsys, tmp_path, "--data.engine", f"{__name__}.DyingEngine", *UNTIL_IT_BREAKS)
    assert "the engine ran out of memory" in said


@pytest.mark.slow
def test_a_hanging_engine_ends_the_run_with_the_setting_that_bounds_the_wait(capsys, tmp_path):
    flags = ["--data.engine", f"{__name__}.HangingEngine", "--data.limits.rollout_timeout_s", "2"]
    said = message(capsys, tmp_path, *flags, *UNTIL_IT_BREAKS)
    assert "rollout_timeout_s=2" in said
    assert "HangingEngine" in said


def test_a_tokenizer_with_more_tokens_than_the_model_is_refused(capsys, tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    for file in Path(asset("sort_policy")).iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens(["<one>", "<two>"])
    tokenizer.save_pretrained(folder)
    assert "vocabulary" in message(capsys, tmp_path, "--model.model", str(folder))


@pytest.mark.slow
@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM], ids=["Ctrl-C", "SIGTERM"])
def test_a_signal_ends_the_run_within_seconds(sent, tmp_path):
    (tmp_path / "slow_reward.py").write_text(
        "import time\n\ndef judge(prompt, completion):\n"
        "    print('scoring', flush=True)\n    time.sleep(0.2)\n    return 1.0\n"
    )
    flags = ["--data.reward", "slow_reward.judge", "--trainer.max_steps", "10000"]
    flags += ["--trainer.val_check_interval", "10000"]
    command = [sys.executable, "scripts/train.py", *BASE, *flags]
    command += ["--trainer.logger.init_args.save_dir", str(tmp_path / "runs")]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)
    try:
        for line in process.stdout:
            if "scoring" in line:
                break
        time.sleep(1.0)
        process.send_signal(sent)
        said, _ = process.communicate(timeout=20)
        assert said.count("Traceback") == 0, said
    finally:
        process.kill()
