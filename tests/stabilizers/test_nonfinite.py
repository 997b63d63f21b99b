"""Gradients that are no numbers change nothing, and too many of them end the run."""

import lightning.pytorch as pl
import pytest
import torch
from failing_engines import Watch, said
from flow import fit, make_data, make_module, parameters
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.precision import MixedPrecision

import lit_async_rl as rl
from lit_async_rl.callbacks import (
    GradientAlignmentControl,
    GradientClipping,
    GradientMonitor,
    RolloutTape,
    SaveOnFailure,
    SkipNonFinite,
)
from lit_async_rl.errors import NonFiniteError
from lit_async_rl.replay.tape import Tape
from lit_async_rl.stabilizers.gradients import DroppedUpdates

pytestmark = pytest.mark.timeout(120)


class NaNs(pl.Callback):
    """In the gradients of some steps; notes weights, moments and versions after each."""

    def __init__(self, steps):
        self.steps, self.seen = steps, []

    def on_after_backward(self, trainer, pl_module):
        if trainer.global_step in self.steps:
            next(p.grad for p in pl_module.parameters() if p.grad is not None).view(-1)[0] = torch.nan

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        moments = [value.clone() for state in trainer.optimizers[0].state.values() for value in state.values()]
        self.seen.append((parameters(pl_module).clone(), torch.cat([m.flatten() for m in moments]), pl_module.version))


@pytest.mark.slow
@pytest.mark.parametrize("guard", [SkipNonFinite, GradientClipping])
def test_a_gradient_with_nan_changes_neither_weights_nor_moments_nor_version(guard, caplog):
    nans = NaNs({2, 3})
    fit(make_module(), make_data(groups_per_step=2), 6, [nans, guard()])
    assert [version for *_, version in nans.seen] == [1, 2, 2, 2, 3, 4]
    for name in range(2):
        assert torch.equal(nans.seen[1][name], nans.seen[3][name])
        assert not torch.equal(nans.seen[3][name], nans.seen[4][name])
    assert nans.seen[-1][0].isfinite().all()
    assert len(said(caplog, "the gradient contains NaN or infinity, so this update is dropped")) == 2


class NumSkipped(pl.Callback):
    """Notes the logged number after each step."""

    def __init__(self):
        self.seen = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        number = trainer.callback_metrics.get("grad/num_skipped")
        self.seen.append(None if number is None else float(number))


@pytest.mark.slow
@pytest.mark.parametrize(("steps", "expected"), [({2, 3}, [None, None, 1, 2, 2]), (set(), [None] * 2)])
def test_the_number_of_dropped_updates_is_logged_once_there_is_one(steps, expected):
    noted = NumSkipped()
    fit(make_module(), make_data(groups_per_step=2), len(expected), [NaNs(steps), SkipNonFinite(), noted])
    assert noted.seen[: len(expected)] == expected


@pytest.mark.slow
def test_too_many_nans_in_a_row_end_the_run_with_a_checkpoint(tmp_path, caplog):
    keep = ModelCheckpoint(tmp_path, every_n_train_steps=1000)
    guards = [NaNs(range(2, 99)), SkipNonFinite(max_in_a_row=2), keep, SaveOnFailure()]
    module, watch, tape = make_module(), Watch(), RolloutTape(str(tmp_path / "tape"))
    with pytest.raises(NonFiniteError, match=r"3 updates in a row .* SkipNonFinite\.max_in_a_row=2"):
        fit(module, make_data(groups_per_step=2), 99, [*guards, watch, tape], enable_checkpointing=True)
    resumed, rest = make_module(), Watch()
    fit(resumed, make_data(groups_per_step=2), 7, [rest], ckpt_path=str(tmp_path / "failed.ckpt"))
    assert not set(watch.trained) & set(rest.trained)
    assert (len(watch.trained), len(rest.trained)) == (10, 4)
    assert [step.step for step in Tape(tmp_path / "tape").steps()] == [0, 1, 2, 3, 4]
    with pytest.raises(ValueError, match=r"SkipNonFinite\.max_in_a_row must be >= 0"):
        SkipNonFinite(max_in_a_row=-1)


def test_only_those_in_a_row_end_the_run_and_all_are_counted_over_a_resume():
    dropped = DroppedUpdates("Guard", max_in_a_row=1)
    for is_dropped in (True, False, True, False, True):
        dropped.note(is_dropped)
        dropped.check()
    assert dropped.total == 3
    dropped.note(True)
    with pytest.raises(NonFiniteError, match="2 updates in a row"):
        dropped.check()
    saved, resumed = SkipNonFinite(), SkipNonFinite()
    saved.dropped.note(True)
    resumed.load_state_dict(saved.state_dict())
    assert resumed.dropped.total == 1
    assert resumed.dropped.num_in_a_row == 0


def logged_by(module):
    """What is logged about the gradient in each step, filled during training."""
    log, seen = module.log, []

    def note(name, value, **options):
        step = module.trainer.global_step
        seen.extend({} for _ in range(step + 1 - len(seen)))
        if name.startswith("grad/"):
            seen[step][name] = float(value)
        log(name, value, **options)

    module.log = note
    return seen


@pytest.mark.slow
def test_clipping_beside_the_default_callbacks_logs_no_norm_of_what_they_have_dropped():
    """It saw a gradient of norm 0 in such a step."""
    clipping, module = GradientClipping(), make_module()
    logged = logged_by(module)
    settings = dict(accelerator="cpu", max_steps=4, logger=False, enable_checkpointing=False)
    trainer = rl.Trainer(callbacks=[NaNs({2}), clipping], enable_progress_bar=False, **settings)
    trainer.fit(module, datamodule=make_data(groups_per_step=2))
    assert [step.get("grad/num_skipped", 0) for step in logged[:4]] == [0, 0, 1, 1]
    assert [step["grad/num_dropped"] for step in logged[:4]] == [0, 0, 0, 0]  # counted once
    assert logged[2]["grad/clip_scale"] == 0
    assert ["grad/norm" in step for step in logged[:4]] == [True, True, False, True]
    assert clipping.dropped.total == 0


def test_after_a_fit_whose_last_update_was_dropped_gradients_are_clipped():
    clipping, module = GradientClipping(), make_module()
    fit(module, make_data(groups_per_step=2), 3, [NaNs({2}), SkipNonFinite(), clipping])
    parameters = list(module.parameters())
    for one in parameters:
        one.grad = torch.ones_like(one)
    assert clipping.apply(module, torch.optim.SGD(parameters, lr=0.1))["grad/clip_scale"] > 0


EARLIER = [SkipNonFinite, GradientAlignmentControl, GradientClipping]


@pytest.mark.slow
@pytest.mark.parametrize("guard", [SkipNonFinite, GradientClipping])
def test_a_limit_holds_for_what_gradient_alignment_control_has_dropped(guard):
    guards = [NaNs(range(2, 99)), GradientAlignmentControl(), guard(max_in_a_row=1)]
    with pytest.raises(NonFiniteError, match=rf"2 updates in a row .* {guard.__name__}\.max_in_a_row=1"):
        fit(make_module(), make_data(groups_per_step=2), 9, guards)


@pytest.mark.slow
@pytest.mark.parametrize("guards", [(SkipNonFinite, GradientClipping), (GradientClipping, SkipNonFinite)])
def test_the_limit_of_the_first_guard_holds_alone(guards):
    """A limit that is switched off is not that of the other one."""
    first, second = guards[0](max_in_a_row=None), guards[1](max_in_a_row=1)
    fit(make_module(), make_data(groups_per_step=2), 6, [NaNs(range(2, 99)), first, second])
    assert (first.dropped.total, second.dropped.total) == (4, 0)


@pytest.mark.parametrize("earlier", EARLIER)
def test_no_norm_is_logged_where_the_gradient_was_dropped_before(earlier):
    module = make_module()
    logged = logged_by(module)
    fit(module, make_data(groups_per_step=2), 4, [NaNs({2}), earlier(), GradientMonitor()])
    assert ["grad/norm" in step for step in logged[:4]] == [True, True, False, True]


class LastNaN(pl.Callback):
    """In the gradient of the last parameter only."""

    def on_after_backward(self, trainer, pl_module):
        [p for p in pl_module.parameters() if p.grad is not None][-1].grad.view(-1)[-1] = torch.inf


@pytest.mark.parametrize("guard", [SkipNonFinite, GradientClipping])
def test_a_nan_in_one_group_of_parameters_drops_the_update_of_all(guard):
    def two_groups(params):
        return torch.optim.AdamW([{"params": params[:-1]}, {"params": params[-1:]}], lr=1e-3)

    module = make_module(optimizer=two_groups)
    before = parameters(module).clone()
    fit(module, make_data(groups_per_step=2), 2, [LastNaN(), guard()])
    assert torch.equal(parameters(module), before)
    assert module.version == 0


def scaled(scale):
    return dict(plugins=[MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=scale))])


@pytest.mark.slow
def test_a_step_that_the_loss_scaler_skips_is_no_new_version():
    nans = NaNs({2, 3})
    fit(make_module(), make_data(groups_per_step=2), 6, [nans, SkipNonFinite()], **scaled(8.0))
    assert [version for *_, version in nans.seen] == [1, 2, 2, 2, 3, 4]
    assert torch.equal(nans.seen[1][0], nans.seen[3][0])
    assert not torch.equal(nans.seen[3][0], nans.seen[4][0])


@pytest.mark.slow
def test_nans_that_no_loss_scale_explains_end_the_run():
    guards = [NaNs(range(2, 99)), SkipNonFinite(max_in_a_row=2)]
    with pytest.raises(NonFiniteError, match=r"3 updates in a row .* SkipNonFinite\.max_in_a_row=2"):
        fit(make_module(), make_data(groups_per_step=2), 99, guards, **scaled(4.0))
    assert len(guards[0].seen) == 2 + 2 + 3, "two halvings of the scale, then three that count"
