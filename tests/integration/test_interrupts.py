"""Ctrl-C and SIGTERM, sent to the real command: a checkpoint and the way to go on, or an end at once."""

import os
import pty
import re
import shlex
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch
from flow import fit, make_data, make_module
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.utilities.exceptions import SIGTERMException

import lit_async_rl as rl
from lit_async_rl.api.run import CtrlC
from lit_async_rl.callbacks import SaveOnSigterm
from lit_async_rl.callbacks.run.save_on_sigterm import _HangupHandler
from lit_async_rl.cli.app import resume_command

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
    """A step was logged: what the validation before training logs comes when no signal is handled yet."""
    return any("policy/loss" in path.read_text() for path in folder.glob("runs/**/metrics.csv"))


def wait_until_it_trains(command, folder):
    while not has_trained(folder):
        command.read_until("scoring")


OWN_PROCESS = ("--config", "configs/own_process.yaml", "--defaults.checkpoint", "null")


@pytest.mark.parametrize(
    "flags",
    [
        pytest.param((), marks=pytest.mark.slow, id="as_shipped"),
        pytest.param(OWN_PROCESS, marks=pytest.mark.sweep, id="own_process_no_checkpoints"),
    ],
)
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
    assert "none was saved" not in said
    assert "weights_only" not in said
    (resume,) = re.findall(r"^resume with: python (.*)$", said, re.MULTILINE)
    step = int(re.search(r"saved \S+/last\.ckpt after step (\d+)", said)[1])

    command.start([*shlex.split(resume), "--trainer.max_steps", str(step + 2)], tmp_path)
    said = command.end(100)
    assert command.process.returncode == 0, said
    assert re.search(r"optimizer steps\s*│ 2 ", said)


def test_in_a_terminal_another_thread_says_what_ctrl_c_does(monkeypatch, capsys):
    """This one may be drawing."""
    monkeypatch.setattr(os, "isatty", lambda descriptor: True)
    told = []
    before = signal.signal(signal.SIGTERM, lambda *_: told.append("to stop"))
    try:
        with pytest.raises(SystemExit), CtrlC():
            signal.raise_signal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert told == ["to stop"]
    said = ""
    deadline = time.monotonic() + 20
    while "Ctrl-C: training ends after this step" not in said:
        assert time.monotonic() < deadline
        time.sleep(0.01)
        said += capsys.readouterr().err


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


# -- the terminal closes ----------------------------------------------------------------------------------------------


@pytest.fixture
def _handlers_as_before():
    before = {number: signal.getsignal(number) for number in (signal.SIGHUP, signal.SIGTERM, signal.SIGINT)}
    yield
    SaveOnSigterm.signal_name = "SIGTERM"
    for number, handler in before.items():
        signal.signal(number, handler)


def hang_up_after_two_steps(trainer, *_):
    if trainer.global_step == 2:
        signal.raise_signal(signal.SIGHUP)


@pytest.mark.slow
@pytest.mark.usefixtures("_handlers_as_before")
def test_sighup_saves_as_sigterm_does(tmp_path, caplog):
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    callbacks = [LambdaCallback(on_train_batch_end=hang_up_after_two_steps), SaveOnSigterm()]
    with pytest.raises(SIGTERMException):
        fit(make_module(), make_data(), 9, callbacks, default_root_dir=tmp_path, enable_checkpointing=True)
    assert torch.load(tmp_path / "last.ckpt", weights_only=True)["global_step"] == 2
    assert any(text.startswith(f"SIGHUP: saved {tmp_path / 'last.ckpt'} after step 2") for text in caplog.messages)
    with pytest.raises(SIGTERMException):  # a second run in the process
        fit(make_module(), make_data(), 9, callbacks, default_root_dir=tmp_path, enable_checkpointing=True)


@pytest.mark.usefixtures("_handlers_as_before")
@pytest.mark.parametrize("kept", ["ignored", "handled"])
def test_nohup_and_a_handler_of_the_users_are_left_alone(kept, tmp_path):
    heard = []
    handler = {"ignored": signal.SIG_IGN, "handled": lambda *_: heard.append(1)}[kept]
    signal.signal(signal.SIGHUP, handler)
    callbacks = [LambdaCallback(on_train_batch_end=hang_up_after_two_steps), SaveOnSigterm()]
    trainer = fit(make_module(), make_data(), 3, callbacks, default_root_dir=tmp_path, enable_checkpointing=True)
    assert trainer.global_step == 3
    assert not list(tmp_path.rglob("last.ckpt"))
    assert len(heard) == (kept == "handled")
    assert signal.getsignal(signal.SIGHUP) == handler


def test_after_a_run_sighup_ends_the_process_as_ever():
    if (pid := os.fork()) == 0:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGHUP, _HangupHandler(None))  # which Lightning puts back when a run has ended
        signal.raise_signal(signal.SIGHUP)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGHUP


@pytest.mark.slow
def test_a_run_whose_terminal_is_closed_saves_and_says_so_in_a_file(tmp_path):
    (tmp_path / "slow_reward.py").write_text(REWARD)
    arguments = [*SMALL, "--trainer.logger.init_args.save_dir", str(tmp_path / "runs")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), os.getcwd()]), "OMP_NUM_THREADS": "1"}
    pid, terminal = pty.fork()
    if pid == 0:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # it is inherited, and ignored where the tests run under nohup
        os.execve(sys.executable, [sys.executable, "scripts/train.py", *arguments], environment)
    try:
        os.set_blocking(terminal, False)
        deadline = time.monotonic() + 100
        while not has_trained(tmp_path):
            assert time.monotonic() < deadline
            drain(terminal)
            time.sleep(0.05)
        os.close(terminal)
        while time.monotonic() < deadline and (ended := os.waitpid(pid, os.WNOHANG)) == (0, 0):
            time.sleep(0.05)
        assert os.waitstatus_to_exitcode(ended[1]) == 0
    finally:
        if time.monotonic() >= deadline:
            os.kill(pid, signal.SIGKILL)
    (last,) = tmp_path.rglob("last.ckpt")
    step = torch.load(last, weights_only=True)["global_step"]
    said = (last.parents[1] / "after_hangup.txt").read_text()
    assert f"SIGHUP: saved {last} after step {step}" in said  # in one piece, however narrow the terminal was
    assert "resume with: python scripts/train.py" in said


def drain(terminal):
    """Reads what was printed: a full terminal would stop the run."""
    try:
        while os.read(terminal, 65536):
            pass
    except BlockingIOError:
        pass


# -- before training --------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("_handlers_as_before")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_stop_while_the_first_validation_begins_saves_nothing_anywhere(number, tmp_path, monkeypatch, caplog):
    """The engine is started there, which may take minutes."""
    monkeypatch.chdir(tmp_path)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    end = LambdaCallback(on_validation_start=lambda *_: signal.raise_signal(number))
    few = dict(groups_per_step=2, group_size=2, sampling=rl.SamplingParams(max_tokens=4), accelerator="cpu", devices=1)
    few["validation"] = rl.Validation(prompts=rl.SortDigits(4, size=4, split="held_out"), batch_size=1)
    prompts = rl.SortDigits(4, size=20)
    with pytest.raises(SystemExit) as ended:
        rl.fit(rl.asset("small_sort_policy"), prompts, rl.exact_match, max_steps=2, callbacks=end, **few)
    assert ended.value.code == 128 + (signal.SIGTERM if number == signal.SIGTERM else number)
    assert not list(tmp_path.rglob("*.ckpt"))
    assert any("nothing is saved" in text for text in caplog.messages)


class NeverStarts(rl.EmbeddedEngine):
    """Sends a signal while it starts, which it never ends; the first `num_good` start, and fail while they sample."""

    number = signal.SIGTERM
    num_good = 0

    def setup(self, model):
        NeverStarts.num_good -= 1
        if NeverStarts.num_good < 0:
            os.kill(os.getpid(), self.number)
            threading.Event().wait()
        super().setup(model)

    def poll(self, timeout_s):
        if self.num_tokens > 30:
            raise RuntimeError("the driver has gone")
        return super().poll(timeout_s)


def fit_with(engine):
    few = dict(groups_per_step=2, group_size=2, sampling=rl.SamplingParams(max_tokens=4), accelerator="cpu", devices=1)
    few |= dict(max_steps=10**6, self_check=False, engine=engine)
    return rl.fit(rl.asset("small_sort_policy"), rl.SortDigits(4, size=20), rl.exact_match, **few)


@pytest.mark.timeout(120)
@pytest.mark.usefixtures("_handlers_as_before")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_stop_while_the_engine_starts_ends_the_run_at_once(number, tmp_path, monkeypatch, caplog):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(NeverStarts, "num_good", 0)
    monkeypatch.setattr(NeverStarts, "number", number)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    with pytest.raises(SystemExit) as ended:
        fit_with(NeverStarts())
    assert ended.value.code == 128 + number
    assert not list(tmp_path.rglob("*.ckpt"))
    assert any("training had not begun; nothing is saved" in text for text in caplog.messages)


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.usefixtures("_handlers_as_before")
def test_a_stop_while_another_engine_starts_saves_the_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(NeverStarts, "num_good", 1)
    trainer = fit_with(NeverStarts())
    (saved,) = tmp_path.rglob("last.ckpt")
    assert torch.load(saved, weights_only=True)["global_step"] == trainer.global_step > 0


@pytest.mark.usefixtures("_handlers_as_before")
def test_sigterm_in_a_validation_that_lightning_ends_saves_nothing(tmp_path, monkeypatch, caplog):
    monkeypatch.chdir(tmp_path)
    module, data = make_module(), make_data(val_prompts=rl.SortDigits(8, size=4, split="held_out"))
    trainer = rl.Trainer(accelerator="cpu", devices=1, max_steps=2, logger=False, enable_progress_bar=False)

    def end(trainer, *_):
        trainer._signal_connector.received_sigterm = True
        raise SIGTERMException

    trainer.callbacks.insert(0, LambdaCallback(on_validation_batch_end=end))
    with pytest.raises(SIGTERMException):
        trainer.validate(module, data, verbose=False)
    assert not list(tmp_path.rglob("*.ckpt"))
    assert any("training had not begun; nothing is saved" in text for text in caplog.messages)
