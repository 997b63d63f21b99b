"""Spans of reward workers: all of their seconds, few spans, and where they belong."""

import threading
import time
from itertools import pairwise

import pytest

from lit_async_rl.problem import Prompt
from lit_async_rl.rewards.scorer import MAX_LANES, Scorer, score_all
from lit_async_rl.runtime.spans import MAX_PENDING, reward_lane, start_recording, stop_recording

PROMPT = Prompt(text="1+1=", answer="2")


@pytest.fixture
def spans():
    """Recorder of a run."""
    found = start_recording()
    yield found
    stop_recording(found)


def drawn(spans):
    return [event for event in spans.take(include_open=True) if event["name"] == "score"]


def test_completions_that_wait_share_a_span(spans):
    is_filled, is_done = threading.Event(), threading.Event()

    def reward(prompt: Prompt, completion: str) -> float:
        is_filled.wait(30.0)
        if completion == "7":
            raise ValueError("one that fails")
        return 1.0

    scorer = Scorer(reward, max_tries=1)
    for n in range(400):
        done = (lambda _: is_done.set()) if n == 399 else (lambda _: None)
        scorer.submit(PROMPT, str(n), done, group=n // 4)
    is_filled.set()
    assert is_done.wait(30.0)
    scorer.close()
    events = drawn(spans)
    assert sum(event["args"]["completions"] for event in events) == 400
    assert sum(event["dur"] for event in events) / 1e6 == pytest.approx(scorer.busy_s, abs=1e-6 * len(events))
    assert events[0]["args"]["group"] == 0
    assert [event["args"]["ok"] for event in events].count(False) == 1
    assert len(events) < 100


def test_of_a_reward_that_takes_no_time_no_completion_is_lost(spans):
    lane = spans.lane(reward_lane(0))
    for n in range(3 * MAX_PENDING):
        lane.add("score", 1e-6 * n, 1e-6, group=n, ok=True, completions=1)
    events = drawn(spans)
    assert sum(event["args"]["completions"] for event in events) == 3 * MAX_PENDING
    assert len(events) < 10
    assert spans.num_lost == 0


def test_a_slow_reward_is_drawn_when_it_happens(spans):
    calls = []

    def reward(prompt: Prompt, completion: str) -> float:
        began = time.monotonic()
        time.sleep(0.08)
        calls.append((began, time.monotonic()))
        return 1.0

    scorer = Scorer(reward, num_workers=2)
    score_all(scorer, [(PROMPT, str(n)) for n in range(7)], lambda: None)
    scorer.close()
    events = drawn(spans)
    assert [event["args"]["completions"] for event in events] == [1] * 7  # each longer than a window
    begins = sorted(event["ts"] / 1e6 for event in events)
    epoch = begins[0] - calls[0][0]
    for began, (real, _) in zip(begins, sorted(calls), strict=True):
        assert began - epoch == pytest.approx(real, abs=0.02)
    for worker in {event["tid"] for event in events}:
        mine = sorted((event["ts"], event["ts"] + event["dur"]) for event in events if event["tid"] == worker)
        assert all(one[1] <= other[0] + 2 for one, other in pairwise(mine))


def test_so_many_workers_are_drawn(spans):
    together = threading.Barrier(MAX_LANES + 2)

    def reward(prompt: Prompt, completion: str) -> float:
        together.wait(30.0)
        return 1.0

    scorer = Scorer(reward, num_workers=MAX_LANES + 2)
    score_all(scorer, [(PROMPT, "")] * (MAX_LANES + 2), lambda: None)
    scorer.close()
    assert len({event["tid"] for event in drawn(spans)}) == MAX_LANES


def test_validation_adds_nothing_to_the_lanes_of_training(spans):
    scorer = Scorer(lambda prompt, completion: 1.0, records_spans=False)
    assert score_all(scorer, [(PROMPT, "")], lambda: None) == [1.0]
    scorer.close()
    assert drawn(spans) == []
