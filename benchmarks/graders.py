"""What `MathVerify` makes of the public test sets of grader libraries.

    pip download --no-deps --no-binary :all: math-verify==0.9.0 && tar xzf math_verify-0.9.0.tar.gz
    curl -O https://raw.githubusercontent.com/hendrycks/math/main/modeling/math_equivalence_test.py
    python benchmarks/graders.py math_verify-0.9.0/tests math_equivalence_test.py --out docs/measurements/graders.json

Reads cases out of the test files, without running them: lists of `pytest.mark.parametrize` whose arguments begin with
gold, pred and expected, and pairs that a `unittest` compares by `is_equiv`, of which the second is put in a box, as a
model does. Each is graded with the gold as reference answer. A case is `right` if the verdict is the expected one;
`refused` if the reference cannot be read, which a run says at its start; `stricter` if an answer was expected to be
right and has 0; `laxer` if one was expected to be wrong and has full marks. `DIFFERS` lists the cases in which the
verdict differs from the library's on purpose. Some references are whole solutions without a box, which this grader is
not for: the check at the start of a run names them.
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import lit_async_rl as rl
from benchmarks.common.measurement import measurement, write_measurement
from lit_async_rl.types import Prompt

KINDS = ("right", "differs on purpose", "reference is a solution", "refused", "stricter", "laxer")
NAMES_OF_SETS = {"tests": "math-verify 0.9.0", "math_equivalence_test.py": "Hendrycks et al., MATH"}
NAMES = (["gold", "pred", "expected"], ["gold", "pred", "result"])


def cases(path: Path) -> Iterator[tuple[str, str, bool]]:
    """Triples of reference, answer and whether it is right, in the order of a test file."""
    tree = ast.parse(path.read_text(encoding="utf-8").replace("\t    ", "\t\t"))
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.mark.parametrize":
            names = [name.strip() for name in str(_literal(node.args[0])).split(",")]
            if names not in NAMES:  # others set an option of the library
                continue
            for case in node.args[1].elts:
                try:
                    gold, pred, expected = ast.literal_eval(case)
                except ValueError:  # computed by the test
                    continue
                yield gold, pred, bool(expected)
        elif isinstance(node, ast.FunctionDef) and "is_equiv" in ast.unparse(node):
            given = [_literal(one.value) for one in node.body if isinstance(one, ast.Assign)]
            yield given[0], f"\\boxed{{{given[1]}}}", "assertTrue" in ast.unparse(node)


def _literal(node: ast.AST) -> Any:
    return ast.literal_eval(node)


DIFFERS = {
    ("1,22", "1.22"): "a comma is no decimal point",
    ("0,111", "0.111"): "a comma is no decimal point",
    ("$9$", "Answer $ \n 9 \n $"): "the library's case is about delimiters: without them, 9 is the answer",
    ("$9$", "Answer \\( \n 9 \n \\)"): "the library's case is about delimiters: without them, 9 is the answer",
    ("10, 4, -2", "\\boxed{4, 10, -2}"): "a list has no order",
    ("0.1, 4, 2", "\\boxed{4, .1, 2}"): "a list has no order",
    (r"$1 - \frac{1}{\mathrm{e}}$", r"$1 + \frac{1}{\mathrm{e}}$"): "not equal: the library's case expects its mistake",
}
LONGEST = 500  # characters of a reference that is an answer, and not a solution


def kind_of(grade: Any, reference: str, answer: str, is_right: bool) -> str:
    """How a verdict compares with the expected one."""
    try:
        found = bool(grade(Prompt(text="", answer=reference), answer))
    except ValueError:
        return "refused"
    if found == is_right:
        return "right"
    if (reference, answer) in DIFFERS:
        return "differs on purpose"
    if len(reference) > LONGEST:
        return "reference is a solution"
    return "stricter" if is_right else "laxer"


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tests", nargs="+", type=Path, help="test files, or folders of them")
    parser.add_argument("--out", type=Path, help="measurement to write")
    given = parser.parse_args()
    grade = rl.MathVerify(timeout_s=10.0)
    rows = []
    for source in given.tests:
        counts: Counter[str] = Counter()
        for path in sorted(source.glob("test_*.py")) if source.is_dir() else [source]:
            for reference, answer, is_right in cases(path):
                kind = kind_of(grade, reference, answer, is_right=is_right)
                counts[kind] += 1
                if kind != "right":
                    reason = DIFFERS.get((reference, answer), "")
                    print(kind, path.name, repr(reference)[:150], "|", repr(answer)[-150:], reason)
        rows.append(
            [NAMES_OF_SETS.get(source.name, source.name), sum(counts.values()), *(counts[kind] for kind in KINDS)]
        )
        print(rows[-1])
    if given.out is None:
        return
    found = measurement(
        given.out.stem,
        sum(row[-1] + row[-2] for row in rows),
        "unexplained verdicts",
        columns=["test set", "cases", *KINDS],
        rows=rows,
        command=f"python benchmarks/graders.py {' '.join(map(str, given.tests))} --out {given.out}",
        machine="any",  # counts, no times
    )
    write_measurement(given.out, found)


if __name__ == "__main__":
    main()
