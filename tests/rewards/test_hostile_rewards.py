"""Whatever an isolated reward does, the trainer waits no longer than its limit, and executes nothing of it."""

import os
import time
from typing import Any

import pytest
from agent_endpoints import importable
from processes import wait_for_the_end_of

from lit_async_rl.errors import RewardError
from lit_async_rl.problem import Prompt
from lit_async_rl.rewards.calls import score
from lit_async_rl.rewards.functions import IsolatedReward
from lit_async_rl.runtime.isolation import IsolatedCallError

LIMIT_S = 0.7
PROMPT = Prompt(text="q", answer="a", metadata={"tuple": (1, 2)})


@pytest.fixture(scope="module")
def reward(tmp_path_factory):
    marker = tmp_path_factory.mktemp("executed") / "marker"
    os.environ["HOSTILE_COMMAND"] = f"touch {marker}"
    reward = IsolatedReward("hostile_rewards.judge", timeout_s=LIMIT_S, max_memory_gb=4.0)
    yield reward
    del os.environ["HOSTILE_COMMAND"]
    assert not marker.exists(), "something was executed in the trainer"


def check(reward: IsolatedReward, what: str, error: Any, message: str, slack_s: float = 0.0) -> None:
    """The call ends in time with that error, and the next one works."""
    assert reward(PROMPT, "nothing") == 0.5  # starts the process
    began = time.monotonic()
    with pytest.raises(error, match=message):
        reward(PROMPT, what)
    assert time.monotonic() - began < LIMIT_S + 2.0 + slack_s
    assert reward(PROMPT, "nothing") == 0.5


@pytest.mark.parametrize("what", ["fork and hang", "no alarm", "ignore alarm"])
def test_what_hangs_is_killed_from_outside(what, reward):
    check(reward, what, TimeoutError, r"hostile_rewards.judge did not return within 0\.7 s; its process was killed")


@pytest.mark.parametrize("what", ["daemon and die", "escape and die"])
def test_a_pipe_that_a_grandchild_holds_open_is_not_waited_for(what, reward):
    check(reward, what, RuntimeError, "exit code 3")


@pytest.mark.parametrize("what", ["crafted", "crafted error"])
def test_crafted_values_are_refused_and_not_executed(what, reward):
    check(reward, what, IsolatedCallError, "which is not a number" if what == "crafted" else "RuntimeError: <hostile")


def test_a_number_in_disguise_is_a_number(reward):
    assert reward(PROMPT, "crafted number") == 0.25
    assert type(reward(PROMPT, "crafted number")) is float


@pytest.mark.parametrize("what", ["pickle", "old reply", "garbage in the pipe", "nested", "flood"])
def test_what_is_no_reply_ends_the_process(what, reward):
    is_line = what not in ("pickle", "flood")  # else it may be waited for
    pattern = "an invalid reply" + ("" if is_line else "|did not return within")
    check(reward, what, RuntimeError if is_line else (RuntimeError, TimeoutError), pattern)


@pytest.mark.slow
def test_a_reply_sent_ahead_is_not_taken_for_the_next():
    reward = IsolatedReward("hostile_rewards.judge", timeout_s=LIMIT_S)
    with pytest.raises(RuntimeError, match="an invalid reply to request 1"):
        reward(PROMPT, "two replies")
    assert reward(PROMPT, "nothing") == 0.5


def test_what_is_printed_is_no_reply(capfd):
    reward = IsolatedReward("hostile_rewards.judge", timeout_s=30.0)
    assert reward(PROMPT, "garbage") == 0.5
    assert "garbage on stdout" in capfd.readouterr().err


@pytest.mark.slow
def test_a_process_that_ends_or_closes_its_pipe_is_an_error(reward):
    check(reward, "close the pipe", RuntimeError, "closed its pipe, and was killed", slack_s=2.0)
    check(reward, "kill itself", TimeoutError, "ended by SIGKILL")


def test_what_the_process_started_ends_with_it():
    reward = IsolatedReward("hostile_rewards.judge", timeout_s=5.0)
    pid = int(reward(PROMPT, "leave a daemon"))
    assert reward(PROMPT, "nothing") == 0.5
    del reward
    wait_for_the_end_of(pid)


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("text", "returned 'no number', which is not a number"),
        ("list", r"returned \[1.0\], which is not a number"),
        ("none", "returned None, which is not a number"),
        ("nan", "returned nan; a reward must be finite"),
        ("memory", "MemoryError"),
    ],
)
def test_values_that_are_no_rewards_are_refused_in_one_line(what, message, reward):
    with pytest.raises(RewardError, match=message) as caught:
        score(reward, PROMPT, what)
    assert "\n" not in str(caught.value)
    assert reward(PROMPT, "one") == 1.0


def test_an_async_function_is_awaited_in_its_process(tmp_path):
    source = "import asyncio\n\n\nasync def judge(prompt, completion):\n    await asyncio.sleep(0)\n"
    with importable(tmp_path, f"{source}    return float(completion)\n") as name:
        reward = IsolatedReward(f"{name}.judge", timeout_s=30.0)
        assert [reward(PROMPT, text) for text in ("0.5", "2")] == [0.5, 2.0]
        with pytest.raises(RewardError, match="ValueError: could not convert string to float"):
            score(reward, PROMPT, "none")


def test_limits_must_be_positive():
    with pytest.raises(ValueError, match=r"max_memory_gb must be positive, got -1\.0"):
        IsolatedReward("a.b", max_memory_gb=-1.0)


def test_the_process_of_a_reward_gets_prompts_without_loading_torch(tmp_path):
    source = "import sys\nimport lit_async_rl as rl\n\n\ndef has_torch(prompt: rl.Prompt, completion: str) -> float:\n"
    with importable(tmp_path, f'{source}    return float("torch" in sys.modules)\n') as name:
        assert IsolatedReward(f"{name}.has_torch", timeout_s=30.0)(PROMPT, "b") == 0.0
    graded = IsolatedReward("lit_async_rl.last_number", timeout_s=30.0)
    assert graded(Prompt(text="2 + 2", answer="4"), "it is 4") == 1.0
