"""Reward workers: what waits at the end is not scored any more, and no thread is left but one that hangs."""

import asyncio
import logging
import threading
import time

import pytest
from flow import fit, make_data, make_module
from hostile_engines import wait_until

from lit_async_rl.advantages.group import GroupMeanStd
from lit_async_rl.errors import ProducerError, RewardError, SetupError
from lit_async_rl.problem import Prompt
from lit_async_rl.rewards.combined import CombinedReward
from lit_async_rl.rewards.forms import LOOK_INTERVAL_S, BatchedReward
from lit_async_rl.rewards.scorer import CLOSE_TIMEOUT_S, Scorer, score_all
from lit_async_rl.rollouts.intake import GroupFilter
from lit_async_rl.runtime import limited_log as log_limit
from lit_async_rl.runtime.limited_log import LimitedLog
from lit_async_rl.runtime.retries import MAX_CONSECUTIVE_FAILURES

PROMPT = Prompt(text="1+1=", answer="2")


def workers(since: set[threading.Thread]) -> list[threading.Thread]:
    return [t for t in set(threading.enumerate()) - since if t.name.startswith("reward")]


def check_while(scorer, is_running):
    """As who waits for rewards."""
    while is_running():
        scorer.check()
        time.sleep(0.01)


def test_after_closing_nothing_is_scored_and_no_worker_lives():
    before, scored, running = set(threading.enumerate()), [], threading.Event()

    def slow(prompt: Prompt, completion: str) -> float:
        running.set()
        time.sleep(0.2)
        return 1.0

    scorer = Scorer(slow, num_workers=2)
    for n in range(50):
        scorer.submit(PROMPT, str(n), done=scored.append)
    assert running.wait(10.0)
    scorer.close()
    assert not workers(before)
    done = len(scored)
    assert done < 50
    time.sleep(0.5)
    assert len(scored) == done


def test_closing_waits_for_a_hanging_reward_no_longer_than_it_says():
    hangs, release = threading.Event(), threading.Event()

    def hang(prompt: Prompt, completion: str) -> float:
        hangs.set()
        release.wait(60.0)
        return 1.0

    scorer = Scorer(hang)
    scorer.submit(PROMPT, "2", done=lambda reward: None)
    assert hangs.wait(10.0)
    began = time.monotonic()
    scorer.close()
    assert CLOSE_TIMEOUT_S - 0.5 < time.monotonic() - began < CLOSE_TIMEOUT_S + 5.0
    release.set()


@pytest.mark.parametrize("form", ["plain", "async", "awaitable"])
def test_calls_that_hang_end_the_run_before_they_are_too_many(form, monkeypatch):
    """Of those that return after their limit none is counted."""
    monkeypatch.setattr("lit_async_rl.rewards.scorer.MAX_ABANDONED", 3)
    monkeypatch.setattr("lit_async_rl.runtime.loop.ANSWER_S", 0.1)
    release, begun = threading.Event(), []

    def hang(prompt, completion):
        begun.append(completion)
        release.wait(60.0)
        return 1.0

    async def blocked(prompt, completion):
        return hang(prompt, completion)

    rewards = {"plain": hang, "async": blocked, "awaitable": lambda prompt, completion: blocked(prompt, completion)}
    scorer = Scorer(rewards[form], timeout_s=0.2, max_tries=1)
    for prompt, text in prompts(8):
        scorer.submit(prompt, text, done=lambda reward: None)
    with pytest.raises(
        RewardError, match=r"\d calls of reward .* within data\.scoring\.timeout_s=0\.2 and are still running"
    ):
        check_while(scorer, lambda: len(begun) < 8)
    assert 2 <= len(begun) < 8
    release.set()
    scorer.close()


def test_calls_that_return_after_their_limit_are_not_counted_as_hanging(monkeypatch):
    monkeypatch.setattr("lit_async_rl.rewards.scorer.MAX_ABANDONED", 1)
    late = [threading.Event() for _ in range(3)]
    scorer = Scorer(lambda prompt, completion: float(late[int(completion)].wait(60.0)), timeout_s=0.2, max_tries=1)
    scorer._check_abandoned = lambda: None
    for number, event in enumerate(late):
        given_up = threading.Event()
        scorer.submit(PROMPT, str(number), done=lambda reward: None, give_up=given_up.set)
        while not given_up.wait(0.01):
            scorer.check()
        event.set()
        scorer._abandoned[-1].join(30.0)
    del scorer._check_abandoned
    scorer._check_abandoned()
    scorer.close()


def test_rewards_come_back_in_order_with_none_for_what_could_not_be_scored():
    def reward(prompt: Prompt, completion: str) -> float:
        if completion == "3":
            raise KeyError("gold")
        time.sleep(0.01 * (5 - int(completion)))
        return float(completion)

    scorer, signs = Scorer(reward, num_workers=3, max_tries=2), []
    asked = [(PROMPT, str(n)) for n in range(5)]
    assert score_all(scorer, asked, lambda: signs.append(1)) == [0.0, 1.0, 2.0, None, 4.0]
    assert len(signs) >= 5
    scorer.close()


def test_a_reward_that_hangs_is_named_to_who_waits_for_it():
    release = threading.Event()
    scorer = Scorer(lambda prompt, completion: float(release.wait(60.0)), timeout_s=0.3)
    with pytest.raises(
        RewardError, match=r"<lambda> did not return within data\.scoring\.timeout_s=0\.3 on prompt '1\+1='"
    ):
        score_all(scorer, [(PROMPT, "2")], lambda: None)
    release.set()
    scorer.close()


def prompts(num: int) -> list[tuple[Prompt, str]]:
    return [(Prompt(text=str(n)), "") for n in range(num)]


def test_when_nothing_can_be_scored_tries_end():
    def reward(prompt: Prompt, completion: str) -> float:
        raise KeyError("gold")

    scorer = Scorer(reward, max_tries=2)
    assert score_all(scorer, prompts(MAX_CONSECUTIVE_FAILURES - 1), lambda: None) == [None] * (
        MAX_CONSECUTIVE_FAILURES - 1
    )
    with pytest.raises(
        RewardError, match=r"10 prompts in a row .* data\.scoring\.tries=2 times; the last error: .*KeyError"
    ):
        score_all(scorer, prompts(1), lambda: None)
    scorer.close()


def test_one_reward_in_between_keeps_tries_going():
    def reward(prompt: Prompt, completion: str) -> float:
        if int(prompt.text) % 9:
            raise KeyError("gold")
        return 1.0

    scorer = Scorer(reward, max_tries=1)
    assert sum(value is None for value in score_all(scorer, prompts(40), lambda: None)) == 35
    scorer.close()


def test_warnings_are_limited_and_counted(caplog, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(log_limit.time, "monotonic", lambda: now[0])
    log = LimitedLog(logging.getLogger("limited"))
    for n in range(1000):
        log.warning("line %d", n)
    now[0] = 11.0
    log.warning("line %d", 1000)
    log.warning("line %d", 1001)
    lines = [record.getMessage() for record in caplog.records]
    assert lines[:10] == [f"line {n}" for n in range(10)]
    assert lines[10:] == ["line 1000 (990 more such lines were left out before)", "line 1001"]


class OutcomeError(BaseException):
    """As pytest's, which a test harness in a reward lets through."""


FATAL = [StopIteration, StopAsyncIteration, GeneratorExit, asyncio.CancelledError, KeyboardInterrupt, SystemExit]
FATAL.append(OutcomeError)


class OfGroups:
    """Scores groups with a function of one completion."""

    def __init__(self, reward):
        self.score_group = lambda prompt, completions: [reward(prompt, one) for one in completions]

    def __call__(self, prompt, completion):
        raise AssertionError


def in_form(form, reward):
    """A plain reward in another form."""

    async def awaited(prompt, completion):
        await asyncio.sleep(0)
        return reward(prompt, completion)

    forms = {
        "plain": lambda: reward,
        "async": lambda: awaited,
        "batch": lambda: BatchedReward(
            lambda prompts, texts: [reward(*one) for one in zip(prompts, texts, strict=True)]
        ),
        "part": lambda: CombinedReward({"a": reward, "b": lambda prompt, completion: 0.0}),
        "async part": lambda: CombinedReward({"a": awaited, "b": lambda prompt, completion: 0.0}),
        "group": lambda: OfGroups(reward),
    }
    return forms[form]()


@pytest.mark.parametrize("form", ["plain", "async", "batch", "part", "async part", "group"])
@pytest.mark.parametrize("kind", FATAL)
def test_whatever_a_reward_raises_is_a_failed_try_that_names_it(form, kind, caplog):
    tried = []

    def reward(prompt, completion):
        tried.append(1)
        if len(tried) == 1:
            raise kind
        return 1.0

    scorer = Scorer(in_form(form, reward), max_tries=2, timeout_s=60.0)
    filed, is_filed = [], threading.Event()
    submit, asked = (scorer.submit_group, ["x"]) if form == "group" else (scorer.submit, "x")
    submit(PROMPT, asked, done=lambda value: (filed.append(value), is_filed.set()), give_up=is_filed.set)
    while not is_filed.wait(0.01):
        scorer.check()
    scorer.close()
    assert filed in ([1.0], [[1.0]])
    text = next(one.getMessage() for one in caplog.records if "try 1 of data.scoring.tries=2" in one.getMessage())
    assert "reward " in text
    assert ("its part 'a'" in text) is ("part" in form)
    inner = (
        "RuntimeError: coroutine raised StopIteration" if "async" in form and kind is StopIteration else kind.__name__
    )
    assert f"raised {inner}" in text


class RaisingFilter(GroupFilter):
    """Raises in place of filtering."""

    def __init__(self, kind):
        self.kind = kind

    def __call__(self, group):
        raise self.kind


class RaisingEstimator(GroupMeanStd):
    """Raises in place of estimating."""

    def __call__(self, *args, **kwargs):
        raise StopIteration


@pytest.mark.parametrize(
    "part",
    [
        {"filters": [RaisingFilter(StopIteration)]},
        {"filters": [RaisingFilter(SystemExit)]},
        {"advantage": RaisingEstimator()},
    ],
)
def test_a_run_does_not_end_in_silence_where_a_filter_or_an_estimator_raises_what_would(part):
    """Lightning takes `StopIteration` for the end of the data."""
    with pytest.raises(ProducerError, match=r"StopIteration|SystemExit"):
        fit(make_module(), make_data(**part), 2)


@pytest.mark.timeout(20)
def test_without_a_reward_scoring_ends_with_an_error_and_not_with_its_worker():
    scorer = Scorer(None)
    with pytest.raises(SetupError, match=r"data\.reward is null"):
        score_all(scorer, [(PROMPT, "2")], lambda: None)
    scorer.close()


def test_a_pause_that_nobody_ends_is_no_reason_to_wait():
    """The producer's thread ends it. While that hangs in the engine, the engine's time limit was never reached."""

    def failing(prompt: Prompt, completion: str) -> float:
        raise ValueError("not now")

    scorer = Scorer(failing, timeout_s=0.1, max_tries=2, backoff_s=0.05)
    try:
        scorer.submit(PROMPT, "3", done=lambda reward: None)
        deadline = time.monotonic() + 10
        while (work := scorer.work()) is None or work.oldest_s < 0.3:
            assert time.monotonic() < deadline, work
            time.sleep(0.01)
    finally:
        scorer.close()


@pytest.mark.parametrize("is_part", [False, True])
def test_a_batch_that_never_returns_keeps_no_others_from_being_scored(is_part):
    hangs = iter([True])
    ends = threading.Event()

    def scores(prompts, completions):
        if next(hangs, False):
            ends.wait(30)
        return [float(len(completion)) for completion in completions]

    reward = BatchedReward(scores, max_batch_size=2)
    scorer = Scorer(
        CombinedReward({"length": reward}) if is_part else reward, num_workers=4, timeout_s=0.3, max_tries=2
    )
    found = []
    try:
        for text in ("a", "bb", "ccc", "dddd", "eeeee"):
            scorer.submit(PROMPT, text, done=found.append)
        deadline = time.monotonic() + 20
        while len(found) < 5:
            assert time.monotonic() < deadline, found
            scorer.check()
            time.sleep(0.01)
    finally:
        ends.set()
        scorer.close()
    assert sorted(found) == [1, 2, 3, 4, 5]


def test_calls_whose_batch_was_abandoned_wait_for_it_and_score_nothing():
    began = threading.Event()
    ends = threading.Event()
    sizes = []

    def hangs(prompts, completions):
        sizes.append(len(prompts))
        if len(sizes) == 1:
            began.set()
            ends.wait(30)
        return [1.0] * len(prompts)

    reward = BatchedReward(hangs)
    reward._batch_lock.acquire()
    threads = [threading.Thread(target=reward, args=(PROMPT, str(n)), daemon=True) for n in range(3)]
    for thread in threads:
        thread.start()
    wait_until(lambda: len(reward._waiting) == 3)
    reward._batch_lock.release()
    assert began.wait(30)
    reward.abandon_batch(0.0)
    time.sleep(3 * LOOK_INTERVAL_S)  # so often they look
    assert reward(PROMPT, "another") == 1.0
    ends.set()
    for thread in threads:
        thread.join(30)
    assert sizes == [3, 1]


def test_a_worker_scores_nothing_more_after_its_result_could_not_be_filed():
    before = set(threading.enumerate())
    scored = []

    def broken(reward):
        raise RuntimeError("no room")

    scorer = Scorer(lambda prompt, completion: float(len(completion)))
    scorer.submit(PROMPT, "first", broken)
    scorer.submit(PROMPT, "second", scored.append)
    try:
        wait_until(lambda: not workers(before))
        with pytest.raises(RuntimeError, match="no room"):
            scorer.check()
    finally:
        scorer.close()
    assert not scored
