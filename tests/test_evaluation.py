"""Evaluation beside training: it changes nothing, says which policy it measured, and neither side starves."""

import logging
import threading
import time

import pytest
import torch
from flow import barrier_engine, fit, make_data, make_module, parameters

from lit_async_rl.callbacks import Evaluation
from lit_async_rl.embedded_engine import EmbeddedEngine
from lit_async_rl.engine import GenerationRequest, SamplingParams
from lit_async_rl.engine_listener import EngineListener
from lit_async_rl.evaluation import FIRST_ID, EvaluationPlan, EvaluationRun, make_questions
from lit_async_rl.request_queue import RequestQueue
from lit_async_rl.scoring import Scorer
from lit_async_rl.simulated_engine import Constant, SimulatedEngine
from lit_async_rl.tasks import SortDigits

GREEDY = SamplingParams(temperature=0.0, max_tokens=10)


def held_out(size=12):
    return {"eight": SortDigits(8, size=size, split="held_out"), "six": SortDigits(6, size=size, split="held_out")}


class Counting:
    """Mixed into an engine: how many samples of evaluation, and of training, it has had at a time."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.now, self.most, self.trained_meanwhile = 0, 0, 0

    def submit(self, requests):
        self.now += sum(r.num_samples for r in requests if r.id >= FIRST_ID)
        self.most = max(self.most, self.now)
        super().submit(requests)

    def poll(self, timeout_s):
        found = super().poll(timeout_s)
        self.trained_meanwhile += sum(c.request_id < FIRST_ID for c in found) if self.now else 0
        self.now -= sum(c.request_id >= FIRST_ID for c in found)
        return found


class CountingEmbedded(Counting, EmbeddedEngine):
    pass


class CountingSimulated(Counting, SimulatedEngine):
    pass


class Slow(SimulatedEngine):
    """Never hands out an evaluation."""

    def poll(self, timeout_s):
        return [c for c in super().poll(timeout_s) if c.request_id < FIRST_ID]


def fixed_lag(*callbacks):
    torch.manual_seed(0)
    data = make_data(schedule="fixed_lag", max_staleness=2, engine=barrier_engine())
    module = make_module()
    fit(module, data, 6, list(callbacks))
    return parameters(module)


def test_training_is_the_same_to_the_bit_and_one_version_is_measured():
    evaluation = Evaluation(held_out(), every_n_steps=2, num_samples=2)
    assert torch.equal(fixed_lag(), fixed_lag(evaluation))
    assert len(evaluation.results) >= 2
    for result in evaluation.results:
        assert result.oldest_version == result.newest_version == result.version == result.mean_version
    assert evaluation.results[0].version == 0
    assert [r.version for r in evaluation.results] == sorted({r.version for r in evaluation.results})


def engines():
    return [
        lambda: CountingEmbedded(num_slots=16),
        lambda: CountingSimulated(Constant(0.01), num_slots=16),
        lambda: CountingSimulated(Constant(0.01), num_slots=16, in_flight_weight_updates=False),
    ]


@pytest.mark.parametrize("make", engines(), ids=["embedded", "simulated", "simulated-barrier"])
def test_both_sides_go_on_with_any_engine(make):
    engine = make()
    evaluation = Evaluation(held_out(), every_n_steps=1, num_samples=2, max_concurrent=4)
    fit(make_module(), make_data(engine=engine, max_staleness=4), 8, [evaluation])
    assert evaluation.results, "training did not starve it"
    if engine.in_flight_weight_updates:  # otherwise it is a batch of its own
        assert engine.trained_meanwhile > 0, "nor it training"
        assert engine.most <= 4
    for result in evaluation.results:
        assert result.version <= result.oldest_version <= result.newest_version
        assert result.num_unscored == 0
        assert {"pass@1", "pass@2", "reward", "eight/pass@1", "six/pass@2"} <= result.metrics.keys()
        parts = result.metrics["eight/pass@1"], result.metrics["six/pass@1"]
        assert result.metrics["pass@1"] == pytest.approx(sum(parts) / 2), "as many prompts in each data set"
        assert result.metrics["pass@1"] <= result.metrics["pass@2"]


def test_it_measures_what_validation_does():
    """Greedy completions of the first version."""
    data = make_data(val_prompts=held_out(24)["eight"], val_sampling=GREEDY, sampling=GREEDY, group_size=2)
    module = make_module()
    evaluation = Evaluation({"eight": held_out(24)["eight"]}, every_n_steps=100, max_block_s=30.0)
    trainer = fit(module, data, 1, [evaluation])
    fresh = make_module()
    expected = trainer.validate(fresh, datamodule=data, verbose=False)[0]
    [result] = evaluation.results
    assert result.version == result.newest_version == 0, "the trainer waited, as it was allowed to"
    assert 0 < result.metrics["pass@1"] < 1
    assert result.metrics["pass@1"] == pytest.approx(expected["val/pass@1"])
    assert result.metrics["reward"] == pytest.approx(expected["val/reward"])


def test_it_never_blocks_longer_than_it_says():
    evaluation = Evaluation(held_out(), every_n_steps=100, max_block_s=0.3, end_wait_s=0.2)
    fit(make_module(), make_data(engine=Slow(Constant(0.002), num_slots=64)), 4, [evaluation])
    assert evaluation.results == []
    assert 0.5 <= evaluation._blocked_s < 0.5 + 1.0, "the machine may be busy"


def test_one_that_does_not_end_is_given_up_and_another_begins(caplog):
    evaluation = Evaluation(held_out(), every_n_steps=1, timeout_s=0.05, end_wait_s=0.0)
    with caplog.at_level(logging.WARNING):
        fit(make_module(), make_data(engine=Slow(Constant(0.02), num_slots=64)), 8, [evaluation])
    given_up = [r.getMessage() for r in caplog.records if "given up: Evaluation.timeout_s" in r.getMessage()]
    assert len(given_up) >= 2


def test_pass_at_k_is_that_of_all_subsets():
    """Against the mean over all choices of k of n samples, of known rewards."""
    from itertools import combinations

    from lit_async_rl.text import TextCodec

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
        assert all(run.collect(c) for c in engine.poll(0.05))
    result = run.result(1.0, [1, 2, 3, 4])
    assert len(rewards) == 12
    for k in (1, 2, 3, 4):
        chances = [[max(some) for some in combinations(values, k)] for values in rewards.values()]
        expected = sum(sum(c) / len(c) for c in chances) / len(chances)
        assert result.metrics[f"pass@{k}"] == pytest.approx(expected)


def test_a_resumed_run_begins_an_interrupted_evaluation_again():
    evaluation = Evaluation(held_out(), every_n_steps=10)
    evaluation._next_step, evaluation._began_step = 30, 20
    assert evaluation.state_dict() == {"next_step": 30}
    evaluation._run = object()
    saved = evaluation.state_dict()
    again = Evaluation(held_out(), every_n_steps=10)
    again.load_state_dict(saved)
    assert again._next_step == 20


def request(number, priority=0):
    return GenerationRequest(id=number, prompt_ids=(3, 4), num_samples=1, sampling=SamplingParams(), priority=priority)


def test_waiting_requests_of_higher_priority_begin_first_but_none_passes_a_barrier():
    from lit_async_rl.request_queue import NewBatch

    queue = RequestQueue(num_slots=2)
    queue.push_requests([request(0), request(1)])
    queue.push_barrier(NewBatch(0))
    queue.push_requests([request(2), request(3), request(10, 1), request(4), request(11, 1)])
    taken = [item.request.id for item in queue.take_requests(0)]
    assert queue.take_barrier(0) is not None
    while items := queue.take_requests(0):
        taken += [item.request.id for item in items]
    assert taken == [0, 1, 10, 11, 2, 3, 4]


def test_a_long_queue_of_rollouts_does_not_keep_an_evaluation_waiting():
    data = make_data()
    engine = EmbeddedEngine(num_slots=8)
    engine.setup(data.model)
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


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        (dict(every_n_steps=0), "every_n_steps"),
        (dict(num_samples=0), "num_samples"),
        (dict(max_concurrent=0), "max_concurrent"),
        (dict(max_block_s=-1.0), "max_block_s"),
        (dict(timeout_s=0.0), "timeout_s"),
        (dict(ks=[1, 3], num_samples=2), "ks"),
        (dict(datasets={}), "datasets"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings, named):
    with pytest.raises(ValueError, match=f"Evaluation.{named}"):
        Evaluation(**(dict(datasets=held_out()) | settings))


def test_one_whose_engine_is_replaced_is_lost_and_does_not_wait():
    data = make_data()
    first, second = Slow(Constant(0.0)), SimulatedEngine(Constant(0.0))
    listener = EngineListener(first, threading.Condition(threading.RLock()), lambda c: None, lambda: None)
    questions = make_questions(held_out(2), data.codec)
    plan = EvaluationPlan(questions=questions, num_samples=1, sampling=GREEDY, version=3, max_concurrent=1)
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
