"""`CodeReward`: runs the code of a completion on test cases, in a sandbox."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import json
import logging
import re
import secrets
import threading
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from lit_async_rl.errors import FinalRewardError, RewardError
from lit_async_rl.problem import Prompt
from lit_async_rl.rewards.references import References
from lit_async_rl.sandbox.code_cases import Block, Cases, agrees, last_block, read_cases, solution_of
from lit_async_rl.sandbox.plain_tests import (
    HasFailed,
    SplitTests,
    as_calls,
    passed_cases,
    room_for_answers,
    split_tests,
)
from lit_async_rl.sandbox.program import Program, ProgramResult, SandboxError, SandboxLimits
from lit_async_rl.sandbox.sandbox import Sandbox
from lit_async_rl.utils.checks import check_choice, check_range, meant
from lit_async_rl.utils.elsewhere import Rebuildable

PYTHON = "python"
LANGUAGES = {
    "javascript": "node main.js",
    "bash": "bash main.sh",
    "perl": "perl main.pl",
    "ruby": "ruby main.rb",
    "c": "gcc -O1 -o program main.c -lm && exec ./program",
    "cpp": "g++ -O1 -std=c++17 -o program main.cpp && exec ./program",
}
FENCE = "~" * 8
RECENT = 1000  # completions in the latency statistics
OUTCOMES = ("right", "wrong", "no_code", "time", "memory", "output", "failed")
log = logging.getLogger(__name__)


@dataclass
class _Call:
    began: float = field(default_factory=time.monotonic)
    is_counted: bool = True


class CodeReward(Rebuildable):
    r"""1 if the code of a completion passes the test cases of its prompt, else 0; or the share that it passes.

    The code is the completion's last closed fenced block (three backticks or tildes); without one the reward is 0. The
    cases are in the prompt's record or answer, see `read_cases`; without any, the reward does not apply (None, for one
    of several rewards).

    The trainer compares standard output, and what functions return to calls with plain values: a program can neither
    read what is expected nor claim to be right. Other unit tests are *weak*: they run beside the program, which can
    forge what they find, see `lit_async_rl.sandbox.plain_tests`.

    Example:
        ```python
        import lit_async_rl as rl

        reward = rl.CodeReward(allow_unsandboxed=True)
        prompt = rl.Prompt(text="Write double(x).", metadata={"test_list": ["assert double(2) == 4"]})
        assert reward(prompt, "```python\ndef double(x):\n    return 2 * x\n```") == 1.0
        reward.close()
        ```

    Args:
        language: of a block that names none, and of whole completions.
        languages: command for `/bin/sh` by the language name of a fence, besides `LANGUAGES`; it names the code's file,
            `main.` and a suffix. Only Python supports cases other than standard input and output.
        extract: `fence`; or `whole`: all of the completion, for models that continue code.
        partial_credit: whether the reward is the share of cases passed; else the first failure skips the rest.
        tests: `apart`: the trainer compares calls with plain values, other unit tests are weak; `plain`: likewise, but
            a prompt with weak tests is refused; `together`: all unit tests run beside the program, and are weak.
        compare: of standard output: `lines` (without space at the ends of lines and of the text), `tokens` (word for
            word) or `exact`.
        tolerance: with `lines` and `tokens`, greatest difference of numbers, absolute or relative; 0 compares texts.
        max_cases: number of cases per prompt, from the first on; None is all.
        timeout_s: time limit for all cases of a completion; must be less than `data.scoring.timeout_s`.
        limits: of each program.
        level: level of isolation, see `Sandbox`.
        allow_unsandboxed: whether resource limits suffice where namespaces are unavailable.
        readable: see `Sandbox`.
        python_path: see `Sandbox`.
        preload: see `Sandbox`.
        name: prefix of its metrics.

    Raises:
        SetupError: there is no sandbox on this machine, and `allow_unsandboxed` is false.
        ValueError: a setting is out of range, or a language's command is not installed.
    """

    def __init__(
        self,
        language: str = PYTHON,
        languages: Mapping[str, str] | None = None,
        extract: Literal["fence", "whole"] = "fence",
        partial_credit: bool = False,
        tests: Literal["apart", "plain", "together"] = "apart",
        compare: Literal["lines", "tokens", "exact"] = "lines",
        tolerance: float = 0.0,
        max_cases: int | None = None,
        timeout_s: float = 30.0,
        limits: SandboxLimits = SandboxLimits(),  # noqa: B008  frozen
        level: Literal["auto", "bubblewrap", "namespace", "limits"] = "auto",
        allow_unsandboxed: bool = False,
        readable: Sequence[str] = (),
        python_path: Sequence[str] = (),
        preload: Sequence[str] = (),
        name: str = "code",
    ) -> None:
        check_choice("CodeReward", ("fence", "whole"), extract=extract)
        check_choice("CodeReward", ("apart", "plain", "together"), tests=tests)
        check_choice("CodeReward", ("lines", "tokens", "exact"), compare=compare)
        check_range("CodeReward", ">= 0 and finite", tolerance=tolerance)
        check_range("CodeReward", "integer positive", max_cases=max_cases)
        check_range("CodeReward", "positive", timeout_s=timeout_s)
        if not name.isidentifier():
            raise ValueError(f"CodeReward.name must be a Python identifier, got {name!r}")
        # Arguments that rewards depend on are public under their own name, for `reward_identity`; all else is private.
        self.language = language
        self.languages = dict(languages or {})
        self.extract = extract
        self.partial_credit = partial_credit
        self.tests = tests
        self.compare = compare
        self.tolerance = tolerance
        self.max_cases = max_cases
        self.limits = dataclasses.asdict(limits)
        self.python_path = list(python_path)
        self.preload = list(preload)
        self._limits = limits
        self._timeout_s = timeout_s
        self._name = name
        self._sandbox = Sandbox(
            level=level,
            allow_unsandboxed=allow_unsandboxed,
            limits=limits,
            readable=readable,
            python_path=python_path,
            preload=preload,
        )
        self._commands = {**LANGUAGES, **self.languages}
        try:
            self._check_languages()
        except ValueError:
            self._sandbox.close()
            raise
        self._lock = threading.Lock()  # guards the next six
        self._num_checked = 0
        self._num_weak_checked = 0
        self._counts: Counter[str] = Counter()  # of completions by outcome, of those with weak tests, of programs
        self._cpu_s = 0.0
        self._seconds: deque[float] = deque(maxlen=RECENT)
        self._warnings: set[str] = set()
        self._sandbox.announce("CodeReward")

    def _check_languages(self) -> None:
        for language in {*self.languages, self.language} - {PYTHON}:
            if language not in self._commands:
                known = [PYTHON, *self._commands]
                raise ValueError(f"CodeReward.language={language!r} is not known{meant(language, known)}")
            command = self._commands[language]
            if _program_file(command) is None:
                raise ValueError(
                    f"CodeReward.languages.{language}={command!r} must contain the program's file name, main.SUFFIX, "
                    "as a word of its own"
                )
            if not self._sandbox.has_command(program := command.split()[0]):
                raise ValueError(
                    f"CodeReward: {language} needs {program}, which is not in a folder that programs can read: add its "
                    "folder to CodeReward.readable"
                )

    @property
    def call_timeout_s(self) -> float:
        """Time limit of a call."""
        return self._timeout_s

    @property
    def sandbox(self) -> Sandbox:
        """Sandbox of the programs."""
        return self._sandbox

    def __call__(self, prompt: Prompt, completion: str) -> float | None:
        """Reward of a completion; None for a prompt without test cases.

        Raises:
            RewardError: the sandbox failed.
            FinalRewardError: the test cases of the prompt cannot be read, or test nothing.
        """
        return self._reward(prompt, completion, _Call())

    def _reward(self, prompt: Prompt, completion: str, call: _Call) -> float | None:
        try:
            cases, tests = self._read(prompt)
        except ValueError as error:
            raise FinalRewardError(str(error)) from error
        if not cases:
            return None
        block = Block("", completion) if self.extract == "whole" else last_block(completion)
        if block is None:
            self._count("no_code", call)
            return 0.0
        language = block.language or self.language
        try:
            value, outcome = self._score(prompt, cases, tests, block=replace(block, language=language), call=call)
        except SandboxError as error:
            raise RewardError(str(error)) from error
        self._count(outcome, call, is_weak=tests.is_weak)
        return value

    def check_prompt(self, prompt: Prompt) -> Cases:
        """Test cases of a prompt; called for each prompt at the start of a run.

        Raises:
            ValueError: the cases cannot be read, or test nothing; or they are weak, and `tests` is `plain`.
        """
        cases, tests = self._read(prompt)
        with self._lock:
            self._num_checked += bool(cases)
            self._num_weak_checked += tests.is_weak
        return cases

    def end_check(self) -> None:
        """Logs how many prompts of the check at the start have weak tests."""
        with self._lock:
            counts = self._num_weak_checked, self._num_checked
            self._num_checked = self._num_weak_checked = 0
        if counts[1]:
            log.log(
                logging.WARNING if counts[0] else logging.INFO,
                "CodeReward: %d of %d prompts have weak tests, which a program can pass without solving the task%s",
                *counts,
                "; CodeReward.tests=plain refuses such prompts" if counts[0] else "",
            )

    def _read(self, prompt: Prompt) -> tuple[Cases, SplitTests]:
        try:
            cases = read_cases(prompt)
            limit = self.max_cases
            tests = self._split(
                replace(cases, asserts=cases.asserts[:limit], calls=cases.calls[:limit]),
                head_of(prompt, cases.function),
            )
        except (ValueError, TypeError, AttributeError) as error:
            raise ValueError(f"CodeReward cannot use the test cases of the prompt: {error}") from error
        if tests.is_weak and self.tests == "plain":
            weak = "\n".join([*tests.weak.asserts, tests.weak.check]).strip()
            raise ValueError(
                f"CodeReward.tests=plain refuses the prompt: its tests {weak!r:.200} are weak (a plain test "
                "compares the result of one call with a literal), so a program can pass them without solving the task"
            )
        return cases, tests

    def _split(self, cases: Cases, head: str | None) -> SplitTests:
        if cases.streams:
            return SplitTests()
        if self.tests != "together":
            return split_tests(cases, head or "")
        calls = split_tests(replace(cases, asserts=(), check=""))
        return replace(calls, weak=replace(cases, calls=()))

    def ask_references(self) -> References:
        """Solutions from the prompts' records, and programs that do nothing, for the check at the start."""
        return References(self._solution, partial_credit=True, wrong=self._nothing, reward=self._uncounted_reward)

    def metrics(self) -> dict[str, float]:
        """Totals so far, and latencies of recent completions."""
        with self._lock:
            found = {f"{self._name}/num_{key}": float(self._counts[key]) for key in (*OUTCOMES, "weak", "programs")}
            if num_programs := self._counts["programs"]:
                found[f"{self._name}/cpu_s"] = self._cpu_s / num_programs
            if self._seconds:
                found[f"{self._name}/latency_s"] = sum(self._seconds) / len(self._seconds)
        return found

    def close(self) -> None:
        """Ends the processes of the sandbox; a later call starts new ones."""
        self._sandbox.close()

    # -- check at the start -------------------------------------------------------------------------------------------

    def _uncounted_reward(self, prompt: Prompt, completion: str) -> float:
        return self._reward(prompt, completion, _Call(is_counted=False)) or 0.0

    def _solution(self, prompt: Prompt) -> str | None:
        cases = self._checkable(prompt)
        code = solution_of(prompt)
        if cases is None or code is None:
            return None
        if (name := cases.function) is not None:
            pattern = rf"^({re.escape(name)}\s*[:=]|\s*(async\s+)?(def|class)\s+({re.escape(name)}|Solution)\b)"
            if not re.search(pattern, with_head(code, prompt, name)[1], re.MULTILINE):
                return None  # a function body; the prompt does not have the head as code
        return self._completion(code)

    def _nothing(self, prompt: Prompt) -> tuple[str, str] | None:
        if (cases := self._checkable(prompt)) is None:
            return None
        code = "pass" if cases.function is None else f"def {cases.function}(*_, **__):\n    pass"
        return self._completion(code), "a program that does nothing"

    def _checkable(self, prompt: Prompt) -> Cases | None:
        with contextlib.suppress(ValueError):  # refused with an error elsewhere
            if self.language == PYTHON and (cases := self._read(prompt)[0]):
                return cases
        return None

    def _completion(self, code: str) -> str:
        return code if self.extract == "whole" else f"{FENCE}{PYTHON}\n{code}\n{FENCE}\n"

    # -- scoring ------------------------------------------------------------------------------------------------------

    def _score(self, prompt: Prompt, cases: Cases, tests: SplitTests, block: Block, call: _Call) -> tuple[float, str]:
        """Reward, and the outcome for the counts."""
        if cases.streams:
            return self._score_streams(cases.streams[: self.max_cases], block, call)
        if block.language != PYTHON:
            return 0.0, "failed"
        head, code = with_head(block.code, prompt, cases.function)
        # also before the tests: they must use the problem's helpers, not the program's
        weak = replace(tests.weak, setup=f"{head}\n{tests.weak.setup}")
        return self._score_tests(replace(tests, weak=weak), code, call)

    def _score_streams(self, streams: Sequence[tuple[str, str]], block: Block, call: _Call) -> tuple[float, str]:
        command = None
        file = "main.py"
        if block.language != PYTHON:
            command = self._commands.get(block.language)
            if command is None:
                return 0.0, "failed"
            file = _program_file(command) or file
        num_passed = 0
        outcome = "right"
        for stdin, expected in streams:
            if (limits := self._limits_now(call)) is None:
                outcome = "time"
                break
            program = Program(source=block.code, stdin=stdin, command=command, file=file)
            result = self._note(self._sandbox.run(program, limits), call)
            if result.is_ok and agrees(result.stdout, expected, compare=self.compare, tolerance=self.tolerance):
                num_passed += 1
                continue
            outcome = _outcome(result)
            if not self.partial_credit:
                break
        return self._value(num_passed, len(streams)), outcome

    def _score_tests(self, tests: SplitTests, code: str, call: _Call) -> tuple[float, str]:
        num_passed = number = 0
        outcome = "right"
        for run, is_there in ((self._run_plain, tests.plain), (self._run_weak, tests.is_weak)):
            if not is_there:
                continue
            if (limits := self._limits_now(call)) is None:
                number += max(len(tests.weak.asserts), 1)
                outcome = "time"
                break
            passed, result = run(tests, code, limits=limits)
            self._note(result, call)
            num_passed += sum(passed)
            number += len(passed)
            if not all(passed):
                outcome = _outcome(result)
                if not self.partial_credit:
                    break
        if not number:  # a program beside its tests said that there are none
            return 0.0, "wrong"
        return self._value(num_passed, number), outcome

    def _run_plain(self, tests: SplitTests, code: str, limits: SandboxLimits) -> tuple[list[bool], ProgramResult]:
        """Calls functions of the program, and compares what they return."""
        stops = not self.partial_credit
        doc = {"program": code, "calls": as_calls(tests.plain), "function": tests.function, "stops": stops}
        program = Program(source=json.dumps(doc), kind="calls", answer_bytes=room_for_answers(tests.plain))
        has_failed = HasFailed(tests.plain)
        result = self._sandbox.run(program, limits, is_enough=lambda answers: stops and has_failed(answers))
        return passed_cases(tests.plain, result.channel), result

    def _run_weak(self, tests: SplitTests, code: str, limits: SandboxLimits) -> tuple[list[bool], ProgramResult]:
        """Runs tests beside the program, which can forge their verdict."""
        weak = tests.weak
        mark = secrets.token_hex(16)
        doc = {
            "mark": mark,
            "program": code,
            "setup": weak.setup,
            "cases": list(weak.asserts),
            "check": weak.check,
            "is_rest": tests.is_rest,
            "function": tests.function,
            "stops": not self.partial_credit,
        }
        result = self._sandbox.run(Program(source=json.dumps(doc), kind="tests"), limits)
        verdict = _verdict(result.channel.decode(errors="replace"))
        if verdict.get("mark") != mark:
            verdict = {"passed": []}
        passed = [one is True for one in verdict["passed"]]
        failure = str(verdict.get("failure"))[:200]
        if "ModuleNotFoundError" in failure:
            hint = "CodeReward.python_path names folders of packages"
            self._warn_once("tests import a module that the sandbox does not have, and fail", failure, hint)
        missing = len(weak.asserts) - len(passed)
        if not passed and verdict.get("failure", "") is not None:
            missing = max(missing, 1)
        return passed + [False] * missing, result

    def _value(self, num_passed: int, number: int) -> float:
        return num_passed / number if self.partial_credit else float(num_passed == number)

    def _limits_now(self, call: _Call) -> SandboxLimits | None:
        """Limits for a program that starts now; None when the completion's time is up."""
        left_s = self._timeout_s - (time.monotonic() - call.began)
        return replace(self._limits, wall_s=min(self._limits.wall_s, left_s)) if left_s > 0 else None

    def _note(self, result: ProgramResult, call: _Call) -> ProgramResult:
        with self._lock:
            self._counts["programs"] += call.is_counted
            self._cpu_s += result.cpu_s * call.is_counted
        return result

    def _count(self, outcome: str, call: _Call, is_weak: bool = False) -> None:
        if not call.is_counted:
            return
        with self._lock:
            self._counts[outcome] += 1
            self._counts["weak"] += is_weak
            self._seconds.append(time.monotonic() - call.began)

    def _warn_once(self, problem: str, failure: str, hint: str) -> None:
        with self._lock:
            has_warned = problem in self._warnings
            self._warnings.add(problem)
        if not has_warned:
            log.warning("%s (%s): %s", problem, failure, hint)


def head_of(prompt: Prompt, function: str | None) -> str | None:
    """Code of a prompt before its function; None where other text stands there."""
    if function is None:
        return None
    start = _definition(function, prompt.text)
    if start is None:
        return None
    head = prompt.text[: start.start()]
    try:
        ast.parse(head)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    return head


def _definition(function: str, code: str) -> re.Match[str] | None:
    return re.search(rf"^(async )?def {re.escape(function)}\(", code, re.MULTILINE)


def with_head(code: str, prompt: Prompt, function: str | None) -> tuple[str, str]:
    """Code of the prompt before a function, and the program after it, combined as HumanEval does.

    Code with the function follows the prompt's imports and helpers; other code follows the function's head, as its
    body. Prompts without a head (see `head_of`) are ignored.
    """
    head = head_of(prompt, function)
    if function is None or head is None or "class Solution" in code:
        return "", code
    if _definition(function, code):
        return head, f"{head}\n{code}"
    body = code if code[:1].isspace() else "".join(f"    {line}" for line in code.splitlines(keepends=True))
    return head, f"{prompt.text.rstrip()}\n{body}"


def _verdict(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) and isinstance(found.get("passed"), list) else {}


def _program_file(command: str) -> str | None:
    """The program's file in the command of a language; None without one."""
    words = command.replace(";", " ").split()
    return next((word for word in words if re.fullmatch(r"main\.[\w.+-]+", word)), None)


def _outcome(result: ProgramResult) -> str:
    """How the failure of a program is counted."""
    if result.verdict in ("time", "output"):
        return result.verdict
    if result.verdict in ("memory", "processes") or "MemoryError" in result.stderr[-200:]:
        return "memory"
    is_failed = result.status != 0 and result.verdict == "ended"
    return "failed" if is_failed else "wrong"
