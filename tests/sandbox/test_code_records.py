# ruff: noqa: E501  programs are as long as they are
"""Records in the forms of public sets, each with right and wrong programs; tests that never run; checks at the start."""

from __future__ import annotations

import json
import os

import numpy as np
import pytest
from sandboxes import LIMITS, levels

import lit_async_rl as rl
from lit_async_rl.errors import FinalRewardError
from lit_async_rl.rewards.reference_check import check_references
from lit_async_rl.sandbox.code_cases import problem_of_tests

pytestmark = pytest.mark.skipif(not levels("limits"), reason="needs Linux or macOS")
LIMIT = {"limits": LIMITS, "allow_unsandboxed": not levels()}
SITE = os.path.dirname(os.path.dirname(np.__file__))


@pytest.fixture(scope="module", params=["apart", "together"])
def reward(request):
    partial = request.param == "apart"
    made = rl.CodeReward(**LIMIT, tests=request.param, partial_credit=partial, python_path=[SITE], preload=["numpy"])
    yield made
    made.close()


@pytest.fixture(scope="module")
def plain():
    made = rl.CodeReward(**LIMIT, partial_credit=True)
    yield made
    made.close()


def prompt(text="Write it.", answer=None, **fields):
    return rl.Prompt(text=text, answer=answer, metadata=fields)


def fenced(code):
    return f"```python\n{code}\n```"


PLUS = """
import numpy as np

def is_floats(x) -> bool:
    if isinstance(x, float):
        return True
    if isinstance(x, (list, tuple)):
        return all(isinstance(i, float) for i in x)
    if isinstance(x, np.ndarray):
        return x.dtype == np.float64 or x.dtype == np.float32
    return False


def assertion(out, exp, atol):
    exact_match = out == exp

    if atol == 0 and is_floats(exp):
        atol = 1e-6
    if not exact_match and atol != 0:
        assert np.allclose(out, exp, rtol=1e-07, atol=atol)
    else:
        assert exact_match


def check(candidate):
    inputs = INPUTS
    results = RESULTS
    for i, (inp, exp) in enumerate(zip(inputs, results)):
        assertion(candidate(*inp), exp, 0)
"""


def plus(text, name, inputs, results):
    """A record in the template of HumanEval+."""
    test = PLUS.replace("INPUTS", repr(inputs)).replace("RESULTS", repr(results))
    return prompt(text, test=test, entry_point=name)


def human(text, name, *lines, **more):
    return prompt(
        text,
        test="\n".join(["METADATA = {'author': 'x'}", "", "def check(candidate):", *lines]),
        entry_point=name,
        **more,
    )


HEAD = 'from typing import List\n\n\ndef total(xs: List[int]) -> int:\n    """Sum."""\n'
RAISES = "def f(x):\n    if x < 0:\n        raise ValueError('negative')\n    return x * 2"
DOUBLE = "def f(x):\n    return x * 2"
ZERO = "def f(x):\n    return 0"
# record; right programs; wrong programs
RECORDS = {
    "humaneval": (
        human(HEAD, "total", "    assert candidate([1, 2]) == 3", "    assert candidate([]) == 0"),
        ["    return sum(xs)"],
        ["    return 3", "    return len(xs)"],
    ),
    "humaneval_helper": (
        human(
            "def twice(x):\n    return 2 * x\n\n\ndef four(x):\n    pass\n",
            "four",
            "    assert candidate(2) == twice(twice(2))",
        ),
        ["def four(x):\n    return 4 * x", "def four(x):\n    return twice(twice(x))"],
        ["def twice(x):\n    return 0\n\n\ndef four(x):\n    return 0"],
    ),
    "humaneval_tolerance": (
        human(
            "",
            "third",
            "    assert abs(candidate(1.0) - 1 / 3) < 1e-6",
            "    assert math.isclose(candidate(2.0), 2 / 3)",
        ),
        ["def third(x):\n    return x / 3"],
        ["def third(x):\n    return 0.33 * x", "def abs(x):\n    return 0\ndef third(x):\n    return 0"],
    ),
    "humaneval_loop": (
        human("", "f", "    for n in range(5):", "        assert candidate(n) == 2 * n, n", "    assert True"),
        [DOUBLE],
        [ZERO, "def f(x):\n    return x * 2 if x < 4 else None"],
    ),
    "plus_exact": (
        plus("", "f", [[1], ["a"], [[1]]], [2, "aa", [1, 1]]),
        [DOUBLE],
        [ZERO, "def f(x):\n    return 2 if x == 1 else None"],
    ),
    "plus_floats": (
        plus("", "f", [[0.1], [0.3]], [0.2, 0.6]),
        [DOUBLE, "def f(x):\n    return x * 2 + 1e-9"],
        [ZERO, "def f(x):\n    return x * 2 + 1e-3"],
    ),
    "plus_list_of_floats": (
        plus("", "f", [[[1.0, 2.0]]], [[2.0, 4.0]]),
        ["def f(x):\n    return [2 * one + 1e-9 for one in x]"],
        ["def f(x):\n    return [2.0]"],
    ),
    "plus_mixed": (plus("", "f", [[1], [0.5]], [2, 1.0]), [DOUBLE], ["def f(x):\n    return 2 if x == 1 else 7"]),
    "plus_tuple": (
        plus("", "f", [["ab"], [""]], [("a", "b"), ()]),
        ["def f(x):\n    return tuple(x)"],
        ["def f(x):\n    return list(x)"],
    ),
    "mbpp": (
        prompt(test_list=["assert f(2) == 4", "assert f('a') == 'aa'"], test_imports=[], test_setup_code=""),
        [DOUBLE],
        [ZERO, "def g(x):\n    return x * 2"],
    ),
    "mbpp_setup": (
        prompt(
            test_setup_code="root = Node(1)\nroot.left = Node(2)",
            test_list=["assert depth(root) == 2", "assert depth(None) == 0"],
        ),
        [
            "class Node:\n    def __init__(self, x):\n        self.x = x\n        self.left = None\ndef depth(node):\n    return 0 if node is None else 1 + depth(node.left)"
        ],
        [
            "class Node:\n    def __init__(self, x):\n        self.left = None\ndef depth(node):\n    return 1 if node else 0"
        ],
    ),
    "mbpp_imports": (
        prompt(test_imports=["import math"], test_list=["assert math.isclose(area(1), math.pi)"]),
        ["from math import pi\ndef area(r):\n    return pi * r * r"],
        ["def area(r):\n    return 3.14 * r * r"],
    ),
    "mbpp_tolerance": (
        prompt(test_list=["assert isclose(f(2), 4)", "assert abs(f(1) - 2) < 1e-6"]),
        [DOUBLE],
        ["def isclose(*_):\n    return True\nabs = lambda x: 0\n" + ZERO],
    ),
    "mbpp_library_name": (
        prompt(test_list=["assert abs(sum(10, 15) - 6) < 1e-6"]),
        ["def sum(a, b):\n    return 6"],
        ["def abs(x):\n    return 0\ndef sum(a, b):\n    return 7"],
    ),
    "mbpp_branches": (
        prompt(
            test_list=[
                "if f(1) > 5:\n    assert f(2) == 5\nelse:\n    assert f(2) == 4",
                "try:\n    f(None)\n    assert False\nexcept TypeError:\n    pass",
            ]
        ),
        [DOUBLE],
        [ZERO, "def f(x):\n    return 4"],
    ),
    "numpy_by_its_usual_name": (
        prompt(test_list=["assert np.allclose(f(2.0), 4.0)"]),
        [DOUBLE],
        ["class np:\n    allclose = staticmethod(lambda *_: True)\n" + ZERO],
    ),
    "constant": (
        prompt(test_list=["assert f(1.0) - 2 < EPS and 2 - f(1.0) < EPS"], test_setup_code="EPS = 1e-6"),
        [DOUBLE],
        ["EPS = 1e9\n" + ZERO],
    ),
    "raises": (
        human(
            "",
            "f",
            "    assert candidate(2) == 4",
            "    try:",
            "        candidate(-1)",
            "        assert False, 'no error'",
            "    except ValueError:",
            "        pass",
        ),
        [RAISES],
        [DOUBLE, ZERO],
    ),
    "either": (
        human(
            "",
            "f",
            "    try:",
            "        assert candidate(2) == 5",
            "    except AssertionError:",
            "        assert candidate(2) == 4",
        ),
        [DOUBLE, "def f(x):\n    return 5"],
        [ZERO],
    ),
    "helper_that_is_not_called": (
        prompt(
            test="def helper(x):\n    assert x > 100\n\ndef check(candidate):\n    assert candidate(2) == 4\n",
            entry_point="f",
        ),
        [DOUBLE],
        [ZERO],
    ),
    "helper_that_is_called": (
        prompt(
            test="def helper(f, x):\n    assert f(x) == 2 * x\n\ndef check(candidate):\n    helper(candidate, 3)\n",
            entry_point="f",
        ),
        [DOUBLE],
        [ZERO],
    ),
    "platform": (
        human(
            "",
            "f",
            "    assert candidate(2) == 4",
            "    import sys",
            "    if sys.platform == 'win32':",
            "        assert candidate(3) == 7",
        ),
        [DOUBLE],
        [ZERO],
    ),
    "return": (
        human("", "f", "    assert candidate(2) == 4", "    return", "    assert candidate(3) == 7"),
        [DOUBLE],
        [ZERO],
    ),
    "raises_without_assert": (
        human("", "f", "    if candidate(2) != 4:", "        raise ValueError('wrong')"),
        [DOUBLE],
        [ZERO],
    ),
    "call_at_the_end": (
        prompt(test="def check(candidate):\n    assert candidate(2) == 4\n\ncheck(f)\n", entry_point="f"),
        [DOUBLE],
        [ZERO],
    ),
    "statements": (prompt(answer="assert f(2) == 4\nassert f(3) == 6\n"), [DOUBLE], [ZERO]),
    "async_check": (
        prompt(test="async def check(candidate):\n    assert candidate(2) == 4\n", entry_point="f"),
        [DOUBLE],
        [ZERO],
    ),
    "functions": (
        prompt(
            test="def test_a():\n    assert f(1) == 2\n\ndef test_b(x=3):\n    assert f(x) == 6\n\nasync def test_c():\n    assert f(4) == 8\n"
        ),
        [DOUBLE],
        [ZERO, "def f(x):\n    return 2 * x if x != 4 else 0", "def f(x):\n    return 2 * x if x != 3 else 0"],
    ),
    "patched": (
        prompt(test="from unittest.mock import patch\n@patch('time.time')\ndef test_a(fake):\n    assert f(2) == 4\n"),
        [DOUBLE],
        [ZERO],
    ),
    "unittest": (
        prompt(
            test="import sys, unittest\nclass TestF(unittest.TestCase):\n    def setUp(self):\n        self.x = 2\n    def test_a(self):\n        self.assertEqual(f(self.x), 4)\n"
            "    @unittest.skipIf(sys.platform != 'x', 'never here')\n    def test_b(self):\n        self.assertEqual(f(2), 5)\n"
            "    def test_c(self):\n        with self.assertRaises(TypeError):\n            f(None)\nif __name__ == '__main__':\n    unittest.main()\n",
            entry_point="f",
        ),
        [DOUBLE],
        [ZERO, "def f(x):\n    return 4"],
    ),
    "unittest_async": (
        prompt(
            test="import unittest\nclass TestF(unittest.IsolatedAsyncioTestCase):\n    async def test_a(self):\n        self.assertEqual(f(2), 4)\n",
            entry_point="f",
        ),
        [DOUBLE],
        [ZERO],
    ),
    "all_skipped": (
        prompt(
            test="import unittest\n@unittest.skipIf(True, 'x')\nclass T(unittest.TestCase):\n    def test_a(self):\n        self.assertEqual(f(2), 4)\n",
            entry_point="f",
        ),
        [],
        [DOUBLE, ZERO],
    ),
    "skipped_by_the_program": (
        prompt(
            test="import unittest\nclass T(unittest.TestCase):\n    def test_a(self):\n        self.assertEqual(f(2), 4)\n",
            entry_point="f",
        ),
        [DOUBLE],
        ["import unittest\ndef f(x):\n    raise unittest.SkipTest('x')", "def f(x):\n    raise SystemExit(0)"],
    ),
    "dataclass": (
        prompt(test_list=["assert total([1, 2]) == 3", "assert Point(1, 2).x == 1"]),
        [
            "from dataclasses import dataclass\n@dataclass\nclass Point:\n    x: int\n    y: 'int' = 0\ndef total(xs):\n    return sum(Point(one).x for one in xs)",
            "from __future__ import annotations\nfrom dataclasses import dataclass, field\n@dataclass(order=True)\nclass Point:\n    x: int\n    y: list[int] = field(default_factory=list)\ndef total(xs):\n    return sum(xs)",
            "import pickle\nclass Point:\n    def __init__(self, x, y):\n        self.x = x\ndef total(xs):\n    return sum(pickle.loads(pickle.dumps(Point(one, 0))).x for one in xs)",
        ],
        [
            "from dataclasses import dataclass\n@dataclass\nclass Point:\n    x: int\n    y: int\ndef total(xs):\n    return 0"
        ],
    ),
    "annotations": (
        prompt(test_list=["assert kinds() == ['int', 'str']"]),
        [
            "def kinds():\n    def inner(a: int, b: str): pass\n    return [one.__name__ for one in inner.__annotations__.values()]"
        ],
        ["def kinds():\n    return [int, str]"],
    ),
    "exit": (
        prompt(test_list=["assert f(2) == 4"]),
        [DOUBLE + "\nexit()", DOUBLE + "\nquit(0)", DOUBLE + "\nif __name__ == '__main__':\n    raise ValueError"],
        [ZERO + "\nexit()", DOUBLE + "\nexit(1)"],
    ),
    "attributes": (
        prompt(
            test_list=[
                "a = Account()\na.balance = 3\nassert a.balance == 3",
                "a = Account()\ntry:\n    a.balance = -1\nexcept ValueError:\n    pass\nelse:\n    assert False",
            ]
        ),
        [
            "class Account:\n    balance = property(lambda self: self._x)\n    @balance.setter\n    def balance(self, x):\n        if x < 0:\n            raise ValueError\n        self._x = x"
        ],
        ["class Account:\n    pass", "class Account:\n    balance = property(lambda self: 0, lambda self, x: None)"],
    ),
    "truth_and_inequality": (
        prompt(test_list=["assert not Box(0)", "assert Box(1) and not (Box(1) != Box(1))", "assert Box(1) != Box(2)"]),
        [
            "class Box:\n    def __init__(self, x):\n        self.x = x\n    def __bool__(self):\n        return self.x != 0\n    def __eq__(self, other):\n        return self.x == other.x"
        ],
        [
            "class Box:\n    def __init__(self, x):\n        self.x = x\n    def __eq__(self, other):\n        return self.x == other.x",
            "class Box:\n    def __init__(self, x):\n        self.x = x\n    def __bool__(self):\n        return self.x != 0\n    def __ne__(self, other):\n        return False",
        ],
    ),
}


@pytest.mark.parametrize("name", RECORDS)
def test_right_programs_have_full_marks_and_wrong_ones_have_not(reward, name):
    record, right, wrong = RECORDS[name]
    assert [reward(record, fenced(code)) for code in right] == [1.0] * len(right)
    for code in wrong:
        assert reward(record, fenced(code)) < 1.0, code


def test_partial_credit_is_of_the_asserts_that_are_reached(plain):
    branches = [
        "    if candidate(1) == 2:",
        "        assert candidate(3) == 6",
        "    else:",
        "        assert candidate(3) == 7",
    ]
    record = human("", "f", "    assert candidate(1) == 2", "    assert candidate(2) == 4", *branches)
    for code, share in (
        (DOUBLE, 1.0),
        ("def f(x):\n    return 2 * x if x != 2 else 0", 2 / 3),
        ("def f(x):\n    return 2", 1 / 3),
        ("def f(x):\n    return 7", 1 / 3),
        (ZERO, 0.0),
        ("n = []\ndef f(x):\n    n.append(x)\n    return 0 if len(n) < 2 else 2 * x", 1 / 2),  # right when asked again
    ):
        assert plain(record, fenced(code)) == pytest.approx(share), code


NEVER_RUN = {
    "a class for pytest": (
        "class TestF:\n    def test_a(self):\n        assert f(2) == 5\n",
        "the class TestF is not a unittest.TestCase",
    ),
    "a fixture": ("def test_a(tmp_path):\n    assert f(2) == 5\n", "test_a needs tmp_path"),
    "parameters": (
        "import pytest\n@pytest.mark.parametrize('x,y', [(1, 2)])\ndef test_a(x, y, *, z=1):\n    assert f(x) == y\n",
        "test_a needs x, y",
    ),
    "one of two": ("def test_a():\n    assert f(2) == 4\ndef test_b(x):\n    assert f(x) == 4\n", "test_b needs x"),
    "a generator": ("def test_a():\n    yield f(2) == 4\n", "test_a is a generator"),
    "skipped": (
        "import unittest\nclass T(unittest.TestCase):\n    @unittest.skip('x')\n    def test_a(self):\n        self.assertEqual(f(2), 5)\n",
        "nothing in its tests",
    ),
    "a skipped class": (
        "import unittest\n@unittest.skip('x')\nclass T(unittest.TestCase):\n    def test_a(self):\n        self.assertEqual(f(2), 5)\n",
        "nothing in its tests",
    ),
    "async in a plain class": (
        "import unittest\nclass T(unittest.TestCase):\n    async def test_a(self):\n        self.assertEqual(f(2), 5)\n",
        "async tests",
    ),
    "an empty method": (
        "import unittest\nclass T(unittest.TestCase):\n    def test_a(self):\n        pass\n",
        "nothing in its tests",
    ),
    "an empty check": ("def check(candidate):\n    pass\n", "nothing in its tests"),
    "a check that prints": ("def check(candidate):\n    print('checked')\n", "nothing in its tests"),
    "metadata": ("METADATA = {'author': 'x'}\n", "nothing in its tests"),
    "a comment": ("# no tests\n", "nothing in its tests"),
    "a helper alone": ("def helper(x):\n    assert x\n", "nothing in its tests"),
    "a script": ("import unittest\nif __name__ == '__main__':\n    unittest.main()\n", "nothing in its tests"),
    "no Python": ("def check(candidate) assert candidate(2) == 4\n", "not Python"),
}


@pytest.mark.parametrize(("test", "words"), NEVER_RUN.values(), ids=NEVER_RUN)
def test_tests_that_never_run_refuse_their_prompt(plain, test, words):
    given = prompt(test=test, entry_point="f")
    with pytest.raises(ValueError, match=words):
        plain.check_prompt(given)
    with pytest.raises(FinalRewardError, match=words):
        plain(given, fenced(ZERO))


def test_tests_that_need_a_function_or_are_only_defined_refuse_their_prompt(plain):
    with pytest.raises(ValueError, match="entry_point"):
        plain.check_prompt(prompt(test="def check(candidate):\n    assert candidate(2) == 4\n"))
    with pytest.raises(ValueError, match="defines test_a without a call"):
        plain.check_prompt(prompt(test_list=["assert f(1) == 2", "def test_a():\n    assert f(2) == 5"]))
    assert plain.check_prompt(prompt(test_list=["def test_a():\n    assert f(2) == 5", "test_a()"]))
    assert not plain.check_prompt(prompt(answer="42"))


@pytest.mark.parametrize("name", RECORDS)
def test_records_with_tests_are_not_refused(name):
    record = RECORDS[name][0]
    test = record.metadata.get("test") or record.answer or ""
    assert (
        problem_of_tests(tuple(record.metadata.get("test_list", ())), test, record.metadata.get("entry_point")) is None
    )


def faults_of(reward, *prompts):
    references = reward.ask_references()
    return [fault.problem for fault in check_references(reward, references, prompts)]


def test_solutions_of_records_have_full_marks_and_a_program_that_does_nothing_has_not(plain):
    tests = "def check(candidate):\n    assert candidate([1, 2]) == 3\n"
    own = {"test": tests, "entry_point": "total"}
    body = "    return sum(xs)\n"
    good = [
        prompt(HEAD, **own, canonical_solution=body),
        prompt(f"Complete this:\n{HEAD}", **own, canonical_solution=body),  # cannot be put together, so it says nothing
        prompt(f"Complete this:\n{HEAD}", **own, canonical_solution=body, code_prompt="def total(xs):\n"),
        prompt(test_list=["assert f(2) == 4"], code=DOUBLE),
        prompt(test_list=["assert f(2) == 4"], solution=f"So:\n```python\n{DOUBLE}\n```\nDone."),
        prompt(test_list=["assert f(2) == 4"]),
        prompt(inputs=["3\n"], outputs=["6\n"], solutions=json.dumps(["print(2 * int(input()))", "x"])),
        prompt(answer="42"),
        prompt(test="METADATA = {}"),  # is refused elsewhere
    ]
    before = plain.metrics()
    assert faults_of(plain, *good) == []
    bad = [
        prompt(HEAD, **own, canonical_solution="    return len(xs)\n"),
        prompt(test_list=["assert f(2) == 5"], code=DOUBLE),
        prompt(inputs=["3\n"], outputs=["7\n"], solutions=["print(2 * int(input()))"]),
    ]
    assert faults_of(plain, *bad) == ["has 0 of 1 for itself"] * 3
    idle = [
        prompt(test="def check(candidate):\n    candidate(2)\n", entry_point="f"),
        prompt(test="def check(candidate):\n    return\n    assert candidate(2)\n", entry_point="f"),
        prompt(test_list=["assert True"]),
        prompt(inputs=["1"], outputs=[""]),
    ]
    assert faults_of(plain, *idle) == ["has 1 for a program that does nothing"] * 4
    assert plain.metrics() == before  # the check is not counted


def test_a_module_that_the_sandbox_does_not_have_is_named(plain, caplog):
    given = prompt(
        test="import no_such_module\ndef check(candidate):\n    assert candidate(2) in [4]\n", entry_point="f"
    )
    assert plain(given, fenced(DOUBLE)) == 0.0
    assert "No module named 'no_such_module'): CodeReward.python_path" in caplog.text


@pytest.mark.slow
def test_a_run_refuses_or_leaves_out_prompts_whose_tests_test_nothing(tmp_path, caplog):
    rows = tmp_path / "rows.jsonl"
    records = [{"prompt": "1", "test_list": ["assert f(2) == 4"]}, {"prompt": "2", "test": "METADATA = {}"}]
    rows.write_text("".join(json.dumps(one) + "\n" for one in records))
    made = rl.CodeReward(**LIMIT)
    settings = dict(max_steps=1, groups_per_step=1, group_size=2, sampling={"max_tokens": 2}, logger=False)
    settings |= dict(accelerator="cpu", devices=1, enable_progress_bar=False, enable_checkpointing=False)

    def run(on_bad_prompt):
        source = rl.JsonlPrompts(str(rows), answer_field=None, on_bad_prompt=on_bad_prompt)
        return rl.fit(rl.asset("small_sort_policy"), source, rl.CombinedReward({"code": made}), **settings)

    with pytest.raises(ValueError, match=r"rows.jsonl.*2.*nothing in its tests is run that can fail"):
        run("error")
    assert run("skip").global_step == 1
    assert "prompts left out so far (on_bad_prompt=skip): 1 of 2" in caplog.text
