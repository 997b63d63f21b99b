"""Small changes of the package, one at a time, and whether a test notices each.

    python benchmarks/mutants.py --out runs/mutants                # 200 of the core, 100 of the neighbours
    python benchmarks/mutants.py --out runs/mutants --list         # those that none has noticed

Lines are drawn uniformly, by a seed, from those that can be changed; then one change of a line. A change is tried in a
copy of the checkout, with the tests that name its module or stand in its folder, nearest first, until one fails or they
have taken `--limit_s` of processor time. One line of JSON for each in `mutants.jsonl`; started again, it goes on.

A change that alters nothing that a user or a test could see is equivalent; they are named by hand in
`benchmarks/mutants_equivalent.json`, by file and change, and do not count.
"""

from __future__ import annotations

import argparse
import ast
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
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
EQUIVALENT = Path(__file__).with_name("mutants_equivalent.json")
NEIGHBOURS = ("agents", "judges", "lab", "ray", "report", "sandbox", "vllm")
HANG_S = 900.0  # of one change, on a busy machine
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
# ends a session once its tests have taken long enough: what has not failed by then has not noticed
LIMIT = """
import os, resource, time
def spent():
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)
began = []
def pytest_collection_finish(session):
    began.append(spent())
def pytest_runtest_logfinish(nodeid, location):
    if spent() - began[0] > float(os.environ["LIMIT_S"]):
        import pytest
        pytest.exit("the limit", returncode=0)
"""


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


def tests_of(file: str) -> list[str]:
    """Tests of a module, nearest first: named as it is, naming it, of its folder, using what it has."""
    path = Path(file)
    folder = "/".join(path.parts[1:-1]) if path.parts[0] == "lit_async_rl" else file.rpartition("/")[0]
    module = file.removesuffix(".py").replace("/", ".")
    public = re.findall(r"^(?:class|def) ([A-Za-z]\w+)", (ROOT / file).read_text(), re.MULTILINE)
    names = re.compile(rf"\b({'|'.join(public)})\b") if public else None
    ranked = []
    for test in sorted((ROOT / "tests").rglob("test_*.py")):
        text = test.read_text()
        place = str(test.relative_to(ROOT))
        is_near = place.startswith(f"tests/{folder}/")
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


def tried(mutant: Mutant, tree: Path, limit_s: float) -> dict[str, Any]:
    """Result of the tests with the change: the test that has noticed it, if any."""
    target = tree / mutant.file
    original = target.read_bytes()
    begin, end = mutant.place
    changed = original[:begin] + mutant.after.encode() + original[end:]
    began = time.monotonic()
    try:
        compile(changed, mutant.file, "exec")
        target.write_bytes(changed)
        tests = tests_of(mutant.file)
        ran = _run(tests, tree=tree, neighbour=mutant.file.split("/")[1], limit_s=limit_s) if tests else (0, "")
    except SyntaxError:
        return {"caught": "no Python"}
    finally:
        target.write_bytes(original)
    status, output = ran
    # 3 and 4: a conftest that cannot be imported; 2: a test file that cannot
    failed = re.search(r"^(?:FAILED|ERROR) (\S+)", output, re.MULTILINE)
    caught = failed.group(1) if failed else f"status {status}" if status not in (0, 5) else ""
    return {"caught": caught, "seconds": round(time.monotonic() - began, 1), "tests": len(tests)}


def _run(tests: list[str], tree: Path, neighbour: str, limit_s: float) -> tuple[int, str]:
    (tree / "mutation_limit.py").write_text(LIMIT)
    python = ROOT / ".venv-vllm/bin/python" if neighbour == "vllm" else Path(sys.executable)
    marks = "not sweep and not gpu and not soak" if neighbour == "ray" else "not sweep and not gpu and not ray"
    command = [str(python), "-m", "pytest", "-x", "-q", "-n", "0", "-p", "mutation_limit", "-p", "no:cacheprovider"]
    command += ["-m", marks, "--jaxtyping-packages=", "--timeout", "120", *tests]
    variables = os.environ | {"PYTHONPATH": str(tree), "LIMIT_S": str(limit_s), "OMP_NUM_THREADS": "1"}
    try:
        done = subprocess.run(command, cwd=tree, env=variables, capture_output=True, text=True, timeout=HANG_S)
    except subprocess.TimeoutExpired:
        return -1, "FAILED a hang"
    return done.returncode, done.stdout


def copied(out: Path) -> Path:
    """A copy of the checkout's files, in which one module is changed at a time."""
    tree = out / "tree"
    shutil.rmtree(tree, ignore_errors=True)
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in listed.splitlines():
        target = tree / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, target, follow_symlinks=False)
    return tree


def main() -> None:
    """Tries what is not in the file yet, and prints shares."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/mutants"))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--core", type=int, default=200)
    parser.add_argument("--neighbours", type=int, default=100)
    parser.add_argument("--limit_s", type=float, default=60.0)
    parser.add_argument("--list", action="store_true", help="print those that no test has noticed, and try none")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    file = args.out / "mutants.jsonl"
    results = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    equivalent = json.loads(EQUIVALENT.read_text()) if EQUIVALENT.exists() else {}
    if not args.list:
        tree = copied(args.out)
        for number, mutant in enumerate(drawn(args.seed, args.core, args.neighbours)):
            if number < len(results):
                continue
            part = "core" if number < args.core else "neighbours"
            row = {"part": part, "file": mutant.file, "line": mutant.line, "change": mutant.name}
            row |= tried(mutant, tree, args.limit_s)
            results.append(row)
            with file.open("a") as lines:
                lines.write(json.dumps(row) + "\n")
            print(
                number + 1,
                row["file"],
                row["line"],
                row["change"].replace("\n", " ")[:90],
                "|",
                row["caught"],
                flush=True,
            )
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
