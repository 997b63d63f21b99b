"""`async def` rewards: awaited in one loop by all workers, within `data.scoring.timeout_s`."""

import asyncio
import threading
import time

import pytest
from hostile_engines import wait_until

import lit_async_rl as rl
from lit_async_rl.errors import RewardError
from lit_async_rl.problem import Prompt
from lit_async_rl.rewards.calls import score
from lit_async_rl.rewards.scorer import Scorer, score_all

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


def test_hundreds_wait_at_once_in_two_threads():
    class Crowd:
        max_concurrent = 300
        present = 0
        everyone = None

        async def __call__(self, prompt, completion):
            self.everyone = self.everyone or asyncio.Event()
            self.present += 1
            if self.present == 300:
                self.everyone.set()
            await self.everyone.wait()  # hangs unless all are awaited at once
            return float(threading.active_count() - before)

    before = threading.active_count()
    assert max(scored(Crowd(), map(str, range(300)), timeout_s=60.0)) <= 3, "the loop, the filing thread, the clock"


def test_no_more_are_awaited_than_there_are_workers():
    under_way = []

    async def reward(prompt, completion):
        under_way.append(1)
        most = len(under_way)
        await asyncio.sleep(0.001)
        under_way.pop()
        return float(most)

    assert max(scored(reward, map(str, range(50)), num_workers=3)) == 3


@pytest.mark.parametrize("is_async", [False, True])
def test_a_group_is_scored_in_one_call(is_async):
    calls = []

    def ranks(prompt, completions):
        calls.append(completions)
        return [float(sorted(completions).index(text)) for text in completions][: 2 if "short" in completions else None]

    class Plain:
        score_group = staticmethod(ranks)

        def __call__(self, prompt, completion):
            raise AssertionError("its group is scored")

    class Async(Plain):
        async def __call__(self, prompt, completion):
            raise AssertionError("its group is scored")

        async def score_group(self, prompt, completions):
            await asyncio.sleep(0)
            return ranks(prompt, completions)

    scorer, found, gone = Scorer((Async if is_async else Plain)(), max_tries=2), [], threading.Event()
    assert scorer.scores_groups
    scorer.submit_group(PROMPT, ["b", "c", "a"], done=found.append, give_up=pytest.fail)
    scorer.submit_group(PROMPT, ["short", "c", "a"], done=pytest.fail, give_up=gone.set)
    assert gone.wait(30)
    scorer.check()
    scorer.close()
    assert found == [[1.0, 2.0, 0.0]]
    assert calls == [("b", "c", "a")] + 2 * [("short", "c", "a")]


def test_a_job_that_nobody_wants_any_more_is_dropped():
    called, is_done, first = [], threading.Event(), threading.Event()

    async def reward(prompt, completion):
        called.append(completion)
        await asyncio.get_running_loop().run_in_executor(None, first.wait, 30)
        return 1.0

    scorer, wanted = Scorer(reward), [True]
    scorer.submit(PROMPT, "a", done=lambda reward: None)
    scorer.submit(PROMPT, "b", done=lambda reward: None, is_wanted=lambda: wanted[0])
    scorer.submit(PROMPT, "c", done=lambda reward: is_done.set())
    wanted[0] = False
    first.set()
    assert is_done.wait(30)
    scorer.close()
    assert called == ["a", "c"]


@pytest.mark.parametrize("is_part", [False, True])
@pytest.mark.parametrize(("workers", "expected"), [(None, 64), (3, 3)])
def test_an_async_reward_waits_for_many_completions_at_once_by_default(workers, expected, is_part):
    waiting = most = 0
    everybody = threading.Event()

    async def slow(prompt, completion):
        nonlocal waiting, most
        waiting += 1
        most = max(most, waiting)
        if waiting == expected:
            everybody.set()
        while not everybody.is_set():
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.01)  # in which one more would begin, if it could
        waiting -= 1
        return 1.0

    reward = rl.CombinedReward({"slow": slow}) if is_part else slow
    scorer = rl.Scoring(workers=workers).make_scorer(reward)
    results = []
    try:
        for _ in range(100):
            scorer.submit(PROMPT, "c", results.append)
        wait_until(lambda: len(results) == 100)
    finally:
        scorer.close()
    assert most == expected
