"""The rules of `make lint` that ruff lacks."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(ROOT / "scripts")
    import lint_style

REFUSED = {
    "tuple-assignment": [
        "a, b = 1, 2",
        "[a, b] = [1, 2]",
        "class C:\n    def f(self, x, y):\n        self.x, self.y = x, y",
        "a, (b, c) = 1, f()",
        "a, *b = 1, 2, 3",
        "a, b = a + 1, b + 1",
    ],
    "docstring-opener": [
        '"""What a module has."""',
        'class C:\n    """Whose it is."""',
        'class C:\n    async def f(self):\n        """\n        Whoever calls it.\n        """',
    ],
}
ACCEPTED = [
    "a, b = b, a",
    "groups, self.taken = self.taken, []",
    "a[i], a[j] = a[j], a[i]",
    "a, b = f()",
    "a, b = (1, 2) if c else (3, 4)",
    "a = b = 0",
    "pair = 1, 2",
    'def f(x):\n    """Whether x is even.\n\n    Args:\n        x: what is divided.\n    """',
    'x = 1\n"""What follows an assignment is no docstring of a module."""',
    'def f():\n    """"""',
]


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A package without modules yet."""
    folder = tmp_path / "package"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    return folder


@pytest.mark.parametrize(("rule", "code"), [(rule, code) for rule, codes in REFUSED.items() for code in codes])
def test_several_things_at_once_are_refused(package: Path, rule: str, code: str) -> None:
    (package / "sample.py").write_text(code)
    (found,) = lint_style.problems([package])
    assert f"sample.py:{found.split(':')[1]}: {rule}: " in found


@pytest.mark.parametrize("code", ACCEPTED)
def test_other_code_is_accepted(package: Path, code: str) -> None:
    (package / "sample.py").write_text(code)
    assert lint_style.problems([package]) == []


@pytest.mark.parametrize("code", ["asyncio.run(f())", "loop = asyncio.new_event_loop()", "self.loop.run_forever()"])
def test_event_loops_are_made_in_one_module(tmp_path: Path, code: str) -> None:
    for folder in ("lit_async_rl", "lit_async_rl/runtime", "scripts"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "__init__.py").write_text("")
        (tmp_path / folder / "loop.py").write_text(code)
    (found,) = lint_style.problems([tmp_path / "lit_async_rl", tmp_path / "scripts"])
    assert "lit_async_rl/loop.py:1: event-loop: use lit_async_rl.runtime.loop, not " in found


STARTS = [
    "import threading\nthreading.Thread(target=f).start()",
    "from concurrent.futures import ThreadPoolExecutor as Pool\npool = Pool(1)",
    "import subprocess as s\ns.Popen(['true'])",
    "import asyncio\nasync def f():\n    await asyncio.create_subprocess_exec('true')",
    "import socket\nours, theirs = socket.socketpair()",
    "import http.server\nclass Page(http.server.HTTPServer):\n    pass",
    "import struct\nstruct.pack('>Q', 1)",
    "import asyncio\nasync def f():\n    await asyncio.open_connection('host', 1)",
    "import asyncio\nasync def f():\n    await asyncio.start_server(f, 'host', 1)",
    "import asyncio\nasync def f():\n    await asyncio.get_running_loop().create_server(f)",
    "async def f(loop):\n    await loop.create_connection(f)",
    "class C:\n    async def f(self):\n        await self.loop.subprocess_exec(f, 'true')",
    "from socketserver import ThreadingTCPServer\nclass Page(ThreadingTCPServer):\n    pass",
    "from http.server import ThreadingHTTPServer\nThreadingHTTPServer(('', 0), None)",
    "from urllib.request import urlopen\nurlopen('http://host')",
    "import urllib.request\nurllib.request.urlopen('http://host')",
    "import http.client\nhttp.client.HTTPConnection('host')",
    "import torch.multiprocessing as mp\nmp.spawn(f)",
    "from torch import multiprocessing\nmultiprocessing.get_context('spawn')",
    "import uvicorn\nuvicorn.run(f)",
    "import uvicorn\nuvicorn.Server(uvicorn.Config(f))",
    "import os\nos.execvp('true', ['true'])",
    "import os\nos.posix_spawn('true', ['true'], {})",
    "def f():\n    import grpc\n    with grpc.insecure_channel('host'):\n        pass",
    "from grpc import aio\naio.secure_channel('host', None)",
]


@pytest.mark.parametrize("code", STARTS)
def test_threads_processes_sockets_and_frames_are_made_in_one_folder(tmp_path: Path, code: str) -> None:
    for folder in ("lit_async_rl", "lit_async_rl/runtime", "scripts"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "__init__.py").write_text("")
        (tmp_path / folder / "some.py").write_text(code)
    (found,) = lint_style.problems([tmp_path / "lit_async_rl", tmp_path / "scripts"])
    assert re.search(
        r"lit_async_rl/some\.py:\d: runtime: use lit_async_rl\.runtime, not [\w.]+\(\.\.\.\), or give", found
    )


def test_a_loop_has_threads_of_its_own(package: Path) -> None:
    code = "import asyncio\nasync def f(loop):\n    await asyncio.to_thread(f)\n    await loop.run_in_executor(None, f)"
    (package.rename(package.with_name("lit_async_rl")) / "sample.py").write_text(code)
    assert lint_style.problems([package.with_name("lit_async_rl")]) == []


def test_a_reason_that_holds_no_longer_is_a_problem(tmp_path: Path) -> None:
    (tmp_path / "lit_async_rl/ray").mkdir(parents=True)
    for folder in ("lit_async_rl", "lit_async_rl/ray"):
        (tmp_path / folder / "__init__.py").write_text("")
    (tmp_path / "lit_async_rl/ray/supervise.py").write_text("import subprocess\nsubprocess.run(['true'])")
    assert lint_style.problems([tmp_path / "lit_async_rl"]) == []
    (tmp_path / "lit_async_rl/ray/supervise.py").write_text("import threading\nthreading.Timer(1.0, print)")
    unused, new = sorted(lint_style.problems([tmp_path / "lit_async_rl"]))
    assert "runtime: lit_async_rl.ray.supervise needs no reason in STARTING_MODULES for a process any more" in unused
    assert "runtime: use lit_async_rl.runtime, not threading.Timer(...)" in new


def test_the_command_fails_with_the_places(package: Path) -> None:
    command = [sys.executable, str(ROOT / "scripts/lint_style.py"), str(package)]
    assert subprocess.run(command, capture_output=True, check=False).returncode == 0
    (package / "sample.py").write_text("x = 0\na, b = 1, 2\n")
    failed = subprocess.run(command, capture_output=True, text=True, check=False, cwd=package)
    assert failed.returncode == 1
    assert failed.stdout == "sample.py:2: tuple-assignment: write one assignment a line\n"


@pytest.mark.parametrize(("code", "rule"), [("x = 1; y = 2\n", "E702"), ("if True: x = 1\n", "E701")])
def test_ruff_refuses_two_statements_in_one_line(code: str, rule: str) -> None:
    ruff = Path(sys.executable).with_name("ruff")
    if not ruff.exists():
        pytest.skip("ruff is not installed")
    command = [str(ruff), "check", "--output-format", "concise", "--stdin-filename", "lit_async_rl/sample.py", "-"]
    checked = subprocess.run(command, input=code, capture_output=True, text=True, check=False, cwd=ROOT)
    assert rule in checked.stdout
