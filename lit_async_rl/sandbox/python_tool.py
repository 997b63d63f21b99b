"""A tool for environments: the policy writes Python programs, and reads their output."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import re
import textwrap
from collections.abc import Sequence
from typing import Literal

from lit_async_rl.environments.base import Environment, Episode, Observation
from lit_async_rl.problem import Prompt
from lit_async_rl.rewards.calls import Reward, check_reward, score
from lit_async_rl.rewards.forms import as_reward_function
from lit_async_rl.rewards.functions import exact_match
from lit_async_rl.rewards.scorer import Awaiter
from lit_async_rl.runtime.guarded_calls import in_thread
from lit_async_rl.runtime.threads import ThreadPool
from lit_async_rl.sandbox.program import Program, ProgramResult, SandboxLimits, signal_name
from lit_async_rl.sandbox.sandbox import Sandbox
from lit_async_rl.utils.checks import check_range

CALL = (
    # text such as `</think>` may stand before a block of Python on its line; a fence without a language may as well end
    # a block, or be an answer's
    r"(?m:^)(?P<indent>[ \t]*)(?![ \t])(?:```(?:python|py)?|[^\n]*?```(?:python|py))[ \t]*\n"
    # no line of the code is a fence as far in as the block's, or opens a block behind text: it would begin with an
    # earlier block of the turn
    r"(?P<code>(?:(?!(?m:^)(?:(?P=indent)? {0,3}```|[ \t]*[^ \t\n`][^\n]*?```(?:python|py)[ \t]*\n)).)*?)"
    r"(?<![ \t])[ \t]*```[ \t\n]*$"  # spaces are tried from their first one on: their number does not square
)


class PythonTool(Environment):
    r"""Runs the program at the end of a turn, and answers with its output; any other turn is the final answer.

    Each program starts afresh in a sandbox, without anything of an earlier turn. The value of a final expression is
    printed, as in a notebook.

    Example:
        ```python
        import asyncio

        import lit_async_rl as rl


        async def play() -> tuple[str, float]:
            tool = rl.PythonTool(allow_unsandboxed=True)
            episode = await tool.start(rl.Prompt(text="What is 12 factorial?", answer="479001600"))
            said = await episode.step("```python\nimport math\nmath.factorial(12)\n```")
            end = await episode.step("479001600")
            await tool.close()
            return said.text, end.reward


        assert asyncio.run(play()) == ("\n```output\n479001600\n```\n", 1.0)
        ```

    Args:
        reward: of the final answer, `reward(prompt, completion)`; None is `exact_match`.
        max_calls: programs per episode; a further one ends it with reward 0.
        max_chars: of an answer; a longer one loses its middle.
        pattern: regular expression of a turn that is a call, with a group `code`.
        template: text around the answer, with `{output}`.
        max_concurrent: programs running at a time, of all episodes.
        limits: of each program.
        level: of isolation, see `Sandbox`.
        allow_unsandboxed: see `Sandbox`.
        python_path: see `Sandbox`.
        preload: see `Sandbox`.

    Raises:
        SetupError: there is no sandbox on this machine, and `allow_unsandboxed` is false.
        ValueError: a setting is out of range.
    """

    def __init__(
        self,
        reward: Reward | None = None,
        max_calls: int = 4,
        max_chars: int = 2000,
        pattern: str = CALL,
        template: str = "\n```output\n{output}\n```\n",
        max_concurrent: int = 16,
        limits: SandboxLimits = SandboxLimits(),  # noqa: B008  frozen
        level: Literal["auto", "bubblewrap", "namespace", "limits"] = "auto",
        allow_unsandboxed: bool = False,
        python_path: Sequence[str] = (),
        preload: Sequence[str] = (),
    ) -> None:
        check_range("PythonTool", "integer positive", max_calls=max_calls, max_concurrent=max_concurrent)
        check_range("PythonTool", "integer >= 20", max_chars=max_chars)
        if "code" not in re.compile(pattern).groupindex:
            raise ValueError(f"PythonTool.pattern must have a group named code, got {pattern!r}")
        if "{output}" not in template:
            raise ValueError(f"PythonTool.template must have {{output}}, got {template!r}")
        reward = reward or exact_match
        check_reward(reward, "PythonTool.reward")
        self.reward = as_reward_function(reward)
        self.max_calls = max_calls
        self.max_chars = max_chars
        self.pattern = pattern
        self.template = template
        self.limits = dataclasses.asdict(limits)
        self.python_path = list(python_path)
        self.preload = list(preload)
        self._max_concurrent = max_concurrent
        self._sandbox = Sandbox(
            level=level,
            allow_unsandboxed=allow_unsandboxed,
            limits=limits,
            python_path=python_path,
            preload=preload,
        )
        self._sandbox.announce("PythonTool")
        self._threads: ThreadPool | None = None
        self._awaiter = Awaiter(60.0, self.reward)

    async def start(self, prompt: Prompt) -> PythonEpisode:
        """Starts an episode for one prompt."""
        if self._threads is None:
            self._threads = ThreadPool(self._max_concurrent, name="python-tool")
        return PythonEpisode(self, prompt)

    async def run(self, code: str) -> str:
        """Runs a program; returns its output and its failure, at most `max_chars`.

        Raises:
            SandboxError: the sandbox failed.
        """
        program = Program(source=code, shows_last=True)
        result = await in_thread(self._threads, functools.partial(self._sandbox.run, program))
        return shortened(described(result), self.max_chars)

    async def final_reward(self, prompt: Prompt, completion: str) -> float:
        """Reward of the last turn."""
        call = functools.partial(score, self.reward, prompt, completion, wait=self._awaiter.wait)
        return await in_thread(self._threads, call)

    async def close(self) -> None:
        """Ends the sandbox's processes and an async reward's event loop; a later episode starts new ones."""
        threads = self._threads
        self._threads = None
        if threads is not None:
            threads.shutdown(cancel_futures=True)
        try:
            await asyncio.get_running_loop().run_in_executor(None, self._sandbox.close)
        finally:
            await asyncio.to_thread(self._awaiter.close)


class PythonEpisode(Episode):
    """An episode with a Python tool.

    Args:
        tool: that it uses.
        prompt: of the episode.
    """

    def __init__(self, tool: PythonTool, prompt: Prompt) -> None:
        self._tool = tool
        self._prompt = prompt
        self._calls_left = tool.max_calls

    async def step(self, completion: str) -> Observation:
        """Runs the program of a turn, or scores the final answer."""
        call = re.search(self._tool.pattern, completion, re.DOTALL)
        if call is None:
            return Observation(reward=await self._tool.final_reward(self._prompt, completion), done=True)
        if not self._calls_left:
            return Observation(done=True)
        self._calls_left -= 1
        code = call["code"]
        if code.lstrip("\n")[:1].isspace():  # in a list; other code keeps its lines of spaces, which `dedent` empties
            code = textwrap.dedent(code)
        return Observation(text=self._tool.template.replace("{output}", await self._tool.run(code)))

    async def step_cut(self, completion: str) -> Observation:
        """Ends the episode: a turn that was cut is no answer, and half a program is not run."""
        return Observation(done=True)


def described(result: ProgramResult) -> str:
    """Result of a program for the policy: output, last line of its error, and cause of its end."""
    parts = [result.stdout.rstrip()]
    if result.verdict != "ended":
        parts.append(f"(ended: too much {'time' if result.verdict == 'time' else result.verdict})")
    elif result.status:
        error = result.stderr.strip().rpartition("\n")[2]
        parts.append(error or f"({signal_name(result.status)})")
    return "\n".join(part for part in parts if part)


def shortened(text: str, max_chars: int) -> str:
    """A text without its middle, if it is longer than that."""
    if len(text) <= max_chars:
        return text
    mark = "\n...\n"
    half = (max_chars - len(mark)) // 2
    return text[:half] + mark + text[len(text) - half :]
