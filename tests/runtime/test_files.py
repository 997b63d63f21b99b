"""A second name for a file or folder: by hard links where they are possible, else by copies."""

import errno
import os
import stat
import subprocess
import sys
from contextlib import nullcontext

import pytest

from lit_async_rl.runtime.files import duplicate


def content(path):
    """Relative name and text of each file."""
    files = sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]
    return {str(p.relative_to(path)): p.read_text() for p in files}


def made(path, kind, text):
    if kind == "file":
        path.write_text(text)
        return
    if kind == "link":
        path.symlink_to("nowhere")
        return
    (path / "inner").mkdir(parents=True)
    for name in ("__0_0.distcp", ".metadata", "inner/more"):
        (path / name).write_text(text + name)


@pytest.mark.parametrize("link", [True, False])
@pytest.mark.parametrize("before", [None, "file", "folder", "link"])
@pytest.mark.parametrize("kind", ["file", "folder"])
def test_it_takes_the_place_of_what_was_there_and_outlives_the_original(tmp_path, kind, before, link):
    source, target = tmp_path / "step=3.ckpt", tmp_path / "healthy.ckpt"
    made(source, kind, "new")
    if before is not None:
        made(target, before, "old")
    expected = content(source)
    duplicate(source, target, link)
    duplicate(source, target, link)
    one = "." if kind == "file" else ".metadata"
    assert (target / one).samefile(source / one) == link
    source.rename(tmp_path / "gone")
    assert content(target) == expected
    assert {path.name for path in tmp_path.iterdir()} == {"gone", "healthy.ckpt"}


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_a_file_system_without_hard_links_gets_copies(tmp_path, kind, monkeypatch):
    def refused(*args, **kwargs):
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "link", refused)
    made(tmp_path / "a", kind, "text")
    duplicate(tmp_path / "a", tmp_path / "b", link=True)
    assert content(tmp_path / "b") == content(tmp_path / "a")


def test_what_was_there_stays_when_the_disk_is_full(tmp_path, monkeypatch):
    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("shutil.copy2", full)
    made(tmp_path / "a", "file", "new")
    made(tmp_path / "b", "file", "old")
    with pytest.raises(OSError, match="No space"):
        duplicate(tmp_path / "a", tmp_path / "b", link=False)
    assert content(tmp_path / "b") == {".": "old"}
    assert {path.name for path in tmp_path.iterdir()} == {"a", "b"}


def test_an_append_that_the_disk_takes_only_in_part_leaves_the_file_as_it_was(tmp_path):
    """In a process of its own: a limit on the size of files stands in for a full disk."""
    file = tmp_path / "log"
    file.write_text("before\n")
    program = f"""
import resource, signal
from pathlib import Path
from lit_async_rl.runtime.files import append
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (10, 10))
try:
    append(Path({str(file)!r}), "more than fits")
except OSError as error:
    print(type(error).__name__)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "OSError", done.stderr
    assert file.read_text() == "before\n"


@pytest.mark.parametrize(("number", "is_tolerated"), [(errno.EINVAL, True), (errno.EIO, False)])
def test_a_folder_that_cannot_be_flushed_is_an_error_unless_its_file_system_never_can(
    number, is_tolerated, tmp_path, monkeypatch
):
    source = tmp_path / "step=3.ckpt"
    source.write_text("new")

    def fail(handle):
        if stat.S_ISDIR(os.fstat(handle).st_mode):
            raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", fail)
    with nullcontext() if is_tolerated else pytest.raises(OSError, match=os.strerror(number)):
        duplicate(source, tmp_path / "last.ckpt", link=False)
    assert (tmp_path / "last.ckpt").read_text() == "new"
