"""What every stabilizer promises, whichever it is: one test each, for all of them."""

import itertools
import math
from dataclasses import dataclass
from typing import Any

import jsonargparse
import lightning.pytorch as pl
import pytest
import torch
import yaml
from foreign_modules import ROWS, Probe, Regression, Rows, fit, weights
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.optim.lr_scheduler import ExponentialLR
from torch.utils.data import DataLoader, Subset

from lit_async_rl import callbacks
from lit_async_rl.callbacks import (
    AdaptiveStaleness,
    CollapseAlarm,
    ESSLearningRate,
    GradientAlignmentControl,
    GradientClipping,
    StalenessController,
)
from lit_async_rl.stabilizers.alignment import LastProjected
from lit_async_rl.stabilizers.collapse import LowerStaleness


class BoundedRows(pl.LightningDataModule):
    """Rows for up to 33 steps, with a bound on staleness that anybody may set."""

    def __init__(self, rows=None):
        super().__init__()
        self.rows = rows or Rows(200, scale=0.5)
        self.max_staleness = 8

    def set_max_staleness(self, max_staleness):
        self.max_staleness = max_staleness

    def train_dataloader(self):
        return DataLoader(self.rows, batch_size=ROWS)


@dataclass(frozen=True)
class Case:
    """How to build one stabilizer so that it does nothing, so that it does much, and what it must log."""

    neutral: Any
    active: Any
    logs: tuple[str, ...]
    config: str

    def __repr__(self):
        return type(self.active()).__name__


def quick(**settings):
    """One that forecasts from the second step on, because these runs are short."""
    controller = StalenessController(**settings)
    controller.forecast.MIN_STEPS = 2
    return controller


CASES = [
    Case(
        lambda: GradientAlignmentControl(low=1.0, high=1.0),
        lambda: GradientAlignmentControl(low=0.0, high=0.98, reference=LastProjected()),
        ("gac/cosine", "gac/regime", "gac/kept", "gac/norm", "gac/low", "gac/high"),
        """{class_path: lit_async_rl.callbacks.GradientAlignmentControl, init_args: {low: 0.1,
            residual: {class_path: lit_async_rl.stabilizers.alignment.FixedResidual, init_args: {kept: 0.2}},
            reference: lit_async_rl.stabilizers.alignment.LastProjected, optimizer: actor}}""",
    ),
    Case(
        lambda: ESSLearningRate(power=0.0),
        ESSLearningRate,
        ("ess/ratio", "ess/lr_scale", "ess/num_samples"),
        "{class_path: lit_async_rl.callbacks.ESSLearningRate, init_args: {power: 1, base_ess_ratio: 0.55}}",
    ),
    Case(
        lambda: GradientClipping(math.inf),
        lambda: GradientClipping(0.05),
        ("grad/norm", "grad/clip_scale"),
        "{class_path: lit_async_rl.callbacks.GradientClipping, init_args: {max_norm: 1, optimizer: 0}}",
    ),
    Case(
        lambda: CollapseAlarm(min_ess_ratio=None, max_kl=None, max_grad_norm_factor=None),
        lambda: CollapseAlarm(LowerStaleness(), min_ess_ratio=0.99, patience=1, cooldown_steps=0),
        ("collapse/ess_ratio", "collapse/kl", "collapse/reward", "collapse/entropy", "collapse/num_alarms"),
        """{class_path: lit_async_rl.callbacks.CollapseAlarm, init_args: {max_kl: null, min_ess_ratio: 0.1,
            action: {class_path: lit_async_rl.stabilizers.rollback.RollBack, init_args: {every_n_steps: 10}}}}""",
    ),
    Case(
        lambda: AdaptiveStaleness(target_ess_ratio=0.0),
        lambda: AdaptiveStaleness(target_ess_ratio=0.99, band=0.0),
        ("staleness/bound", "staleness/smoothed_ess_ratio"),
        "{class_path: lit_async_rl.callbacks.AdaptiveStaleness, init_args: {max_kl: 0.1}}",
    ),
    Case(
        lambda: quick(limit=1e9, max_rollbacks=0),
        lambda: quick(limit=-1e9, max_halvings=1, cooldown_steps=1),
        ("controller/log_odds", "controller/lr_scale", "controller/bound"),
        "{class_path: lit_async_rl.callbacks.StalenessController, init_args: {min_staleness: null}}",
    ),
]
each = pytest.mark.parametrize("case", CASES, ids=repr)
pytestmark = pytest.mark.filterwarnings("ignore:(CollapseAlarm|StalenessController) at", "ignore:.*NaN or inf")


def module():
    return Regression(make_scheduler=lambda optimizer: ExponentialLR(optimizer, 0.9))


def train(*cbs, data=None, **kwargs):
    data, trained, probe = data or BoundedRows(), module(), Probe()
    fit(trained, probe, *cbs, data=data, **(dict(max_epochs=9) | kwargs))
    return weights(trained), data.max_staleness, probe


def test_no_stabilizer_is_forgotten():
    not_here = {"WeightSync", "RunSummary", "SampleLogger", "Progress", "BottleneckVerdict"}
    not_here |= {"SaveOnSigterm", "RolloutTape", "Evaluation", "Timeline", "EngineCheck", "LinkedCheckpoint"}
    not_here |= {"LiveView", "LMEvalValidation", "ReplicaScaling"}
    not_here |= {"SaveOnFailure", "SkipNonFinite"}  # test_faults
    not_here |= {"ReferenceReset"}  # of the losses that it changes: test_trajectory_losses
    not_here |= {"EstimatorBlend"}  # of the correction that it changes: test_blended_estimators
    not_here |= {n for n in callbacks.__all__ if n.endswith("Monitor")}
    assert {repr(case) for case in CASES} == set(callbacks.__all__) - not_here


@each
def test_at_its_neutral_setting_it_changes_no_bit(case):
    plain, acted = train(), train(case.neutral())
    assert torch.equal(plain[0], acted[0])
    assert plain[1] == acted[1]


@each
def test_at_an_active_setting_it_changes_something(case):
    plain, acted = train(), train(case.active())
    assert not torch.equal(plain[0], acted[0]) or plain[1] != acted[1]


@each
@pytest.mark.parametrize("accumulate", [1, 2])
def test_it_logs_what_it_saw_and_leaves_the_schedule_alone(case, accumulate):
    _, _, plain = train(accumulate_grad_batches=accumulate)
    _, _, probe = train(case.active(), accumulate_grad_batches=accumulate)
    assert set(case.logs) <= set(probe.metrics[-1])
    assert all(math.isfinite(value) for metrics in probe.metrics for value in metrics.values())
    assert probe.scheduled_lr == plain.scheduled_lr


@each
def test_it_goes_on_after_a_resume_where_it_left_off(case, tmp_path):
    straight = case.active()
    expected, bound, _ = train(straight)
    saver = ModelCheckpoint(tmp_path, filename="at3", every_n_train_steps=3, save_top_k=-1, save_last=False)
    train(case.active(), saver, max_steps=3, enable_checkpointing=True)
    resumed = case.active()
    rest = BoundedRows(Subset(BoundedRows().rows, range(3 * ROWS, 200)))  # a DataLoader starts over
    result, resumed_bound, _ = train(resumed, data=rest, ckpt_path=str(tmp_path / "at3.ckpt"))
    if isinstance(straight, GradientAlignmentControl):  # whose reference is not checkpointed, as it says
        assert set(resumed.state_dict()) == set(straight.state_dict())
        return
    assert torch.equal(result, expected)
    assert resumed_bound == bound
    assert resumed.state_dict() == straight.state_dict()


@each
def test_its_state_is_plain_data(case):
    callback = case.active()
    train(callback)

    def check(value):
        if isinstance(value, dict):
            return all(check(v) for v in value.values())
        if isinstance(value, list):
            return all(check(v) for v in value)
        return value is None or isinstance(value, int | float | str)

    assert check(callback.state_dict())


@each
@pytest.mark.parametrize("value", [math.nan, math.inf, 80.0, -80.0])
def test_broken_log_ratios_leave_weights_and_metrics_finite(case, value):
    rows = Rows(200)
    rows.log_ratio[2::5] = value
    result, _, probe = train(case.active(), data=BoundedRows(rows))
    assert result.isfinite().all()
    assert all(math.isfinite(v) for metrics in probe.metrics for v in metrics.values())


@pytest.mark.parametrize("first", range(len(CASES)))
def test_they_commute_except_for_clipping_after_alignment(first):
    """Projection and clipping do not: a clipped gradient projected is shorter than a projected one clipped."""
    for second in range(first + 1, len(CASES)):
        pair = CASES[first], CASES[second]
        one, other = (train(*(case.active() for case in order))[:2] for order in (pair, pair[::-1]))
        if {repr(case) for case in pair} == {"GradientAlignmentControl", "GradientClipping"}:
            assert not torch.equal(one[0], other[0])
        elif {repr(case) for case in pair} <= {"CollapseAlarm", "AdaptiveStaleness", "StalenessController"}:
            continue  # two owners of one bound: who comes last in a step has the last word
        else:
            torch.testing.assert_close(one[0], other[0], rtol=0, atol=0)


@pytest.mark.slow
def test_all_together_work_and_each_has_its_say():
    for order in itertools.islice(itertools.permutations(CASES), 0, 120, 29):
        result, _, probe = train(*(case.active() for case in order))
        assert result.isfinite().all()
        assert all(name in probe.metrics[-1] for case in CASES for name in case.logs)


@each
def test_a_configuration_file_can_name_it(case):
    parser = jsonargparse.ArgumentParser()
    parser.add_argument("--callback", type=pl.Callback)
    config = parser.parse_object({"callback": yaml.safe_load(case.config)})
    assert type(parser.instantiate_classes(config).callback).__name__ == repr(case)
