"""Which tests are plain, what their answers may be, and runs that count or refuse weak ones."""

from __future__ import annotations

import json
import logging
import time

import pytest
from sandboxes import LIMITS, levels

import lit_async_rl as rl
from lit_async_rl.errors import FinalRewardError
from lit_async_rl.sandbox.code_cases import Cases, read_cases
from lit_async_rl.sandbox.plain_tests import HasFailed, PlainCase, as_calls, passed_cases, split_tests
from lit_async_rl.sandbox.values import NotPlain, decode, encode

pytestmark = pytest.mark.skipif(not levels("limits"), reason="needs Linux or macOS")
LIMIT = {"limits": LIMITS, "allow_unsandboxed": not levels()}
CHECK = "def check(candidate):\n    "


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


def prompt(text="Write it.", **fields):
    return rl.Prompt(text=text, metadata=fields)


def fenced(code):
    return f"```python\n{code}\n```"


@pytest.mark.parametrize(
    ("test", "compares", "expected"),
    [
        ("assert f(2) == 4", "equal", 4),
        ("assert f(2) == -4, 'a message'", "equal", -4),
        ("assert {1: (2, 'a')} == f([1, {2}], x=None)", "equal", {1: (2, "a")}),
        ("assert f() == set()", "equal", set()),
        ("assert f(2) is None", "same", None),
        ("assert f(2) is True", "same", True),
        ("assert f(2)", "true", True),
        ("assert not f(2)", "true", False),
        ("assert sum(10, 15) == 6", "equal", 6),
        ("assert True, 'always'", "constant", True),
    ],
)
def test_plain_tests(test, compares, expected):
    for cases in (Cases(asserts=(test,)), Cases(check=test), Cases(check=CHECK + test, function="f")):
        if "sum" in test and cases.function:
            continue  # the library's, where the record names another function
        found = split_tests(cases)
        assert [(one.compares, one.expected) for one in found.plain] == [(compares, expected)]
        assert not found.is_weak


@pytest.mark.parametrize(
    "test",
    [
        "assert f(2) != 4",
        "assert f(2) is not None",
        "assert f(2) is 4",
        "assert f(2) in (4, 5)",
        "assert f(2) < 4",
        "assert f(2) == f(3)",
        "assert f(2) == x",
        "assert f(x) == 4",
        "assert f(*[2]) == 4",
        "assert f(**{'x': 2}) == 4",
        "assert f(2) == f(2) == 4",
        "assert sorted(f(2)) == [4]",
        "assert abs(f(2) - 4) < 1e-6",
        "assert f(2).x == 4",
        "assert a.f(2) == 4",
        "assert f(2) == 2 + 2",
        "assert f(2) == ...",
        "assert max(2, 3) == 3 and f(2) == 4",
        "assert f(2) == 4\nassert f(3) == 6",
        "for n in range(3):\n    assert f(n) == 4",
        "def f(x): return 4\nassert f(2) == 4",
    ],
)
@pytest.mark.filterwarnings("ignore:.*is.* with .*literal:SyntaxWarning")
def test_weak_tests(test):
    found = split_tests(Cases(asserts=(test,)))
    assert (found.plain, found.weak.asserts, found.is_weak) == ((), (test,), True)


def test_names_that_are_not_the_programs_are_weak():
    assert split_tests(Cases(asserts=("assert f(2) == 4",), setup="def f(x): return 4")).is_weak
    assert split_tests(Cases(asserts=("assert f(2) == 4",)), head="def f(x): return 4").is_weak
    assert split_tests(Cases(asserts=("assert max(1, 2) == 2", "assert f(2) == 4"))).weak.asserts == (
        "assert max(1, 2) == 2",
    )
    assert [
        one.function for one in split_tests(Cases(check=CHECK + "assert candidate(2) == 4", function="g")).plain
    ] == ["g"]


def test_weak_tests_run_behind_the_setup_alone_without_the_prompts_helpers():
    cases = Cases(asserts=("assert f(limit) < limit",), setup="limit = 4")
    assert split_tests(cases, head="def helper(): ...").weak.setup == "limit = 4"


@pytest.mark.parametrize(
    ("body", "num_plain", "rest"),
    [
        (["assert f(1) == 2", "assert f(2) == 4"], 2, False),
        (["'''Words.'''", "assert f(1) == 2", "x = 3"], 2 - 1, False),
        (["import math", "assert f(1) == 2", "assert math.isclose(f(2), 4)"], 1, True),
        (["for n in range(3):", "    assert f(n) == 2 * n", "assert f(1) == 2"], 1, True),
        (["assert f(1) == 2", "return", "assert f(2) == 4"], 0, True),
        (["f = str", "assert f(1) == '1'"], 0, True),
        (["try:", "    assert f(2) == 5", "except AssertionError:", "    assert f(2) == 4"], 0, True),
    ],
)
def test_plain_assertions_of_a_check_are_taken_out(body, num_plain, rest):
    check = "\n    ".join(["METADATA = {}\n\ndef check(f):", *body])
    found = split_tests(Cases(check=check, function="f"))
    assert (len(found.plain), found.is_weak) == (num_plain, rest)
    assert found.is_rest is (num_plain > 0)


def test_a_check_that_is_called_otherwise_is_left_as_it_is():
    check = CHECK + "assert candidate(2) == 4\n\ncheck(f)\n"
    assert split_tests(Cases(check=check, function="f")).weak.check == check
    check = "async " + CHECK + "assert candidate(2) == 4\n"
    assert split_tests(Cases(check=check, function="f")).weak.check == check


def test_calls_have_no_expected_value():
    cases = Cases(asserts=("assert f(2) == 4711", "assert f(3)", "assert True"), calls=[([1], 4711)], function="f")
    calls = as_calls(split_tests(cases).plain)
    assert "4711" not in json.dumps(calls)
    assert [one[3:] for one in calls] == [[False, False], [True, False], [True, True]]


# -- answers ----------------------------------------------------------------------------------------------------------

FOUR = PlainCase("equal", 4, "f", args=[], kwargs={})


@pytest.mark.parametrize(
    ("answer", "is_right"),
    [
        (b"[4]", True),
        (b'[["float","0x1.0p+2"]]', True),
        (b'[["decimal","4"]]', True),
        (b'[["fraction","8/2"]]', True),
        (b"null", False),
        (b"[5]", False),
        (b"[4, 4]", False),
        (b"[]", False),
        (b"4", False),
        (b"[4.0]", False),
        (b'[["object",1]]', False),
        (b'[["object",4]]', False),
        (b'[["decimal","sNaN"]]', False),
        (b'[["fraction","1e999999999"]]', False),
        (b'[["fraction","4/0"]]', False),
        (b'[["int","x"]]', False),
        (b'[["range",[0,1e9,1]]]', False),
        (b'[["list",' * 900 + b"]" * 900, False),
        (b"[" * 100_000, False),
        (b"\xff", False),
        (b"", False),
    ],
)
def test_an_answer_is_right_or_wrong_and_nothing_else(answer, is_right):
    assert FOUR.holds(answer) is is_right
    assert passed_cases([FOUR, FOUR], b"[null]\n[4]\n" + answer + b"\n") == [True, is_right]


@pytest.mark.parametrize("kind", ["set", "frozenset", "dict"])
def test_answers_that_collide_cost_no_time(kind):
    items = [["int", hex(n * (2**61 - 1))] for n in range(1, 20_000)]
    began = time.process_time()
    with pytest.raises(NotPlain, match="same hash"):
        decode([kind, [[one, 0] for one in items] if kind == "dict" else items])
    assert time.process_time() - began < 5.0  # without the refusal 200 million comparisons
    large = {n: n for n in range(20_000)}
    assert decode(encode([large, set(large)])) == [large, set(large)]


class Odd:
    """Equal to everything."""

    def __eq__(self, other):
        return True

    __hash__ = None


def nested(depth):
    return [nested(depth - 1)] if depth else 0


def test_an_object_of_another_class_is_no_answer_and_neither_is_one_without_end():
    for value in (Odd(), [Odd()], {"a": Odd()}):
        with pytest.raises(NotPlain, match="an object of the class Odd"):
            encode(value)
    encode(nested(200))
    with pytest.raises(NotPlain, match="nested more than 200 levels deep"):
        encode(nested(201))


@pytest.mark.parametrize(("expected", "right", "wrong"), [(True, True, (False, 1, None)), (1, 1, (True, None))])
def test_truth_is_no_number_in_json(expected, right, wrong):
    case = PlainCase("json", expected, "f", args=[], kwargs={})
    assert case.holds(json.dumps([right]).encode())
    assert not any(case.holds(json.dumps([value]).encode()) for value in wrong)


def test_answers_of_a_program_that_ends_or_fails():
    truth = PlainCase("constant", True)
    assert passed_cases([FOUR, FOUR, truth], b"[null]\n[4]\n[4") == [True, False, True]
    assert passed_cases([FOUR, truth], b"") == [False, False]
    assert passed_cases([FOUR], b"[null]\n[4]\n[4]\n[4]\n") == [True]


def test_the_first_failure_is_seen_and_another_try_begins_anew():
    has_failed = HasFailed([PlainCase("constant", True), FOUR, FOUR])
    answers = bytearray()
    for part, expected in ((b"[null]\n[4]", False), (b"\n[", False), (b"5]\n[4]\n", True)):
        answers += part
        assert has_failed(answers) is expected
    assert not has_failed(bytearray(b"[null]\n[4]\n[4]\n[9]\n"))
    assert has_failed(bytearray(b"[null]\n[5]\n"))


# -- programs ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("test", "code", "value"),
    [
        ("assert f(2) == 4", "class Four(int): pass\ndef f(x): return Four(4)", 1.0),
        (
            "assert f(2) == (1, 2)",
            "from collections import namedtuple\ndef f(x): return namedtuple('P', 'a b')(1, 2)",
            1.0,
        ),
        ("assert f(2) == {'a': 2}", "from collections import Counter\ndef f(x): return Counter('aa')", 1.0),
        ("assert f(2) == [0, 1]", "def f(x): yield from range(x)", 0.0),
        ("assert f(2)", "import re\ndef f(x): return re.match('a', 'a')", 1.0),
        ("assert not f(2)", "import re\ndef f(x): return re.match('a', 'a')", 0.0),
        ("assert f(2) == None", "class None_:\n    def __eq__(self, x): return True\ndef f(x): return None_()", 0.0),
        ("assert f(2) is None", "def f(x): pass", 1.0),
        ("assert f(2) is True", "def f(x): return 1", 0.0),
        ("assert f(2) == 10**0", "def f(x): return 1", 1.0),
        ("assert f(b'a', {1, 2}, (3,), 1j, None) == (b'a', {1, 2}, (3,), 1j, None)", "def f(*x): return x", 1.0),
        ("assert f(2) == 4", "def f(x):\n    raise SystemExit(0)", 0.0),
        ("assert f(2) == 4", "import sys\nsys.stdout.close()\nsys.stderr.close()\ndef f(x): return 4", 1.0),
    ],
)
def test_what_programs_return(reward, test, code, value):
    assert reward(prompt(test_list=[test]), fenced(code)) == value


def test_a_program_has_no_expected_value_in_its_memory(reward):
    code = """
import gc, sys
def f(x):
    frame, found = sys._getframe(), []
    while frame is not None:
        found.append(str(frame.f_locals))
        frame = frame.f_back
    found += [str(one) for one in gc.get_objects() if isinstance(one, (dict, list, tuple, str))]
    text = "".join(found)
    for name in ("maps",):
        for line in open("/proc/self/" + name):
            start, end = (int(part, 16) for part in line.split()[0].split("-"))
            if " rw" in line and end - start < 2**27:
                try:
                    with open("/proc/self/mem", "rb", 0) as memory:
                        memory.seek(start)
                        text += memory.read(end - start).decode("latin1")
                except OSError:
                    pass
    return "sesame" + str(2355 * 2 + 1) in text
"""
    assert reward(prompt(test_list=["assert f(1) == False", "assert f(2) == 'sesame4711'"]), fenced(code)) == 0.0
    if not levels():
        pytest.skip("the program reads more memory than the limits of a process allow")
    seen = rl.CodeReward(**LIMIT, partial_credit=True)
    # half: the first call has found nothing, the second does not return the text
    assert seen(prompt(test_list=["assert f(1) == False", "assert f(2) == 'sesame4711'"]), fenced(code)) == 0.5
    seen.close()


def test_the_first_wrong_value_ends_the_program(reward):
    given = prompt(inputs=[[n] for n in range(3)], outputs=[0, 7, 2], fn_name="f")
    before = reward.metrics()["code/num_wrong"]
    began = time.monotonic()
    assert reward(given, fenced("import time\ndef f(x):\n    time.sleep(30 if x == 2 else 0)\n    return x")) == 0.0
    assert time.monotonic() - began < LIMITS.wall_s - 2
    assert reward.metrics()["code/num_wrong"] == before + 1


def test_partial_credit_counts_plain_and_weak_tests(partial):
    given = prompt(test_list=["assert f(1) == 2", "assert f(2) in (4, 5)", "assert f(3) == 6", "assert f(4) > 7"])
    for code, value in (
        ("def f(x): return 2 * x", 1.0),
        ("def f(x): return 2 * x if x < 3 else 0", 0.5),
        ("def f(x): return 2 * x if x > 1 else x / 0", 0.75),
        ("import os\ndef f(x): return 2 * x if x < 3 else os._exit(0)", 0.25),
        ("x = 1", 0.0),
    ):
        assert partial(given, fenced(code)) == value, code


def test_long_answers(reward):
    long = prompt(inputs=[[300_000]], outputs=[[0] * 300_000], fn_name="f")
    assert reward(long, fenced("def f(n): return [0] * n")) == 1.0
    assert reward(long, fenced("def f(n): return (0,) * n")) == 1.0
    assert reward(long, fenced("def f(n): return [1] * n")) == 0.0
    before = reward.metrics()["code/num_output"]
    assert reward(prompt(test_list=["assert f(1) == 2"]), fenced("def f(n): return 'x' * 10**7")) == 0.0
    assert reward.metrics()["code/num_output"] == before + 1


# -- weak tests are counted, or refused -------------------------------------------------------------------------------

WEAK = "assert f(2) in (4, 5)"


def test_prompts_with_weak_tests_are_refused():
    made = rl.CodeReward(**LIMIT, tests="plain")
    assert made.check_prompt(prompt(test_list=["assert f(2) == 4"]))
    assert made.check_prompt(prompt(inputs=["1"], outputs=["1"]))
    assert not made.check_prompt(prompt(text="no cases"))
    right = fenced("def f(x): return 2 * x")
    assert made(prompt(test_list=["assert f(2) == 4"]), right) == 1.0
    weak = prompt(test_list=["assert f(1) == 2", WEAK])
    words = r"CodeReward.tests=plain refuses the prompt: its tests 'assert f\(2\) in \(4, 5\)' are weak"
    with pytest.raises(ValueError, match=words):
        made.check_prompt(weak)
    with pytest.raises(FinalRewardError, match=words):
        made(weak, right)
    made.close()
    first = rl.CodeReward(**LIMIT, tests="plain", max_cases=1)
    assert first.check_prompt(weak)  # the weak one is not used
    first.close()


@pytest.mark.slow
def test_prompts_with_weak_tests_are_counted_once(tmp_path, caplog):
    rows = tmp_path / "rows.jsonl"
    tests = [["assert f(2) == 4"], [WEAK], ["assert f(2) == 4", WEAK]]
    rows.write_text("".join(json.dumps({"prompt": str(n), "test_list": one}) + "\n" for n, one in enumerate(tests)))
    settings = dict(max_steps=1, groups_per_step=1, group_size=2, sampling={"max_tokens": 2}, logger=False)
    settings |= dict(accelerator="cpu", devices=1, enable_progress_bar=False, enable_checkpointing=False)

    def run(mode, on_bad_prompt="error"):
        source = rl.JsonlPrompts(str(rows), answer_field=None, on_bad_prompt=on_bad_prompt)
        reward = rl.CombinedReward({"code": rl.CodeReward(**LIMIT, tests=mode)})
        caplog.clear()
        with caplog.at_level(logging.INFO):
            rl.fit(rl.asset("small_sort_policy"), source, reward, **settings)
        return [one.getMessage() for one in caplog.records if "weak tests" in one.getMessage()]

    (line,) = run("apart")
    assert line.startswith("CodeReward: 2 of 3 prompts have weak tests, which a program can pass without")
    (line,) = run("together")
    assert line.startswith("CodeReward: 3 of 3 prompts have weak tests")
    assert run("plain", "skip") == [
        "CodeReward: 0 of 1 prompts have weak tests, which a program can pass without solving the task"
    ]
    with pytest.raises(ValueError, match=r"rows.jsonl.*2.*CodeReward.tests=plain refuses the prompt"):
        run("plain")


def test_a_program_does_not_change_what_is_weak(reward):
    given = prompt(test_list=["assert f(2) == 4"], entry_point="f")
    codes = ["class Solution:\n    def f(self, x): return 2 * x", "def f(x): return 4", "candidate = check = set = 0"]
    before = reward.metrics()["code/num_weak"]
    for code in codes:
        reward(given, fenced(code))
    assert reward.metrics()["code/num_weak"] == before
    assert read_cases(given).asserts == ("assert f(2) == 4",)


@pytest.mark.parametrize("kind", ["reward", "partial"])
def test_a_forged_verdict_without_a_test_is_worth_nothing(kind, request, monkeypatch):
    forged = {"mark": "the mark", "passed": [], "failure": None}
    monkeypatch.setattr("lit_async_rl.sandbox.code.secrets.token_hex", lambda size: "the mark")
    monkeypatch.setattr("lit_async_rl.sandbox.code._verdict", lambda text: forged)
    asked = prompt(
        tests="def check(candidate):\n    for n in range(3):\n        assert candidate(n) == n\n", entry_point="f"
    )
    assert request.getfixturevalue(kind)(asked, fenced("def f(n):\n    return 7\n")) == 0.0
