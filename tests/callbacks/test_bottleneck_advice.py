"""Each kind of advice is applied: throughput must not fall. Virtual time or counted work where timing must be exact."""

import dataclasses
import itertools
import time
from types import SimpleNamespace

import lightning.pytorch as pl
import pytest
import torch
from flow import fit, make_data, make_module

import lit_async_rl as rl
from benchmarks.common.simulated_run import SimulatedRun
from lit_async_rl import Bounded, FixedLag
from lit_async_rl.callbacks import BottleneckVerdict, RolloutMonitor
from lit_async_rl.callbacks.monitors import bottleneck_verdict as advice
from lit_async_rl.callbacks.monitors.bottleneck_verdict import StepLoad, adjustable_settings
from lit_async_rl.engines.base import GenerationRequest, SamplingParams
from lit_async_rl.engines.embedded.engine import EmbeddedEngine
from lit_async_rl.problem import Prompt
from lit_async_rl.rewards.scorer import Scorer, score_all
from lit_async_rl.scheduling.bottleneck import diagnose
from lit_async_rl.simulation.engine import SimulatedEngine
from lit_async_rl.simulation.latency import Constant, LogNormal
from lit_async_rl.stabilizers.collapse import CollapseTrend
from lit_async_rl.tasks import SortDigits

VCPO = dict(
    loss=rl.Reinforce(),
    proximal=rl.CurrentProximal(),
    correction=rl.SequenceTruncatedIS(cap=8.0),
    baseline=rl.OptimalBaseline(),
)


@pytest.fixture(scope="module")
def module():
    return make_module()


def advised(side, data, module, **load):
    """The setting that would be advised."""
    return getattr(
        adjustable_settings(data, module, StepLoad(**(dict(num_steps=1, num_tokens=1, num_positions=1) | load))), side
    )


def run_of(latency, bound, **changes):
    settings = dict(train_s=0.4, num_steps=200) | changes
    return SimulatedRun(latency=latency(settings["train_s"] / 4), max_staleness=bound, **settings)


@pytest.mark.parametrize("bound", [0, 1, 2])
def test_a_higher_bound_where_both_sides_wait_for_each_other(bound, module):
    run = run_of(LogNormal, bound)
    before = run.ideal()
    assert diagnose(before, adjustable_settings(make_data(), module, StepLoad(num_steps=1))).side == "staleness bound"
    setting = advised("staleness", make_data(max_staleness=bound), module)
    assert (setting.name, setting.present) == ("data.max_staleness", bound)
    assert dataclasses.replace(run, max_staleness=setting.suggested).ideal().wall_s < before.wall_s


def test_no_bound_where_a_callback_has_lowered_it_below_that_of_the_settings(module):
    data = make_data(max_staleness=4)
    assert advised("fresher", data, module, min_queued=12).suggested == 2
    data._slots.max_staleness = 2  # `--data.max_staleness 4`, twice as much, would change nothing, and 1 limit the loop
    assert advised("staleness", data, module) is None
    assert advised("fresher", data, module, min_queued=12) is None


def fastest(*runs, clock=time.process_time):
    """Least seconds of each, of three in turns: other programs slow one of them down, now and then."""
    seconds = [[] for _ in runs]
    for _ in range(3):
        for run, found in zip(runs, seconds, strict=True):
            began = clock()
            run()
            found.append(clock() - began)
    return [min(found) for found in seconds]


@pytest.mark.slow
def test_bounded_admission_in_place_of_a_fixed_lag(module):
    data = make_data(admission=FixedLag(), max_staleness=2)
    assert str(advised("staleness", data, module)) == "change data.admission from FixedLag to Bounded"

    def train(admission):
        engine = SimulatedEngine(LogNormal(0.03), num_slots=4, in_flight_weight_updates=not admission.in_order, seed=3)
        fit(make_module(), make_data(engine=engine, admission=admission, max_staleness=2), 6)

    fixed, bounded = fastest(lambda: train(FixedLag()), lambda: train(Bounded()), clock=time.monotonic)
    assert bounded < 1.25 * fixed


def test_more_slots_where_requests_wait_for_one(module):
    data = make_data(engine=EmbeddedEngine(num_slots=4))
    setting = advised("engine", data, module, num_unfinished=8)
    assert str(setting).startswith("change data.engine.num_slots from 4 to 8 (")
    request = GenerationRequest(
        id=0, prompt_ids=tuple(range(1, 9)), num_samples=16, sampling=SamplingParams(max_tokens=24)
    )
    sizes = setting.present, setting.suggested
    few, many = (EmbeddedEngine.from_module(module.policy.causal_lm, num_slots=slots) for slots in sizes)
    present, suggested = fastest(lambda: few.run([request]), lambda: many.run([request]))
    assert suggested < 1.1 * present


@pytest.mark.parametrize(("cores", "is_advised"), [(1, False), (2, False), (3, False), (4, True), (64, True)])
def test_more_threads_only_where_a_core_is_left_besides_trainer_engine_and_reward(
    cores, is_advised, module, monkeypatch
):
    monkeypatch.setattr(advice, "num_cores", lambda: cores)
    data = make_data()
    assert advice.num_busy_threads(data, module, num_ranks=1) == 3
    found = {advised("trainer", data, module), advised("engine", data, module)} - {None}
    assert {setting.name for setting in found} == ({"num_threads", "data.engine.num_threads"} if is_advised else set())
    busier = make_data(engine=EmbeddedEngine(num_threads=2), reward_workers=4)
    assert advice.num_busy_threads(busier, module, num_ranks=2) == 2 + 2 + 4


def test_fewer_passes_where_there_is_little_padding_and_more_where_there_is_much(module):
    data = make_data(micro_batches_per_step=2)
    few = advised("trainer", data, module, num_tokens=95, num_positions=100)
    many = advised("trainer", data, module, num_tokens=50, num_positions=100)
    assert (few.suggested, many.suggested) == (1, 4)
    lengths = sorted([10, 12, 40, 100, 11, 14, 90, 42])
    positions = {n: sum(max(lengths[k : k + 8 // n]) * (8 // n) for k in range(0, 8, 8 // n)) for n in (1, 2, 4)}
    assert positions[4] < positions[2] < positions[1]  # positions that are computed for rollouts sorted by length


@pytest.mark.slow
def test_no_gradient_checkpointing(module):
    checkpointed = make_module(gradient_checkpointing=True)
    assert advised("trainer", make_data(), checkpointed).name == "model.gradient_checkpointing"
    ids = torch.randint(1, 10, (32, 64))

    def train(one):
        one.policy.causal_lm(input_ids=ids).logits.sum().backward()

    without, with_checkpoints = fastest(lambda: train(module), lambda: train(checkpointed))
    assert without < 1.1 * with_checkpoints


def test_more_reward_workers(module):
    def slow(prompt, completion):
        time.sleep(0.02)
        return 1.0

    setting, seconds = advised("reward", make_data(), module), {}
    assert str(setting) == "change data.scoring.workers from 1 to 2"
    for workers in (setting.present, setting.suggested):
        scorer = Scorer(slow, workers)
        began = time.monotonic()
        score_all(scorer, [(Prompt(text="1", answer="1"), "1")] * 16, lambda: None)
        seconds[workers] = time.monotonic() - began
        scorer.close()
    assert seconds[2] < seconds[1]


def test_publishing_less_often_is_named_as_the_setting_that_exists(module):
    setting = advised("weight_sync", make_data(), module)
    assert str(setting) == "change data.weight_sync_steps from 1 to 2"
    assert make_data(weight_sync_steps=setting.suggested).weight_sync_steps == 2
    num_published = {steps: len(range(steps, 41, steps)) for steps in (setting.present, setting.suggested)}
    assert num_published[2] < num_published[1]


def test_a_lower_bound_where_whole_rounds_are_always_ready(module):
    setting = advised("fresher", make_data(max_staleness=6), module, min_queued=4 * 4)
    assert (setting.present, setting.suggested) == (6, 3)
    before = SimulatedRun(latency=Constant(0.05), max_staleness=6, train_s=0.4, num_steps=100).ideal()
    after = SimulatedRun(latency=Constant(0.05), max_staleness=3, train_s=0.4, num_steps=100).ideal()
    assert after.wall_s <= before.wall_s * 1.001
    assert advised("fresher", make_data(max_staleness=6), module, min_queued=4) is None


def test_a_collapse_is_a_tiny_sample_size_and_a_falling_reward_together_until_the_reward_is_back():
    def observe(trend, ess, reward, steps=20):
        return [trend.observe(ess, reward) for _ in range(steps)][-1]

    trend = CollapseTrend()
    assert observe(trend, 0.9, 0.8) is None
    assert observe(trend, 0.01, 0.8) is None, "the reward holds"
    assert observe(CollapseTrend(), 0.01, 0.0) is None, "there was nothing to lose"
    assert "0.1 from 0.8" in observe(trend, 0.01, 0.1)
    assert "0.01 of the completions" in observe(trend, 1.0, 0.1), "all samples equal: it has ended up there"
    assert observe(trend, 0.9, 0.8) is None
    assert observe(trend, 0.9, 0.1) is None, "a fall of another cause"


class Falling(pl.Callback):
    """Logs what monitors would log of a run that collapses."""

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        is_well = trainer.global_step <= 10
        pl_module.log("importance/ess_ratio", 0.9 if is_well else 0.01)
        pl_module.log("reward/mean", 0.8 if is_well else 0.1)


def test_a_collapsing_run_is_told_so_with_the_file_that_helps_and_nothing_about_speed(capsys):
    judge = BottleneckVerdict(every_n_steps=10)
    data = make_data(engine=SimulatedEngine(Constant(0.001), num_slots=16), groups_per_step=1)
    fit(make_module(), data, 20, callbacks=[Falling(), judge])
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith(("step", "whole"))]
    assert "the trainer waits" in lines[0]
    for line in lines[1:]:
        assert "training is collapsing" in line
        assert "--config configs/stabilizers/vcpo.yaml" in line
        assert "change" not in line


@pytest.mark.parametrize(
    ("max_staleness", "parts", "words"),
    [
        (16, {}, "vcpo.yaml, or set model.learning_rate to 0.3 times that of a synchronous run, and resume"),
        (
            8,
            {"loss": rl.PPOClip()},
            "vcpo.yaml, or set model.learning_rate to 0.5 times that of a synchronous run, and",
        ),
        (4, {}, "vcpo.yaml, and resume"),  # the rate of a synchronous run fits, as far as is known
        (16, {"loss": rl.OPMD()}, "vcpo.yaml, and resume"),
        (16, VCPO, "lower model.learning_rate or data.max_staleness (now 16), and resume"),
    ],
)
def test_the_advice_on_a_collapse_names_the_rate_that_fits_the_bound(max_staleness, parts, words):
    trainer = SimpleNamespace(datamodule=make_data(max_staleness=max_staleness))
    assert words in advice.stabilizing_setting(trainer, make_module(**parts))


def test_a_module_of_another_kind_is_given_no_rate():
    trainer = SimpleNamespace(datamodule=make_data(max_staleness=16))
    assert "(now 16)" in advice.stabilizing_setting(trainer, pl.LightningModule())
    assert advice.fitting_rate(pl.LightningModule(), trainer.datamodule, 16) == 1.0


def test_the_rate_that_fits_counts_steps_between_publications(module):
    data = make_data(weight_sync_steps=5, max_staleness=16)
    assert advice.fitting_rate(module, data, 1) == pytest.approx(4 / 9)


@pytest.mark.slow
def test_a_run_whose_rewards_are_all_equal_is_told_that_it_learns_nothing(capsys):
    data = make_data(engine=SimulatedEngine(Constant(0.001), num_slots=16), groups_per_step=1, reward=always(0.0))
    fit(make_module(), data, 20, callbacks=[RolloutMonitor(), BottleneckVerdict(every_n_steps=10)])
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith(("step", "whole"))]
    assert len(lines) == 3
    for line, steps in zip(lines, (10, 20, 20), strict=True):
        assert f"nothing was learned in the last {steps} steps, all completions of a prompt had the same reward" in line
        assert "data.reward" in line


@pytest.mark.slow
def test_a_run_that_learns_now_and_then_is_not(capsys):
    rewards = itertools.cycle([0.0] * 8 + [1.0])
    data = make_data(
        engine=SimulatedEngine(Constant(0.001), num_slots=16), groups_per_step=1, reward=lambda *_: next(rewards)
    )
    fit(make_module(), data, 20, callbacks=[RolloutMonitor(), BottleneckVerdict(every_n_steps=10)])
    assert "nothing was learned" not in capsys.readouterr().out


def always(value):
    return lambda prompt, completion: value


@pytest.mark.slow
def test_processor_time_of_validations_is_not_that_of_the_steps(monkeypatch):
    monkeypatch.setattr(advice, "MIN_STEPS_FOR_VERDICT", 0)
    verdict, prompts = BottleneckVerdict(), SortDigits(4, size=4, split="held_out")
    held_out, seconds = {prompts[n].text for n in range(4)}, []

    def reward(prompt, completion):
        if prompt.text not in held_out:
            return 1.0
        began = time.process_time()
        while time.process_time() < began + 0.2:
            pass
        seconds.append(0.2)
        return 1.0

    data = make_data(reward=reward, groups_per_step=2, val_prompts=prompts)
    began = time.process_time()
    fit(make_module(), data, 4, [verdict], val_check_interval=2, limit_val_batches=1.0)
    of_all = time.process_time() - began
    assert sum(seconds) >= 1.5
    assert 0 < verdict.verdict.intervals.cpu_s < of_all - sum(seconds) + 0.05


def test_more_replicas(module, monkeypatch):
    data = make_data()
    monkeypatch.setattr(type(data.engine), "num_replicas", 3)
    assert str(advised("engine", data, module)) == "change data.engine.replicas from 3 to 4"
