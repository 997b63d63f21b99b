"""Data policies: the bound holds whatever is dropped, nothing is lost unseen, and what is lost is said to be."""

import itertools
import math
from dataclasses import replace

import pytest
import torch
from flow import MODEL, barrier_engine, fit, make_data, make_module, parameters
from hypothesis import given, settings
from hypothesis import strategies as st
from lightning.pytorch.callbacks import ModelCheckpoint

from lit_async_rl.admission import Admission
from lit_async_rl.callbacks import LengthBiasMonitor
from lit_async_rl.curriculum import DifficultyWindow, HardestFirst, Learnability, PassRates
from lit_async_rl.engine import SamplingParams
from lit_async_rl.expiry import Drop, ExpiringAdmission, Retry
from lit_async_rl.filters import DynamicSampling, OverlongFilter, OverlongPenalty
from lit_async_rl.intake import Intake
from lit_async_rl.producer import Producer
from lit_async_rl.prompts import PromptStream
from lit_async_rl.ring import RingBuffer, make_admission
from lit_async_rl.scoring import Scorer
from lit_async_rl.simulated_engine import LogNormal, SimulatedEngine
from lit_async_rl.tasks import SortDigits
from lit_async_rl.text import TextCodec
from lit_async_rl.types import Prompt, Rollout, RolloutGroup


def group(rewards, lengths=None, index=0, reasons=None) -> RolloutGroup:
    lengths, reasons = lengths or [3] * len(rewards), reasons or ["stop"] * len(rewards)
    rollouts = [
        Rollout(
            completion_ids=(1,) * n,
            behavior_logprobs=(-1.0,) * n,
            versions=(0,) * n,
            finish_reason=reason,
            text="",
            reward=reward,
        )
        for reward, n, reason in zip(rewards, lengths, reasons, strict=True)
    ]
    return RolloutGroup(
        index=index, prompt=Prompt(text="p"), prompt_ids=(1,), rollouts=tuple(rollouts), admitted_version=0
    )


# -- the bound --------------------------------------------------------------------------------------------------------


@settings(max_examples=40)
@given(st.integers(1, 4), st.integers(0, 5), st.floats(0, 0.8), st.data())
def test_refilled_slots_keep_the_bound_and_the_engine_full(groups, bound, drop_rate, data):
    """Groups finish in any order and are dropped at random; each drop is refilled at once."""
    admission = Admission(groups, bound)
    running: dict[int, int] = {}
    finished: dict[int, int] = {}
    for _ in range(8):
        while admission.num_left_in_round:
            for _ in range(admission.num_admissible):
                running[admission.admit()] = admission.round
            assert len(running) + len(finished) + admission.num_taken == (bound + 1) * groups, "a slot is empty"
            chosen = admission.choose()
            if chosen is not None:
                admission.take(chosen)
                assert admission.round - finished.pop(chosen) <= bound
                continue
            assert running, "nothing to wait for: a deadlock"
            index = sorted(running)[data.draw(st.integers(0, len(running) - 1))]
            begun = running.pop(index)
            if data.draw(st.floats(0, 1)) < drop_rate:
                admission.drop(index)
            else:
                finished[index] = begun
                admission.finish(index)
        admission.advance()


@settings(max_examples=40)
@given(st.integers(1, 5), st.integers(0, 3), st.sampled_from([0.0, 0.5, 2.0, 6.0]), st.data())
def test_what_expires_is_exactly_what_is_too_old(groups, bound, ahead, data):
    """There is always room to begin, progress in every round, and no group trains beyond the bound."""
    admission = ExpiringAdmission(groups, bound, ahead)
    running: dict[int, int] = {}
    finished: dict[int, int] = {}
    for _ in range(8):
        while admission.num_left_in_round:
            for _ in range(admission.num_admissible):
                running[admission.admit()] = admission.round
            assert len(running) + len(finished) == math.floor((1 + ahead) * groups)
            chosen = admission.choose()
            if chosen is not None:
                admission.take(chosen)
                assert admission.round - finished.pop(chosen) <= bound
                continue
            assert running, "nothing to wait for: a deadlock"
            index = sorted(running)[data.draw(st.integers(0, len(running) - 1))]
            finished[index] = running.pop(index)
            admission.finish(index)
            assert admission.lose() == []
        admission.advance()
        lost = set(admission.lose())
        assert lost == {i for i, begun in (running | finished).items() if admission.round - begun > bound}
        for index in lost:
            (running if index in running else finished).pop(index)


# -- the producer, with its threads -----------------------------------------------------------------------------------


def simulated(intake: Intake, max_staleness: int, reward, num_steps: int, num_slots: int = 16, groups: int = 4):
    """Groups of each step, with the producer, on an engine whose completions are as long as they take."""
    engine = SimulatedEngine(LogNormal(0.01, 1.0), num_slots=num_slots, tokens_per_s=2000.0)
    admission = make_admission(groups, max_staleness, "free", None, intake.at_bound)
    producer = Producer(
        engine=engine,
        stream=PromptStream(SortDigits(8, size=64)),
        codec=TextCodec(MODEL),
        scorer=Scorer(reward),
        admission=admission,
        group_size=2,
        sampling=SamplingParams(max_tokens=10**6),
        timeout_s=20.0,
        intake=intake,
    )
    steps = []
    producer.start(0)
    try:
        for step in range(num_steps):
            producer.begin_step()
            steps.append([producer.take() for _ in range(groups)])
            engine.load_weights(step + 1, [])
            producer.advance(step + 1)
        producer.begin_step()
    finally:
        producer.stop()
        engine.close()
    return steps, producer


@pytest.mark.parametrize("max_staleness", [0, 2])
def test_dynamic_sampling_trains_on_groups_with_a_signal_only_and_counts_the_others(max_staleness):
    calls = itertools.count()
    intake = Intake([DynamicSampling()])
    # two completions of a prompt: every third group has two different rewards
    steps, producer = simulated(intake, max_staleness, lambda p, c: float(next(calls) % 6 == 0), 10)
    for version, groups in enumerate(steps):
        for one in groups:
            assert len({rollout.reward for rollout in one.rollouts}) == 2
            assert version - min(v for rollout in one.rollouts for v in rollout.versions) <= max_staleness
    fates = producer.stats().fates
    assert fates["trained"].num_groups == 40
    assert 78 <= fates["no_signal"].num_groups <= 78 + 3 * 4 * (max_staleness + 1)
    assert fates["no_signal"].length > 0


def test_a_solved_task_ends_instead_of_sampling_for_ever(caplog):
    intake = Intake([DynamicSampling(max_in_a_row=5)])
    steps, producer = simulated(intake, 0, lambda p, c: 1.0, 3)
    assert sum(len(groups) for groups in steps) == 12
    assert producer.stats().fates["no_signal"].num_groups == 5
    assert [record for record in caplog.records if "max_in_a_row=5" in record.message]


@pytest.mark.parametrize("at_bound", [Drop(ahead=4.0), Retry(ahead=4.0, max_tries=100)])
def test_dropping_at_the_bound_loses_long_completions_and_says_so(at_bound):
    # room for all: what is lost is lost because it is long, not because it never began
    steps, producer = simulated(Intake(at_bound=at_bound), 1, lambda p, c: 1.0, 30, num_slots=64)
    for version, groups in enumerate(steps):
        for one in groups:
            assert version - min(v for rollout in one.rollouts for v in rollout.versions) <= 1
    fates = producer.stats().fates
    trained, expired = fates["trained"], fates["expired"]
    assert trained.num_groups == 120
    assert expired.num_groups > 30
    assert expired.length / expired.num_groups > 1.2 * trained.length / trained.num_groups


def test_retry_samples_the_same_prompts_again_and_drop_does_not():
    _, dropped = simulated(Intake(at_bound=Drop(ahead=2.0)), 0, lambda p, c: 1.0, 12)
    _, retried = simulated(Intake(at_bound=Retry(ahead=2.0, max_tries=10**6)), 0, lambda p, c: 1.0, 12)
    lost = sum(totals.num_groups for fate, totals in retried.stats().fates.items() if fate != "trained")
    assert lost > 20
    # every position is trained on, waiting to be sampled again, or being sampled: none is lost
    assert retried.stream.position == 48 + len(retried.again) + len(retried.book.unfinished) + len(
        retried.book.finished
    )
    assert dropped.stream.position > 48 + 12
    assert not dropped.again


def test_waiting_loses_nothing():
    _, producer = simulated(Intake(), 1, lambda p, c: 1.0, 10)
    assert set(producer.stats().fates) == {"trained"}
    assert producer.stats().fates["trained"].num_groups == 40


# -- filters ----------------------------------------------------------------------------------------------------------


def dapo_penalty(length, max_tokens, buffer, factor):
    """As the paper writes it, in three cases."""
    if length <= max_tokens - buffer:
        return 0.0
    if length <= max_tokens:
        return factor * ((max_tokens - buffer) - length) / buffer
    return -factor


@given(st.integers(1, 40), st.integers(1, 30), st.integers(0, 30), st.floats(0, 2))
def test_overlong_penalty_is_the_papers(length, buffer, extra, factor):
    shaped = OverlongPenalty(buffer + extra, buffer, factor)(group([1.0, 0.0], [length, 1]))
    expected = [
        1.0 + dapo_penalty(length, buffer + extra, buffer, factor),
        dapo_penalty(1, buffer + extra, buffer, factor),
    ]
    assert [rollout.reward for rollout in shaped.rollouts] == pytest.approx(expected, abs=1e-12)


def test_cut_off_rollouts_do_not_train_and_stay_in_the_baseline():
    module, data = make_module(), make_data(intake=Intake([OverlongFilter()]), sampling=SamplingParams(max_tokens=8))
    fit(module, data, max_steps=1)  # eight digits and no end: hardly any is finished
    rollouts = [rollout for one in data.last_step_groups for rollout in one.rollouts]
    finished = [rollout for rollout in rollouts if rollout.finish_reason == "stop"]
    assert len(finished) < len(rollouts) == 16
    assert module.stabilizer_signals["mask"].sum() == sum(len(rollout.completion_ids) for rollout in finished)
    mixed = OverlongFilter()(group([1.0, 0.0], reasons=["stop", "length"]))
    assert [rollout.num_trained_tokens for rollout in mixed.rollouts] == [3, 0]
    assert [rollout.reward for rollout in mixed.rollouts] == [1.0, 0.0]


def test_filters_act_in_their_order():
    """Two equally right completions, one too long: accuracy says no signal, the shaped reward says there is one."""
    two = group([1.0, 1.0], [3, 9])
    accuracy_first = Intake([DynamicSampling(), OverlongPenalty(9, 4)])
    shaped_first = Intake([OverlongPenalty(9, 4), DynamicSampling()])
    assert accuracy_first.judge(two, 0) is None
    kept = shaped_first.judge(two, 0)
    assert kept is not None
    assert [rollout.reward for rollout in kept.rollouts] == [1.0, 0.0]
    assert accuracy_first.pass_rates.of(0) == 1.0
    shaped_first.trained(kept, 0, 0)
    assert shaped_first.pass_rates.of(0) == 1.0, "a pass rate is that of rewards before they were shaped"


# -- curriculum -------------------------------------------------------------------------------------------------------


def test_prompts_are_sampled_as_often_as_their_pass_rate_says():
    source, rates = SortDigits(8, size=4), PassRates()
    for number, rate in enumerate([0.0, 0.5, 1.0]):
        rates.measure(number, rate)  # number 3 was never measured
    for curriculum, chances in (
        (Learnability(floor=0.2), [0.2, 1.0, 0.2, 1.0]),
        (HardestFirst(floor=0.2), [1.0, 0.5, 0.2, 1.0]),
        (DifficultyWindow(0.1, 0.9, floor=0.2), [0.2, 1.0, 0.2, 1.0]),
    ):
        stream = PromptStream(source, seed=1)
        taken = [stream.number_at(curriculum.advance(stream, rates)) for _ in range(2000)]
        epochs = stream.position / 4
        for number, chance in enumerate(chances):
            assert taken.count(number) / epochs == pytest.approx(chance, abs=0.06)


def test_pass_rates_follow_the_newest_groups_and_survive_a_checkpoint():
    rates = PassRates(smoothing=0.5)
    for new in (1.0, 0.0, 0.0):
        rates.measure(7, new)
    assert rates.of(7) == 0.25
    assert rates.of(1) is None
    other = PassRates()
    other.load_state_dict(rates.state_dict())
    assert other.of(7) == 0.25
    assert len(other) == 1


def test_a_curriculum_is_repeated_to_the_bit_also_over_a_resume(tmp_path):
    def run(callbacks=None, **trainer):
        intake = Intake(curriculum=Learnability(floor=0.05))
        source = SortDigits(8, size=24)
        data = make_data(prompts=source, intake=intake, schedule="fixed_lag", max_staleness=1, engine=barrier_engine())
        module = make_module(learning_rate=3e-4)
        fit(module, data, 12, callbacks, **trainer)
        return module, data

    saving = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=7, save_top_k=-1)
    whole, data = run([saving], enable_checkpointing=True)
    assert data.stream.position > 12 * 4 + 4, "nothing was skipped"
    resumed, _ = run(ckpt_path=str(tmp_path / "step=7.ckpt"))
    assert torch.equal(parameters(whole), parameters(resumed))


# -- all of it in a run -----------------------------------------------------------------------------------------------


def test_the_monitor_logs_what_was_lost_and_warns_of_a_bias():
    logged = {}

    class Listener(LengthBiasMonitor):
        def compute(self, trainer, pl_module):
            logged.update(found := super().compute(trainer, pl_module))
            return found

    fit(make_module(), make_data(intake=Intake([DynamicSampling()])), max_steps=4, callbacks=[Listener()])
    assert logged["intake/trained_share"] + logged["intake/no_signal_share"] == pytest.approx(1.0)
    assert logged["intake/trained_length"] > 0
    assert logged["intake/no_signal_s"] > 0

    monitor = LengthBiasMonitor(min_groups=2)
    short = Intake()
    for n in range(4):
        short.trained(group([1.0], [4], n), n, n)
    intake = Intake(at_bound=Drop())
    intake._fates = dict(short.fates)
    for n in range(4):
        intake.lose(n, n, n, length=6.0, seconds=1.0)
    with pytest.warns(UserWarning, match=r"1.50 times as long"):
        monitor._warn(intake.fates)


def test_what_drops_is_refused_where_lag_is_fixed_and_settings_are_named():
    with pytest.raises(ValueError, match=r"schedule=fixed_lag with data.intake.filters holding DynamicSampling"):
        make_data(intake=Intake([DynamicSampling()]), schedule="fixed_lag")
    for settings_, message in (
        (dict(schedule="fixed_lag"), r"data.intake.at_bound=Retry with data.schedule=fixed_lag"),
        (dict(async_ratio=0.5), r"data.intake.at_bound=Retry with data.async_ratio=0.5"),
        (dict(ring=RingBuffer(num_sampling=4, capacity=4)), r"data.ring with data.intake.at_bound=Retry"),
    ):
        with pytest.raises(ValueError, match=message):
            make_data(intake=Intake(at_bound=Retry()), **settings_)
    for make, message in (
        (lambda: DynamicSampling(max_in_a_row=0), "max_in_a_row must be >= 1, got 0"),
        (lambda: OverlongPenalty(4, 5), "buffer_tokens must be between 1 and max_tokens=4, got 5"),
        (lambda: Drop(ahead=-1.0), "ahead must be >= 0, got -1"),
        (lambda: Retry(max_tries=0), "max_tries must be >= 1, got 0"),
        (lambda: Learnability(floor=0.0), r"floor must be in \(0, 1\]"),
        (lambda: DifficultyWindow(0.9, 0.1), "0 <= low < high <= 1"),
        (lambda: LengthBiasMonitor(ratio=1.0), "ratio must be > 1, got 1.0"),
    ):
        with pytest.raises(ValueError, match=message):
            make()
    assert replace(Drop(), ahead=2.0).ahead == 2.0
