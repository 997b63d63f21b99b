# ruff: noqa: E501  programs are as long as they are
"""`CodeReward` on the forms of public sets, and on programs that want to look right."""

from __future__ import annotations

import base64
import json
import os
import pickle
import re
import shutil
import subprocess
import sys
import zlib
from pathlib import Path

import pytest
from sandboxes import LIMITS, levels

import lit_async_rl as rl
from lit_async_rl.errors import FinalRewardError, SetupError
from lit_async_rl.rewards.hooks import metrics_of
from lit_async_rl.rewards.scorer import Scorer, score_all
from lit_async_rl.sandbox.code_cases import agrees, last_block, read_cases
from lit_async_rl.utils.identity import reward_identity

pytestmark = pytest.mark.skipif(not levels("limits"), reason="needs Linux or macOS")
ROOT = Path(__file__).parents[2]
LIMIT = {"limits": LIMITS, "allow_unsandboxed": not levels()}


@pytest.fixture(scope="module")
def reward():
    made = rl.CodeReward(**LIMIT)
    yield made
    made.close()


@pytest.fixture(scope="module")
def partial():
    made = rl.CodeReward(**LIMIT, partial_credit=True)
    yield made
    made.close()


def prompt(answer=None, text="Write it.", **fields):
    return rl.Prompt(text=text, answer=answer, metadata=fields)


def fenced(code, language="python"):
    return f"Here it is:\n\n```{language}\n{code}\n```\nDone."


MBPP = prompt(test_list=["assert double(2) == 4", "assert double(-1) == -2", "assert double([1]) == [1, 1]"])
HUMANEVAL_TEXT = 'from typing import List\n\n\ndef total(xs: List[int]) -> int:\n    """Sum."""\n'
HUMANEVAL = prompt(
    text=HUMANEVAL_TEXT,
    test="def check(candidate):\n    assert candidate([1, 2]) == 3\n    assert candidate([]) == 0\n"
    "    for n in range(4):\n        assert candidate(list(range(n))) == n * (n - 1) // 2\n",
    entry_point="total",
)
APPS = prompt(input_output=json.dumps({"inputs": ["1 2\n", "5 -5\n"], "outputs": ["3\n", "0\n"]}))
APPS_CALLS = prompt(
    input_output=json.dumps(
        {"fn_name": "spread", "inputs": [[[1, 5]], [[2.5, 2.5]]], "outputs": [[1, 5, 4], [[2.5, 2.5, 0.0]]]}
    )
)
TACO = prompt(inputs=["3\n"], outputs=[["3", "2", "1"]])
LCB = prompt(
    public_test_cases=json.dumps([{"input": "[1,2]\n3", "output": "6", "testtype": "functional"}]),
    metadata=json.dumps({"func_name": "addUp"}),
)
UNITTEST = prompt(
    test="import unittest\nclass TestCases(unittest.TestCase):\n    def setUp(self):\n        self.two = 2\n"
    "    def test_a(self):\n        self.assertEqual(task_func(self.two), 4)\n"
    "    def test_b(self):\n        with self.assertRaises(ValueError):\n            task_func(-1)\n",
    entry_point="task_func",
)
PYTEST = prompt(test="def test_one():\n    assert f(1) == 1\ndef test_two():\n    assert f(2) == 2\n")

POLY = prompt(
    text="import math\n\n\ndef poly(xs, x):\n    return sum(c * x**n for n, c in enumerate(xs))\n\n\ndef zero(xs):\n    pass\n",
    test="def check(candidate):\n    assert math.fabs(poly([-6, 2], candidate([-6, 2]))) < 1e-4\n",
    entry_point="zero",
)

RIGHT_ONES = [  # and those of test_code_records
    (HUMANEVAL, "def total(xs):\n    return sum(xs)"),
    (HUMANEVAL, "    return sum(xs)"),
    (HUMANEVAL, "return sum(xs)"),
    (APPS, "print(sum(map(int, input().split())))"),
    (APPS_CALLS, "def spread(x):\n    return (*x, x[1] - x[0])"),
    (APPS_CALLS, "class Solution:\n    def spread(self, x):\n        return [*x, x[1] - x[0]]"),
    (TACO, "for n in range(int(input()), 0, -1):\n    print(n)"),
    (LCB, "class Solution:\n    def addUp(self, x, y):\n        return sum(x) + y"),
    (UNITTEST, "def task_func(x):\n    if x < 0:\n        raise ValueError('no')\n    return x * x"),
    (PYTEST, "def f(x):\n    return x"),
    (prompt(answer='["assert f() == 1"]'), "f = lambda: 1"),
    (prompt(answer='{"inputs": ["a"], "outputs": ["a"]}'), "print(input())"),
    (prompt(answer='[{"input": "a", "output": "a"}]'), "print(input())"),
    (prompt(test_list=["x = [3, 1]\norder(x)\nassert x == [1, 3]"]), "def order(x):\n    x.sort()"),
    (prompt(test_list=["assert list(count(3)) == [0, 1, 2]"]), "def count(n):\n    yield from range(n)"),
    (prompt(test_list=["assert apply(lambda x: x + 1, 2) == 3"]), "def apply(f, x):\n    return f(x)"),
    (prompt(test_list=["assert f(1) == {1: (2, 'a', None)}"]), "def f(x):\n    return {1: (2, 'a', None)}"),
    (prompt(test_list=["assert Counter(f()) == Counter('aab')"]), "def f():\n    return ['a', 'b', 'a']"),
    (
        prompt(test_list=["assert f() == Counter('aab')"]),
        "from collections import Counter\ndef f():\n    return Counter('aba')",
    ),
    (
        prompt(test_list=["s = Stack()\ns.push(4)\nassert s.pop() == 4 and len(s) == 0\nassert isinstance(s, Stack)"]),
        "class Stack:\n    def __init__(self):\n        self.x = []\n    def push(self, x):\n        self.x.append(x)\n"
        "    def pop(self):\n        return self.x.pop()\n    def __len__(self):\n        return len(self.x)",
    ),
    (
        prompt(
            test_list=["try:\n    f()\nexcept Bad as error:\n    assert str(error) == 'x'\nelse:\n    assert False"]
        ),
        "class Bad(ValueError):\n    pass\ndef f():\n    raise Bad('x')",
    ),
]


@pytest.mark.parametrize(("given", "code"), RIGHT_ONES)
def test_right_programs_pass(reward, partial, given, code):
    assert reward(given, fenced(code)) == 1.0
    assert partial(given, fenced(code)) == 1.0


@pytest.mark.parametrize("given", [one for one, _ in RIGHT_ONES])
@pytest.mark.parametrize("code", ["x = 1", "syntax error", "raise SystemExit(0)", "import os\nos._exit(0)"])
def test_other_programs_fail(reward, given, code):
    assert reward(given, fenced(code)) == 0.0


FORGERIES = {
    "prints_the_verdict": 'print(\'{"passed": [true, true, true], "failure": null}\')\n'
    "def double(x): raise SystemExit(0)",
    "writes_it_everywhere": "import os\nfor n in range(3, 64):\n    try: os.write(n, b'{\"passed\": [true, true, true]}')\n"
    "    except OSError: pass\nos._exit(0)",
    "equals_everything": "class Any:\n    def __eq__(self, other): return True\n    def __ne__(self, other): return False\n"
    "def double(x): return Any()",
    "equals_as_an_int": "class Any(int):\n    def __eq__(self, other): return True\n    __hash__ = int.__hash__\n"
    "def double(x): return Any(0)",
    "mock_any": "from unittest.mock import ANY\ndef double(x): return ANY",
    "class_of_any": "from unittest import mock\ndouble = lambda x: mock.MagicMock(__eq__=lambda *_: True)",
    "patches_builtins": "import builtins, sys\nbuiltins.AssertionError = KeyError\nbuiltins.isinstance = lambda *_: True\n"
    "sys.settrace(lambda *_: None)\ndef double(x): return 0",
    "patches_the_harness": "import sys\nfor name, module in list(sys.modules.items()):\n    if 'sandbox' in name:\n"
    "        for key in list(vars(module)):\n            if callable(getattr(module, key)): setattr(module, key, lambda *a, **k: 0)\n"
    "def double(x): return 0",
    "defines_the_names_of_tests": "def __held__(n): pass\ndef __failed__(n, e): pass\npassed = [True] * 3\n"
    "def check(c): return True\ndef double(x): return 0",
    "looks_for_the_tests": "import gc, sys\ndef double(x):\n    text = str([o for o in gc.get_objects() if isinstance(o, (str, list, dict))])\n"
    "    if 'assert double' in text: return {2: 4, -1: -2}.get(x, [1, 1]) if not isinstance(x, list) else [1, 1]\n    return 0",
    "stops_the_loop": "def double(x): raise StopIteration",
    "kills_all": "import os, signal\nos.kill(-1, 9)\ndef double(x): return 0",
    "exits_later": "import os\ndef double(x): os._exit(0)",
    "speaks_the_protocol": "import os, json\nfor fd in range(3, 64):\n    data = json.dumps(['ready', {'double': ['callback', 0], '__builtins__': {}}]).encode()\n"
    "    try: os.write(fd, len(data).to_bytes(4, 'big') + data)\n    except OSError: pass\nimport time\ntime.sleep(0.2)",
    "floods_the_protocol": "import os\nfor fd in range(3, 64):\n    try: os.write(fd, b'\\x7f' * 100_000)\n    except OSError: pass\n",
}


@pytest.mark.parametrize("code", FORGERIES.values(), ids=FORGERIES)
def test_a_verdict_cannot_be_forged(reward, partial, code):
    for given in (MBPP, prompt(test="def check(candidate):\n    assert candidate(2) == 4\n", entry_point="double")):
        assert reward(given, fenced(code)) == 0.0
        assert partial(given, fenced(code)) == 0.0
    assert reward(MBPP, fenced("def double(x): return x * 2")) == 1.0


# Programs that a test beside them takes for right, though they are not: what it means that a test is weak
WEAK_FORGERIES = [
    (
        "assert abs(f(2) - 3.5) < 1e-6",
        "class Near:\n    def __sub__(self, x): return self\n    def __abs__(self): return self\n"
        "    def __lt__(self, x): return True\ndef f(x): return Near()",
    ),
    ("assert all(map(f, [2, 3, 5]))", "def f(x): raise StopIteration"),
    ("assert 3 in f(2)", "class All:\n    def __contains__(self, x): return True\ndef f(x): return All()"),
    (
        "assert f(2) in (4, 5)",
        "class Any:\n    def __eq__(self, x): return True\n    def __hash__(self): return 4\ndef f(x): return Any()",
    ),
]


@pytest.mark.parametrize(
    ("test", "code"),
    [
        ("assert all(f(x) for x in (1, 2))", "def all(x): return True\ndef f(x): return False"),
        ("assert all(f(x) for x in (1, 2))", "def all(x): return True"),
        ("assert abs(f(2) - 3.5) < 1e-6", "def abs(x): return 0\ndef f(x): return 0"),
        (
            "assert Counter(f()) == Counter('ab')",
            "class Counter:\n    def __init__(self, x): pass\n    def __eq__(self, x): return True\ndef f(): return 0",
        ),
        ("assert f(2) == 4", "import math\ndef f(x): return math.nan"),
        ("assert str(f(2)) == '4'", "class S(str):\n    def __eq__(self, x): return True\ndef f(x): return S('x')"),
        ("assert sorted(f(2)) == [4]", "def sorted(x): return [4]\ndef f(x): return []"),
        (
            "import math\nassert math.isclose(f(2), 4)",
            "class math:\n    isclose = staticmethod(lambda *a: True)\ndef f(x): return 0",
        ),
    ],
)
def test_programs_do_not_change_what_tests_use(reward, test, code):
    assert reward(prompt(test_list=[test]), fenced(code)) == 0.0
    assert reward(prompt(test=f"def check(f):\n    {test.splitlines()[-1]}\n", entry_point="f"), fenced(code)) == 0.0


def test_forgeries_that_pass_beside_weak_tests(reward):
    """The number in the documentation; with a plain test of the same function none of them passes."""
    beside = rl.CodeReward(**LIMIT, tests="together")
    passed = [name for name, code in FORGERIES.items() if beside(MBPP, fenced(code))]
    beside.close()
    assert passed == ["equals_everything", "equals_as_an_int", "mock_any", "class_of_any", "looks_for_the_tests"]
    weak = reward.metrics()["code/num_weak"]
    for test, code in WEAK_FORGERIES:
        assert reward(prompt(test_list=[test]), fenced(code)) == 1.0
        assert reward(prompt(test_list=[test, "assert f(7) == 9"]), fenced(code)) == 0.0
    assert reward.metrics()["code/num_weak"] == weak + 2 * len(WEAK_FORGERIES)
    others = test_programs_do_not_change_what_tests_use.pytestmark[0].args[1]
    shares = re.findall(r"(\d+) of (\d+) cheating programs", (ROOT / "docs" / "rewards.md").read_text())
    number = len(FORGERIES) + len(WEAK_FORGERIES) + len(others)
    assert shares == [(str(len(passed) + len(WEAK_FORGERIES)), str(number))]


def test_helpers_of_a_problem_are_not_the_programs(reward):
    assert reward(POLY, fenced("def poly(xs, x):\n    return 0\ndef zero(xs):\n    return 1")) == 0.0


def test_standard_output_is_compared_outside(reward):
    code = "import builtins\nbuiltins.str.__eq__ if 0 else None\nprint('3')\nprint('0')"
    assert reward(APPS, fenced(code)) == 0.0
    assert reward(APPS, fenced("print(3 if input()[0] == '1' else 0)\nraise SystemExit(1)")) == 0.0
    assert reward(APPS, fenced("import os\nos.system('env; ls /; cat *')")) == 0.0


def test_partial_credit(partial):
    assert partial(MBPP, fenced("def double(x):\n    return 2 * x if x != -1 else 0")) == pytest.approx(2 / 3)
    assert partial(APPS, fenced("print(3)")) == 0.5
    assert partial(HUMANEVAL, fenced("def total(xs):\n    return 3 if xs else 0")) == pytest.approx(2 / 3)
    assert partial(UNITTEST, fenced("def task_func(x):\n    return 4")) == 0.5
    assert partial(PYTEST, fenced("def f(x):\n    return 1")) == 0.5
    assert partial(APPS_CALLS, fenced("def spread(x):\n    return [1, 5, 4]")) == 0.5


def test_a_program_that_ends_gets_what_it_passed_before(partial):
    code = "import os\ndef double(x):\n    return 4 if x == 2 else os._exit(0)"
    assert partial(MBPP, fenced(code)) == pytest.approx(1 / 3)


def test_the_last_closed_block_is_the_code():
    assert last_block("no code") is None
    assert last_block("```python\nx = 1\n```\ntext\n```py\nx = 2\n```\n").code == "x = 2\n"
    assert last_block("```python\nx = 1\n```\n```\nx = 2").code == "x = 1\n"
    assert last_block("~~~js\nx\n~~~").language == "javascript"
    assert last_block("````python\n```\n````").code == "```\n"
    assert last_block("  ```c++ title\nx\n  ```").language == "cpp"
    assert last_block("text ```python inline``` text") is None
    assert last_block("```\r\n" * 50_001).code == ""
    assert last_block("```py" * 50_000) is None
    assert last_block(" " * 100_000 + "```\nx\n```") is None
    assert last_block("") is None


def test_without_code_the_reward_is_zero_and_counted(reward):
    before = reward.metrics()["code/num_no_code"]
    assert reward(MBPP, "def double(x): return 2 * x") == 0.0
    assert reward(MBPP, "```python\ndef double(x): return 2 * x") == 0.0
    assert reward.metrics()["code/num_no_code"] == before + 2


def test_whole_completions():
    made = rl.CodeReward(**LIMIT, extract="whole")
    assert made(HUMANEVAL, "    return sum(xs)\n") == 1.0
    assert made(MBPP, "def double(x): return x * 2") == 1.0
    made.close()


def test_without_cases_it_does_not_apply(reward):
    assert reward(prompt(answer="42"), fenced("print(42)")) is None
    combined = rl.CombinedReward({"code": reward, "short": lambda prompt, completion: 0.5})
    score = combined(prompt(answer="42"), fenced("print(42)"))
    assert (float(score), dict(score.parts)) == (0.5, {"short": 0.5})
    score = combined(APPS, fenced("print(sum(map(int, input().split())))"))
    assert dict(score.parts) == {"code": 1.0, "short": 0.5}
    assert "code/num_right" in metrics_of(combined)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"inputs": ["1"], "outputs": []}, "lists of the same length"),
        ({"test_cases": [{"input": "1"}]}, "needs input and output"),
        ({"inputs": [[1]], "outputs": [1], "fn_name": "not a name"}, "fn_name"),
    ],
)
def test_cases_that_cannot_be_read(reward, fields, words):
    with pytest.raises(FinalRewardError, match=words):
        reward(prompt(**fields), fenced("x"))


def packed(cases, protocol=None):
    """Cases as LiveCodeBench publishes the private ones."""
    return base64.b64encode(zlib.compress(pickle.dumps(json.dumps(cases), protocol=protocol))).decode()


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_packed_private_cases_count(protocol):
    """A program that prints the public example's answer would have been right."""
    public = json.dumps([{"input": "3", "output": "9", "testtype": "stdin"}])
    private = packed([{"input": "7", "output": "ä", "testtype": "stdin"}] * 2, protocol=protocol)
    cases = read_cases(prompt(public_test_cases=public, private_test_cases=private))
    assert cases.streams == [("3", "9"), ("7", "ä"), ("7", "ä")]


@pytest.mark.parametrize("empty", [float("nan"), None, {}, "{}", [], "[]", " \n"])
def test_a_field_without_cases_is_as_if_it_was_not_there(empty):
    """A table has NaN where a record lacks a column."""
    public = [{"input": "3", "output": "9"}]
    assert read_cases(prompt(public_test_cases=public, private_test_cases=empty)).streams == [("3", "9")]
    assert read_cases(prompt(test_list=empty, tests=empty, answer=json.dumps(public))).streams == [("3", "9")]


@pytest.mark.parametrize("tests", [5, {"unit": 3}])
def test_where_the_answer_has_the_cases_a_field_of_their_name_may_be_something_else(tests):
    public = [{"input": "3", "output": "9"}]
    assert read_cases(prompt(tests=tests, answer=json.dumps(public))).streams == [("3", "9")]
    assert read_cases(prompt(tests=tests, answer="assert f(1) == 2")).check == "assert f(1) == 2"
    for fields in ({}, {"answer": "9"}, {"public_test_cases": public}, {"test_cases": public, "answer": "assert f(1)"}):
        with pytest.raises(ValueError, match="tests must be a list of cases"):
            read_cases(prompt(tests=tests, **fields))
    with pytest.raises(ValueError, match="private_test_cases must be a list of cases"):
        read_cases(prompt(tests=tests, private_test_cases="eJwz", answer=json.dumps(public)))


class Hostile:
    """Its pickle, when it is loaded, ends the process."""

    def __reduce__(self):
        return os._exit, (3,)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("private_test_cases", base64.b64encode(zlib.compress(pickle.dumps(Hostile()))).decode()),
        ("private_test_cases", base64.b64encode(zlib.compress(pickle.dumps(["[]", "[]"]))).decode()),
        ("private_test_cases", base64.b64encode(zlib.compress(b"no pickle")).decode()),
        ("private_test_cases", packed({"input": ["7"], "output": ["49"]})),
        ("private_test_cases", packed([])[:-8]),
        ("private_test_cases", {"input": ["7"], "output": ["49"]}),
        ("test_cases", '[{"input": "7", "output"'),
        ("tests", 5),
        ("public_test_cases", "7 -> 49"),
    ],
)
def test_fields_of_cases_that_are_no_lists_are_refused(name, value):
    """They were left out without a word, and the other cases decided."""
    other = "test_cases" if name != "test_cases" else "public_test_cases"
    with pytest.raises(ValueError, match=f"^{name} must be a list of cases with input and output, got "):
        read_cases(prompt(**{other: [{"input": "3", "output": "9"}], name: value}))


def test_empty_fields_of_cases_are_none():
    fields = dict(
        public_test_cases="[]", private_test_cases="", test_cases=({"input": "3", "output": "9"},), tests=None
    )
    assert read_cases(prompt(**fields)).streams == [("3", "9")]


def test_fields_of_public_sets():
    assert (
        read_cases(prompt(test_list=["assert 1"], test_imports=["import re"], test_setup_code="")).setup == "import re"
    )
    assert len(read_cases(APPS).streams) == 2
    assert read_cases(TACO).streams == [("3\n", "3\n2\n1")]
    assert read_cases(LCB).calls == [([[1, 2], 3], 6)]
    assert not read_cases(prompt(answer="assertive", inputs=None, outputs=None))


@pytest.mark.parametrize(
    ("language", "code"),
    [
        ("bash", "read a b\necho $((a + b))"),
        ("sh", "read a b; echo $((a + b))"),
        (
            "javascript",
            "const [a, b] = require('fs').readFileSync(0, 'utf8').split(' ').map(Number)\nconsole.log(a + b)",
        ),
        ("perl", "my ($a, $b) = split ' ', <STDIN>; print $a + $b, \"\\n\";"),
        ("c", '#include <stdio.h>\nint main() { int a, b; scanf("%d %d", &a, &b); printf("%d\\n", a + b); }'),
    ],
)
def test_other_languages(reward, language, code):
    program = {"sh": "bash", "javascript": "node", "c": "gcc"}.get(language, language)
    if shutil.which(program, path="/usr/local/bin:/usr/bin:/bin") is None:
        pytest.skip(f"{program} is not installed")
    if program == "node" and not levels():
        pytest.skip("node reserves more addresses than the limits of a process allow")
    assert reward(APPS, fenced(code, language)) == 1.0
    assert reward(APPS, fenced(code.replace("+", "*"), language)) == 0.0
    assert reward(MBPP, fenced(code, language)) == 0.0


def test_languages_of_ones_own():
    made = rl.CodeReward(**LIMIT, language="awk", languages={"awk": "awk -f main.awk"})
    assert made(APPS, "```\n{ print $1 + $2 }\n```") == 1.0
    assert made(APPS, fenced("print(sum(map(int, input().split())))")) == 1.0
    assert made(APPS, fenced("x", "brainfuck")) == 0.0
    made.close()


def test_tests_in_one_process():
    made = rl.CodeReward(**LIMIT, tests="together")
    given = prompt(test_list=["class Own:\n    n = 3\nassert f(Own()) == 3"])
    right = fenced("def f(x):\n    return x.n")
    assert made(given, right) == 1.0
    for code in ("print('{\"passed\": [true]}')\nraise SystemExit(0)", "import os\nos._exit(0)", "def f(x): return 0"):
        assert made(given, fenced(code)) == 0.0
    made.close()


def test_objects_of_tests_are_handed_over_beside_the_program(reward):
    given = prompt(test_list=["class Own:\n    n = 3\nassert f(Own()) == 3"])
    before = reward.metrics()["code/num_weak"]
    assert reward(given, fenced("def f(x):\n    return x.n")) == 1.0
    assert reward(given, fenced("def f(x):\n    return 4")) == 0.0
    assert reward.metrics()["code/num_weak"] == before + 2


@pytest.mark.parametrize(
    ("found", "expected", "settings", "is_right"),
    [
        ("1 2\n3", "1 2 \n3\n\n", ("lines", 0.0), True),
        ("1  2", "1 2", ("lines", 0.0), False),
        ("1  2\n3", "1 2 3", ("tokens", 0.0), True),
        ("0.3333333", "0.33333", ("lines", 1e-4), True),
        ("0.34", "0.33333", ("lines", 1e-4), False),
        ("nan", "1", ("tokens", 1e-4), False),
        ("1000001", "1000000", ("tokens", 1e-5), True),
        ("3", "INF", ("lines", 1e-4), False),
        ("3", "-inf", ("tokens", 1e-4), False),
        ("3", str(7**400), ("lines", 1e-4), False),
        ("inf", str(7**400), ("lines", 1e-4), False),
        ("INF", "INF", ("lines", 1e-4), True),
        (f"{7**400} 2.0", f"{7**400} 2", ("lines", 1e-4), True),
        ("1\n", "1", ("exact", 0.0), False),
        ("", "", ("lines", 0.0), True),
    ],
)
def test_comparison_of_outputs(found, expected, settings, is_right):
    assert agrees(found, expected, compare=settings[0], tolerance=settings[1]) is is_right


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"timeout_s": 0.0}, "CodeReward.timeout_s must be positive, got 0"),
        ({"max_cases": 0}, "CodeReward.max_cases"),
        ({"tolerance": -1.0}, "CodeReward.tolerance"),
        ({"language": "pyhton"}, "did you mean python"),
        (
            {"languages": {"x": "no_such_program main.x"}},
            "needs no_such_program, which is not in a folder that programs can read",
        ),
        ({"languages": {"x": "sh program"}}, "must contain the program's file name, main.SUFFIX"),
        ({"languages": {"x": "bash ./main.sh"}}, "x='bash ./main.sh' must contain the program's file name"),
        ({"languages": {"x": "bash -c 'bash main.sh'"}}, "main.SUFFIX, as a word of its own"),
        ({"readable": ["/no/such/folder"]}, "Sandbox.readable: there is no '/no/such/folder'"),
        ({"readable": ["/"]}, "Sandbox.readable='/' cannot be mounted"),
    ],
)
def test_settings_out_of_range(settings, words):
    with pytest.raises(ValueError, match="(?s)" + words.replace("(", r"\(")):
        rl.CodeReward(**{**LIMIT, **settings})


def test_choices_are_named(tmp_path):
    """Outside of the tests' own checks of types."""
    script = tmp_path / "choices.py"
    script.write_text(
        "import lit_async_rl as rl\n"
        "for settings in (dict(extract='all'), dict(tests='x'), dict(compare='x'), dict(level='jail')):\n"
        "    try:\n        rl.CodeReward(**settings)\n    except ValueError as error:\n        print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, str(script)],
        capture_output=True,
        text=True,
        timeout=170,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert done.stdout.splitlines() == [
        "CodeReward.extract must be fence or whole, got 'all'",
        "CodeReward.tests must be apart, plain or together, got 'x'",
        "CodeReward.compare must be lines, tokens or exact, got 'x'",
        "Sandbox.level must be auto, bubblewrap, namespace or limits, got 'jail'",
    ]


def test_less_than_a_namespace_must_be_allowed():
    with pytest.raises(SetupError, match="allow_unsandboxed: true"):
        rl.CodeReward(level="limits")
    with pytest.warns(UserWarning, match="CodeReward runs programs in a sandbox, limits: resource limits only"):
        made = rl.CodeReward(level="limits", allow_unsandboxed=True, limits=LIMITS)
    assert made(MBPP, fenced("def double(x): return x * 2")) == 1.0
    made.close()


@pytest.mark.slow
def test_identity_has_the_settings():
    def identity(**settings):
        made = rl.CodeReward(**{**LIMIT, **settings})
        made.close()
        return reward_identity(made)

    same = identity()
    assert same == identity() == identity(timeout_s=9.0, name="other")
    others = [
        identity(partial_credit=True),
        identity(tests="together"),
        identity(tests="plain"),
        identity(compare="tokens"),
        identity(tolerance=1e-3),
        identity(extract="whole"),
        identity(max_cases=2),
        identity(limits=rl.SandboxLimits(wall_s=1.0)),
        identity(languages={"awk": "awk -f main.awk"}),
    ]
    assert len({same, *others}) == 10


def test_threads_of_the_scorer_share_it(reward):
    scorer = Scorer(reward, num_workers=6)
    jobs = []
    for n in range(36):
        right = n % 3 > 0
        jobs.append((prompt(inputs=[str(n)], outputs=[str(n + right)]), fenced(f"print({n + 1})")))
    found = score_all(scorer, jobs, on_progress=lambda: None)
    scorer.close()
    assert found == [float(n % 3 > 0) for n in range(36)]


@pytest.mark.slow
def test_time_of_a_completion_is_limited():
    made = rl.CodeReward(**(LIMIT | {"limits": rl.SandboxLimits(wall_s=0.3)}), timeout_s=0.5, partial_credit=True)
    given = prompt(inputs=["1"] * 50, outputs=["1"] * 50)
    assert made(given, fenced("while True: pass")) == 0.0
    metrics = made.metrics()
    assert metrics["code/num_time"] == 1.0
    assert metrics["code/num_programs"] <= 3
    assert made(MBPP, fenced("def double(x):\n    while True: pass")) == 0.0
    assert made.metrics()["code/num_time"] == 2.0
    made.close()
    made.close()
    assert made(MBPP, fenced("def double(x): return x * 2")) == 1.0  # it opens again
    made.close()
