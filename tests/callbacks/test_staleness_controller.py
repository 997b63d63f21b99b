"""StalenessController: down before a forecast collapse, back to healthy weights after one, up again when it is calm."""

import itertools
import math
import random
import statistics
from types import SimpleNamespace

import pytest
import torch
from flow import make_data, make_module
from foreign_modules import Probe, Regression, fit, weights
from lightning.pytorch.callbacks import ModelCheckpoint
from test_all_callbacks import BoundedRows

import lit_async_rl as rl
from lit_async_rl.corrections import TokenTruncatedIS
from lit_async_rl.stabilizers.collapse import CollapseForecast, GainWatch, LowerStaleness, StepHealth
from lit_async_rl.stabilizers.signals import StepSignals
from lit_async_rl.stabilizers.step_lr import OneStepLearningRate

pytestmark = pytest.mark.filterwarnings("ignore:StalenessController at")
LR = 0.01


def scripted(odds=None, rewards=None):
    """A module with these rewards, and a forecast with these log-odds, step by step; the last one stays."""

    class Scripted(Regression):
        def signals(self, batch):
            step = self.trainer.global_step
            found = super().signals(batch)
            if rewards:
                found["rewards"] = torch.full_like(found["rewards"], rewards[min(step, len(rewards) - 1)])
            return found

    module = Scripted(make_optimizer=lambda params: torch.optim.SGD(params, lr=LR))

    def observe(seen):
        return (odds or [-9.0])[min(module.trainer.global_step, len(odds or [0]) - 1)]

    return module, observe


def run(odds=None, rewards=None, max_steps=30, data=None, ckpt_path=None, callbacks=(), **settings):
    module, observe = scripted(odds, rewards)
    controller = rl.StalenessController(**settings)
    controller.forecast.observe = observe
    data = data or BoundedRows()
    probe = Probe()
    settings = dict(max_steps=max_steps, max_epochs=9)
    settings["enable_checkpointing"] = any(isinstance(callback, ModelCheckpoint) for callback in callbacks)
    fit(module, probe, controller, *callbacks, data=data, ckpt_path=ckpt_path, **settings)
    return controller, data, probe, module


def test_first_the_rate_is_halved_and_then_the_bound_down_to_its_minimum():
    data = BoundedRows()
    bounds = []
    data.set_max_staleness = lambda bound: (bounds.append(bound), setattr(data, "max_staleness", bound))
    controller, _, probe, _ = run([9.0], max_steps=33, data=data, max_halvings=2, min_staleness=2, cooldown_steps=1)
    assert [rate for n, rate in enumerate(probe.used_lr) if n == 0 or rate != probe.used_lr[n - 1]] == [
        LR,
        LR / 2,
        LR / 4,
    ]
    assert bounds == [8, 4, 2]
    assert probe.scheduled_lr == [LR] * 33, "schedulers and checkpoints never see it"
    assert controller.rung == 4
    assert "the learning rate is multiplied by 0.5" in controller.reports[0]
    assert "max_staleness is 4 now, and was 8" in controller.reports[2]


def test_after_a_change_of_the_bound_it_waits_for_the_data_of_the_old_one():
    controller, _, _, _ = run([9.0], max_steps=30, max_halvings=0, cooldown_steps=1)
    steps = [int(report.split("step ")[1].split(":")[0]) for report in controller.reports]
    assert steps == [1, 1 + 1 + 9 + 1, 1 + 1 + 9 + 1 + 1 + 5 + 1]  # data of a bound of 8 need 9 steps, of 4 five


def test_calm_steps_bring_the_rate_back_and_nothing_beyond_the_configured_one():
    odds = [9.0, 9.0, 9.0, 9.0, -9.0]
    controller, data, probe, _ = run(odds, calm_steps=3, cooldown_steps=1, min_staleness=None)
    assert min(probe.used_lr) == LR / 4
    assert probe.used_lr[-1] == LR
    assert controller.rung == 0
    assert data.max_staleness == 8


def test_between_the_two_limits_nothing_changes():
    controller, _, _, _ = run([9.0, CollapseForecast.LIMIT - 0.5], calm_steps=1, cooldown_steps=1)
    assert controller.rung == 1


def test_lost_rewards_bring_healthy_weights_back_and_that_rung_is_not_climbed_again():
    rewards = [0.5] * 10 + [1.0] * 10 + [0.0] * 10 + [1.0]
    controller, _, probe, _ = run(
        rewards=rewards, max_steps=33, copy_every_n_steps=1, calm_steps=2, min_staleness=None, cooldown_steps=1
    )
    assert controller.rollback.num_rollbacks == 1
    assert "half of the gained reward was lost. Weights and moments were rolled back" in controller.reports[0]
    assert min(probe.used_lr) == LR / 4
    assert probe.used_lr[-1] <= LR / 2, "never again the rate at which the reward was lost"


def test_the_weights_after_a_rollback_are_those_of_a_calm_step():
    seen = {}

    class Look(Probe):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            seen[trainer.global_step] = weights(pl_module)

    rewards = [0.5] * 10 + [1.0] * 10 + [0.0]
    controller, *_ = run(rewards=rewards, max_steps=30, copy_every_n_steps=1, min_staleness=None, callbacks=[Look()])
    words = controller.reports[0]
    came = int(words.split("at step ")[1].split(":")[0])
    back = int(words.rsplit("after step ", 1)[1].split(".")[0])
    assert back < 20 + GainWatch.WINDOW * GainWatch.COLLAPSE  # the reward fell at step 20
    assert torch.equal(seen[came], seen[back])


def test_without_a_forecast_the_first_weights_are_the_ones_to_return_to():
    controller, *_ = run([None], rewards=[0.5] * 10 + [0.0], max_steps=19, min_staleness=None)
    assert "were rolled back to those after step 0" in controller.reports[0]


def test_a_step_that_measures_nothing_is_no_reason_for_a_copy():
    """The first weights may be returned to; those of a later step without signals are not known to be healthy."""
    controller = rl.StalenessController()
    assert controller._is_worth_a_copy()
    for _ in range(CollapseForecast.MIN_STEPS):
        controller.forecast.observe(StepHealth(ess_ratio=0.01, grad_norm=1.0))
    controller._log_odds = controller.forecast.observe(StepHealth(ess_ratio=None, grad_norm=None))
    assert not controller._is_worth_a_copy()


def test_a_resumed_run_goes_on_as_the_whole_one(tmp_path):
    odds = [9.0] * 6 + [-9.0]
    settings = dict(cooldown_steps=1, calm_steps=3, max_halvings=1, min_staleness=1)
    saver = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=8, save_top_k=-1)
    whole, data, probe, module = run(odds, max_steps=24, callbacks=[saver], **settings)
    resumed = tmp_path / "step=8.ckpt"
    found, data_again, probe_again, again = run(odds, max_steps=24, ckpt_path=resumed, **settings)
    assert probe_again.used_lr == probe.used_lr[8:]
    assert data_again.max_staleness == data.max_staleness
    assert found.reports == whole.reports
    assert found.state_dict()["rung"] == whole.state_dict()["rung"]
    assert len(weights(again)) == len(weights(module))


class FakeRollBack:
    """Counts; its weights are the test's."""

    num_rollbacks = 0

    def act(self, trainer, pl_module):
        self.num_rollbacks += 1
        return "Weights and moments were rolled back."

    def state_dict(self):
        return {"num_rollbacks": self.num_rollbacks}


def test_signals_of_discarded_weights_are_forgotten_with_them():
    """A gradient 10^4 times as large stayed in the averages, and took the rolled back run down to the last rung."""
    controller = rl.StalenessController(correction=None)
    controller.rollback = FakeRollBack()
    trainer = SimpleNamespace(datamodule=BoundedRows(), global_step=0)
    rungs = []
    for step in range(100):
        is_bad = 60 <= step < 72 and not controller.rollback.num_rollbacks
        reward = 0.0 if is_bad else min(0.8, 0.1 + step * 0.012)
        ess = 0.05 if is_bad else 0.8
        signals = StepSignals(
            num_samples=32, num_broken=0, ess_ratio=ess, kl=0.0, entropy=1.0, reward=reward, staleness=8.0
        )
        controller._log_odds = controller._observe(signals, 1e3 if is_bad else 0.1)
        if controller.rollback.num_rollbacks:
            assert controller._is_worth_a_copy() == (controller._num_calm > 0), "not the first weights once more"
        controller.on_step_complete(trainer, None)
        if controller.rollback.num_rollbacks:
            rungs.append(controller.rung)
        if step == 68:  # resumed soon after the rollback
            state = controller.state_dict()
            controller = rl.StalenessController(correction=None)
            controller.load_state_dict(state)
            controller.rollback = FakeRollBack()
            controller.rollback.num_rollbacks = 1
            assert controller.state_dict() == state
    assert rungs[0] == max(rungs), "never further down by what the rollback discarded"
    assert rungs[-1] < rungs[0], "up again after calm steps"


def test_a_resume_with_a_shorter_ladder_is_at_its_last_rung_that_changes_something():
    """It was stuck: a rung up that changed nothing was taken back."""
    saved = rl.StalenessController(max_rollbacks=0).state_dict() | {"rung": 8}  # of a bound of 8: 5 halvings and 3
    for max_staleness, changes in ((2, dict()), (8, dict(max_halvings=2)), (8, dict(min_staleness=None))):
        controller = rl.StalenessController(max_rollbacks=0, **changes)
        controller.load_state_dict(saved)
        data = BoundedRows()
        data.max_staleness = max_staleness
        trainer = SimpleNamespace(datamodule=data, global_step=0)
        controller.on_fit_start(trainer, None)
        present = controller.lr_scale, data.max_staleness
        assert present == (0.5**controller.max_halvings, 8 if controller.min_staleness is None else 1)
        while controller.rung > 0:
            controller._move(trainer, -1, "calm")
            assert (controller.lr_scale, data.max_staleness) != present
            present = controller.lr_scale, data.max_staleness
        assert present == (1.0, max_staleness)


@pytest.mark.parametrize(
    ("saved", "correction", "expected"),
    [
        (dict(rung=4, first_rung=3, num_corrections=1), None, (3, 2)),
        (dict(rung=1, first_rung=1, num_corrections=1), None, (1, 1)),  # lost on rung 0, which has no correction
        (dict(rung=2, first_rung=1, num_corrections=0), TokenTruncatedIS(), (3, 2)),
        (dict(rung=2, first_rung=0, num_corrections=0), TokenTruncatedIS(), (3, 0)),
    ],
)
def test_the_rung_of_the_lost_reward_moves_with_the_ladder(saved, correction, expected):
    """Only the present rung did, and a run whose correction was taken away climbed to the rate that had failed."""
    controller = rl.StalenessController(max_rollbacks=0, correction=correction)
    controller.load_state_dict(controller.state_dict() | saved)
    module = make_module(loss=rl.Reinforce())
    controller.on_fit_start(SimpleNamespace(datamodule=BoundedRows(), global_step=0), module)
    assert (controller.rung, controller._first_rung) == expected
    controller.close()


class GivenRows(BoundedRows):
    """Says its configured bound, as `RolloutDataModule` does."""

    configured_bound = 8


@pytest.mark.parametrize("make", [GivenRows, lambda: make_data(max_staleness=8)])
def test_a_resumed_run_does_not_depend_on_the_order_of_callbacks_that_bound_staleness(make):
    """The second one took for configured what the first had restored, and raised what it had lowered."""
    controller_state = rl.StalenessController(max_rollbacks=0).state_dict() | {"rung": 7}  # a bound of 2
    for adaptive_bound, expected in ((3, 2), (1, 1)):
        for order in itertools.permutations(range(3)):
            controller = rl.StalenessController(max_rollbacks=0, correction=None)
            controller.load_state_dict(controller_state)
            adaptive = rl.AdaptiveStaleness()
            adaptive.load_state_dict({"smoothed": 0.9, "bound": adaptive_bound, "wait": 0})
            alarm = rl.CollapseAlarm(LowerStaleness())
            alarm.load_state_dict(alarm.state_dict() | {"action": {"bound": 4}})
            data = make()
            trainer = SimpleNamespace(datamodule=data, global_step=0)
            for place in order:
                (controller, adaptive, alarm)[place].on_fit_start(trainer, None)
            assert data.max_staleness == expected
            assert (adaptive._max_bound, controller._configured_bound) == (8, 8)


def test_a_fixed_lag_has_no_bound_to_lower_and_is_refused_at_the_start():
    data = make_data(admission=rl.FixedLag(), max_staleness=2)
    with pytest.raises(ValueError, match="FixedLag"):
        fit(make_module(), rl.StalenessController(), data=data)


@pytest.mark.parametrize(
    "setting",
    [dict(max_halvings=-1), dict(min_staleness=-1), dict(cooldown_steps=0), dict(limit=math.nan), dict(margin=-1.0)],
)
def test_settings_out_of_range_are_refused_by_name(setting):
    with pytest.raises(ValueError, match=rf"StalenessController.{next(iter(setting))}"):
        rl.StalenessController(**setting)


# -- The forecast ------------------------------------------------------------------------------------------------------


def test_the_log_odds_are_those_of_the_formula_and_continue_after_a_resume():
    drawn = random.Random(3)
    steps = [(drawn.uniform(0.01, 1), drawn.uniform(0.1, 9)) for _ in range(40)]
    forecast = CollapseForecast()
    for number, (ess, norm) in enumerate(steps):
        found = forecast.observe(StepHealth(ess_ratio=ess, grad_norm=norm))
        assert forecast.observe(StepHealth(ess_ratio=None, grad_norm=norm)) is None, "not measured: no step"
        if number == 20:
            state = forecast.state_dict()
            forecast = CollapseForecast()
            forecast.load_state_dict(state)
        if number < 9:
            assert found is None
            continue
        ages = [0.5 ** ((number - n) / 5) for n in range(number + 1)]
        e, g = (sum(a * s[k] for a, s in zip(ages, steps, strict=False)) / sum(ages) for k in (0, 1))
        first = sorted(norm for _, norm in steps[:5])[2]
        expected = -5.77 * math.log10(e) + 2.52 * math.log10(g / first) - 5.78
        assert found == pytest.approx(expected, rel=1e-12)


def test_first_norms_that_are_mostly_zero_are_no_measure_of_later_ones():
    """Beside a median of 0 each later norm was 10^5 times as large, and a healthy run collapsing forever."""
    for num_zeros in range(20):
        forecast = CollapseForecast()
        found = [
            forecast.observe(StepHealth(ess_ratio=0.9, grad_norm=0.0 if step < num_zeros else 0.1))
            for step in range(60)
        ]
        ready = max(CollapseForecast.MIN_STEPS, num_zeros + 3)
        assert found[: ready - 1] == [None] * (ready - 1)
        assert max(found[ready - 1 :]) < CollapseForecast.LIMIT - 1
        assert found[-1] == pytest.approx(-5.77 * math.log10(0.9) - 5.78, abs=0.1)
    norms = [0.0, 0.0, 0.3, 0.1, 0.2]
    forecast = CollapseForecast()
    for norm in norms + [0.1] * 5:
        forecast.observe(StepHealth(ess_ratio=0.9, grad_norm=norm))
    assert forecast.state_dict()["first_norms"] == norms, "two zeros stay: so the rule was fitted"
    state = forecast.state_dict() | {"first_norms": [0.0, 0.0, 0.0, 0.1, 0.1]}  # of an earlier commit
    forecast.load_state_dict(state)
    assert forecast.observe(StepHealth(ess_ratio=0.9, grad_norm=0.1)) < CollapseForecast.LIMIT - 1


def test_the_share_that_is_lost_is_of_the_gain_or_of_the_first_value_without_one():
    watch = GainWatch()
    assert [watch.observe(0.4) for _ in range(9)] == [0.0] * 9
    assert watch.observe(0.4) == 0
    for _ in range(10):
        share = watch.observe(0.1)
    assert share == pytest.approx(0.75)
    for _ in range(10):
        watch.observe(0.9)
    for _ in range(10):
        share = watch.observe(0.65)
    assert share == pytest.approx(0.5)


def rewards_of(solved, num_completions, seed):
    """Mean rewards of steps with so many completions, each of which is solved with that step's probability."""
    drawn = random.Random(seed)
    return [statistics.fmean(drawn.random() < p for _ in range(num_completions)) for p in solved]


@pytest.mark.parametrize("num_completions", [16, 32, 128])
def test_noise_of_few_completions_is_no_collapse_and_a_collapse_is_found_in_it(num_completions):
    """A controller rolled a healthy language model back three times: of 32 completions half a small gain is chance."""
    from benchmarks.staleness.predictor import collapse_step

    rises = [0.14 + 0.2 * min(1, step / 25) for step in range(100)]
    healthy = [collapse_step(rewards_of(rises, num_completions, seed)) for seed in range(200)]
    assert sum(step is not None for step in healthy) <= 10  # 149, 51 and 0 by the share alone
    falls = rises[:60] + [0.0] * 40
    found = [collapse_step(rewards_of(falls, num_completions, seed)) for seed in range(200)]
    assert all(step is not None for step in found)
    assert statistics.median(found) < 60 + GainWatch.WINDOW


def test_what_is_known_of_noise_survives_a_checkpoint_and_one_of_before_is_read():
    rewards = rewards_of([0.14] * 15 + [0.5] * 15 + [0.05] * 15, 32, 0)
    whole = GainWatch()
    shares = [whole.observe(reward) for reward in rewards]
    first = GainWatch()
    for reward in rewards[:20]:
        first.observe(reward)
    resumed = GainWatch()
    resumed.load_state_dict(first.state_dict())
    assert [resumed.observe(reward) for reward in rewards[20:]] == shares[20:]
    assert resumed.is_collapse is whole.is_collapse is True
    assert resumed.state_dict() == whole.state_dict()
    before = {name: first.state_dict()[name] for name in ("rewards", "first", "best")}
    resumed.load_state_dict(before)
    assert [resumed.observe(reward) for reward in rewards[20:]] == shares[20:]


@pytest.mark.slow
def test_the_constants_are_those_that_the_benchmark_fits():
    from benchmarks.staleness.predictor import fit as fitted
    from benchmarks.staleness.predictor import is_fitted, read_steps, runs_of, threshold

    steps = read_steps()
    runs = runs_of(steps[is_fitted(steps)])
    found = fitted(runs)
    assert found == pytest.approx([*CollapseForecast.WEIGHTS, CollapseForecast.CONSTANT], abs=0.03)
    assert threshold(runs, found) == pytest.approx(CollapseForecast.LIMIT, abs=0.03)


# -- Two factors of one step -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("in_step", [True, False])
def test_two_factors_of_one_rate_multiply_and_neither_is_kept(in_step):
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    first = OneStepLearningRate(optimizer)
    second = OneStepLearningRate(optimizer)

    def closure():
        if in_step:
            first.scale(0.5)
            second.scale(0.25)
        parameter.grad = torch.ones(1)
        return torch.zeros(())

    for number in range(1, 3):
        if not in_step:
            second.scale(0.25)
            first.scale(0.5)
        optimizer.step(closure)
        assert parameter.item() == pytest.approx(-0.125 * number)
        assert optimizer.param_groups[0]["lr"] == 1.0
    first.close()
    second.scale(0.5)
    optimizer.step(lambda: parameter.grad.fill_(1.0).sum())
    assert optimizer.param_groups[0]["lr"] == 1.0
    second.close()
    assert not optimizer._optimizer_step_pre_hooks
    assert not hasattr(optimizer, "_step_rate")


def test_a_state_of_an_earlier_commit_is_read():
    state = rl.StalenessController().state_dict()
    state["highest_rung"] = state.pop("first_rung") + 3
    controller = rl.StalenessController()
    controller.load_state_dict(state)
    assert controller.state_dict()["first_rung"] == 3
