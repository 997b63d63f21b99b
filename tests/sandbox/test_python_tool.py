"""The Python tool: what the policy reads, and that each program starts anew."""

from __future__ import annotations

import asyncio
import re
import threading

import pytest
from sandboxes import LIMITS, levels

import lit_async_rl as rl
from lit_async_rl.sandbox.python_tool import CALL, shortened

pytestmark = pytest.mark.skipif(not levels("limits"), reason="needs Linux or macOS")
LIMIT = {"limits": LIMITS, "allow_unsandboxed": not levels()}


def played(turns, **settings):
    """Observations of an episode."""

    async def play():
        tool = rl.PythonTool(**{**LIMIT, **settings})
        try:
            episode = await tool.start(rl.Prompt(text="?", answer="42"))
            return [await episode.step(turn) for turn in turns]
        finally:
            await tool.close()

    return asyncio.run(play())


def call(code):
    return f"I think:\n```python\n{code}\n```"


def test_the_policy_reads_what_programs_print():
    turns = [
        call("x = 6\nprint('hi')\nx * 7"),
        call("x"),
        call("import sys; sys.exit('bad')"),
        call("import os; os.kill(os.getpid(), 11)"),
        "- so\n    ```python\n    y = 3\n    print(y)\n    ```",
        call('s = """a\n   \nb"""\nprint(len(s))'),
    ]
    texts = [one.text for one in played([*turns, "42"], max_calls=6)]
    assert texts[0] == "\n```output\nhi\n42\n```\n"
    assert "NameError: name 'x' is not defined" in texts[1]
    assert "bad" in texts[2]
    assert any(words in texts[3] for words in ("SIGSEGV", "ended", "PermissionError"))  # the last without namespaces
    assert texts[4] == "\n```output\n3\n```\n"  # of a block that is indented in a list
    assert texts[5] == "\n```output\n7\n```\n"


DOCUMENTED = """
    '''Example:

    ```python
    f()
    ```
    '''
f()"""


@pytest.mark.parametrize(
    ("turn", "code"),
    [
        (call("print(2)"), "print(2)\n"),
        ("```python\nprint(2)\n```", "print(2)\n"),
        ("```py \nprint(2)```\n\n", "print(2)"),
        ("1.\n   ```\n   print(2)\n   ```", "   print(2)\n"),
        (f"{call('x = 1')}\nThat is not enough, so:\n{call('print(2)')}", "print(2)\n"),
        (f"Data:\n```text\n1 2\n```\nso:\n{call('print(2)')}", "print(2)\n"),
        (f"Data:\n```\n1 2\n```\nso:\n{call('print(2)')}", "print(2)\n"),
        (call("print('```python')"), "print('```python')\n"),
        (f"{call('x = 1')}\nThe answer is 42.", None),
        (f"{call('x = 1')}\nIt prints:\n```text\n1\n```", None),
        ("Let me compute: ```python\nprint(2)\n```", "print(2)\n"),
        ("</think>```python\nprint(2)```", "print(2)"),
        ("- so\n    ```python\n    print(2)\n    ```", "    print(2)\n"),
        ("- so\n    ```python\n    x = 1\n    ```\n- or\n    ```python\n    print(2)\n    ```", "    print(2)\n"),
        ("    ```python\n    x = 1\n```\nso: ```python\nprint(2)\n```", "print(2)\n"),
        ("First: ```python\nx = 1\n```\nThen: ```python\nprint(2)\n```", "print(2)\n"),
        (call(f"def f():{DOCUMENTED}"), f"def f():{DOCUMENTED}\n"),
        ("Answer: ```\n42\n```", None),
        ("x```a```\ny```b```", None),
        ("Data:```text\nfoo ```\n```", None),
        ("```python\nprint(2)", None),
    ],
)
def test_a_turn_is_a_call_of_the_block_at_its_end(turn, code):
    found = re.search(CALL, turn, re.DOTALL)
    assert (None if found is None else found["code"]) == code


def test_a_turn_of_many_blocks_is_read_in_linear_time():
    assert re.search(CALL, "```python\n" * 100_000, re.DOTALL) is None
    assert re.search(CALL, "```python\n" + "``` x" * 100_000, re.DOTALL) is None
    assert re.search(CALL, "```python\n" + " " * 300_000 + "x", re.DOTALL) is None
    assert re.search(CALL, "x ```python\n" * 30_000, re.DOTALL) is None
    for line in ("So ```\n", "  ```\n x", "x```\n\n\n\n\n"):  # 10 s for 30,000 characters were too much
        assert re.search(CALL, line * 30_000, re.DOTALL) is None


def test_the_last_turn_is_the_answer():
    right = played([call("42"), "42"])[-1]
    assert (right.reward, right.done) == (1.0, True)
    assert played(["41"])[-1].reward == 0.0
    own = played(["x"], reward=lambda prompt, completion: 0.25)[-1]
    assert own.reward == 0.25


def of_a_batch(prompts, completions):
    return [float(text == one.answer) for one, text in zip(prompts, completions, strict=True)]


def in_trls_form(completions, answer, **kwargs):
    return [float(text == one) for text, one in zip(completions, answer, strict=True)]


def with_the_completion_first(completion, prompt):
    return float(completion == prompt.answer)


@pytest.mark.parametrize("reward", [of_a_batch, in_trls_form, with_the_completion_first])
def test_the_reward_of_an_answer_may_have_any_form(reward):
    assert [played([answer], reward=reward)[-1].reward for answer in ("42", "41")] == [1.0, 0.0]


def test_a_reward_that_cannot_be_called_is_refused_by_its_name():
    with pytest.raises(ValueError, match=r"^PythonTool\.reward=.* a parameter is missing"):
        played([], reward=lambda completion: 1.0)


def test_an_async_reward_leaves_no_thread_behind():
    threads = []

    async def reward(prompt, completion):
        threads.append(threading.current_thread())
        return 0.5

    assert played(["x"], reward=reward)[-1].reward == 0.5
    assert not threads[0].is_alive()


def test_calls_are_limited():
    first, second = played([call("1"), call("2")], max_calls=1)
    assert not first.done
    assert (second.done, second.reward) == (True, 0.0)


def test_long_outputs_and_long_programs_are_cut():
    found = played([call("print('a' * 10**5)"), call("while True: print('x' * 10**5)")], max_chars=100)
    assert len(found[0].text) < 130
    assert "..." in found[0].text
    assert found[1].text.endswith("(ended: too much output)\n```\n")
    spin = played([call("while True: pass")], limits=rl.SandboxLimits(wall_s=0.3))[0]
    assert "too much time" in spin.text
    assert shortened("abc", 3) == "abc"


def test_a_turn_that_was_cut_runs_nothing():
    async def play():
        tool = rl.PythonTool(**LIMIT)
        episode = await tool.start(rl.Prompt(text="?", answer="42"))
        found = await episode.step_cut(call("1"))
        await tool.close()
        return found

    assert asyncio.run(play()) == rl.Observation(done=True)


@pytest.mark.slow
def test_many_episodes_at_a_time():
    async def play():
        tool = rl.PythonTool(**LIMIT)
        episodes = [await tool.start(rl.Prompt(text="?", answer="")) for _ in range(12)]
        found = await asyncio.gather(*(one.step(call(f"{n} + 1")) for n, one in enumerate(episodes)))
        await tool.close()
        return [one.text.split("\n")[2] for one in found]

    assert asyncio.run(play()) == [str(n + 1) for n in range(12)]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"max_calls": 0}, "PythonTool.max_calls"),
        ({"max_chars": 3}, "PythonTool.max_chars"),
        ({"pattern": "x"}, "PythonTool.pattern must have a group named code"),
        ({"template": "x"}, "PythonTool.template must have {output}"),
    ],
)
def test_settings_out_of_range(settings, words):
    with pytest.raises(ValueError, match=words):
        rl.PythonTool(**{**LIMIT, **settings})


def test_a_run_in_which_the_policy_calls_it():
    """Every number that the shipped policy writes is a program."""
    tool = rl.PythonTool(**LIMIT, pattern="^0*(?P<code>[1-9][0-9]*)$", template="{output}=", max_calls=1)
    rows = [{"prompt": f"{n}=", "answer": "".join(sorted(str(n)))} for n in range(10, 30)]
    trainer = rl.fit(
        rl.asset("small_sort_policy"),
        rows,
        None,
        engine=rl.EpisodeEngine(rl.EmbeddedEngine(), tool, max_turns=3),
        max_steps=2,
        groups_per_step=2,
        group_size=2,
        sampling={"max_tokens": 4},
        accelerator="cpu",
        devices=1,
        enable_progress_bar=False,
        enable_checkpointing=False,
        logger=False,
    )
    assert trainer.global_step == 2
