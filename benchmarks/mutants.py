"""Small changes of the package, one at a time, and whether a test notices each.

    pip install coverage                                           # no dependency of the project
    python benchmarks/mutants.py --out runs/mutants                # 200 of the core, 100 of the neighbours
    python benchmarks/mutants.py --out runs/mutants --list         # those that none has noticed

Lines are drawn uniformly, by a seed, from those that can be changed; then one change of a line. The quick tests run
once to record which of them run which lines. A change is tried in a copy of the checkout: first with the quick tests
that run its line, nearest first, then with the slow tests of its module, until one fails or they have taken `--limit_s`
of processor time. One line of JSON for each in `mutants.jsonl`; started again, it goes on.

A change that alters nothing that a user or a test could see is equivalent; they are named by hand in
`benchmarks/mutants_equivalent.json`, by file and change, and do not count.
"""

from __future__ import annotations

import argparse
import ast
import functools
import json
import os
import random
import re
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from queue import Queue
from threading import Lock
from typing import Any

ROOT = Path(__file__).parents[1]
EQUIVALENT = Path(__file__).with_name("mutants_equivalent.json")
NEIGHBOURS = ("agents", "judges", "lab", "ray", "report", "sandbox", "vllm")
HANG_S = 900.0  # of one change, on a busy machine
MAX_FILES = 20  # of a module's tests: each takes time to collect
NEVER = "not sweep and not gpu and not soak"
PYTEST = [sys.executable, "-m", "pytest", "-q", "-p", "mutants_plugin", "-p", "no:cacheprovider"]
PYTEST.append("--jaxtyping-packages=")
COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult,
    ast.Pow: ast.Mult,
}
NAMES = {"min": "max", "max": "min", "any": "all", "all": "any", "amax": "amin", "amin": "amax", "sum": "mean"}
LOGGING = re.compile(r"(log|self\._\w*(log|warnings))\.")
DROPPED = ast.Raise | ast.AugAssign | ast.Delete  # statements that are replaced by `pass`


@dataclass(frozen=True)
class Mutant:
    """A change of one line: `before` at the offsets of `place` becomes `after`."""

    file: str
    line: int
    place: tuple[int, int]  # in bytes of the file
    before: str
    after: str

    @property
    def name(self) -> str:
        """As in the file of those that are equivalent; without the line, which moves."""
        return f"{self.before} -> {self.after}"


def changes(node: ast.AST) -> Iterator[ast.AST]:
    """Changes of a node."""
    changed: Any = deepcopy(node)
    if isinstance(node, ast.Compare) and type(node.ops[0]) in COMPARISONS:
        changed.ops[0] = COMPARISONS[type(node.ops[0])]()
        yield changed
    elif (
        isinstance(node, ast.BinOp)
        and type(node.op) in OPERATORS
        and not isinstance(node.left, ast.Constant | ast.Name)
    ):
        changed.op = OPERATORS[type(node.op)]()
        yield changed
    elif isinstance(node, ast.BoolOp):
        changed.op = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        yield changed
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not | ast.USub):
        yield changed.operand
    elif isinstance(node, ast.IfExp):
        changed.body, changed.orelse = changed.orelse, changed.body
        yield changed
    elif isinstance(node, ast.Call):
        called = changed.func
        if isinstance(called, ast.Name) and called.id in NAMES:
            called.id = NAMES[called.id]
            yield changed
        elif isinstance(called, ast.Attribute) and called.attr in NAMES:
            called.attr = NAMES[called.attr]
            yield changed
    elif isinstance(node, ast.Constant) and type(node.value) in (int, float):
        changed.value = node.value + 1
        yield changed
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        changed.value = not node.value
        yield changed
    elif isinstance(node, DROPPED) or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)):
        yield ast.Pass()


def mutants_of(path: Path) -> Iterator[Mutant]:
    """All changes of a module, but for those of annotations, messages, logging and what only types see."""
    source = path.read_bytes()
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    tree = ast.parse(source)
    skipped: set[ast.AST] = set()
    for node in ast.walk(tree):
        parts: list[ast.AST | None] = []
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            parts = [node.returns, *(one.annotation for one in ast.walk(node.args) if isinstance(one, ast.arg))]
        elif isinstance(node, ast.AnnAssign):
            parts = [node.annotation]
        elif (
            isinstance(node, ast.JoinedStr)
            or (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test))
            or (isinstance(node, ast.Call) and LOGGING.match(ast.unparse(node.func)))
        ):
            parts = [node]
        skipped.update(inner for part in parts if part is not None for inner in ast.walk(part))
    for node in ast.walk(tree):
        if node in skipped or (isinstance(node, ast.Expr) and node.value in skipped) or not hasattr(node, "lineno"):
            continue
        begin = starts[node.lineno - 1] + node.col_offset
        end = starts[node.end_lineno - 1] + node.end_col_offset
        before = source[begin:end].decode()
        for changed in changes(node):
            after = ast.unparse(changed)
            after = f"({after})" if isinstance(node, ast.expr) and not isinstance(changed, ast.Constant) else after
            yield Mutant(str(path.relative_to(ROOT)), node.lineno, (begin, end), before=before, after=after)


def drawn(seed: int, core: int, neighbours: int) -> list[Mutant]:
    """Changes of so many lines of each part, drawn by the seed."""
    paths = [path for folder in ("lit_async_rl", "callbacks") for path in sorted((ROOT / folder).rglob("*.py"))]
    found = []
    chooser = random.Random(seed)
    for number, is_neighbours in ((core, False), (neighbours, True)):
        by_line: dict[tuple[str, int], list[Mutant]] = {}
        for path in paths:
            parts = path.relative_to(ROOT).parts
            if "callbacks" in parts[1:]:  # a link to the folder
                continue
            if (parts[0] == "lit_async_rl" and parts[1] in NEIGHBOURS) is is_neighbours:
                for one in mutants_of(path):
                    by_line.setdefault((one.file, one.line), []).append(one)
        for place in chooser.sample(sorted(by_line), number):
            found.append(chooser.choice(by_line[place]))
    return found


@functools.cache
def tests_of(file: str) -> list[str]:
    """Test files of a module, nearest first: named as it is, naming it, of its folder, using what it has."""
    path = Path(file)
    folder = "/".join(path.parts[1:-1]) if path.parts[0] == "lit_async_rl" else file.rpartition("/")[0]
    module = file.removesuffix(".py").replace("/", ".")
    public = re.findall(r"^(?:class|def) ([A-Za-z]\w+)", (ROOT / file).read_text(), re.MULTILINE)
    names = re.compile(rf"\b({'|'.join(public)})\b") if public else None
    ranked = []
    for test in sorted((ROOT / "tests").rglob("test_*.py")):
        text = test.read_text()
        place = str(test.relative_to(ROOT))
        is_near = place.startswith((f"tests/{folder}/", f"tests/with_{folder}/"))
        is_named = module in text or module.replace("callbacks.", "lit_async_rl.callbacks.", 1) in text
        rank = 4
        if test.stem.startswith(f"test_{path.stem}"):
            rank = 0
        elif is_named:
            rank = 1
        elif is_near:
            rank = 2
        elif names is not None and names.search(text):
            rank = 3
        if rank < 4:
            ranked.append((rank, place))
    return [place for _, place in sorted(ranked)]


class Covering:
    """The quick tests that run a line, from one run of all of them with `coverage`."""

    def __init__(self, out: Path) -> None:
        if not (out / "done").exists():
            self._record(out)
        self.seconds: dict[str, float] = {}
        for file in out.glob("seconds.*.json"):
            self.seconds |= json.loads(file.read_text())
        self.databases = sorted(out.glob("lines.*"))

    @staticmethod
    def _record(out: Path) -> None:
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir(parents=True)
        variables = environment(ROOT) | {"LINES_OUT": str(out.resolve()), "LINES_ROOT": str(ROOT)}
        subprocess.run([*PYTEST, "-n", "3", "-m", f"not slow and not ray and {NEVER}"], cwd=ROOT, env=variables)
        (out / "done").touch()

    def tests(self, mutant: Mutant, limit_s: float) -> list[str]:
        """Nearest and then quickest first, as many as about twice the limit holds."""
        from coverage import CoverageData

        found: set[str] = set()
        for database in self.databases:
            data = CoverageData(str(database))
            data.read()
            for test in data.contexts_by_lineno(str(ROOT / mutant.file)).get(mutant.line, []):
                if test in self.seconds:
                    found.add(test)
        nearest = {file: rank for rank, file in enumerate(tests_of(mutant.file))}
        ordered = sorted(found, key=lambda test: (nearest.get(test.split("::")[0], len(nearest)), self.seconds[test]))
        chosen = []
        sum_s = 0.0
        for test in ordered:
            if sum_s + self.seconds[test] <= 2 * limit_s:
                chosen.append(test)
                sum_s += self.seconds[test]
        return chosen


def tried(mutant: Mutant, tree: Path, covering: Covering, limit_s: float) -> dict[str, Any]:
    """Result of the tests with the change: the test that has noticed it, if any."""
    target = tree / mutant.file
    original = target.read_bytes()
    begin, end = mutant.place
    changed = original[:begin] + mutant.after.encode() + original[end:]
    began = time.monotonic()
    tests = covering.tests(mutant, limit_s)
    near = tests_of(mutant.file)[:MAX_FILES]
    neighbour = mutant.file.split("/")[1]
    caught = ""
    try:
        compile(changed, mutant.file, "exec")
        target.write_bytes(changed)
        if tests:
            caught = _run(tests, tree=tree, neighbour=neighbour, marks=NEVER, limit_s=limit_s)
        if not caught and near:  # lines that run when a module is imported, or in another process, are covered by none
            marks = ("slow" if tests else "") + (" or ray" if tests and neighbour == "ray" else "")
            also = f"({marks}) and {NEVER}" if marks else NEVER
            also += "" if neighbour == "ray" else " and not ray"
            caught = _run(near, tree=tree, neighbour=neighbour, marks=also, limit_s=limit_s)
    except SyntaxError:
        return {"caught": "no Python"}
    finally:
        target.write_bytes(original)
    return {"caught": caught, "seconds": round(time.monotonic() - began, 1), "covering": len(tests)}


def _run(tests: list[str], tree: Path, neighbour: str, marks: str, limit_s: float) -> str:
    """The test that fails, or how the session ended where none could run; empty where all have passed."""
    python = str(ROOT / ".venv-vllm/bin/python") if neighbour == "vllm" else sys.executable
    options = ["-x", "-n", "0", "--timeout", "120", "-m", marks]
    variables = environment(tree) | {"LIMIT_S": str(limit_s)}
    while tests:
        try:
            done = subprocess.run(
                [python, *PYTEST[1:], *options, *tests],
                cwd=tree,
                env=variables,
                capture_output=True,
                text=True,
                timeout=HANG_S,
            )
        except subprocess.TimeoutExpired:
            return "a hang"
        missing = re.findall(r"^ERROR: not found: .*?(tests/.+)$", done.stdout + done.stderr, re.MULTILINE)
        if not missing:
            break
        tests = [test for test in tests if test not in missing]  # names with an address in them
    else:
        return ""
    failed = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
    # 3 and 4: a conftest that cannot be imported; 2: a test file that cannot; 5: no test has these marks
    return failed.group(1) if failed else f"status {done.returncode}" if done.returncode not in (0, 5) else ""


def environment(tree: Path) -> dict[str, str]:
    """Variables under which a tree's package and tests are imported from it."""
    path = os.pathsep.join([str(tree), str(ROOT / "benchmarks"), os.environ.get("PYTHONPATH", "")])
    return os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}


def copied(tree: Path) -> Path:
    """A copy of the checkout's files, in which one module is changed at a time."""
    shutil.rmtree(tree, ignore_errors=True)
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in listed.splitlines():
        target = tree / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, target, follow_symlinks=False)
    (tree / "models").symlink_to(ROOT / "models")
    return tree


def main() -> None:
    """Tries what is not in the file yet, and prints shares."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/mutants"))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--core", type=int, default=200)
    parser.add_argument("--neighbours", type=int, default=100)
    parser.add_argument("--limit_s", type=float, default=60.0)
    parser.add_argument("--num_processes", type=int, default=1)
    parser.add_argument("--list", action="store_true", help="print those that no test has noticed, and try none")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    file = args.out / "mutants.jsonl"
    results = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    equivalent = json.loads(EQUIVALENT.read_text()) if EQUIVALENT.exists() else {}
    if not args.list:
        covering = Covering(args.out / "lines")
        trees: Queue[Path] = Queue()
        for number in range(args.num_processes):
            trees.put(copied(args.out / f"tree{number}"))
        writing = Lock()

        def one(number: int, mutant: Mutant) -> None:
            tree = trees.get()
            row = {"number": number, "part": "core" if number < args.core else "neighbours"}
            row |= {"file": mutant.file, "line": mutant.line, "change": mutant.name}
            row |= tried(mutant, tree=tree, covering=covering, limit_s=args.limit_s)
            trees.put(tree)
            with writing, file.open("a") as lines:
                results.append(row)
                lines.write(json.dumps(row) + "\n")
                change = mutant.name.replace("\n", " ")[:90]
                print(number, row["file"], row["line"], change, "|", row["caught"], flush=True)

        done = {row["number"] for row in results}
        with ThreadPoolExecutor(args.num_processes) as pool:
            waited = [
                pool.submit(one, number, mutant)
                for number, mutant in enumerate(drawn(args.seed, args.core, args.neighbours))
                if number not in done
            ]
            for future in waited:
                future.result()
    for part in ("core", "neighbours"):
        rows = [row for row in results if row["part"] == part]
        counted = [row for row in rows if row["change"] not in equivalent.get(row["file"], [])]
        caught = Counter(bool(row["caught"]) for row in counted)
        print(f"{part}: {caught[True]} of {len(counted)} noticed, {len(rows) - len(counted)} equivalent")
        for row in counted:
            if args.list and not row["caught"]:
                print(f"  {row['file']}:{row['line']}  {row['change']}")


if __name__ == "__main__":
    main()
