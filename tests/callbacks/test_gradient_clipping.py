"""GradientClipping: torch's own result where torch has one; dropped steps where there is no norm."""

import math

import pytest
import torch
from foreign_modules import Probe, Regression, fit, weights
from hypothesis import given
from hypothesis import strategies as st
from lightning.pytorch.plugins import MixedPrecision
from torch import nn

from lit_async_rl.callbacks import CollapseAlarm, GradientClipping, GradientMonitor, SkipNonFinite
from lit_async_rl.stabilizers.collapse import Stop


@given(st.integers(0, 50), st.floats(0.01, 10))
def test_agrees_with_torch_and_never_exceeds_the_bound(seed, max_norm):
    torch.manual_seed(seed)
    params = [nn.Parameter(torch.randn(3)), nn.Parameter(torch.randn(2, 2)), nn.Parameter(torch.zeros(()))]
    for p in params[:2]:
        p.grad = torch.randn_like(p)
    expected = [p.grad.clone() for p in params[:2]]
    copies = [nn.Parameter(p.detach().clone()) for p in params[:2]]
    for copy, grad in zip(copies, expected, strict=True):
        copy.grad = grad
    norm = torch.nn.utils.clip_grad_norm_(copies, max_norm)
    seen = GradientClipping(max_norm).apply(nn.Module(), torch.optim.SGD(params, lr=1.0))
    assert seen["grad/norm"] == pytest.approx(norm.item(), rel=1e-6)
    for p, copy in zip(params[:2], copies, strict=True):
        torch.testing.assert_close(p.grad, copy.grad, rtol=1e-5, atol=1e-6)
    assert math.hypot(*(p.grad.norm().item() for p in params[:2])) <= max_norm * (1 + 1e-5)


def test_equals_lightnings_own_clipping():
    ours, lightnings = Regression(), Regression()
    fit(ours, GradientClipping(0.1))
    fit(lightnings, gradient_clip_val=0.1)
    torch.testing.assert_close(weights(ours), weights(lightnings))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_broken_gradient_is_dropped_said_and_counted(bad, caplog):
    param = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.AdamW([param], lr=0.1, weight_decay=0.5)
    param.grad = torch.tensor([1.0, bad])
    clipping = GradientClipping()
    seen = clipping.apply(nn.Module(), optimizer)
    assert "this update is dropped (number 1, 1 in a row" in caplog.text
    optimizer.step()
    assert seen == {"grad/clip_scale": 0.0, "grad/num_dropped": 1.0}
    assert param.tolist() == [1.0, 1.0]


def test_huge_but_finite_gradients_are_clipped_and_not_dropped():
    param = nn.Parameter(torch.ones(2))
    param.grad = torch.tensor([3e34, 4e34])
    GradientClipping(5.0).apply(nn.Module(), torch.optim.SGD([param], lr=1.0))
    torch.testing.assert_close(param.grad, torch.tensor([3.0, 4.0]))


@pytest.mark.parametrize("fused", [False, True])
def test_under_loss_scaling_the_bound_is_that_of_the_true_gradient(fused):
    def run(scale):
        probe = Probe()
        module = Regression(lambda params: torch.optim.SGD(params, lr=0.1, fused=fused))
        precision = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=scale))
        fit(module, probe, GradientClipping(0.1), plugins=[precision])
        return [m["grad/norm"] for m in probe.metrics], weights(module)

    (norms, one), (scaled_norms, other) = run(1.0), run(64.0)
    assert norms == pytest.approx(scaled_norms, rel=1e-2)
    torch.testing.assert_close(one, other, rtol=1e-2, atol=1e-4)


class Skips(Regression):
    """Its `training_step` returns None for some batches, which Lightning then skips."""

    skipped = (2,)

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return None if batch_idx in self.skipped else loss


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("skipped", [(2,), (0,), (1, 2)])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_under_loss_scaling_a_batch_without_a_loss_is_skipped_as_without_callbacks(fused, skipped, accumulate):
    def run(*callbacks):
        module = Skips(lambda params: torch.optim.SGD(params, lr=0.01, fused=fused))
        module.skipped = skipped
        precision = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=64.0))
        trainer = fit(module, *callbacks, plugins=[precision], max_steps=-1, max_epochs=1, limit_train_batches=6,
                      accumulate_grad_batches=accumulate)  # fmt: skip
        return trainer.global_step, weights(module)

    steps, plain = run()
    watching = [GradientClipping(math.inf), GradientMonitor(), CollapseAlarm(), SkipNonFinite()]
    found_steps, found = run(*watching)
    assert found_steps == steps
    torch.testing.assert_close(found, plain, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("fused", [False, True])
def test_overflows_with_which_the_loss_scaler_finds_its_scale_are_no_collapse(fused):
    class Overflow(Regression):
        def loss(self, batch):
            return super().loss(batch) * (torch.inf if self.global_step < 5 else 1.0)

    module = Overflow(lambda params: torch.optim.SGD(params, lr=0.1, fused=fused))
    precision = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=64.0))
    clipping = GradientClipping(1.0, max_in_a_row=2)
    alarm = CollapseAlarm(Stop(), min_ess_ratio=None, max_kl=None)
    trainer = fit(module, clipping, alarm, plugins=[precision])
    assert trainer.global_step == 6
    assert not alarm.reports
    assert clipping.dropped.total == 0


@pytest.mark.parametrize("max_norm", [0.0, -1.0, math.nan])
def test_senseless_bounds_are_refused(max_norm):
    with pytest.raises(ValueError, match="max_norm"):
        GradientClipping(max_norm)
