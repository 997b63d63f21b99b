"""`async def` rewards: awaited in one loop by all workers, within `data.scoring.timeout_s`."""

import asyncio
import threading
import time

import pytest

from lit_async_rl.errors import RewardError
from lit_async_rl.rewards.scorer import Scorer, score, score_all
from lit_async_rl.types import Prompt

PROMPT = Prompt(text="q", answer="a")


def scored(reward, completions, **settings):
    scorer = Scorer(reward, **settings)
    try:
        return score_all(scorer, [(PROMPT, text) for text in completions], lambda: None)
    finally:
        scorer.close()


async def length(prompt, completion):
    await asyncio.sleep(0)
    return len(completion)


class Length:
    async def __call__(self, prompt, completion):
        return float(len(completion))


@pytest.mark.parametrize("reward", [length, Length()], ids=["function", "object"])
def test_it_is_awaited(reward):
    assert scored(reward, ["", "a", "abc"], num_workers=2) == [0, 1, 3]
    assert score(reward, PROMPT, "ab") == 2


def test_workers_share_a_loop_and_wait_at_the_same_time():
    loops, meeting = set(), []

    async def reward(prompt, completion):
        loops.add(asyncio.get_running_loop())
        if not meeting:
            meeting.append(asyncio.Barrier(3) if hasattr(asyncio, "Barrier") else None)
        if meeting[0] is not None:
            await meeting[0].wait()  # hangs unless three are awaited at once
        return 1.0

    assert scored(reward, ["a", "b", "c"], num_workers=3, timeout_s=30.0) == [1, 1, 1]
    assert len(loops) == 1


def test_what_it_raises_names_it():
    async def reward(prompt, completion):
        raise KeyError("missing")

    with pytest.raises(RewardError, match=r"reward .* on prompt 'q'.* raised KeyError: 'missing'"):
        scored(reward, ["x"])


def test_one_that_never_returns_is_cancelled_at_the_timeout():
    cancelled = threading.Event()

    async def reward(prompt, completion):
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    with pytest.raises(RewardError, match=r"did not return within data.scoring.timeout_s=0.5 on prompt 'q'"):
        scored(reward, ["x"], timeout_s=0.5)
    assert cancelled.wait(20)


@pytest.mark.parametrize("block", [False, True], ids=["waits", "blocks the loop"])
def test_the_next_try_succeeds_after_one_that_hangs(block):
    tries, end = [], threading.Event()

    async def reward(prompt, completion):
        tries.append(time.monotonic())
        if len(tries) == 1:
            if block:
                end.wait(60)
            await asyncio.sleep(60)
        return 1.0

    try:
        assert scored(reward, ["x"], timeout_s=0.5, max_tries=20) == [1]
    finally:
        end.set()
