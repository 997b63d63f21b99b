"""Checkpoints written in the background: what is saved, in which order files change, errors, kills."""

import datetime
import errno
import os
import random
import signal
import threading
import time
from pathlib import Path

import pytest
import torch

from lit_async_rl.training.checkpoint_io import AtomicCheckpointIO, BackgroundCheckpointIO, check_checkpoint


def state(value: float, size: int = 1000) -> dict:
    weights = {"policy.w": torch.full((size,), value)}
    return {"state_dict": weights, "version": 1, "updated": False, "random_state": torch.get_rng_state(), "note": []}


@pytest.fixture
def gate(monkeypatch):
    """Holds each write until it is set."""
    event, write = threading.Event(), AtomicCheckpointIO.save_checkpoint

    def slow(self, *args, **kwargs):
        assert event.wait(60)
        write(self, *args, **kwargs)

    monkeypatch.setattr(AtomicCheckpointIO, "save_checkpoint", slow)
    return event


def test_training_goes_on_and_the_file_holds_what_was_saved(tmp_path, gate):
    io, saved = BackgroundCheckpointIO(), state(1.0)
    io.save_checkpoint(saved, tmp_path / "a.ckpt")
    saved["state_dict"]["policy.w"].fill_(2.0)
    saved["note"].append("later")
    assert not (tmp_path / "a.ckpt").exists()
    gate.set()
    loaded = io.load_checkpoint(tmp_path / "a.ckpt")
    assert loaded["state_dict"]["policy.w"].eq(1.0).all()
    assert loaded["note"] == []
    io.teardown()


def test_a_call_after_saving_finds_the_file(tmp_path, gate):
    io, found = BackgroundCheckpointIO(), []
    io.save_checkpoint(state(1.0), tmp_path / "a.ckpt")
    io.after_saving(lambda: found.append((tmp_path / "a.ckpt").exists()))
    assert not found
    gate.set()
    io.wait()
    assert found == [True]
    io.teardown()


def test_tied_weights_are_written_once(tmp_path):
    io, saved = BackgroundCheckpointIO(), state(1.0, size=100_000)
    saved["state_dict"]["policy.head"] = saved["state_dict"]["policy.w"]
    io.save_checkpoint(saved, tmp_path / "a.ckpt")
    io.teardown()
    assert (tmp_path / "a.ckpt").stat().st_size < 600_000


def test_an_older_one_goes_only_when_its_successor_and_the_link_are_there(tmp_path, gate):
    io, old, new, last = BackgroundCheckpointIO(), tmp_path / "1.ckpt", tmp_path / "2.ckpt", tmp_path / "last.ckpt"
    gate.set()
    io.save_checkpoint(state(1.0), old)
    io.link_checkpoint(str(old), str(last))
    io.wait()
    gate.clear()
    io.save_checkpoint(state(2.0), new)
    io.remove_checkpoint(old)  # in Lightning's order: the link moves at the end
    assert old.exists()
    assert last.resolve() == old
    gate.set()
    io.wait()
    assert old.exists()  # the link leads there
    io.link_checkpoint(str(new), str(last))
    io.teardown()
    assert not old.exists()
    assert io.load_checkpoint(last)["state_dict"]["policy.w"][0] == 2


@pytest.mark.parametrize("how", ["wait", "save", "teardown"])
def test_a_failed_write_is_raised(tmp_path, how):
    io = BackgroundCheckpointIO()
    (tmp_path / "file").touch()
    io.save_checkpoint(state(1.0), tmp_path / "file" / "a.ckpt")
    with pytest.raises(OSError, match="file"):
        {"wait": io.wait, "save": lambda: io.save_checkpoint(state(1.0), tmp_path / "b"), "teardown": io.teardown}[
            how
        ]()
    io.teardown()


def save_for_ever(folder: Path) -> None:
    """As `LinkedCheckpoint` with `save_top_k: 1` does."""
    io, step = BackgroundCheckpointIO(), 0
    while True:
        step += 1
        io.save_checkpoint(state(step, size=100_000), folder / f"{step}.ckpt")
        if step > 1:
            io.remove_checkpoint(folder / f"{step - 1}.ckpt")
        io.link_checkpoint(str(folder / f"{step}.ckpt"), str(folder / "last.ckpt"))


@pytest.mark.slow
def test_a_kill_at_any_moment_leaves_the_last_one_loadable(tmp_path):
    chance = random.Random(0)
    for number in range(8):
        folder = tmp_path / str(number)
        folder.mkdir()
        if (pid := os.fork()) == 0:
            try:
                save_for_ever(folder)
            finally:
                os._exit(1)
        deadline = time.monotonic() + 60
        while not (folder / "last.ckpt").exists() and time.monotonic() < deadline:
            time.sleep(0.001)
        time.sleep(chance.uniform(0, 0.05))
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        check_checkpoint(folder / "last.ckpt")
        value = BackgroundCheckpointIO().load_checkpoint(folder / "last.ckpt")["state_dict"]["policy.w"]
        assert value.eq(value[0]).all()
        assert len(list(folder.glob("[0-9]*.ckpt"))) <= 2


@pytest.mark.parametrize("kind", [BackgroundCheckpointIO, AtomicCheckpointIO])
def test_a_checkpoint_that_could_not_be_loaded_is_named_when_it_is_saved(kind, tmp_path, caplog):
    io = kind()
    for day, name in enumerate(("1.ckpt", "2.ckpt")):
        io.save_checkpoint(
            state(1.0) | {"callbacks": {"Mine": {"since": datetime.date(2026, 1, 1 + day)}}}, tmp_path / name
        )
    io.teardown()
    (line,) = [record.getMessage() for record in caplog.records if "resumed" in record.getMessage()]
    assert (
        f"checkpoint {tmp_path / '1.ckpt'} is refused, because it contains code (which was not executed): datetime.date"
        in line
    )
    caplog.clear()
    io = kind()
    io.save_checkpoint(state(1.0), tmp_path / "3.ckpt")
    io.teardown()
    assert not caplog.records


@pytest.mark.parametrize("kind", [BackgroundCheckpointIO, AtomicCheckpointIO])
def test_whatever_error_a_save_ends_in_the_checkpoint_before_it_stays(kind, tmp_path, monkeypatch):
    io, old, new = kind(), tmp_path / "1.ckpt", tmp_path / "2.ckpt"
    io.save_checkpoint(state(1.0), old)
    if kind is BackgroundCheckpointIO:
        io.wait()

    def broken(*args, **kwargs):
        raise OSError(errno.EIO, "the network file system is gone")

    def save_the_next():
        io.save_checkpoint(state(2.0), new)
        io.remove_checkpoint(old)  # before its successor's error is known
        io.teardown()

    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", broken)
        with pytest.raises(OSError, match="is gone"):
            save_the_next()
    assert old.exists()
    io.remove_checkpoint(old)
    io.save_checkpoint(state(3.0), new)
    io.remove_checkpoint(old)
    io.teardown()
    assert [path.name for path in tmp_path.glob("*.ckpt")] == ["2.ckpt"]


def test_a_link_takes_the_place_of_a_folder_of_shards(tmp_path):
    io, new, last = BackgroundCheckpointIO(), tmp_path / "2.ckpt", tmp_path / "last.ckpt"
    for folder in (new, last):
        folder.mkdir()
        (folder / "meta.pt").touch()
    io.link_checkpoint(str(new), str(last))
    io.teardown()
    assert last.is_symlink()
    assert last.resolve() == new


def test_a_kill_while_a_link_replaces_a_folder_of_shards_keeps_one_of_both(tmp_path, monkeypatch):
    saved, last = tmp_path / "epoch=0-step=2.ckpt", tmp_path / "last.ckpt"
    saved.touch()
    last.mkdir()
    (last / "manifest.json").write_text('{"format": 1}')
    io = BackgroundCheckpointIO()

    def killed(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Path, "replace", killed)
        with pytest.raises(KeyboardInterrupt):
            io._link(saved, last)
    (kept,) = tmp_path.glob(".last.ckpt.*.old.part")  # what `remove_stale_parts` brings back
    assert (kept / "manifest.json").is_file()
    io._link(saved, last)
    assert last.is_symlink()
    assert last.resolve() == saved
    assert sorted(tmp_path.iterdir()) == [saved, last]
