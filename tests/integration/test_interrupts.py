"""Ctrl-C and SIGTERM, sent to the real command: a checkpoint and the way to go on, or an end at once."""

import os
import re
import shlex
import signal
import subprocess
import sys
import time

import pytest

from lit_async_rl.api.interrupts import CtrlC
from lit_async_rl.cli.resume import resume_command

REWARD = """
import pathlib, time

def judge(prompt, completion):
    print("scoring", flush=True)
    if pathlib.Path(__file__).with_name("be_slow").exists():
        time.sleep(30)
    return float(len(completion) % 2)
"""
SMALL = [
    *("--config", "configs/quickstart.yaml", "--model.model", "lit_async_rl/assets/small_sort_policy"),
    *("--model.scheduler", "null", "--model.learning_rate", "1e-4", "--data.groups_per_step", "2"),
    *("--data.group_size", "2", "--data.micro_batches_per_step", "2", "--data.validation.prompts.init_args.size", "4"),
    *("--data.reward", "slow_reward.judge", "--trainer.max_steps", "100000", "--data.scoring.timeout_s", "100"),
]


class Command:
    """`scripts/train.py`, whose output is read line by line."""

    def __init__(self, folder, flags):
        (folder / "slow_reward.py").write_text(REWARD)
        arguments = [*SMALL, "--trainer.logger.init_args.save_dir", str(folder / "runs"), *flags]
        self.start(["scripts/train.py", *arguments], folder)

    def start(self, arguments, folder):
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), os.getcwd()]), "OMP_NUM_THREADS": "1"}
        pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)
        self.process = subprocess.Popen([sys.executable, *arguments], **pipes)
        self.said = []

    def read_until(self, pattern):
        for line in self.process.stdout:
            self.said.append(line)
            if re.search(pattern, line):
                return
        pytest.fail(f"no {pattern} in:\n{''.join(self.said)}")

    def end(self, timeout_s):
        rest, _ = self.process.communicate(timeout=timeout_s)
        return "".join(self.said) + rest


@pytest.fixture
def start(tmp_path):
    commands = []

    def start(*flags):
        commands.append(Command(tmp_path, flags))
        return commands[-1]

    yield start
    for command in commands:
        command.process.kill()
        command.process.communicate()


def has_trained(folder):
    return any(path.stat().st_size for path in folder.glob("runs/**/metrics.csv"))


def wait_until_it_trains(command, folder):
    while not has_trained(folder):
        command.read_until("scoring")


OWN_PROCESS = ("--config", "configs/own_process.yaml", "--defaults.checkpoint", "null")


@pytest.mark.parametrize("flags", [(), OWN_PROCESS], ids=["as_shipped", "own_process_no_checkpoints"])
@pytest.mark.slow
def test_ctrl_c_saves_and_prints_the_summary_and_how_to_resume(flags, start, tmp_path):
    command = start(*flags)
    wait_until_it_trains(command, tmp_path)
    command.process.send_signal(signal.SIGINT)
    said = command.end(60)
    assert command.process.returncode == 130, said
    assert "run summary" in said
    assert "Traceback" not in said
    saved = re.search(r"Ctrl-C: saved (\S+)/last.ckpt after step", said)
    assert saved[1].startswith(str(tmp_path / "runs")), "beside the other files of the run"
    assert saved[1].endswith("/checkpoints")
    assert "SIGTERM: saved" not in said, "nobody sent it"
    (resume,) = re.findall(r"^resume with: python (.*)$", said, re.MULTILINE)
    step = int(re.search(r"saved \S+/last\.ckpt after step (\d+)", said)[1])

    command.start([*shlex.split(resume), "--trainer.max_steps", str(step + 2)], tmp_path)
    said = command.end(100)
    assert command.process.returncode == 0, said
    assert re.search(r"optimizer steps\s*│ 2 ", said)


@pytest.mark.slow
def test_the_second_ctrl_c_ends_at_once(start, tmp_path):
    lag = ("--data.admission", "FixedLag", "--data.max_staleness", "1")  # saving waits until all is scored
    command = start(*lag)
    wait_until_it_trains(command, tmp_path)
    (tmp_path / "be_slow").touch()
    time.sleep(1.0)
    command.process.send_signal(signal.SIGINT)
    command.read_until("Ctrl-C: training ends after this step")
    time.sleep(0.5)
    assert command.process.poll() is None, "the first waits for the reward"
    command.process.send_signal(signal.SIGINT)
    command.end(5)
    assert command.process.returncode == -signal.SIGINT


@pytest.mark.slow
def test_sigterm_ends_the_first_validation(start, tmp_path):
    (tmp_path / "be_slow").touch()
    command = start()
    command.read_until("scoring")
    command.process.send_signal(signal.SIGTERM)
    said = command.end(20)
    assert command.process.returncode == 143, said
    assert "the validation was not finished; nothing is saved" in said
    assert "Traceback" not in said
    assert not has_trained(tmp_path)


def test_ctrl_c_outside_of_training_is_an_interrupt():
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(SystemExit, match="130"), CtrlC():
        signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


def test_the_resume_command_names_one_checkpoint(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["scripts/train.py", "--config", "a b.yaml", "--ckpt_path", "old", "--x=1"])
    assert resume_command("new one") == "python scripts/train.py --config 'a b.yaml' --x=1 --ckpt_path 'new one'"
    assert resume_command("new", ["--ckpt_path=old", "-y"]) == "python scripts/train.py -y --ckpt_path new"
