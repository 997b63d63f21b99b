"""The rules of `make lint` that ruff lacks, and the table that describes how the code is cut."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(ROOT / "scripts")
    import house
    import lint_style

DEFINED = """
from dataclasses import dataclass
from typing import NamedTuple

def four(a, b, c, d): ...
def many(a, b, *rest): ...
def by_position(a, b, c, d, /): ...

@dataclass
class Point:
    x: int
    y: int
    z: int
    t: int

class Row(NamedTuple):
    a: int

class Base:
    def __init__(self, a, b, c, d): ...
    def method(self, a, b, c, d): ...
    @classmethod
    def made(cls, a, b, c, d): ...

class Derived(Base):
    pass
"""

REFUSED = {
    "tuple-assignment": [
        "a, b = 1, 2",
        "[a, b] = [1, 2]",
        "class C:\n    def f(self, x, y):\n        self.x, self.y = x, y",
        "a, (b, c) = 1, f()",
        "a, *b = 1, 2, 3",
        "a, b = a + 1, b + 1",
    ],
    "splatted-local": [
        "def f(x):\n    options = {'a': x}\n    return g(**options)",
        "def f(x):\n    options: dict[str, int] = dict(a=x, **x.others)\n    y = 1\n    return g(y, **options)",
        "def f(x):\n    sizes = x, 2\n    if x:\n        return g(*sizes)\n    return None",
        "def f(x):\n    sizes = [x, 2]\n    with g(1, *sizes) as y:\n        return y",
        "def f(x):\n    try:\n        sizes = (x, 2)\n        g(*sizes, 3)\n    except OSError:\n        pass",
    ],
    "positional-arguments": [
        "from package.below.defined import four\nfour(1, 2, 3, 4)",
        "from .below.defined import four as f\nf(1, 2, 3, 4)",
        "from package.below import defined\ndefined.four(1, 2, 3, 4)",
        "import package.below.defined as d\nd.Point(1, 2, 3, 4)",
        "import package.below.defined\npackage.below.defined.four(1, 2, 3, 4)",
        "from package import Point\nPoint(1, 2, 3, 4)",  # from the stub of a lazy package
        "from package.below.defined import Row\nRow(1, 2, 3, 4)",
        "from package.below.defined import Derived\nDerived(1, 2, 3, 4)",
        "from package.below.defined import Derived\nDerived.made(1, 2, 3, 4)",
        "def f():\n    from package.below.defined import four\n    four(1, 2, 3, 4)",
        "def f():\n    def g(a, b, c, d): ...\n    g(1, 2, 3, 4)",
        "from package.below.defined import Base\nclass C(Base):\n"
        "    def __init__(self):\n        super().__init__(1, 2, 3, 4)",
        "from package.below.defined import Base\nclass C(Base):\n    def f(self):\n        self.method(1, 2, 3, 4)",
        "from package.below.defined import Base\nclass C(Base):\n"
        "    def method(self):\n        return [super().method(1, 2, 3, 4) for _ in self.all]",
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
    "def f(x):\n    options = {'a': x}\n    g(**options)\n    return h(**options)",
    "def f(x):\n    options = {'a': x}\n    if x:\n        options['b'] = 1\n    return g(**options)",
    "def f(x):\n    options = {} if x else {'a': 1}\n    return g(**options)",
    "def f(x):\n    options = {'not a name': x}\n    return g(**options)",
    "def f(x):\n    options = {**x, 'a': 1}\n    return g(**options)",
    "def f(x):\n    if x:\n        sizes = (1, 2)\n    else:\n        sizes = (2, 3)\n    return g(*sizes)",
    "def f(x):\n    sizes = (1, 2)\n    return [g(*sizes) for _ in x]",
    "def f(x):\n    sizes = (1, 2)\n    return lambda: g(*sizes)",
    "def f(x):\n    sizes = list(x)\n    return g(*sizes)",
    "from package.below.defined import four\nfour(1, 2, 3, d=4)",
    "from package.below.defined import four\nfour(1, *x, 3, 4)",
    "from package.below.defined import many\nmany(1, 2, 3, 4)",
    "from package.below.defined import by_position\nby_position(1, 2, 3, 4)",
    "from elsewhere import four\nfour(1, 2, 3, 4)",
    "from package.below.defined import four\ndef f(four):\n    four(1, 2, 3, 4)",
    "from package.below.defined import four\ndef f():\n    four = g()\n    four(1, 2, 3, 4)",
    "class C(Elsewhere):\n    def f(self):\n        self.g(1, 2, 3, 4)\n        super().f(1, 2, 3, 4)",
    "print(1, 2, 3, 4)",
    'def f(x):\n    """Whether x is even.\n\n    Args:\n        x: what is divided.\n    """',
    'x = 1\n"""What follows an assignment is no docstring of a module."""',
    'def f():\n    """"""',
]


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A package with a package in it, and a stub as lazy packages have one."""
    folder = tmp_path / "package"
    (folder / "below").mkdir(parents=True)
    (folder / "__init__.py").write_text("")
    (folder / "__init__.pyi").write_text("from .below.defined import Point as Point\n")
    (folder / "below/__init__.py").write_text("")
    (folder / "below/defined.py").write_text(DEFINED)
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


def test_a_folder_without_init_is_imported_by_its_name(package: Path, tmp_path: Path) -> None:
    (tmp_path / "programs/common").mkdir(parents=True)
    (tmp_path / "programs/common/tools.py").write_text("def four(a, b, c, d): ...")
    (tmp_path / "programs/run.py").write_text("from programs.common.tools import four\nfour(1, 2, 3, 4)")
    (found,) = lint_style.problems([package, tmp_path / "programs"])
    assert "run.py:2: positional-arguments: four(...) has 4 arguments by position" in found


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


def test_the_table_of_a_package(package: Path, tmp_path: Path) -> None:
    first = '"""A module."""\n\nfrom package import second\n\n# why\nX, Y = 1, 2  # how\n\n\n'
    (package / "first.py").write_text(first + 'def f():\n    """Five."""\n    return 1\n')
    (package / "second.py").write_text("def g():\n    from .first import f\n    return f()\n")
    (package / "third.py").write_text("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from . import second\n")
    outside = (package / "below").rename(tmp_path / "outside")
    (package / "linked").symlink_to(outside)
    numbers = house.measure([outside, package])
    assert numbers["files"] == 6  # each once, whatever the number of paths
    assert numbers["lines"] == 11 + 3 + 3 + len(DEFINED.splitlines())
    assert numbers["lines_of_code"] == 4 + 3 + 3 + len([x for x in DEFINED.splitlines() if x])
    assert numbers["largest_file"] == f"package.linked.defined: {len(DEFINED.splitlines())}"
    assert numbers["import_circles"] == []
    assert numbers["import_circles_with_functions"] == [["package.first", "package.second"]]
    assert numbers["single_importer_beside"] == 1  # first, of second; two modules import second
    assert numbers["functions"] == 2 + 6
    assert numbers["functions_of_at_most_5_lines_share"] == 1.0
    assert numbers["classes"] == 4
    per_1000 = 1000 / numbers["lines_of_code"]
    assert numbers["tuple_assignments_per_1000_lines_of_code"] == round(per_1000, 1)
    assert numbers["comments_per_1000_lines_of_code"] == round(2 * per_1000, 1)
    assert numbers["full_line_comments_per_1000_lines_of_code"] == round(per_1000, 1)
    (package / "third.py").write_text("from . import first\n")
    (package / "first.py").write_text("import package.third\n")
    assert house.measure([package])["import_circles"] == [["package.first", "package.third"]]


def test_every_number_of_the_table_has_a_label() -> None:
    command = [sys.executable, str(ROOT / "scripts/house.py"), str(ROOT / "scripts")]
    table = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    numbers = json.loads(subprocess.run([*command, "--json"], capture_output=True, text=True, check=True).stdout)
    assert len(table.splitlines()) == len(numbers) == len(house.LABELS)
