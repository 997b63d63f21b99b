"""The sandbox from outside: its levels, its processes and their ends, and the lowest level, which is none."""

from __future__ import annotations

import gc
import os
import platform
import shutil
import signal
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from sandboxes import LIMITS, levels

from lit_async_rl.errors import SetupError
from lit_async_rl.sandbox import kernel
from lit_async_rl.sandbox.program import Program, SandboxError, SandboxLimits
from lit_async_rl.sandbox.sandbox import Sandbox

ROOT = Path(__file__).parents[2]
ALL = levels("limits")
linux = pytest.mark.skipif(sys.platform != "linux", reason="Linux only")


def make(level, **settings):
    return Sandbox(level=level, allow_unsandboxed=level == "limits", **{"limits": LIMITS} | settings)


def is_there(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.fixture(scope="module", params=ALL)
def sandbox(request):
    with make(request.param) as made:
        yield made


def test_programs_and_what_they_return(sandbox):
    result = sandbox.run(Program(source="import sys\nprint(input() * 2, file=sys.stderr)\nsys.exit(7)", stdin="ab"))
    assert (result.verdict, result.status, result.stdout, result.stderr) == ("ended", 7, "", "abab\n")
    assert not result.is_ok
    assert 0 < result.cpu_s < 10
    assert 0 < result.wall_s < 20
    assert sandbox.run(Program(source="1 + 1", shows_last=True)).stdout == "2\n"
    assert sandbox.run(Program(source="x = 1", shows_last=True)).stdout == ""
    ended = sandbox.run("def f(x: int): pass\nprint(f.__annotations__)\nexit()\nprint(1)")
    assert (ended.status, ended.stdout) == (0, "{'x': <class 'int'>}\n")  # no future import of the sandbox's own
    assert sandbox.run("quit(3)").status == 3
    assert sandbox.run("import atexit\natexit.register(print, 'end')").stdout == "end\n"
    assert "main.py" in sandbox.run("1 / 0").stderr
    assert "    1 / 0" in sandbox.run("1 / 0").stderr
    assert "lit_async_rl" not in sandbox.run("1 / 0").stderr
    assert sandbox.run("print(__name__, __file__, hash('x') == hash('x'))").stdout == "__main__ main.py True\n"
    assert sandbox.run(Program(source="echo $0 $HOME $(ls)", command="sh main.sh", file="main.sh")).stdout.endswith(
        "main.sh\n"
    )


def test_hashes_and_thus_orders_are_the_same_in_every_process(sandbox):
    source = "print(list({'a', 'b', 'c', 'd'}), hash('x'))"
    with make(sandbox.level) as other:
        assert sandbox.run(source).stdout == other.run(source).stdout


def test_limits_at_every_level(sandbox):
    short = SandboxLimits(wall_s=0.5, memory_mb=100, output_kb=8)
    assert sandbox.run("while True: pass", short).verdict == "time"
    assert sandbox.run("while True: print('x' * 1000)", short).verdict == "output"
    assert not sandbox.run("x = bytearray(10**9)", short).is_ok
    assert sandbox.run("import os, time\nif os.fork(): time.sleep(9)\nelse: time.sleep(9)", short).verdict == "time"
    assert sandbox.run("print('well')").stdout == "well\n"


def test_many_threads(sandbox):
    found = {}

    def run(n):
        found[n] = [sandbox.run(f"print({n} * {k})").stdout for k in range(4)]

    threads = [threading.Thread(target=run, args=(n,)) for n in range(8)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert found == {n: [f"{n * k}\n" for k in range(4)] for n in range(8)}


@linux
def test_a_warden_that_was_killed_is_replaced(sandbox):
    assert sandbox.run("print(1)").stdout == "1\n"
    killed = sandbox._idle[-1]._process
    killed.kill()
    wait_until(lambda: not is_there(killed.pid))
    assert sandbox.run("print(2)").stdout == "2\n"
    answers = []
    thread = threading.Thread(target=lambda: answers.append(sandbox.run("import time; time.sleep(0.5); print(3)")))
    number = len(sandbox._idle)
    idle = {one._process.pid for one in sandbox._idle}
    thread.start()
    wait_until(lambda: len(sandbox._idle) < number or answers)
    for pid in idle - {one._process.pid for one in sandbox._idle}:
        os.kill(pid, signal.SIGKILL)
    thread.join(60)
    assert answers[0].stdout == "3\n"  # by another one


@pytest.mark.slow
@linux
@pytest.mark.parametrize("level", ALL)
@pytest.mark.parametrize("ending", ["closed", "dropped"])
def test_nothing_is_left_of_it(level, ending):
    made = make(level)
    for warden in [made._take(), made._take()]:
        made._release(warden)
    pids = [one._process.pid for one in made._idle]
    assert len(pids) == 2
    if ending == "closed":
        made.close()
        made.close()
    else:
        del made
        gc.collect()
    wait_until(lambda: not any(map(is_there, pids)))


@linux
def test_closing_it_ends_a_program_that_runs_and_a_later_one_gets_a_new_process():
    made = make(ALL[0])
    ended = threading.Event()

    def run():
        with pytest.raises(SandboxError):
            made.run("import time; time.sleep(100)")
        ended.set()

    threading.Thread(target=run, daemon=True).start()
    deadline = time.monotonic() + 60
    while not ended.wait(0.02):  # it is tried again in another one, which the same call may have closed
        assert time.monotonic() < deadline
        for warden in list(made._busy):
            made.close()
            wait_until(lambda pid=warden._process.pid: not is_there(pid))
    assert made.run("print(3)").stdout == "3\n"
    made.close()


ORPHAN = """
import os, time
reads, writes = os.pipe()
if not os.fork():
    child = os.getpid()
    if not os.fork():
        while os.getppid() == child:
            time.sleep(0.01)
        os.write(writes, str(os.getppid()).encode())
    os._exit(0)
os.wait()
print(os.read(reads, 20).decode(), os.getppid())
"""


@linux
def test_what_a_program_leaves_behind_becomes_a_child_of_the_process_that_ends_it(sandbox):
    parent, of_the_program = sandbox.run(ORPHAN).stdout.split()
    assert parent == of_the_program


@linux
def test_the_lowest_level_without_the_trainer(tmp_path):
    """Its programs end with the socket of a trainer that was killed."""
    script = tmp_path / "trainer.py"
    script.write_text(
        f"import sys\nsys.path[:0] = {sys.path!r}\nfrom lit_async_rl.sandbox.sandbox import *\n"
        "s = Sandbox(level='limits', allow_unsandboxed=True, limits=SandboxLimits(wall_s=100.0, cpu_s=100))\n"
        "print(s._idle[0]._process.pid, flush=True)\ns.run('import os\\nos.fork()\\nwhile True: pass')"
    )
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True) as trainer:
        warden = int(trainer.stdout.readline())
        children = Path(f"/proc/{warden}/task/{warden}/children")
        wait_until(lambda: children.read_text().split())
        program = int(children.read_text().split()[0])
        trainer.kill()
    wait_until(lambda: not is_there(warden) and not is_there(program))


@linux
def test_what_the_lowest_level_has_where_the_kernel_has_it(tmp_path):
    secret = tmp_path / "key"
    secret.write_text("sesame")
    with make("limits") as made:
        assert made.description.startswith("limits: resource limits only")
        if "seccomp" in made.guards:
            for attempt in (
                "import socket; socket.socket()",
                f"import os; os.kill({os.getpid()}, 0)",
                "import os; os.setsid()",
                f"import resource; resource.prlimit({os.getpid()}, resource.RLIMIT_CORE)",
            ):
                assert "PermissionError" in made.run(attempt).stderr
        if any(one.startswith("Landlock") for one in made.guards):
            assert "PermissionError" in made.run(f"open({str(secret)!r})").stderr
            assert "PermissionError" in made.run(f"open({str(tmp_path / 'new')!r}, 'w')").stderr
        assert made.run("import os\nprint('SECRET' in os.environ, sorted(os.environ))").stdout.startswith("False")
        made.run("open('left', 'w').write('x')")
        assert made.run("import os\nprint(os.listdir('.'))").stdout == "[]\n"


def test_less_than_namespaces_has_to_be_allowed(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda *_, **__: None)
    with pytest.raises(SetupError, match=r"bubblewrap: bwrap is not installed.*allow_unsandboxed: true"):
        Sandbox(level="bubblewrap")
    with pytest.raises(SetupError, match=r"limits: needs allow_unsandboxed"):
        Sandbox(level="limits")


def test_a_module_that_is_not_there_is_named():
    with pytest.raises(SetupError, match="no_such_module"):
        make(ALL[0], preload=["no_such_module"])


@pytest.mark.skipif(Path.home().resolve().is_relative_to("/tmp"), reason="programs have a /tmp of their own")
def test_packages_of_the_user(tmp_path_factory):
    folder = Path.home() / f".sandbox-test-{os.getpid()}"
    folder.mkdir()
    try:
        (folder / "of_mine.py").write_text("value = 41\n")
        with make(ALL[0], python_path=[str(folder)], preload=["of_mine"]) as made:
            assert made.run("import of_mine\nprint(of_mine.value + 1)").stdout == "42\n"
    finally:
        shutil.rmtree(folder)
    with pytest.raises(ValueError, match="in /tmp"):
        make(ALL[0], readable=[str(tmp_path_factory.getbasetemp())])


@pytest.mark.parametrize(
    "settings", [{"wall_s": 0.0}, {"cpu_s": 0}, {"memory_mb": -1}, {"processes": 1}, {"output_kb": 0}, {"file_mb": 0}]
)
def test_limits_out_of_range(settings):
    with pytest.raises(ValueError, match=f"SandboxLimits.{next(iter(settings))} must be"):
        SandboxLimits(**settings)


@linux
@pytest.mark.skipif(os.getuid() != 0, reason="needs root to become somebody else")
@pytest.mark.parametrize("level", levels())
def test_a_user_without_privileges(level):
    """The same for whoever has no rights: the usual trainer."""
    python = "/usr/bin/python3"
    packages = next((path for path in sys.path if path.endswith("site-packages")), "")
    path = os.pathsep.join([str(ROOT), packages])
    script = (
        "import os\nfrom lit_async_rl.sandbox.sandbox import *\n"
        f"with Sandbox(level={level!r}) as s:\n"
        "    print(os.getuid(), s.level, s.run('import os; print(os.listdir(\"/tmp\"), os.getuid())').stdout.strip(),\n"
        "          s.run('open(\"/etc/hostname\")').status)"
    )
    command = ["setpriv", "--reuid=12345", "--regid=12345", "--clear-groups", "env", f"PYTHONPATH={path}", "HOME=/tmp"]
    try:
        done = subprocess.run([*command, python, "-c", script], capture_output=True, text=True, timeout=120)
    except FileNotFoundError:
        pytest.skip("needs setpriv")
    if "ModuleNotFoundError" in done.stderr or (not done.stderr.count("sandbox") and done.returncode == 126):
        pytest.skip("the checkout or its packages are not readable for others")
    assert done.stdout == f"12345 {level} [] 1000 1\n", done.stderr


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
@pytest.mark.parametrize("shares_ids", [False, True])
def test_every_jump_of_the_filter_stays_in_it(monkeypatch, machine, shares_ids):
    monkeypatch.setattr(platform, "machine", lambda: machine)
    code = kernel.seccomp_filter(shares_ids)
    steps = list(struct.iter_unpack("HBBI", code))
    assert len(steps) < 4096
    for place, (kind, yes, no, _) in enumerate(steps):
        assert kind in (0x20, 0x15, 0x25, 0x45, 0x06)
        assert place + 1 + max(yes, no) < len(steps) or kind == 0x06
    assert steps[-1][0] == 0x06


def test_without_known_numbers_there_is_no_filter(monkeypatch):
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    assert kernel.seccomp_filter(False) is None


@pytest.mark.slow
def test_an_error_names_the_level(monkeypatch):
    with make(ALL[0]) as made:
        made.close()
        monkeypatch.setattr("lit_async_rl.sandbox.processes._base_python", lambda: "/no/such/python")
        with pytest.raises(SandboxError, match=f"could not be run .sandbox level {ALL[0]}."):
            made.run("x")
