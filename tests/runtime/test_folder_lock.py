"""One run in one folder: a lock, what killed runs left, and tables that are kept."""

import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
from filelock import FileLock, Timeout

from lit_async_rl.api.run_folders import set_aside
from lit_async_rl.cli.app import main
from lit_async_rl.replay.tape import TapeWriter
from lit_async_rl.runtime.files import FolderLock, lock_path, locked, part_name, remove_stale_parts
from lit_async_rl.training.checkpoint_io import check_checkpoint
from lit_async_rl.training.trackers import CSVLog

ROOT = Path(__file__).parents[2]
HOLDER = """
import sys, time
from lit_async_rl.runtime.files import FolderLock
FolderLock(sys.argv[1], "x")
print("held", flush=True)
time.sleep(60)
"""


@pytest.mark.slow
def test_two_runs_in_one_folder_the_second_is_told_of_the_first(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    runs = tmp_path / "runs" / "quickstart" / "fixed"
    runs.mkdir(parents=True)
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, str(runs)], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout.readline() == "held\n"
        where = ["--trainer.logger.init_args.save_dir", str(tmp_path / "runs")]
        where += ["--trainer.logger.init_args.version", "fixed", "--data.validation.prompts", "null"]
        with pytest.raises(SystemExit) as error:
            main(["--config", "configs/quickstart.yaml", *where])
        assert f"is in use by process {holder.pid} on " in error.value.code
        with pytest.raises(OSError, match=f"process {holder.pid}"):
            TapeWriter(runs)
    finally:
        holder.kill()
        holder.wait()
    lock = FolderLock(runs, "x")  # the kernel took it back
    FolderLock(runs, "y").release()
    lock.release()


def test_a_folder_is_free_after_the_last_of_its_owners_in_one_process_and_not_before(tmp_path):
    owners = [FolderLock(tmp_path, f"owner {n}") for n in range(3)]
    for owner in owners:
        with pytest.raises(Timeout):
            FileLock(lock_path(tmp_path)).acquire(timeout=0)
        owner.release()
        owner.release()  # once more changes nothing
    with FileLock(lock_path(tmp_path)).acquire(timeout=0):
        pass


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


@pytest.mark.parametrize(("left", "found"), [(("", ".old"), "new"), ((".old",), "old"), (("torn", ".old"), "old")])
def test_a_checkpoint_folder_that_was_not_renamed_is_recovered(left, found, tmp_path):
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    part = Path(str(part_name(tmp_path / "last.ckpt")).replace(str(os.getpid()), str(gone.pid)))
    for kind in left:
        folder = part.with_suffix(".old.part") if kind == ".old" else part
        folder.mkdir()
        (folder / ("old" if kind == ".old" else "new")).touch()
        (folder / "manifest.json").write_text('{"form' if kind == "torn" else '{"format": 1}')
    with pytest.raises(ValueError, match="is not a sharded checkpoint"):  # found, and only then looked into
        check_checkpoint(tmp_path / "last.ckpt")
    assert (tmp_path / "last.ckpt" / found).is_file()
    remove_stale_parts(tmp_path)
    assert list(tmp_path.iterdir()) == [tmp_path / "last.ckpt"]


@pytest.mark.slow
def test_lightning_does_not_warn_of_the_lock_of_a_folder_for_checkpoints(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    where = ["--trainer.logger.init_args.save_dir", str(tmp_path / "runs"), "--data.validation.prompts", "null"]
    where += ["--defaults.checkpoint.init_args.dirpath", str(tmp_path / "kept"), "--trainer.max_steps", "1"]
    small = ["--data.groups_per_step", "1", "--data.group_size", "2", "--model.scheduler", "null"]
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        main(["--config", "configs/quickstart.yaml", *where, *small])
    assert not [str(w.message) for w in seen if "not empty" in str(w.message)]
    assert {path.name for path in (tmp_path / "kept").iterdir()} == {"epoch=1-step=1.ckpt", "last.ckpt"}


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
    assert {path.name for path in table.parent.glob("*.csv")} == {"metrics.1.csv", "metrics.2.csv"}


def test_all_folders_of_a_run_are_locked_and_free_after_it(tmp_path):
    folders = [("trainer.logger", tmp_path / "run"), ("ModelCheckpoint.dirpath", tmp_path / "kept")]
    for _, folder in folders:
        folder.mkdir()
    locks = [tmp_path / "run" / ".run.lock", tmp_path / ".kept.run.lock"]
    with locked(folders, beside=["ModelCheckpoint.dirpath"]):
        for path in locks:
            with pytest.raises(Timeout):
                FileLock(path).acquire(timeout=0)
    for path in locks:
        with FileLock(path).acquire(timeout=0):
            pass
