"""The console script: its commands, and how quickly it answers."""

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

import lit_async_rl
from lit_async_rl.cli.app import resume_command
from lit_async_rl.cli.console import COMMANDS, main

ROOT = Path(__file__).parents[2]


def python(code, *args):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, *code, *args], cwd=ROOT, env=environment, capture_output=True, text=True)


def test_version_and_usage(capsys):
    main(["--version"])
    main([])
    printed = capsys.readouterr().out
    assert f"lit-async-rl {lit_async_rl.__version__}\n" in printed
    assert all(f"\n  {name} " in printed for name in COMMANDS)


def test_an_unknown_command_is_named():
    with pytest.raises(SystemExit, match=r"no command 'trian'; did you mean train\?"):
        main(["trian"])


@pytest.mark.parametrize("command", ["chat", "tape"])
def test_help_of_the_small_commands(command, capsys):
    with pytest.raises(SystemExit) as end:
        main([command, "--help"])
    assert end.value.code == 0
    assert f"lit-async-rl {command}" in capsys.readouterr().out


def test_train_reads_the_other_arguments(capsys):
    with pytest.raises(SystemExit) as end:
        main(["train", "--config", "configs/quickstart.yaml", "--data.max_stalenes", "1"])
    assert end.value.code
    assert "no setting data.max_stalenes; did you mean data.max_staleness?" in capsys.readouterr().err


def test_ctrl_c_during_imports_ends_without_a_traceback(monkeypatch):
    def interrupted(name):
        raise KeyboardInterrupt

    monkeypatch.setattr("lit_async_rl.cli.console.importlib.import_module", interrupted)
    monkeypatch.delitem(sys.modules, "lightning", raising=False)
    for command in ("train", "evaluate", "report"):
        with pytest.raises(SystemExit) as end:
            main([command, "--config", "x.yaml"])
        assert end.value.code == 130


@pytest.mark.parametrize(
    ("words", "is_buffered", "status", "said"),
    [
        (["--help"], True, 141, ""),
        (["--help"], False, 141, ""),
        (["grade", "--help"], True, 141, ""),
        (["grade", "rows.csv", "--reward", "exact_match", "--num", "0"], False, 141, ""),
        (["grade", "rows.csv", "--reward", "exact_match"], True, 1, ""),  # a table: Rich ends it, as quietly
        (["trian"], True, 1, "error: there is no command 'trian'"),
    ],
)
def test_output_that_nobody_reads_ends_a_command_quietly(words, is_buffered, status, said, tmp_path):
    (tmp_path / "rows.csv").write_text("answer,completion\n1,1\n")
    read, write = os.pipe()
    os.close(read)
    code = "from lit_async_rl.cli.console import main; main()"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "" if is_buffered else "1"}
    command = [sys.executable, "-c", code, *words]
    done = subprocess.run(command, cwd=tmp_path, env=environment, stdout=write, stderr=subprocess.PIPE, text=True)
    os.close(write)
    assert done.returncode == status
    assert done.stderr.startswith(said)
    assert done.stderr.count("\n") == bool(said)


def test_input_of_a_chat_that_is_not_utf8_is_said_in_one_line(monkeypatch):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"21=\n\xff\n"), encoding="utf-8"))
    with pytest.raises(SystemExit, match=r"^error: the prompts on standard input are not utf-8: .* byte 0xff"):
        main(["chat", "--model", lit_async_rl.asset("small_sort_policy")])


def seconds(code):
    """Processor time of the quickest of three."""
    times = []
    for _ in range(3):
        before = os.times()
        done = python(["-c", code])
        assert done.returncode == 0, done.stderr
        after = os.times()
        times.append(after.children_user + after.children_system - before.children_user - before.children_system)
    return min(times)


def test_importing_the_package_takes_no_time_and_no_torch():
    bare = seconds("pass")
    assert seconds("import lit_async_rl") - bare < 0.1
    light = "import sys, lit_async_rl as rl; assert {'Trainer', 'fit'} < set(dir(rl)) < set(rl.NAMES); "
    assert (
        python(["-c", light + "assert not {'torch', 'lightning', 'transformers'} & set(sys.modules)"]).returncode == 0
    )


def test_grading_a_file_needs_no_torch(tmp_path):
    path = tmp_path / "answers.jsonl"
    path.write_text('{"answer": "4", "completion": "it is 4"}\n')
    words = ["grade", str(path), "--reward", "last_number"]
    code = f"import sys; from lit_async_rl.cli.console import main; main({words}); "
    done = python(["-c", code + "assert not {'torch', 'lightning', 'transformers'} & set(sys.modules)"])
    assert (done.returncode, done.stderr) == (0, "")
    assert "1 right" in done.stdout


def test_the_version_is_there_at_once():
    assert seconds("from lit_async_rl.cli.console import main; main(['--version'])") < 0.3


def test_the_resume_command_is_the_one_that_was_called(monkeypatch):
    args = ["--config", "a.yaml", "--ckpt_path", "old"]
    monkeypatch.setattr(sys, "argv", ["/venv/bin/lit-async-rl", "train", *args])
    assert resume_command("new", args) == "lit-async-rl train --config a.yaml --ckpt_path new"
    monkeypatch.setattr(sys, "argv", ["scripts/train.py", *args])
    assert resume_command("new") == "python scripts/train.py --config a.yaml --ckpt_path new"
