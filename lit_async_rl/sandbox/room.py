"""The room in which programs run: namespaces, a root with read-only folders of the machine, a scratch folder.

    trainer -> launcher (new namespaces) -> warden (process 1 of its own ids, see `warden`) -> programs

In namespaces the warden is process 1 of a pid namespace: when it ends, in any way, the kernel ends all others.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from lit_async_rl.sandbox import kernel

Level = Literal["bubblewrap", "namespace", "limits"]
SCRATCH = "/tmp"
USER = 1000  # id of programs inside
FIRST_OUTER_USER = 2_000_000_000  # ids of programs outside, where the trainer is root; nobody has them
SYSTEM_FOLDERS = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
SYSTEM_FILES = ("/etc/ld.so.cache", "/etc/alternatives", "/etc/localtime")
DEVICES = ("null", "zero", "full", "random", "urandom")
OLD_ROOT = "/.outside"
ETC_PASSWD = f"sandbox:x:{USER}:{USER}::{SCRATCH}:/bin/sh\n"


@dataclass(frozen=True, kw_only=True)
class Room:
    """Environment of programs, and its isolation.

    Attributes:
        level: see `Sandbox`. In a `namespace` the scratch folder has its own file system, which the warden replaces.
        scratch: folder that programs may write to.
        scratch_bytes: size of the scratch folder, if it has its own file system.
        user: user id of programs; None is the warden's.
        has_own_ids: whether it has its own pid namespace.
        has_processes_shown: whether `/proc` is mounted.
        guards: active guards, for the log.
    """

    level: Level
    scratch: str = SCRATCH
    scratch_bytes: int
    user: int | None = None
    has_own_ids: bool = False
    has_processes_shown: bool
    guards: tuple[str, ...]

    def clear(self) -> None:
        """Empties the scratch folder.

        Raises:
            OSError: the folder cannot be emptied.
        """
        if self.level == "namespace":
            kernel.unmount(self.scratch)
            _mount_scratch(self.scratch, self.scratch_bytes)
            return
        for entry in os.scandir(self.scratch):
            if entry.is_dir(follow_symlinks=False):
                _open_up(entry.path)
                shutil.rmtree(entry.path)
            else:
                os.unlink(entry.path)


def _open_up(folder: str) -> None:
    """Gives the owner access to a tree of folders; programs may have removed it."""
    os.chmod(folder, stat.S_IRWXU)
    for path, folders, _ in os.walk(folder):
        for name in folders:
            if not os.path.islink(inner := os.path.join(path, name)):
                os.chmod(inner, stat.S_IRWXU)


def _mount_scratch(path: str, num_bytes: int) -> None:
    options = f"size={num_bytes},nr_inodes=4096,mode=1777"
    kernel.mount("scratch", path, "tmpfs", flags=kernel.MS_NOSUID | kernel.MS_NODEV, data=options)


def build(settings: dict[str, Any]) -> Room | None:
    """Builds the room for this process, which becomes its warden.

    Returns:
        None in a launcher whose warden has ended.

    Raises:
        OSError: the kernel does not allow it.
    """
    level: Level = settings["level"]
    if level == "namespace":
        return _in_namespaces(settings)
    if level == "bubblewrap":
        # This is process 1 in the namespaces of bwrap, as the user of the programs
        return Room(
            level=level,
            scratch_bytes=settings["scratch_bytes"],
            has_own_ids=os.getpid() == 1,
            has_processes_shown=True,
            guards=("bubblewrap",),
        )
    with contextlib.suppress(OSError, AttributeError):  # macOS has none
        kernel.prctl(kernel.PR_SET_CHILD_SUBREAPER, 1)
    return Room(
        level=level,
        scratch=settings["scratch"],
        scratch_bytes=settings["scratch_bytes"],
        has_processes_shown=os.path.isdir("/proc/self"),
        guards=("resource limits only",),
    )


def _in_namespaces(settings: dict[str, Any]) -> Room | None:
    user = os.getuid()
    group = os.getgid()
    outer = FIRST_OUTER_USER + os.getpid()
    may_map = user == 0 and kernel.has_capabilities(kernel.CAP_SETUID, kernel.CAP_SETGID) and _is_known(outer)
    if may_map:  # programs get an unused id: the number of root's processes is unlimited
        ids = f"0 0 1\n{USER} {outer} 1\n"
        helper = _Helper(ids)
    kernel.unshare(
        kernel.CLONE_NEWUSER
        | kernel.CLONE_NEWNS
        | kernel.CLONE_NEWPID
        | kernel.CLONE_NEWNET
        | kernel.CLONE_NEWIPC
        | kernel.CLONE_NEWUTS
    )
    if may_map:
        helper.write()
    else:
        _write("/proc/self/setgroups", "deny")
        _write("/proc/self/uid_map", f"{USER} {user} 1\n")
        _write("/proc/self/gid_map", f"{USER} {group} 1\n")
    kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)  # here, since new privileges clear it
    warden = os.fork()
    if warden:
        os.closerange(3, 64)  # the trainer's pipes end with the warden
        os.waitpid(warden, 0)
        return None
    kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
    has_processes_shown = _make_root(settings)
    _mount_scratch(SCRATCH, settings["scratch_bytes"])
    socket.sethostname("sandbox")
    return Room(
        level="namespace",
        scratch_bytes=settings["scratch_bytes"],
        user=USER if may_map else None,
        has_own_ids=True,
        has_processes_shown=has_processes_shown,
        guards=("namespaces (user, mount, pid, network, ipc, uts)",),
    )


def _is_known(user: int) -> bool:
    """Whether the user namespace of this process has an id; a container's has few."""
    with open("/proc/self/uid_map") as lines:
        ranges = [[int(word) for word in line.split()] for line in lines]
    return any(first <= user < first + number for first, _, number in ranges)


class _Helper:
    """A child that maps the ids of its parent's user namespace from outside, which requires root."""

    def __init__(self, ids: str) -> None:
        self._wakes, self._wake = os.pipe()
        parent = os.getpid()
        self._pid = os.fork()
        if not self._pid:
            status = 1
            with contextlib.suppress(OSError):
                os.close(self._wake)
                if os.read(self._wakes, 1):
                    _write(f"/proc/{parent}/uid_map", ids)
                    _write(f"/proc/{parent}/gid_map", ids)
                    status = 0
            os._exit(status)
        os.close(self._wakes)

    def write(self) -> None:
        os.write(self._wake, b"1")
        os.close(self._wake)
        if os.waitpid(self._pid, 0)[1]:
            raise PermissionError("the user and group ids of a user namespace cannot be mapped")


def _write(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)


def _make_root(settings: dict[str, Any]) -> bool:
    """Makes a new root; returns whether it has `/proc`."""
    kernel.mount("none", "/", flags=kernel.MS_REC | kernel.MS_PRIVATE)
    kernel.mount("root", SCRATCH, "tmpfs", flags=kernel.MS_NOSUID | kernel.MS_NODEV, data="size=1m,mode=755")
    os.chdir(SCRATCH)
    os.mkdir("." + OLD_ROOT)
    kernel.pivot_root("." + OLD_ROOT)
    os.chdir("/")
    os.umask(0o022)
    for path in (*SYSTEM_FOLDERS, *SYSTEM_FILES, *settings["readable"]):
        _show(path)
    os.makedirs("/etc", exist_ok=True)
    _write("/etc/passwd", ETC_PASSWD)
    _make_devices()
    os.mkdir("/proc")
    has_processes_shown = _mount_proc()
    os.makedirs(SCRATCH, exist_ok=True)
    kernel.unmount(OLD_ROOT)
    os.rmdir(OLD_ROOT)
    kernel.make_read_only("/", with_mounts_below=False)
    return has_processes_shown


def _show(path: str) -> None:
    """Mounts a folder or file of the machine at the same path, read-only; recreates a symbolic link."""
    outside = OLD_ROOT + path
    if os.path.lexists(path) or not os.path.lexists(outside):
        return
    os.makedirs(os.path.dirname(path), exist_ok=True)
    if os.path.islink(outside):
        os.symlink(os.readlink(outside), path)
        return
    if os.path.isdir(outside):
        os.mkdir(path)
    else:
        os.close(os.open(path, os.O_CREAT | os.O_WRONLY))
    kernel.mount(outside, path, flags=kernel.MS_BIND | kernel.MS_REC)
    kernel.make_read_only(path)


def _make_devices() -> None:
    os.mkdir("/dev")
    for name in DEVICES:
        path = f"/dev/{name}"
        os.close(os.open(path, os.O_CREAT | os.O_WRONLY))
        kernel.mount(OLD_ROOT + path, path, flags=kernel.MS_BIND)
    os.symlink("/proc/self/fd", "/dev/fd")
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        os.symlink(f"/proc/self/fd/{number}", f"/dev/{name}")
    os.symlink(SCRATCH, "/dev/shm")


def _mount_proc() -> bool:
    flags = kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_NOEXEC
    for options in ("subset=pid", ""):
        with contextlib.suppress(OSError):
            kernel.mount("proc", "/proc", "proc", flags=flags, data=options)
            return True
    return False  # in a container with parts of `/proc` masked


def bubblewrap_options(readable: Sequence[str], scratch_bytes: int) -> list[str]:
    """Arguments of `bwrap` before the command of a warden."""
    command = ["--unshare-all", "--die-with-parent", "--new-session", "--as-pid-1", "--hostname", "sandbox"]
    command += ["--uid", str(USER), "--gid", str(USER)]
    shown: list[str] = []
    for path in (*SYSTEM_FOLDERS, *SYSTEM_FILES, *readable):
        if os.path.islink(path):
            command += ["--symlink", os.readlink(path), path]
        elif os.path.exists(path) and not any(path.startswith(above + "/") for above in shown):
            command += ["--ro-bind", path, path]
            shown.append(path)
    for name in DEVICES:
        command += ["--dev-bind", f"/dev/{name}", f"/dev/{name}"]
    command += ["--symlink", "/proc/self/fd", "/dev/fd", "--symlink", SCRATCH, "/dev/shm"]
    command += ["--proc", "/proc", "--size", str(scratch_bytes), "--perms", "1777", "--tmpfs", SCRATCH]
    return [*command, "--remount-ro", "/", "--chdir", SCRATCH, "--"]
