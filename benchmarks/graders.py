"""Verdicts of `MathVerify` on the public test sets of grader libraries.

    pip download --no-deps --no-binary :all: math-verify==0.9.0 && tar xzf math_verify-0.9.0.tar.gz
    curl -O https://raw.githubusercontent.com/hendrycks/math/main/modeling/math_equivalence_test.py
    python benchmarks/graders.py math_verify-0.9.0/tests math_equivalence_test.py \
        tests/rewards/graded_answers*.jsonl --out docs/measurements/graders.json

Reads cases out of the test files, without running them: lists of `pytest.mark.parametrize` whose arguments begin with
gold, pred and expected, and pairs that a `unittest` compares by `is_equiv`, of which the second is put in a box, as a
model does. Each is graded with the gold as reference answer. A case is `right` if the verdict is the expected one;
`refused` if the reference cannot be read, which a run says at its start; `stricter` if an answer was expected to be
right and has 0; `laxer` if one was expected to be wrong and has full marks. `DIFFERS` lists the cases in which the
verdict differs from the library's on purpose. Some references are whole solutions without a box, which this grader is
not for: the check at the start of a run names them.

A .jsonl file has triples of this repository, which were labelled before any grader had seen them. There math-verify by
itself is graded, too, and `at first` is what the graders made of them before what the triples found was mended.
"""

from __future__ import annotations

import argparse
import ast
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import lit_async_rl as rl
from benchmarks.common.measurement import measurement, write_measurement
from lit_async_rl.problem import Prompt

KINDS = ("right", "differs on purpose", "reference is a solution", "refused", "stricter", "laxer")
NAMES_OF_SETS = {
    "tests": "math-verify 0.9.0",
    "math_equivalence_test.py": "Hendrycks et al., MATH",
    "graded_answers.jsonl": "labelled answers",
    "graded_answers_held_out.jsonl": "labelled answers, second set",
    "graded_answers_third.jsonl": "labelled answers, third set",
}
# of answers that no grader had seen: commit, and numbers of right answers that passed and failed, and of wrong ones
FIRST_RUNS = {
    ("graded_answers.jsonl", "MathVerify"): ("d6f93e9a", 198, 85, 22, 223),
    ("graded_answers.jsonl", "json_match"): ("d6f93e9a", 16, 4, 6, 18),
    ("graded_answers_held_out.jsonl", "MathVerify"): ("0d93ed7b", 122, 5, 1, 93),
    ("graded_answers_held_out.jsonl", "json_match"): ("0d93ed7b", 8, 0, 0, 10),
    ("graded_answers_third.jsonl", "MathVerify"): ("c760ddef", 61, 0, 2, 55),
}
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
        found = grade(Prompt(text="", answer=reference), answer) >= 1.0
    except ValueError:
        return "refused"
    if found == is_right:
        return "right"
    if (reference, answer) in DIFFERS:
        return "differs on purpose"
    if len(reference) > LONGEST:
        return "reference is a solution"
    return "stricter" if is_right else "laxer"


def labelled(path: Path, reward: str) -> Iterator[tuple[str, str, bool]]:
    """Triples of a .jsonl file for a reward."""
    rows = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    return ((row["answer"], row["completion"], row["right"]) for row in rows if row["reward"] == reward)


def bare_library() -> Callable[[Prompt, str], float]:
    """math-verify without anything around it: the reference is a formula."""
    import math_verify

    def grade(prompt: Prompt, completion: str) -> float:
        gold = str(prompt.answer)
        gold = math_verify.parse(gold if "$" in gold or "\\boxed" in gold else f"${gold}$", parsing_timeout=None)
        return float(
            math_verify.verify(gold, math_verify.parse(completion, parsing_timeout=None), timeout_seconds=None)
        )

    return grade


def row_of(name: str, grader: str, grade: Any, triples: Iterable[tuple[str, str, bool]]) -> list[Any]:
    """One row of the table; prints what is not right."""
    counts: Counter[str] = Counter()
    num_right = 0
    for reference, answer, is_right in triples:
        kind = kind_of(grade, reference, answer, is_right=is_right)
        counts[kind] += 1
        num_right += is_right and kind == "right"
        if kind != "right":
            reason = DIFFERS.get((reference, answer), "")
            print(kind, name, grader, repr(reference)[:150], "|", repr(answer)[-150:], reason)
    missed = counts["stricter"] + counts["refused"]
    return [
        name,
        grader,
        counts.total(),
        *(counts[kind] for kind in KINDS),
        *shares(num_right, missed, counts["laxer"]),
    ]


def shares(num_right: int, num_missed: int, num_lax: int) -> tuple[float, float]:
    """Precision and recall."""
    return round(num_right / (num_right + num_lax), 3), round(num_right / (num_right + num_missed), 3)


def rows_of(source: Path) -> Iterator[list[Any]]:
    """Rows of a test file, a folder of them, or a file of triples."""
    name = NAMES_OF_SETS.get(source.name, source.name)
    math_verify = rl.MathVerify(timeout_s=10.0)
    if source.suffix != ".jsonl":
        paths = sorted(source.glob("test_*.py")) if source.is_dir() else [source]
        yield row_of(name, "MathVerify", math_verify, triples=(case for path in paths for case in cases(path)))
        return
    for reward, grade in (("MathVerify", math_verify), ("json_match", rl.json_match)):
        if not (triples := list(labelled(source, reward))):
            continue
        row = row_of(name, reward, grade, triples=triples)
        if (first := FIRST_RUNS.get((source.name, reward))) is not None:
            commit, passed, missed, lax, refuted = first
            counts = [passed + refuted, 0, 0, 0, missed, lax]
            yield [name, f"{reward}, first run ({commit})", row[2], *counts, *shares(passed, missed, lax)]
        yield row
    yield row_of(name, "math-verify alone", bare_library(), triples=labelled(source, "MathVerify"))


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tests", nargs="+", type=Path, help="test files, folders of them, and .jsonl files of triples")
    parser.add_argument("--out", type=Path, help="measurement to write")
    given = parser.parse_args()
    rows = []
    for source in given.tests:
        for row in rows_of(source):
            rows.append(row)
            print(row)
    if given.out is None:
        return
    found = measurement(
        given.out.stem,
        sum(row[-3] + row[-4] for row in rows if row[1] in ("MathVerify", "json_match")),
        "unexplained verdicts",
        columns=["test set", "grader", "cases", *KINDS, "precision", "recall"],
        rows=rows,
        command=f"python benchmarks/graders.py {' '.join(map(str, given.tests))} --out {given.out}",
        machine="any",  # counts, no times
    )
    write_measurement(given.out, found)


if __name__ == "__main__":
    main()
