"""Reward workers: what waits at the end is not scored any more, and no thread is left but one that hangs."""

import threading
import time

from lit_async_rl.rewards.scorer import CLOSE_S, Scorer
from lit_async_rl.types import Prompt

PROMPT = Prompt(text="1+1=", answer="2")


def workers(since: set[threading.Thread]) -> list[threading.Thread]:
    return [t for t in set(threading.enumerate()) - since if t.name.startswith("reward")]


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
    assert CLOSE_S - 0.5 < time.monotonic() - began < CLOSE_S + 5.0
    release.set()
