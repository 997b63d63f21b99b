"""One evaluation: asks for no more than it may, counts what was scored and nothing else, and says what was measured."""

import threading
import time
from itertools import combinations

import pytest
from flow import make_data, make_module

from lit_async_rl.engines.base import Completion, GenerationRequest, SamplingParams
from lit_async_rl.engines.embedded.engine import EmbeddedEngine
from lit_async_rl.engines.embedded.queue import NewBatch, RequestQueue
from lit_async_rl.models.tokenizer import TextCodec
from lit_async_rl.rewards.scorer import Scorer
from lit_async_rl.rewards.success import Success
from lit_async_rl.rollouts.engine_listener import EngineListener
from lit_async_rl.rollouts.evaluation import FIRST_ID, EvaluationPlan, EvaluationRun, make_questions
from lit_async_rl.simulation.engine import SimulatedEngine
from lit_async_rl.simulation.latency import Constant
from lit_async_rl.tasks import SortDigits

pytestmark = pytest.mark.timeout(60)


def held_out(size):
    return {"eight": SortDigits(8, size=size, split="held_out"), "six": SortDigits(6, size=size, split="held_out")}


class Noting(SimulatedEngine):
    """What it is asked; its completions are made by hand."""

    def __init__(self):
        super().__init__(Constant(0.0))
        self.came: list[GenerationRequest] = []
        self.aborted: list[int] = []

    def submit(self, requests):
        self.came += requests

    def abort(self, request_ids):
        self.aborted += request_ids


def begin(engine, reward, num_questions=2, num_samples=1, max_concurrent=1, **scorer):
    """Two data sets of half the questions each; the run has not submitted yet."""
    codec = TextCodec(make_data().model)
    questions = make_questions(held_out(num_questions // 2), codec)
    settings = dict(num_samples=num_samples, sampling=SamplingParams(), version=3, max_concurrent=max_concurrent)
    listener = EngineListener(engine, threading.Condition(threading.RLock()), lambda c: None, lambda: None)
    plan = EvaluationPlan(questions=questions, **settings)
    return EvaluationRun(listener, Scorer(reward, **scorer), codec, plan), listener


def completion(number, sample=0, versions=(3, 3), reward=None):
    fields = dict(token_ids=(5,) * len(versions), logprobs=(-1.0,) * len(versions), versions=versions)
    return Completion(request_id=FIRST_ID + number, sample_index=sample, finish_reason="stop", reward=reward, **fields)


def test_an_abandoned_one_asks_for_nothing_more_and_counts_nothing():
    engine, release, scored = Noting(), threading.Event(), []

    def reward(prompt, text):
        scored.append(prompt)
        release.wait(20)
        return 1.0

    run, _ = begin(engine, reward, 6, max_concurrent=3)
    run.submit()
    assert [one.id - FIRST_ID for one in engine.came] == [0, 1, 2]
    assert all(one.priority > 0 for one in engine.came), "training's is 0"
    run.collect(completion(0))
    while not scored:
        time.sleep(0.01)
    run.collect(completion(1))  # waits to be scored
    assert len(engine.came) == 5, "the next take their places"
    run.abandon()
    assert sorted(number - FIRST_ID for number in engine.aborted) == [2, 3, 4]
    run.collect(completion(2))  # it came nevertheless
    run.collect(completion(99))  # of an older evaluation
    release.set()
    time.sleep(0.1)
    assert len(engine.came) == 5
    assert len(scored) == 1, "nobody needs the others"


def test_one_that_is_lost_leaves_the_new_engine_alone():
    old, new = Noting(), Noting()
    run, listener = begin(old, lambda *_: 1.0, 4, max_concurrent=2)
    run.submit()
    listener.replace(new, [])
    run.collect(completion(0))
    run.abandon()
    assert run.is_lost
    assert new.came == new.aborted == []
    assert listener.stop(5.0)


def test_what_could_not_be_scored_counts_nowhere_and_who_waits_hears_of_the_end():
    def reward(prompt, text):
        time.sleep(0.05)
        raise ValueError("no score")

    run, _ = begin(Noting(), reward, 2, num_samples=2, max_concurrent=4, max_tries=1)
    run.submit()
    for versions, given in (((3, 4), 1.0), ((3, 3, 5), 0.5)):
        run.collect(completion(0, versions=versions, reward=given))  # an environment's own
    run.collect(completion(1, reward=1.0))
    assert not run.is_done
    began = time.monotonic()
    run.collect(completion(1, 1))
    assert run.wait(20.0)
    assert time.monotonic() - began < 5
    result = run.result(Success(1.0), [1, 2])
    assert result.num_unscored == 1
    assert result.metrics == {
        name: value
        for key, value in {"reward": 0.75, "pass@1": 0.5, "pass@2": 1.0, "cut_share": 0.0}.items()
        for name in (key, f"eight/{key}")
    }
    assert (result.version, result.oldest_version, result.newest_version) == (3, 3, 5)
    assert result.mean_version == pytest.approx((3 + 4 + 3 + 3 + 5 + 4 * 3) / 9)


def test_pass_at_k_is_that_of_all_subsets():
    """Against the mean over all choices of k of n samples, of known rewards."""
    rewards = {}

    def reward(prompt, completion):
        rewards.setdefault(prompt.text, []).append(float(len(rewards.get(prompt.text, ())) < len(rewards) % 4))
        return rewards[prompt.text][-1]

    engine = SimulatedEngine(Constant(0.0))
    data = make_data()
    questions = make_questions(held_out(6), TextCodec(data.model))
    plan = EvaluationPlan(questions=questions, num_samples=4, sampling=SamplingParams(), version=0, max_concurrent=8)
    listener = EngineListener(engine, threading.Condition(threading.RLock()), lambda c: None, lambda: None)
    run = EvaluationRun(listener, Scorer(reward), data.codec, plan)
    run.submit()
    deadline = time.monotonic() + 20
    while not run.is_done and time.monotonic() < deadline:
        for found in engine.poll(0.05):
            run.collect(found)
    result = run.result(Success(1.0), [1, 2, 3, 4])
    assert len(rewards) == 12
    for k in (1, 2, 3, 4):
        chances = [[max(some) for some in combinations(values, k)] for values in rewards.values()]
        expected = sum(sum(c) / len(c) for c in chances) / len(chances)
        assert result.metrics[f"pass@{k}"] == pytest.approx(expected)


def test_one_whose_engine_is_replaced_is_lost_and_does_not_wait():
    data = make_data()
    first, second = Noting(), SimulatedEngine(Constant(0.0))
    listener = EngineListener(first, threading.Condition(threading.RLock()), lambda c: None, lambda: None)
    questions = make_questions(held_out(2), data.codec)
    plan = EvaluationPlan(questions=questions, num_samples=1, sampling=SamplingParams(), version=3, max_concurrent=1)
    run = EvaluationRun(listener, Scorer(data.reward), data.codec, plan)
    run.submit()
    assert not run.wait(0.05)
    assert not run.is_lost
    listener.replace(second, [])
    began = time.monotonic()
    assert not run.wait(30.0)
    assert run.is_lost
    assert time.monotonic() - began < 10
    run.abandon()
    second.close()
    assert listener.stop(5.0)


def request(number, priority=0):
    return GenerationRequest(id=number, prompt_ids=(3, 4), num_samples=1, sampling=SamplingParams(), priority=priority)


def test_waiting_requests_of_higher_priority_begin_first_but_none_passes_a_barrier():
    queue = RequestQueue()
    queue.push_requests([request(0), request(1)])
    queue.push_barrier(NewBatch(0))
    queue.push_requests([request(2), request(3), request(10, 1), request(4), request(11, 1)])
    taken = [item.request.id for item in queue.take_requests(0, 2)]
    assert queue.take_barrier(0) is not None
    while items := queue.take_requests(0, 2):
        taken += [item.request.id for item in items]
    assert taken == [0, 1, 10, 11, 2, 3, 4]


def test_a_long_queue_of_rollouts_does_not_keep_an_evaluation_waiting():
    data = make_data()
    engine = EmbeddedEngine(num_slots=8)
    engine.setup(data.model)
    engine.load_weights(0, make_module().policy.lm.named_parameters())
    ids, sampling = data.codec.encode(data.prompts[0]), SamplingParams(max_tokens=10)
    engine.submit([GenerationRequest(id=n, prompt_ids=ids, num_samples=4, sampling=sampling) for n in range(50)])
    engine.poll(0.0)
    urgent = GenerationRequest(id=FIRST_ID, prompt_ids=ids, num_samples=2, sampling=sampling, priority=1)
    engine.submit([urgent])
    seen = []
    while sum(number == FIRST_ID for number in seen) < 2:
        seen += [c.request_id for c in engine.poll(10.0)]
    engine.close()
    assert len(seen) < 40, "of 200 samples that were there before"


def test_a_question_that_the_engine_gives_up_counts_nowhere_and_the_next_one_is_asked():
    engine = Noting()
    run, _ = begin(engine, lambda prompt, text: 1.0, 4, num_samples=2, max_concurrent=2)
    run.submit()
    assert [request.id for request in engine.came] == [FIRST_ID]
    run.collect(completion(0, reward=1.0))
    run.lose(FIRST_ID)
    run.lose(FIRST_ID)  # once is enough
    assert [request.id for request in engine.came] == [FIRST_ID, FIRST_ID + 1]
    for number in (1, 2, 3):
        for sample in (0, 1):
            run.collect(completion(number, sample, reward=0.5))
    assert run.is_done
    result = run.result(Success(1.0), [1])
    assert (result.num_unscored, result.metrics["reward"]) == (1, 0.5)
