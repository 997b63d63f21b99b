"""Damaged, foreign and malicious files: refused in one line that names the file, and nothing in them is executed."""

import json
import logging
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from flow import fit, make_data, make_module
from tapes import groups_of_step
from test_resume import saving

from lit_async_rl.cli.app import main
from lit_async_rl.cli.run_folders import set_aside
from lit_async_rl.data.module import RolloutDataModule
from lit_async_rl.errors import ProducerError
from lit_async_rl.models.sharded_checkpoint import check_folder
from lit_async_rl.prompts.sources import JsonlPrompts
from lit_async_rl.replay.manifest import MANIFEST
from lit_async_rl.replay.tape import Tape, TapeWriter
from lit_async_rl.training.checkpoint_io import AtomicCheckpointIO, check_checkpoint
from lit_async_rl.training.csv_logger import CSVLog
from lit_async_rl.utils.folder_lock import FolderLock, part_name, remove_stale_parts

ROOT = Path(__file__).parents[2]
BASE = [*("--config", "configs/quickstart.yaml", "--data.validation.prompts", "null", "--model.scheduler", "null")]


class Evil:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint")
    data = make_data(groups_per_step=2, max_staleness=0)
    plugins = dict(enable_checkpointing=True, plugins=[AtomicCheckpointIO()])
    fit(make_module(), data, 1, [saving(folder)], **plugins)
    return folder / "step=1.ckpt"


def said_by_main(capsys, monkeypatch, *flags):
    monkeypatch.chdir(ROOT)
    with pytest.raises(SystemExit) as error:
        main([*BASE, *flags])
    said = error.value.code if isinstance(error.value.code, str) else capsys.readouterr().err
    said = said[said.index("error: ") :]
    assert len(said.splitlines()) <= 3, said
    return said


def test_a_flipped_byte_anywhere_in_a_checkpoint_is_noticed(checkpoint, tmp_path):
    content, path = checkpoint.read_bytes(), tmp_path / "flipped.ckpt"
    check_checkpoint(checkpoint)
    for place in [*range(0, len(content), len(content) // 60), *range(len(content) - 80, len(content), 3)]:
        damaged = bytearray(content)
        damaged[place] ^= 4
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"flipped.ckpt' is (damaged|no whole checkpoint)"):
            AtomicCheckpointIO().load_checkpoint(path)
        path.write_bytes(content[:place])
        with pytest.raises(ValueError, match="no whole checkpoint"):
            check_checkpoint(path)


def test_a_checkpoint_without_a_digest_loads_with_a_warning(checkpoint, tmp_path, caplog):
    torch.save(torch.load(checkpoint, weights_only=True), tmp_path / "old.ckpt")
    with caplog.at_level(logging.WARNING):
        assert AtomicCheckpointIO().load_checkpoint(tmp_path / "old.ckpt")["version"] == 1
    assert "has no digest" in caplog.text


def test_malicious_checkpoints_are_refused_by_the_command_line_and_nothing_runs(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("TORCH_FORCE_WEIGHTS_ONLY_LOAD", "")
    path, ran = tmp_path / "evil.ckpt", tmp_path / "ran"
    AtomicCheckpointIO().save_checkpoint({"state_dict": {}, "callbacks": Evil(ran)}, path)
    assert "holds code, which is never executed: posix.system" in said_by_main(
        capsys, monkeypatch, "--ckpt_path", str(path)
    )
    with pytest.raises(ValueError, match="holds code"):
        AtomicCheckpointIO().load_checkpoint(path, weights_only=False)
    torch.save({"weight": torch.zeros(3)}, path)
    assert "no checkpoint of a PolicyModule" in said_by_main(capsys, monkeypatch, "--ckpt_path", str(path))
    assert not ran.exists()


def test_a_malicious_sharded_checkpoint_is_refused_and_nothing_runs(tmp_path):
    import pickle

    torch.save({"version": 0}, tmp_path / "meta.pt")
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Evil(tmp_path / "ran")))
    with pytest.raises(ValueError, match=r"\.metadata cannot be read: it holds code"):
        check_folder(tmp_path, "ckpt_path")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("setting", ["model.scheduler", "model.optimizer", "data.reward"])
@pytest.mark.parametrize("path", ["os.system", "shutil.copy"])
def test_a_function_is_no_class_and_is_not_called(setting, path, tmp_path, capsys, monkeypatch):
    ran = tmp_path / "ran"
    arguments = {"command": f"touch {ran}"} if path == "os.system" else {"src": str(ROOT / "Makefile"), "dst": str(ran)}
    spec = json.dumps({"class_path": path, "init_args": arguments})
    said = said_by_main(capsys, monkeypatch, f"--{setting}", spec)
    assert setting in said
    assert path in said
    assert not ran.exists()


MISSPELT = {
    "--data.max_stalenes": "did you mean data.max_staleness?",
    "--trainer.max_step": "did you mean trainer.max_steps?",
    "--data.group_size": "data.group_size: must be of type int, got 3x",
    "--trainer.accelerator": "accelerator='3x'",
}


@pytest.mark.parametrize("flag", MISSPELT)
def test_a_wrong_flag_is_one_line_with_what_was_meant(flag, capsys, monkeypatch):
    assert MISSPELT[flag] in said_by_main(capsys, monkeypatch, flag, "3x")


CONFIGS = {
    "no UTF-8": (b"data: {seed: \xff}", "is not UTF-8"),
    "no YAML": (b"data: [1", "line 1 is no YAML"),
    "a list": (b"- 1", "holds no settings"),
    "a bomb": (b"a: &a [x,x,x,x,x,x,x,x,x,x]\n" + b"".join(
        b"%c: &%c [%s]\n" % (98 + n, 98 + n, b",".join([b"*%c" % (97 + n)] * 10)) for n in range(9)
    ), "aliases written out"),
    "deep": (b"a: " + b"[" * 300 + b"]" * 300, "levels"),
    "misspelt argument": (
        b"model: {loss: {class_path: lit_async_rl.losses.PPOClip, init_args: {clip_lo: 1}}}", "did you mean clip_low?"
    ),
    "code": (b"data: {seed: !!python/object/apply:os.system [ls]}", "python/object/apply"),
}  # fmt: skip


@pytest.mark.parametrize("case", CONFIGS)
def test_a_bad_configuration_is_one_line(case, tmp_path, capsys, monkeypatch):
    content, named = CONFIGS[case]
    (tmp_path / "bad.yaml").write_bytes(content)
    assert named in said_by_main(capsys, monkeypatch, "--config", str(tmp_path / "bad.yaml"))


class Renamed(RolloutDataModule):
    """The same under another name."""


def test_a_renamed_data_module_finds_its_rollouts_and_a_checkpoint_without_any_is_refused(checkpoint, tmp_path):
    renamed = make_data(groups_per_step=2, max_staleness=0)
    renamed.__class__ = Renamed
    fit(make_module(), renamed, 2, ckpt_path=str(checkpoint))
    assert renamed.stream.position >= 4, "it went on where the other stopped"
    content = torch.load(checkpoint, weights_only=True)
    del content["RolloutDataModule"]
    torch.save(content, tmp_path / "without.ckpt")
    with pytest.raises(ValueError, match="holds 0 states of a RolloutDataModule"):
        fit(make_module(), make_data(groups_per_step=2), 2, ckpt_path=str(tmp_path / "without.ckpt"))


HOLDER = """
import sys, time
from lit_async_rl.utils.folder_lock import FolderLock
FolderLock(sys.argv[1], "x")
print("held", flush=True)
time.sleep(60)
"""


def test_two_runs_in_one_folder_the_second_is_told_of_the_first(tmp_path, capsys, monkeypatch):
    runs = tmp_path / "runs" / "quickstart" / "fixed"
    runs.mkdir(parents=True)
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, str(runs)], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout.readline() == "held\n"
        where = ["--trainer.logger.init_args.save_dir", str(tmp_path / "runs")]
        said = said_by_main(capsys, monkeypatch, *where, "--trainer.logger.init_args.version", "fixed")
        assert f"is in use by process {holder.pid} on " in said
        with pytest.raises(OSError, match=f"process {holder.pid}"):
            TapeWriter(runs)
    finally:
        holder.kill()
        holder.wait()
    lock = FolderLock(runs, "x")  # the kernel took it back
    FolderLock(runs, "y").release()
    lock.release()


def test_parts_of_processes_that_are_gone_are_removed(tmp_path):
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    mine = part_name(tmp_path / "last.ckpt")
    stale = [Path(str(mine).replace(str(os.getpid()), str(gone.pid))), tmp_path / f".metrics.csv.{gone.pid}.part"]
    others = [mine, tmp_path / f".last.ckpt.elsewhere-{gone.pid}.part", tmp_path / ".notes.part"]
    for path in (*stale, *others):
        path.touch()
    remove_stale_parts(tmp_path)
    assert sorted(tmp_path.iterdir()) == sorted(others)


def test_a_table_that_is_there_is_kept(tmp_path):
    for step in (1, 2):
        logger = CSVLog(tmp_path, version="fixed")
        logger.log_metrics({f"m{step}": step}, step)
        logger.save()
    table = Path(logger.log_dir) / "metrics.csv"
    assert table.read_text().splitlines() == ["m1,m2,step", "1,,1", ",2,2"]
    set_aside(table)
    table.touch()
    set_aside(table)
    assert {path.name for path in table.parent.iterdir()} == {"metrics.1.csv", "metrics.2.csv"}


PROMPTS = {
    "surrogate": (r'{"prompt": "\ud800"}', "line 2 holds half of a character"),
    "surrogate in a key": (r'{"prompt": "1", "\udfff": 1}', "line 2 holds half of a character"),
    "deep": ('{"prompt": ' + "[" * 100_000 + "]" * 100_000 + "}", "line 2 is nested too deeply"),
    "a number of 5000 digits": ('{"prompt": ' + "1" * 5000 + "}", "line 2 is no JSON"),
}


@pytest.mark.parametrize("case", PROMPTS)
def test_hostile_prompts_name_file_and_line(case, tmp_path):
    line, named = PROMPTS[case]
    (tmp_path / "p.jsonl").write_text('{"prompt": "1="}\n' + line + "\n")
    with pytest.raises(ValueError, match=f"p.jsonl, {named}"):
        JsonlPrompts(str(tmp_path / "p.jsonl"), answer_field=None)


@pytest.fixture
def tape(tmp_path):
    writer = TapeWriter(tmp_path / "tape")
    for step in range(6):
        writer.append(step, step, groups_of_step(step))
        writer.flush()
    writer.release()
    return tmp_path / "tape"


def test_a_missing_doubled_or_foreign_file_of_a_tape_is_noticed(tape, tmp_path, caplog):
    files = sorted(tape.glob("*.arrow"))
    content = {file: file.read_bytes() for file in files}
    for file in (files[0], files[3], files[-1]):
        file.unlink()
        with pytest.raises(ValueError, match=f"{file.name} is missing"):
            Tape(tape)
        file.write_bytes(content[file])
    lines = (tape / MANIFEST).read_text().splitlines(keepends=True)
    (tape / MANIFEST).write_text("".join(lines[:-1]) + lines[-1][:20])  # killed while it was appended
    assert [step.step for step in Tape(tape).steps()] == list(range(6))
    (tape / MANIFEST).write_text("".join([*lines[:2], "{}\n"]))
    with pytest.raises(ValueError, match=r"manifest.jsonl, line 3 is damaged"):
        Tape(tape)
    (tape / MANIFEST).unlink()
    double = tape / files[2].name.replace("000000002-", "000000001-", 1)
    double.write_bytes(content[files[2]])
    with pytest.raises(ValueError, match="of which .* has some, too"):
        Tape(tape)
    files[1].unlink()
    with pytest.raises(ValueError, match="holds steps|of which"):
        list(Tape(tape).steps())


def test_a_tape_whose_writer_was_killed_at_any_moment_of_a_resume_is_readable(tape, monkeypatch):
    """Kills the second writer before each of its renames in turn; the third one repairs what is left."""
    writer = TapeWriter(tape, 2)
    for step in (2, 3, 4):
        writer.append(step, step, groups_of_step(step))
    writer.flush()  # one file with steps 2 to 4
    writer.release()
    for allowed in range(4):
        left = [allowed]

        def replace(self, target, left=left, rename=Path.rename):
            if left[0] == 0:
                raise KeyboardInterrupt
            left[0] -= 1
            return rename(self, target)

        with monkeypatch.context() as patch:
            patch.setattr(Path, "replace", replace)
            try:
                TapeWriter(tape, 4).release()
            except KeyboardInterrupt:
                assert [step.step for step in Tape(tape).steps()][:4] == [0, 1, 2, 3]
    TapeWriter(tape, 4).release()
    assert [step.step for step in Tape(tape).steps()] == [0, 1, 2, 3]


def test_an_error_that_says_nothing_is_named_by_its_type():
    def reward(prompt, completion):
        return 0.0

    class Broken(type(make_data().engine)):
        def poll(self, timeout_s):
            time.sleep(0.01)
            raise KeyError(0)

    data = make_data(engine=Broken(), engine_restarts=0, reward=reward)
    with pytest.raises(ProducerError, match="rollout generation failed: KeyError: 0"):
        fit(make_module(), data, 1)
