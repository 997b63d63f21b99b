"""Evaluation beside training: it changes nothing, says which policy it measured, and neither side starves."""

import csv
import logging
import shutil
import time

import pytest
import torch
from failing_engines import failing, said
from flow import MODEL, barrier_engine, fit, make_data, make_module, parameters
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger

from lit_async_rl.callbacks import Evaluation
from lit_async_rl.engines.base import SamplingParams
from lit_async_rl.engines.embedded.engine import EmbeddedEngine
from lit_async_rl.rollouts.evaluation import FIRST_ID
from lit_async_rl.simulation.engine import SimulatedEngine
from lit_async_rl.simulation.latency import Constant
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
    """Never hands out an evaluation; notes which requests of one came, and which were aborted."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.came, self.aborted = [], []

    def submit(self, requests):
        self.came += [r for r in requests if r.id >= FIRST_ID]
        super().submit(requests)

    def abort(self, request_ids):
        self.aborted += request_ids
        super().abort(request_ids)

    def poll(self, timeout_s):
        return [c for c in super().poll(timeout_s) if c.request_id < FIRST_ID]


def fixed_lag(*callbacks):
    torch.manual_seed(0)
    data = make_data(schedule="fixed_lag", max_staleness=2, engine=barrier_engine())
    module = make_module()
    fit(module, data, 6, list(callbacks))
    return parameters(module)


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
def test_it_measures_what_validation_does():
    """Greedy completions of the first version."""
    data = make_data(val_prompts=held_out(24)["eight"], val_sampling=GREEDY)
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


def test_a_second_run_has_the_tokens_of_its_own_tokenizer(tmp_path):
    shutil.copytree(MODEL, tmp_path / "other")
    tokenizer = tmp_path / "other" / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text().replace('"1": 3', '"1": 4').replace('"2": 4', '"2": 3'))
    evaluation = Evaluation(held_out(2), every_n_steps=100, end_wait_s=0.0)
    for model in (MODEL, str(tmp_path / "other")):
        engine = Slow(Constant(0.002), num_slots=64)
        data = make_data(engine=engine, model=model)
        fit(make_module(model=model), data, 1, [evaluation])
        assert engine.came
        assert all(request.prompt_ids == data.codec.encode(request.prompt) for request in engine.came)


def test_it_never_blocks_longer_than_it_says():
    evaluation = Evaluation(held_out(), every_n_steps=100, max_block_s=0.3, end_wait_s=0.2)
    fit(make_module(), make_data(engine=Slow(Constant(0.002), num_slots=64)), 4, [evaluation])
    assert evaluation.results == []
    assert 0.5 <= evaluation._blocked_s < 0.5 + 1.0, "the machine may be busy"


def test_one_that_does_not_end_is_given_up_and_another_begins(caplog):
    evaluation = Evaluation(
        held_out(), every_n_steps=1, timeout_s=0.05, end_wait_s=0.0, sampling=SamplingParams(max_tokens=3)
    )
    engine = Slow(Constant(0.02), num_slots=64)
    with caplog.at_level(logging.WARNING):
        fit(make_module(), make_data(engine=engine), 8, [evaluation])
    given_up = [r.getMessage() for r in caplog.records if "abandoned after Evaluation.timeout_s" in r.getMessage()]
    assert len(given_up) >= 2
    ids = [one.id for one in engine.came]
    assert len(set(ids)) == len(ids), "a late completion of the first is none of the second"
    assert set(ids) <= set(engine.aborted)
    assert {one.sampling.max_tokens for one in engine.came} == {3}


def test_each_may_block_as_long_as_it_says():
    waited = []

    class Timed(Evaluation):
        def on_before_optimizer_step(self, *args):
            began = time.monotonic()
            super().on_before_optimizer_step(*args)
            waited.append(time.monotonic() - began)

    evaluation = Timed(held_out(), every_n_steps=1, max_block_s=0.1, timeout_s=0.05, end_wait_s=0.0)
    fit(make_module(), make_data(engine=Slow(Constant(0.002), num_slots=64)), 4, [evaluation])
    assert min(waited) >= 0.09


@pytest.mark.slow
def test_the_interval_is_counted_from_the_beginning_of_the_last_one(tmp_path):
    evaluation = Evaluation(held_out(2), every_n_steps=3, max_block_s=30.0)
    evaluation.load_state_dict({"next_step": -10})  # long overdue
    fit(make_module(), make_data(), 5, [evaluation], logger=CSVLogger(tmp_path, version=0), log_every_n_steps=1000)
    assert [result.version for result in evaluation.results] == [0, 3]
    rows = csv.DictReader((tmp_path / "lightning_logs" / "version_0" / "metrics.csv").read_text().splitlines())
    logged = {int(row["step"]): float(row["eval/pass@1"]) for row in rows if row["eval/pass@1"]}
    assert logged == {1 + r.version: pytest.approx(r.metrics["pass@1"]) for r in evaluation.results}


@pytest.mark.slow
def test_one_that_was_lost_with_its_engine_begins_again(caplog):
    evaluation = Evaluation(held_out(), every_n_steps=100, max_concurrent=2, sampling=SamplingParams(max_tokens=9))
    engine = failing("step", "crash", 1)
    fit(make_module(), make_data(engine=engine, groups_per_step=1, group_size=2, max_staleness=0), 9, [evaluation])
    assert said(caplog, "was lost when its engine was replaced, and will be repeated")
    [result] = evaluation.results
    assert result.oldest_version >= result.version > 0


def test_a_resumed_run_begins_an_interrupted_evaluation_again():
    evaluation = Evaluation(held_out(), every_n_steps=10)
    evaluation._next_step, evaluation._began_step = 30, 20
    assert evaluation.state_dict() == {"next_step": 30}
    evaluation._run = object()
    saved = evaluation.state_dict()
    again = Evaluation(held_out(), every_n_steps=10)
    again.load_state_dict(saved)
    assert again._next_step == 20


@pytest.mark.slow
def test_a_resumed_run_may_have_another_interval(tmp_path):
    saver = ModelCheckpoint(tmp_path, filename="at2", every_n_train_steps=2)
    before = Evaluation(held_out(2), every_n_steps=1000, max_block_s=30.0)
    fit(make_module(), make_data(), 2, [before, saver], enable_checkpointing=True)
    after = Evaluation(held_out(2), every_n_steps=1, max_block_s=30.0)
    fit(make_module(), make_data(), 5, [after], ckpt_path=str(tmp_path / "at2.ckpt"))
    assert [result.version for result in before.results + after.results] == [0, 3, 4]


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


def test_copies_of_one_greedy_completion_are_refused():
    with pytest.raises(
        ValueError, match=r"num_samples=2 with temperature 0: the samples of a prompt would be identical"
    ):
        fit(make_module(), make_data(), 1, [Evaluation(held_out(), num_samples=2, sampling=GREEDY)])


def test_copies_of_one_greedy_completion_are_refused_in_validations_too():
    """They took as many times as long, and pass@k was pass@1."""
    said = r"data\.validation\.num_samples=2 with {}\.temperature=0: the samples of a prompt would be identical"
    with pytest.raises(ValueError, match=said.format(r"data\.validation\.sampling")):
        make_data(val_prompts=held_out()["six"], num_val_samples=2, val_sampling=GREEDY)
    with pytest.raises(ValueError, match=said.format(r"data\.sampling")):
        make_data(val_prompts=held_out()["six"], num_val_samples=2, sampling=GREEDY)
    make_data(val_prompts=held_out()["six"], num_val_samples=1, val_sampling=GREEDY)
