# ruff: noqa: E501  programs are as long as they are
"""Programs that try to get out of the sandbox, each at every level of isolation that works on this machine."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from sandboxes import LIMITS, levels

from lit_async_rl.sandbox.program import Program, SandboxLimits
from lit_async_rl.sandbox.sandbox import Sandbox

SECRET = "sesame-4711"
SHORT = SandboxLimits(wall_s=1.0, cpu_s=20, memory_mb=200, processes=16, output_kb=64, file_mb=8, scratch_mb=16)
IS_THERE = levels()


def test_a_sandbox_works_here(record_property):
    """In continuous integration a machine without namespaces would skip every test below."""
    record_property("sandbox_levels", ", ".join(IS_THERE) or "limits")
    if not IS_THERE and "NEEDS_SANDBOX" not in os.environ:
        pytest.skip("no namespaces here: the level is limits, and no escape was tried")
    assert IS_THERE, "NEEDS_SANDBOX: the machine must allow user namespaces, or have a bubblewrap that works"


@pytest.fixture(scope="module", params=IS_THERE)
def sandbox(request):
    os.environ["SECRET_OF_THE_TRAINER"] = SECRET
    with Sandbox(level=request.param, limits=LIMITS) as made:
        assert made.level == request.param
        assert "seccomp" in made.guards
        yield made
    del os.environ["SECRET_OF_THE_TRAINER"]


def said(sandbox, source, **limits):
    """What a program prints; it must end well, and the sandbox must run another one."""
    result = sandbox.run(source, **limits)
    assert result.is_ok, (result.verdict, result.status, result.stderr[-500:])
    runs_another(sandbox)
    return result.stdout


def runs_another(sandbox):
    assert sandbox.run("print('well')").stdout == "well\n"


ATTEMPTS = """
import os
def attempt(what):
    try:
        found = what()
    except BaseException as error:
        print("refused:", type(error).__name__, getattr(error, "errno", None))
    else:
        print("DONE:", found)
"""


def test_environment_of_the_trainer(sandbox):
    found = said(
        sandbox,
        """
import ctypes, glob, os
print(dict(os.environ))
print(ctypes.string_at(ctypes.cast((ctypes.c_void_p * 1).in_dll(ctypes.CDLL(None), "environ")[0], ctypes.c_void_p).value)
      if 0 else "")
for path in glob.glob("/proc/*/environ"):
    try:
        print(path, open(path, "rb").read())
    except OSError as error:
        print(path, error.errno)
print(os.popen("env").read())
""",
    )
    assert SECRET not in found
    assert "PATH" in found


def test_files_of_the_machine(sandbox, tmp_path):
    (tmp_path / "key.txt").write_text(SECRET)
    here = str(Path(__file__))
    found = said(
        sandbox,
        f"""
import os
for path in ({str(tmp_path / "key.txt")!r}, {here!r}, "/etc/shadow", "/etc/hostname", "/etc/ssh", "/var", "/home",
             os.path.expanduser("~root/.ssh"), "/sys", "/run", "/boot", "/proc/1/root/etc/shadow", "/proc/1/cwd/etc",
             "/proc/self/root/etc/shadow", "/.outside", "/dev/vda", "/dev/mem", "/dev/kmsg"):
    try:
        found = os.listdir(path) if os.path.isdir(path) else open(path, "rb").read()
    except OSError:
        continue
    print("READ", path, found)
""",
    )
    assert "READ" not in found


def test_writing_outside(sandbox, tmp_path):
    target = tmp_path / "file.txt"
    target.write_text("as it was")
    found = said(
        sandbox,
        f"""
import os, sys
for path in ({str(target)!r}, {str(tmp_path)!r} + "/new", "/new", "/usr/new", "/usr/bin/sh", "/etc/passwd", "/dev/new",
             sys.executable, os.__file__, "/proc/sys/kernel/core_pattern", "/proc/sysrq-trigger", "/proc/1/oom_score_adj"):
    for flags in (os.O_WRONLY, os.O_WRONLY | os.O_CREAT, os.O_RDWR | os.O_TRUNC):
        try:
            os.close(os.open(path, flags))
        except OSError:
            continue
        print("OPENED", path)
for path in ("/usr/bin/env", os.__file__):
    for change in (os.unlink, lambda one: os.chmod(one, 0o777), lambda one: os.rename(one, "/tmp/x")):
        try:
            change(path)
        except OSError:
            continue
        print("CHANGED", path)
""",
    )
    assert not found
    assert target.read_text() == "as it was"


def test_links_lead_nowhere(sandbox, tmp_path):
    (tmp_path / "key.txt").write_text(SECRET)
    found = said(
        sandbox,
        f"""
import os
os.symlink({str(tmp_path / "key.txt")!r}, "link")
os.symlink("/", "root")
for path in ("link", "root/etc/shadow", "/proc/self/root" + {str(tmp_path / "key.txt")!r}):
    try:
        print("READ", open(path).read())
    except OSError as error:
        print("refused")
try:
    os.link("/usr/bin/env", "hard")
    print("LINKED")
except OSError:
    pass
""",
    )
    assert found.split() == ["refused"] * 3


def test_fork_bomb(sandbox):
    result = sandbox.run("import os\nwhile True:\n    try: os.fork()\n    except OSError: pass", SHORT)
    assert result.verdict in ("time", "processes", "memory")
    runs_another(sandbox)
    result = sandbox.run(Program(source=":", command="f() { f | f & }; f; sleep 9", file="main.sh"), SHORT)
    assert not result.is_ok
    runs_another(sandbox)


def test_number_of_processes_and_threads(sandbox):
    found = said(
        sandbox,
        """
import os, threading, time
n = 0
try:
    for n in range(100):
        threading.Thread(target=time.sleep, args=(60.0,), daemon=True).start()
except RuntimeError:
    pass
print(n)
""",
    )
    if os.getuid() or sandbox.level == "namespace":  # the kernel does not count the processes of root
        assert int(found) <= LIMITS.processes


def test_network(sandbox):
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        port = server.getsockname()[1]
        found = said(
            sandbox,
            ATTEMPTS
            + f"""
import socket, urllib.request
attempt(lambda: socket.create_connection(("127.0.0.1", {port}), 2))
attempt(lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
attempt(lambda: socket.socket(socket.AF_UNIX))
attempt(lambda: socket.socket(socket.AF_NETLINK, socket.SOCK_RAW))
attempt(lambda: socket.socket(socket.AF_VSOCK, socket.SOCK_STREAM))
attempt(lambda: urllib.request.urlopen("http://127.0.0.1:{port}", timeout=2))
""",
        )
        assert found.count("refused") == 6
        with pytest.raises(BlockingIOError):
            server.accept()
        result = sandbox.run(Program(source="", command=f"bash -c 'echo x > /dev/tcp/127.0.0.1/{port}'"))
        assert not result.is_ok
        with pytest.raises(BlockingIOError):
            server.accept()


def test_signals_reach_nobody_outside(sandbox):
    caught = []
    before = signal.signal(signal.SIGUSR1, lambda *_: caught.append(1))
    try:
        said(
            sandbox,
            f"""
import os, signal
me = os.getpid()
for pid in [os.getppid(), {os.getpid()}, 1, *range(2, 3000)]:
    for number in (signal.SIGUSR1, signal.SIGKILL, signal.SIGSTOP):
        if pid != me:
            try: os.kill(pid, number)
            except OSError: pass
""",
        )
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert not caught
    result = sandbox.run("import os, signal\nos.kill(-1, signal.SIGKILL)\nprint('here')")
    assert result.verdict == "ended"
    runs_another(sandbox)


def test_the_disk_is_small(sandbox):
    found = said(
        sandbox,
        """
total = 0
for n in range(100):
    try:
        with open(f"file{n}", "wb") as file:
            while True:
                total += file.write(bytes(2**20))
                file.flush()
    except OSError:
        pass
print(total)
made = 0
try:
    for made in range(100_000):
        open(f"empty{made}", "w").close()
except OSError:
    pass
print(made)
""",
    )
    written, made = map(int, found.split())
    assert written <= LIMITS.scratch_mb * 2**20
    assert made < 100_000 or sandbox.level == "bubblewrap"


@pytest.mark.parametrize(
    "source",
    [
        "x = []\nwhile True: x.append(bytearray(10**7))",
        "x = bytearray(10**10)",
        "import mmap\nx = mmap.mmap(-1, 2 * 10**9)\nfor n in range(0, len(x), 4096): x[n] = 1",
        "import sys\nsys.setrecursionlimit(10**9)\ndef f(): return f()\nf()",
        "x = 9 ** 9 ** 9",
    ],
    ids=["heap", "at_once", "shared", "stack", "number"],
)
def test_memory(sandbox, source):
    result = sandbox.run(source, SandboxLimits(wall_s=6.0, cpu_s=3, memory_mb=200, processes=16))
    assert not result.is_ok
    runs_another(sandbox)


def test_memory_of_all_processes_together(sandbox):
    source = "import os, time\nfor n in range(8):\n    if not os.fork():\n        x = bytearray(b'1') * 10**8; time.sleep(60)\n"
    assert sandbox.run(source + "time.sleep(60)").verdict == "memory"
    runs_another(sandbox)


def test_memory_that_no_process_has(sandbox):
    found = said(
        sandbox,
        ATTEMPTS
        + """
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
attempt(lambda: os.memfd_create("x"))
def checked(number):
    if number < 0: raise OSError(ctypes.get_errno(), "")
attempt(lambda: checked(libc.shmget(0, 10**9, 0o1600)))
attempt(lambda: checked(libc.msgget(0, 0o1600)))
attempt(lambda: checked(libc.semget(0, 4, 0o1600)))
""",
    )
    assert found.count("refused") == 4


def test_processes_of_others(sandbox):
    refused = ["environ", "mem", "maps", "root", "cwd", "fd", "fdinfo", "auxv", "stack", "syscall", "map_files"]
    if sandbox.level == "bubblewrap" and os.geteuid() == 0:
        refused.remove("fd")  # their numbers alone; `auto` takes another level for root
    found = said(
        sandbox,
        f"""
import glob, os
pids = sorted(int(name) for name in os.listdir("/proc") if name.isdigit())
print(len(pids), os.path.exists("/proc/{os.getpid()}/cmdline") and b"pytest" in open("/proc/{os.getpid()}/cmdline", "rb").read())
for name in {refused}:
    path = "/proc/1/" + name
    try:
        found = os.readlink(path) if os.path.islink(path) else os.listdir(path) if os.path.isdir(path) else open(path, "rb").read(9)
    except OSError:
        continue
    print("READ", name, found)
""",
    )
    assert found.split() == ["2", "False"]


def test_no_tracing(sandbox):
    found = said(
        sandbox,
        ATTEMPTS
        + """
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long
def checked(number):
    if number < 0: raise OSError(ctypes.get_errno(), "")
attempt(lambda: checked(libc.ptrace(16, 1, 0, 0)))
attempt(lambda: checked(libc.ptrace(0, 0, 0, 0)))
buffer = ctypes.create_string_buffer(16)
class Vector(ctypes.Structure): _fields_ = [("base", ctypes.c_void_p), ("size", ctypes.c_size_t)]
one = Vector(ctypes.addressof(buffer), 16)
attempt(lambda: checked(libc.process_vm_readv(os.getpid(), ctypes.byref(one), 1, ctypes.byref(one), 1, 0)))
attempt(lambda: checked(libc.process_vm_writev(1, ctypes.byref(one), 1, ctypes.byref(one), 1, 0)))
attempt(lambda: checked(libc.unshare(0x10000000)))
attempt(lambda: checked(libc.unshare(0x20000)))
attempt(lambda: checked(libc.mount(b"none", b"/tmp", b"tmpfs", 0, None)))
attempt(lambda: checked(libc.umount2(b"/tmp", 2)))
attempt(lambda: checked(libc.chroot(b"/tmp")))
attempt(lambda: checked(libc.sethostname(b"x", 1)))
attempt(lambda: os.setuid(0))
attempt(lambda: os.chown("/tmp", 0, 0))
attempt(lambda: os.mknod("disk", 0o60600, os.makedev(254, 0)))
for number in (425, 248, 250, 321, 298, 323, 435, 463, 9999, 0x40000000 + 101):  # io_uring, keys, bpf, ..., x32
    attempt(lambda: checked(libc.syscall(ctypes.c_long(number), ctypes.c_long(0), ctypes.c_long(0), ctypes.c_long(0))))
stack = ctypes.create_string_buffer(65536)
attempt(lambda: checked(libc.syscall(ctypes.c_long(56), ctypes.c_long(0x10000000 | 17), ctypes.c_long(0), ctypes.c_long(0), ctypes.c_long(0), ctypes.c_long(0))))
""",
    )
    assert "DONE" not in found
    assert found.count("refused") == 24


def test_programs_of_other_users_give_nothing(sandbox):
    found = said(
        sandbox,
        """
import subprocess, os, glob
for command in (["su", "-c", "id"], ["mount"], ["sudo", "-n", "id"], ["newuidmap"], ["unshare", "-r", "id"]):
    try:
        done = subprocess.run(command, capture_output=True, stdin=subprocess.DEVNULL, timeout=5)
        if b"uid=0" in done.stdout: print("ROOT", command)
    except (OSError, subprocess.TimeoutExpired):
        pass
status = open("/proc/self/status").read()
for line in status.splitlines():
    if line.startswith(("CapPrm", "CapEff", "CapInh", "CapAmb", "NoNewPrivs", "Seccomp:")): print(line.split()[1])
""",
    )
    assert found.split() == ["0000000000000000"] * 4 + ["1", "2"] or found.split()[-2:] == ["1", "2"]
    assert "ROOT" not in found


def test_core_dump(sandbox, tmp_path):
    found = said(
        sandbox,
        """
import os, signal
for number in (signal.SIGABRT, signal.SIGSEGV, signal.SIGQUIT):
    pid = os.fork()
    if not pid:
        os.kill(os.getpid(), number)
    status = os.waitpid(pid, 0)[1]
    print(os.WTERMSIG(status) == number, os.WCOREDUMP(status))
print(os.listdir("."))
""",
    )
    assert found.split() == ["True", "False"] * 3 + ["[]"]
    result = sandbox.run("import os\nos.abort()")
    assert (result.verdict, result.status) == ("ended", -signal.SIGABRT)


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_giant_output(sandbox, stream):
    result = sandbox.run(f"import sys\nwhile True: sys.{stream}.write('x' * 100_000)")
    assert result.verdict == "output"
    assert len(result.stdout) + len(result.stderr) == LIMITS.output_kb * 1024
    runs_another(sandbox)
    assert sandbox.run("print('x' * 10**9)", SHORT).verdict in ("output", "ended")


@pytest.mark.parametrize(
    "source",
    [
        "import signal, time\nfor n in range(1, 65):\n    try: signal.signal(n, signal.SIG_IGN)\n    except (OSError, ValueError):"
        " pass\nwhile True: time.sleep(9)",
        "import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)",
        "import os, time\nos.close(0); os.close(1); os.close(2)\ntime.sleep(60)",
        "while True: pass",
        "import threading\nthreading.Thread(target=threading.Event().wait).start()",
        "import os\nif os.fork(): os.wait()\nwhile True: pass",
        "input()\nwhile True:\n    try: raise KeyboardInterrupt\n    except BaseException: pass",
    ],
    ids=["ignores", "stops", "closes", "spins", "waits", "forks", "catches"],
)
def test_endless_programs_are_ended(sandbox, source):
    result = sandbox.run(Program(source=source, stdin="x"), SandboxLimits(wall_s=0.3))
    assert result.verdict == "time"
    runs_another(sandbox)


def test_daemons_and_files_do_not_stay(sandbox):
    sandbox.run(
        """
import os, time
open("left", "w").write("left")
open("/dev/shm/left", "w").write("left")
os.makedirs("/tmp/a/b/c")
os.chmod("/tmp/a/b", 0)
if not os.fork():
    os.setsid()
    if not os.fork():
        while True:
            time.sleep(0.01)
            open("/tmp/daemon", "a").write("x")
"""
    )
    for _ in range(3):
        found = said(
            sandbox,
            "import os\nprint(os.listdir('/tmp'), os.listdir('/dev/shm'), "
            "len([one for one in os.listdir('/proc') if one.isdigit()]))",
        )
        assert found == "[] [] 2\n"


def test_deep_folders_do_not_stay(sandbox):
    sandbox.run(
        """
import os
for n in range(3000):
    try:
        os.mkdir("d"); os.chdir("d")
    except OSError:
        break
"""
    )
    assert said(sandbox, "import os\nprint(os.listdir('/tmp'))") == "[]\n"


def test_memory_of_earlier_programs(sandbox):
    mark = "vermilion" * 3
    sandbox.run(Program(source=f"import sys\nx = sys.stdin.read()\nprint('{mark}')", stdin=f"{mark} of the input"))
    found = said(
        sandbox,
        """
import gc, re
word = b"vermil" + b"ion" + b"vermil"
found = [one for one in gc.get_objects() if isinstance(one, (str, bytes)) and word.decode() in str(one)]
print(len(found))
own = [id(word)]
total = 0
try:
    memory = open("/proc/self/mem", "rb", 0)
except OSError:
    raise SystemExit(print(0))
with open("/proc/self/maps") as maps:
    for line in maps:
        start, end = (int(part, 16) for part in line.split()[0].split("-"))
        if " rw" in line and end - start < 2**27:
            memory.seek(start)
            try: data = memory.read(end - start)
            except OSError: continue
            total += len(re.findall(b"vermil(?:i)onvermil(?:i)onvermilion", data))
print(total)
""",
    )
    assert found.split()[-1] == "0"


def test_inherited_descriptors(sandbox):
    result = sandbox.run(
        """
import os, stat
print(sorted(int(name) for name in os.listdir("/proc/self/fd")))
for n in range(3, 2000):
    try: os.write(n, b'{"verdict": "ended", "status": 0}\\n')
    except OSError: pass
import sys
sys.stdin.buffer.raw.seek(0)
try: os.write(0, b"changed"); print("WRITTEN")
except OSError: pass
raise SystemExit(3)
"""
    )
    assert (result.verdict, result.status) == ("ended", 3)
    assert "WRITTEN" not in result.stdout
    assert len(eval(result.stdout)) <= 4  # the fourth is that of the listing
    runs_another(sandbox)


def test_odd_texts(sandbox):
    assert sandbox.run("print('\ud800')").stdout == "?\n"
    assert sandbox.run("a\0b").status == 1
    assert sandbox.run("(" * 10_000).status in (1, -signal.SIGSEGV)
    assert sandbox.run("import sys; sys.stdout.buffer.write(bytes([255, 0, 10]))").stdout == "\ufffd\0\n"
    assert sandbox.run(Program(source="print(len(input()))", stdin="x" * 3_000_000)).stdout == "3000000\n"
    assert sandbox.run("import os; os._exit(213)").status == 213
    runs_another(sandbox)


KILLED = """
import sys, threading, time
sys.path[:0] = {path!r}
from lit_async_rl.sandbox.program import SandboxLimits
from lit_async_rl.sandbox.sandbox import Sandbox
sandbox = Sandbox(level={level!r}, limits=SandboxLimits(wall_s=100.0, cpu_s=100))
source = "import os, time\\nos.fork()\\nos.setsid() if os.getpid() % 2 else None\\nprint(1)\\nwhile True: time.sleep(0.1)"
for _ in range(2):
    threading.Thread(target=sandbox.run, args=(source,), daemon=True).start()
time.sleep(0.3)
print("running", flush=True)
time.sleep(100)
"""


def processes_of(session_leader: int) -> list[int]:
    """Descendants of a process, and what they have left to others: all with its mark in their environment."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                line = Path(f"/proc/{name}/cmdline").read_bytes()
            except OSError:
                continue
            if f'"parent": {session_leader}'.encode() in line:
                found.append(int(name))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("level", IS_THERE)
def test_a_killed_trainer_leaves_nothing_behind(level, tmp_path):
    script = tmp_path / "trainer.py"
    script.write_text(KILLED.format(path=sys.path, level=level))
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True) as trainer:
        assert trainer.stdout.readline() == "running\n"
        # launchers, wardens and the programs, which keep the command line of their warden
        deadline = time.monotonic() + 60
        while len(processes_of(trainer.pid)) < 6 and time.monotonic() < deadline:
            time.sleep(0.05)
        assert len(processes_of(trainer.pid)) >= 6
        trainer.kill()
    deadline = time.monotonic() + 60
    while processes_of(trainer.pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not processes_of(trainer.pid)
