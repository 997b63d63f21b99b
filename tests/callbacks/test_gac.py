"""GradientAlignmentControl: what it promises about each regime, and that it never gets stuck."""

import math

import pytest
import torch
from foreign_modules import Probe, Regression, fit, weights
from lightning.pytorch.plugins import MixedPrecision
from torch import nn
from torch.utils.data import DataLoader

from lit_async_rl.callbacks import GradientAlignmentControl
from lit_async_rl.stabilizers.alignment import (
    ExactResidual,
    FixedResidual,
    FullRemoval,
    LastProjected,
    LastRaw,
    MovingAverage,
    Regime,
)
from lit_async_rl.training.module import PolicyModule
from lit_async_rl.types import RolloutBatch

RESIDUALS = [FullRemoval(), ExactResidual(), FixedResidual(0.3)]
REFERENCES = [LastRaw(), LastProjected(), MovingAverage(0.5)]


def step(gac, optimizer, *grads):
    """One step of a hand-written loop with the given gradients."""
    for p, grad in zip((p for g in optimizer.param_groups for p in g["params"]), grads, strict=True):
        p.grad = grad.clone()
    seen = gac.apply(nn.Module(), optimizer)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return seen


def vector(*values):
    return torch.tensor(values, dtype=torch.float32)


# -- the step ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reference", REFERENCES)
def test_matches_a_slow_copy_written_with_flat_vectors(reference):
    torch.manual_seed(3)
    low, drift, p, skips = 0.2, torch.randn(5), None, 0
    params = [nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(3))]
    optimizer = torch.optim.SGD(params, lr=1.0)
    gac = GradientAlignmentControl(low=low, high=0.8, residual=FixedResidual(0.3), reference=reference)
    expected = torch.zeros(5)
    for _ in range(40):
        g = drift + torch.randn(5)
        step(gac, optimizer, g[:2], g[2:])
        applied = g
        if p is not None and p.norm() > 0:
            c = (g @ p / g.norm() / p.norm()).item()
            if c > low:
                if c > 0.8 and skips < 1:
                    applied, skips = None, skips + 1
                else:
                    applied, skips = g - (1 - 0.3) * (g @ p) / (p @ p) * p, 0
            else:
                skips = 0
        if applied is not None:
            expected -= applied
        if isinstance(reference, LastRaw):
            p = g
        elif applied is not None:
            old = torch.zeros(5) if p is None else p
            p = applied if isinstance(reference, LastProjected) else 0.5 * old + 0.5 * g
        torch.testing.assert_close(torch.cat([q.detach() for q in params]), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("residual", RESIDUALS)
@pytest.mark.parametrize("reference", REFERENCES)
@pytest.mark.parametrize("max_consecutive_skips", [0, 3])
def test_a_constant_direction_still_moves_and_never_stops(residual, reference, max_consecutive_skips):
    param = nn.Parameter(torch.zeros(3))
    optimizer = torch.optim.SGD([param], lr=1.0)
    gac = GradientAlignmentControl(
        low=0.0, high=0.3, residual=residual, reference=reference, max_consecutive_skips=max_consecutive_skips
    )
    halfway = None
    for n in range(100):
        step(gac, optimizer, vector(1.0, 2.0, 2.0))
        if n == 50:
            halfway = param.detach().clone()
    assert param.norm() > halfway.norm() + 0.05 * 3 * 50 / (max_consecutive_skips + 2)


def test_a_skip_moves_neither_weights_nor_moments_nor_decay():
    param = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.AdamW([param], lr=0.1, weight_decay=0.5)
    gac = GradientAlignmentControl(low=0.1, high=0.2)
    step(gac, optimizer, vector(1.0, 0.0))
    before = param.detach().clone()
    state = {k: v.clone() for k, v in optimizer.state[param].items()}
    seen = step(gac, optimizer, vector(1.0, 0.5))
    assert seen["gac/regime"] == Regime.SKIP
    assert torch.equal(param, before)
    assert all(torch.equal(state[k], v) for k, v in optimizer.state[param].items())


@pytest.mark.parametrize("low", [0.0, 0.2])
def test_with_a_high_of_one_a_constant_direction_is_never_skipped(low):
    """What a projection would leave of it is less than `min_remainder`."""
    param = nn.Parameter(torch.zeros(2))
    gac = GradientAlignmentControl(low=low, high=1.0)
    seen = [step(gac, torch.optim.SGD([param], lr=1.0), vector(3.0, 4.0))["gac/regime"] for _ in range(4)]
    assert Regime.SKIP not in seen
    assert param.norm() > 5.0


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_broken_gradient_is_dropped_said_and_forgotten(bad):
    param = nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([param], lr=1.0)
    gac = GradientAlignmentControl(low=0.1, high=0.9)
    step(gac, optimizer, vector(1.0, 0.0))
    with pytest.warns(UserWarning, match="dropped"):
        seen = step(gac, optimizer, vector(1.0, bad))
    assert seen["gac/regime"] == Regime.DROP
    assert seen["gac/num_dropped"] == 1
    assert param.tolist() == [-1.0, 0.0]
    assert all(math.isfinite(value) for value in seen.values())
    seen = step(gac, optimizer, vector(0.0, 1.0))
    assert seen["gac/cosine"] == 0


def test_zero_gradients_are_applied_and_leave_the_reference():
    param = nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([param], lr=1.0)
    gac = GradientAlignmentControl()
    step(gac, optimizer, vector(1.0, 0.0))
    assert "gac/cosine" not in step(gac, optimizer, vector(0.0, 0.0))
    assert step(gac, optimizer, vector(2.0, 2.0))["gac/cosine"] == pytest.approx(0.5**0.5)


def test_calibration_watches_first_and_then_sets_both_thresholds():
    torch.manual_seed(0)
    param = nn.Parameter(torch.zeros(50))
    optimizer = torch.optim.SGD([param], lr=1.0)
    gac = GradientAlignmentControl(low=0.0, high=0.5, calibrate_steps=20, calibrate_quantile=0.9)
    seen = [step(gac, optimizer, torch.randn(50)) for _ in range(60)]
    assert all(s["gac/regime"] == Regime.APPLY for s in seen[:21])
    cosines = sorted(s["gac/cosine"] for s in seen[1:21])
    assert gac.rule.low == pytest.approx(cosines[18])
    assert gac.rule.high == pytest.approx(gac.rule.low + (1 - gac.rule.low) * 0.5)
    resumed = GradientAlignmentControl(low=0.0, high=0.5, calibrate_steps=20, calibrate_quantile=0.9)
    resumed.load_state_dict(gac.state_dict())
    assert resumed.rule == gac.rule


# -- in a trainer -----------------------------------------------------------------------------------------------------


def test_acts_once_per_step_on_the_accumulated_gradient():
    plain, controlled, probe = Regression(), Regression(), Probe()
    fit(plain, max_steps=4, accumulate_grad_batches=2)
    fit(controlled, GradientAlignmentControl(low=0.05, high=1.0), probe, max_steps=4, accumulate_grad_batches=2)
    assert not torch.equal(weights(plain), weights(controlled))
    assert {m["gac/regime"] for m in probe.metrics[1:]} >= {float(Regime.PROJECT)}


def test_a_skip_in_a_trainer_advances_the_scheduler_but_not_the_weights():
    module, probe = Regression(make_scheduler=lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.5)), Probe()
    gac = GradientAlignmentControl(low=0.0, high=0.0, max_consecutive_skips=10**6, two_sided=True)
    history = []

    class Watch(Probe):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            history.append(weights(pl_module))

    fit(module, gac, Watch(), probe, max_steps=3)
    assert torch.equal(history[0], history[1])
    assert torch.equal(history[0], history[2])
    assert probe.scheduled_lr == pytest.approx([0.005, 0.0025, 0.00125])


@pytest.mark.parametrize("fused", [False, True])
def test_loss_scaling_changes_neither_cosines_nor_skips(fused):
    """A fused optimizer's gradients are still scaled when the hook runs, and by another factor in the next step."""

    class Scaler(torch.amp.GradScaler):
        def update(self, new_scale=None):
            super().update(self.get_scale() * 2)

    def run(scaler):
        probe, module = Probe(), Regression(lambda params: torch.optim.SGD(params, lr=0.01, fused=fused))
        gac = GradientAlignmentControl(low=0.0, high=0.9, reference=MovingAverage(0.5))
        fit(module, gac, probe, plugins=[MixedPrecision("16-mixed", "cpu", scaler)])
        return [m.get("gac/cosine", 0.0) for m in probe.metrics], [m["gac/regime"] for m in probe.metrics]

    plain, scaled = run(torch.amp.GradScaler("cpu", init_scale=1.0)), run(Scaler("cpu", init_scale=2.0))
    assert Regime.SKIP in plain[1]
    assert scaled[1] == plain[1]
    assert scaled[0] == pytest.approx(plain[0], abs=1e-2)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.filterwarnings("ignore:GradientAlignmentControl")
def test_an_overflow_is_dropped_and_the_loss_scaler_still_learns_from_it(fused):
    class Overflow(Regression):
        def loss(self, batch):
            return super().loss(batch) * (torch.inf if self.global_step == 2 else 1.0)

    probe, scaler = Probe(), torch.amp.GradScaler("cpu", init_scale=8.0)
    module = Overflow(lambda params: torch.optim.AdamW(params, lr=0.01, fused=fused))
    fit(module, GradientAlignmentControl(), probe, plugins=[MixedPrecision("16-mixed", "cpu", scaler)])
    assert [m["gac/regime"] for m in probe.metrics][2] == Regime.DROP
    assert scaler.get_scale() == 4.0
    assert weights(module).isfinite().all()


def test_a_skipped_step_is_no_new_version_of_the_policy():
    batch_size, length = 2, 6
    mask = torch.ones(batch_size, length, dtype=torch.bool)
    mask[:, :2] = False
    batch = RolloutBatch(
        input_ids=torch.arange(3, 3 + batch_size * length).reshape(batch_size, length),
        attention_mask=torch.ones_like(mask),
        loss_mask=mask,
        behavior_logprobs=torch.full(mask.shape, -1.0),
        versions=torch.zeros(mask.shape, dtype=torch.long),
        advantages=torch.tensor([[1.0], [-1.0]]).expand(mask.shape),
        token_weights=mask / mask.sum(),
        rewards=torch.tensor([1.0, 0.0]),
        group_index=torch.zeros(batch_size, dtype=torch.long),
    )
    updated = []

    class Watch(Probe):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            updated.append(pl_module.take_updated())

    module = PolicyModule("lit_async_rl/assets/sort_policy")
    gac = GradientAlignmentControl(low=0.0, high=0.0, max_consecutive_skips=9)
    fit(module, gac, Watch(), data=DataLoader([batch] * 3, batch_size=None), max_steps=3)
    assert updated == [True, False, False]
