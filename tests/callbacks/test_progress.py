"""Progress in a pipe, in a terminal, in one that can do nothing, and the live view; notices about long waits."""

import fcntl
import io
import os
import pty
import re
import struct
import sys
import termios
import threading
import time
from pathlib import Path

import lightning.pytorch as pl
import pyte
import pytest
from flow import fit, make_data, make_module
from launch import start

from lit_async_rl.callbacks import LiveView, Progress, RolloutMonitor
from lit_async_rl.callbacks.monitors import live_view
from lit_async_rl.callbacks.run.progress import Bars, OneAtATime
from lit_async_rl.cli.app import main
from lit_async_rl.runtime import waiting
from lit_async_rl.runtime.waiting import announced, duration

ROOT = Path(__file__).parents[2]
FLAGS = ["--config", "configs/quickstart.yaml", "--data.groups_per_step", "2", "--data.group_size", "4"]
FLAGS += ["--data.validation.prompts.init_args.size", "8", "--trainer.val_check_interval", "4"]
LINE = re.compile(
    r"step \d+/\d+  reward [\d.]+  (held-out [\d.]+  )?staleness [\d.]+  tokens/s [\d,]+  \S+ s/step(  .* left)?"
)


class Terminal:
    """A pseudo terminal, and all that was written to it."""

    def __init__(self, columns=100, lines=30):
        self.master, self.slave = pty.openpty()
        self.resize(columns, lines)
        self.text = ""
        threading.Thread(target=self._read, daemon=True).start()

    def resize(self, columns, lines):
        fcntl.ioctl(self.slave, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    def _read(self):
        while True:
            try:
                self.text += os.read(self.master, 65536).decode(errors="replace")
            except OSError:
                return

    def wait_for(self, text, since=0, timeout_s=150):
        deadline = time.monotonic() + timeout_s
        while text not in self.text[since:]:
            assert time.monotonic() < deadline, f"no {text!r} in {self.text[-3000:]}"
            time.sleep(0.05)


@pytest.fixture(autouse=True)
def _from_the_root(monkeypatch):
    monkeypatch.chdir(ROOT)


def logs(tmp_path, steps):
    return ["--trainer.logger.init_args.save_dir", str(tmp_path), "--trainer.max_steps", str(steps)]


@pytest.mark.slow
def test_a_pipe_gets_few_short_lines(tmp_path, capsys):
    main([*FLAGS, *logs(tmp_path, 8)])
    captured = capsys.readouterr()
    assert not {"\r", "\x1b"} & set(captured.out + captured.err)
    steps = [line for line in captured.out.splitlines() if line.startswith("step ")]
    assert 2 <= len(steps) <= 6  # of a run of seconds, at whatever load
    assert all(LINE.fullmatch(line) and len(line) < 120 for line in steps), steps
    assert steps[0].startswith("step 1/8")
    assert steps[-1].startswith("step 8/8")


@pytest.mark.slow
def test_every_s_is_the_time_between_lines(tmp_path, capsys):
    main([*FLAGS, *logs(tmp_path, 5), "--defaults.progress.init_args.every_s", "0"])
    assert len([line for line in capsys.readouterr().out.splitlines() if LINE.fullmatch(line)]) == 5
    with pytest.raises(ValueError, match=r"Progress.every_s must be >= 0, got -1"):
        Progress(every_s=-1.0)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["Progress", "LiveView"])
@pytest.mark.parametrize("term", ["xterm-256color", "dumb"])
def test_a_terminal_gets_what_it_can_draw(kind, term, tmp_path, monkeypatch):
    terminal = Terminal()
    monkeypatch.setenv("TERM", term)
    with os.fdopen(os.dup(terminal.slave), "w") as out, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", out)
        main([*FLAGS, *logs(tmp_path, 6), "--defaults.progress", kind])
    terminal.wait_for("run summary")
    if term == "dumb":
        assert "\x1b" not in terminal.text
        assert "step 6/6  reward" in terminal.text
    elif kind == "Progress":
        assert "step 6/6" in terminal.text
        assert "━" in terminal.text
        assert "validation" in terminal.text
    else:
        assert "engine is busy" in terminal.text
    assert "bottleneck" in terminal.text  # the table comes after it, whole


IN_TERMINAL = """
import os, runpy, sys
terminal = os.open(sys.argv.pop(1), os.O_RDWR | os.O_NOCTTY)
for number in range(3):
    os.dup2(terminal, number)
sys.stdout = sys.__stdout__ = open(1, "w", buffering=1, closefd=False)
sys.stderr = sys.__stderr__ = open(2, "w", buffering=1, closefd=False)
runpy.run_path("scripts/train.py", run_name="__main__")
"""


@pytest.mark.slow
def test_the_live_view_survives_a_resize(tmp_path, monkeypatch):
    """Through the command line, in a terminal of its own."""
    terminal = Terminal()
    script = tmp_path / "in_terminal.py"
    script.write_text(IN_TERMINAL)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("COLUMNS", raising=False)  # set by pytest-xdist, and stronger than the terminal
    flags = [*FLAGS, *logs(tmp_path, 100_000), "--defaults.progress", "LiveView"]
    flags += ["--defaults.verdict.init_args.every_n_steps", "2"]
    (process,) = start(script, [os.ttyname(terminal.slave), *flags], 1)
    try:
        for text in ("lit-async-rl", "engine is busy", "staleness", "samples in the", "to gain", "tokens/s"):
            terminal.wait_for(text)
        for columns, lines in ((40, 10), (15, 4), (200, 60)):
            before = len(terminal.text)
            terminal.resize(columns, lines)
            os.kill(process.pid, 28)  # SIGWINCH
            terminal.wait_for("╰", before) if lines > 30 else time.sleep(0.5)
        terminal.wait_for("─" * 100, before)  # wider than the 78 of before
        assert process.returncode is None
        assert "Traceback" not in terminal.text
    finally:
        process.kill()
        process.communicate(30.0)


@pytest.mark.slow
def test_a_drawing_reads_nothing_that_changes_while_it_is_read_and_counts_the_tokens_of_a_step(monkeypatch):
    """Lightning's metrics are computed when they are asked for, and grow while the next step logs."""
    monkeypatch.setattr(live_view, "REFRESH_HZ", 500)
    broken = []
    monkeypatch.setattr(threading, "excepthook", broken.append)
    written = io.StringIO()
    console = OneAtATime(file=written, force_terminal=True, width=80)
    asked_by = set()

    class Watched(LiveView):
        def make_display(self, trainer):
            return live_view._View(self, console)

        def get_metrics(self, trainer, pl_module):
            asked_by.add(threading.current_thread())
            return super().get_metrics(trainer, pl_module)

    class Counts(pl.Callback):
        counted, shown = [], []

        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            self.counted.append(int(batch.loss_mask.sum()))
            self.shown.append(sum(view.staleness.values()))

    view = Watched()
    fit(make_module(), make_data(max_staleness=2), 30, [RolloutMonitor(), view, Counts()], enable_progress_bar=True)
    assert not broken
    assert asked_by == {threading.current_thread()}
    assert Counts.shown == Counts.counted
    text = written.getvalue()
    assert text.count("metrics") > 3
    assert "reward" in text


@pytest.mark.parametrize("whose", ["producer", "engine"])
def test_who_logs_while_holding_a_lock_that_a_drawing_needs_waits_for_no_drawing(whose, monkeypatch):
    """A replica that is lost is said under the engine's lock, a resume under the producer's: both stood for ever."""
    monkeypatch.setattr(live_view, "REFRESH_HZ", 500)
    written = io.StringIO()
    console = OneAtATime(file=written, force_terminal=True, width=80)
    of_engine = threading.Lock()
    asked = threading.Event()

    class View(LiveView):
        def make_display(self, trainer):
            return live_view._View(self, console)

    class Logs(pl.Callback):
        is_said = False

        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            producer = trainer.datamodule._source._producer
            with of_engine if whose == "engine" else producer.changed:
                assert asked.wait(60.0)  # the drawing's thread waits for the lock, or is about to
                logs = threading.Thread(target=print, args=("replica 1 is lost",), daemon=True)
                logs.start()
                logs.join(20.0)
                self.is_said = not logs.is_alive()

    data = make_data(max_staleness=2)
    stats = data.stats

    def asked_stats():
        if whose == "engine" or threading.current_thread() is threading.main_thread():
            return stats()
        asked.set()
        try:
            return stats()
        finally:
            asked.clear()

    def num_running(engine):
        if whose == "engine":
            asked.set()
        with of_engine:
            asked.clear()
            return 0

    monkeypatch.setattr(data, "stats", asked_stats)
    logs = Logs()

    class Patched(pl.Callback):
        def on_train_start(self, trainer, pl_module):
            monkeypatch.setattr(type(data.engine), "num_running", property(num_running))

    fit(make_module(), data, 1, [Patched(), View(), logs], enable_progress_bar=True)
    assert logs.is_said
    assert "replica 1 is lost" in written.getvalue()


def test_above_a_drawing_lines_end_between_words_and_a_path_longer_than_a_line_stays_in_one_piece():
    path = "/a/folder/whose/name/is/longer/than/the/whole/line/of/the/terminal/last.ckpt"
    written = io.StringIO()
    bars = Bars(OneAtATime(file=written, force_terminal=True, width=40))
    bars.step(1, 2.0, ["reward 0.50"])
    bars.print(f"saved {path} after step 1")
    print(f"a warning of {path}", flush=True)
    bars.print("the trainer waits 10% of the time, publishing takes 5%")
    print("the trainer waits 20% of the time, publishing takes 6%", flush=True)
    bars.step(2, 2.0, ["reward 0.75"])
    bars.close()
    screen = pyte.Screen(40, 30)
    pyte.Stream(screen).feed(written.getvalue().replace("\n", "\r\n"))
    lines = [line.rstrip() for line in screen.display]
    for share, publishing in (("10%", "5%"), ("20%", "6%")):
        first = lines.index(f"the trainer waits {share} of the time,")
        assert lines[first + 1] == f"publishing takes {publishing}"
    seen = "".join(screen.display)
    assert seen.count(path) == 2
    assert seen.count("step 2/2") == 1
    assert "step 1/2" not in seen


def test_long_waits_are_said_ever_more_rarely(monkeypatch, capsys):
    monkeypatch.setattr(waiting, "FIRST_NOTICE_S", 0.05)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    number = iter(range(100))
    with announced(lambda: f"a kettle, look {next(number)}"):
        time.sleep(1.0)
    said = capsys.readouterr().err.splitlines()
    assert 2 <= len(said) <= 4  # after 0.05, 0.2 and 0.8 seconds
    assert re.fullmatch(r"waiting for a kettle, look 0 \(0 s so far\)", said[0])
    with announced("nothing"):
        pass
    time.sleep(0.1)
    assert not capsys.readouterr().err


def test_other_processes_of_a_machine_say_nothing(monkeypatch, capsys):
    monkeypatch.setattr(waiting, "FIRST_NOTICE_S", 0.01)
    monkeypatch.setenv("LOCAL_RANK", "1")
    with announced("a kettle"):
        time.sleep(0.1)
    assert not capsys.readouterr().err


def slow_match(prompt, completion):
    time.sleep(0.02)
    return 1.0


@pytest.mark.slow
def test_the_first_rollouts_are_waited_for_in_words(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(waiting, "FIRST_NOTICE_S", 0.05)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    main([*FLAGS, *logs(tmp_path, 1), "--data.groups_per_step", "16", "--data.reward", "test_progress.slow_match"])
    assert re.search(r"waiting for the first rollouts: \d+ groups being sampled", capsys.readouterr().err)


@pytest.mark.parametrize(("seconds", "text"), [(3.4, "3 s"), (60, "1:00"), (3725, "1:02:05"), (59.9, "60 s")])
def test_durations(seconds, text):
    assert duration(float(seconds)) == text
