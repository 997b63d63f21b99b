"""Every mistake a user can make ends in one clear message that names the setting, soon, and leaves no thread behind."""

import json
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
from lit_async_rl.training.module import PolicyModule

ROOT = Path(__file__).parents[2]
BASE = [
    *("--config", "configs/quickstart.yaml", "--trainer.max_steps", "3", "--trainer.enable_progress_bar", "false"),
    *("--data.groups_per_step", "2", "--data.group_size", "2", "--data.validation.prompts", "null"),
    *("--trainer.val_check_interval", "3", "--model.scheduler", "null"),
]
PLAIN = ["--config", "configs/stabilizers/plain.yaml"]
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


SIMPLE = {
    "unknown key": (["--data.max_stale", "3"], "max_stale"),
    "misspelt flag, no abbreviation": (["--data.max_stalenes", "3"], "max_stalenes"),
    "wrong type": (["--data.group_size", "many"], "group_size"),
    "negative bound": (["--data.max_staleness", "-1"], "max_staleness"),
    "no groups": (["--data.groups_per_step", "0"], "groups_per_step"),
    "negative temperature": (["--data.sampling.temperature", "-1"], "temperature"),
    "missing model folder": (["--model.model", "./no/such/folder"], "./no/such/folder"),
    "missing model name": (["--model.model", "nobody/nothing"], "nobody/nothing"),
    "unknown reward": (["--data.reward", "lit_async_rl.rewards.functions.no_such"], "no_such"),
    "unknown admission": (["--data.admission", "Sometimes"], "admission"),
    "no threads": (["--num_threads", "0"], "num_threads"),
    "prompt longer than the context": (["--data.sampling.max_tokens", "300"], "max_tokens=300"),
    "missing checkpoint": (["--ckpt_path", "no/such.ckpt"], "no/such.ckpt"),
    "missing config file": (["--config", "no_such.yaml"], "no_such.yaml"),
    "fixed lag with in-flight updates": (
        ["--data.admission", "FixedLag", "--data.engine", "lit_async_rl.engines.embedded.engine.EmbeddedEngine"],
        "in_flight_weight_updates=false",
    ),
    "nothing to compare a rollout with": (
        ["--data.group_size", "1"],
        "data.group_size=1 with model.baseline=OptimalBaseline",
    ),
    "the same without the baseline": ([*PLAIN, "--data.group_size", "1"], "data.group_size=1 with data.advantage"),
    "greedy training": (["--data.sampling.temperature", "0"], "data.sampling.temperature=0 with model.baseline"),
    "a correction with nothing to correct": (
        [*PLAIN, "--model.correction", "lit_async_rl.corrections.IcePop"],
        "BehaviorProximal",
    ),
}


@pytest.mark.parametrize("case", SIMPLE)
def test_a_wrong_setting_is_named(case, capsys, tmp_path):
    flags, named = SIMPLE[case]
    assert named in message(capsys, tmp_path, *flags)


PROMPTS = {
    "missing file": (None, "nowhere.jsonl"),
    "empty dataset": ("", "no prompts"),
    "line that is no JSON": ('{"prompt": "1=", "answer": "1"}\n{oops\n', "line 2"),
    "missing field": ('{"question": "1=", "answer": "1"}\n', "'prompt'"),
    "empty prompt": ('{"prompt": "", "answer": "1"}\n', "no tokens"),
}


@pytest.mark.parametrize("case", PROMPTS)
def test_bad_prompts_are_named(case, capsys, tmp_path):
    text, named = PROMPTS[case]
    path = tmp_path / "nowhere.jsonl"
    if text is not None:
        path.write_text(text)
    source = json.dumps({"class_path": "lit_async_rl.prompts.sources.JsonlPrompts", "init_args": {"path": str(path)}})
    assert named in message(capsys, tmp_path, "--data.prompts", source)


def test_a_reward_class_without_an_argument_that_it_needs_is_refused(capsys, tmp_path):
    body = "    def __init__(self, least):\n        self.least = least\n    def __call__(self, prompt, text): pass\n"
    (tmp_path / "needy_reward.py").write_text("class Needy:\n" + body)
    said = message(capsys, tmp_path, "--data.reward", "needy_reward.Needy")
    assert "data.reward.init_args.least is null, but needs a value" in said


REWARDS = {
    "raises": ("raise KeyError('gold')", "KeyError"),
    "is NaN": ("return float('nan')", "must be finite"),
    "is text": ("return 'good'", "'good'"),
    "hangs": ("import time; time.sleep(30)", "data.scoring.timeout_s=1"),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", REWARDS)
def test_a_bad_reward_names_function_and_prompt(case, capsys, tmp_path):
    body, named = REWARDS[case]
    module = f"reward_{case.replace(' ', '_')}"
    (tmp_path / f"{module}.py").write_text(f"def judge(prompt, completion):\n    {body}\n")
    said = message(capsys, tmp_path, "--data.reward", f"{module}.judge", "--data.scoring.timeout_s", "1")
    assert named in said
    assert f"{module}.judge" in said
    assert "=" in said, "the prompt is shown"


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


def test_a_folder_without_a_model_is_refused(capsys, tmp_path):
    (tmp_path / "empty").mkdir()
    assert str(tmp_path / "empty") in message(capsys, tmp_path, "--model.model", str(tmp_path / "empty"))


def test_a_truncated_checkpoint_is_named(capsys, tmp_path):
    (tmp_path / "half.ckpt").write_bytes(b"PK\x03\x04 not all of it")
    assert "half.ckpt" in message(capsys, tmp_path, "--ckpt_path", str(tmp_path / "half.ckpt"))


@pytest.mark.slow
@pytest.mark.parametrize("where", ["logger", "tape", "checkpoints"])
def test_a_folder_that_cannot_be_written_to_is_named_at_the_start(where, capsys, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("in the way")
    folder = str(tmp_path / "file" / "runs")
    flags = {
        "logger": ["--trainer.logger.init_args.save_dir", folder],
        "tape": ["--trainer.callbacks+=RolloutTape", "--trainer.callbacks.folder", folder],
        "checkpoints": ["--trainer.callbacks+=ModelCheckpoint", "--trainer.callbacks.dirpath", folder],
    }
    monkeypatch.setattr(PolicyModule, "training_step", lambda *_: pytest.fail("it has begun to train"))
    said = message(capsys, tmp_path, *flags[where])
    assert "cannot be written to" in said
    assert folder in said
    assert (tmp_path / "file").read_text() == "in the way"


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
