"""Stabilizers in code that was not written for them: examples, every way to hand over signals, manual, Fabric."""

import runpy
import subprocess
import sys
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from foreign_modules import ROWS, Probe, Regression, Rows, fit, weights
from lightning.fabric import Fabric
from torch import nn
from torch.distributions import Categorical
from torch.utils.data import DataLoader

from lit_async_rl.callbacks import CollapseAlarm, ESSLearningRate, GradientAlignmentControl, GradientClipping
from lit_async_rl.stabilizers.alignment import Regime
from lit_async_rl.stabilizers.step_lr import OneStepLearningRate

EXAMPLES = Path(__file__).parents[2] / "examples"


def stabilizers(optimizer=None):
    return [
        GradientAlignmentControl(low=0.1, high=0.95, optimizer=optimizer),
        ESSLearningRate(optimizer=optimizer),
        GradientClipping(0.3, optimizer=optimizer),
    ]


def test_an_image_classifier_with_alignment_control_learns():
    metrics = runpy.run_path(str(EXAMPLES / "foreign_classifier_gac.py"))["main"](max_epochs=1)
    assert metrics["accuracy"] > 0.9
    assert 0 < metrics["gac/low"] < metrics["gac/high"] < 1


class Silent(Regression):
    def signals(self, batch):
        return {}


@pytest.mark.parametrize(
    ("alarm", "says"),
    [
        (CollapseAlarm(), "cannot watch min_ess_ratio, max_kl. To provide these signals, set self.stabilizer_signals"),
        (CollapseAlarm(min_ess_ratio=None, min_entropy=0.1, max_kl=None), "cannot watch min_entropy. To provide"),
    ],
)
def test_an_alarm_without_signals_says_what_it_cannot_watch_and_what_to_set(alarm, says):
    with pytest.warns(UserWarning, match=f"CollapseAlarm: a step had no log_ratio signals .* so the callback {says}"):
        fit(Silent(), alarm)


def test_what_needs_no_signals_says_nothing(recwarn):
    only_gradients = CollapseAlarm(min_ess_ratio=None, max_kl=None)
    fit(Silent(), only_gradients, GradientAlignmentControl(low=0.1, high=0.95), GradientClipping(0.3))
    assert not [one for one in recwarn if "signals" in str(one.message)]


@pytest.mark.slow
def test_a_ppo_style_module_with_ess_scaling_learns():
    metrics = runpy.run_path(str(EXAMPLES / "foreign_ppo_ess.py"))["main"](max_steps=600)
    assert metrics["reward"] > 0.5  # chance is an eighth
    assert 0 < metrics["ess/lr_scale"] <= 1
    assert metrics["ess/num_samples"] == 128


class ByOutput(Regression):
    """Signals beside the loss."""

    def __init__(self):
        super().__init__()
        del self.stabilizer_signals

    def training_step(self, batch, batch_idx):
        return {"loss": self.loss(batch)} | self.signals(batch)


class Untouched(ByOutput):
    """No signals anywhere."""

    def training_step(self, batch, batch_idx):
        return {"loss": self.loss(batch), "batch": batch}


class Manual(Regression):
    """Steps by hand, with two micro-batches inside one training step."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        for half in (slice(0, 3), slice(3, 6)):
            part = {name: value[half] for name, value in batch.items()}
            self.stabilizer_signals = self.signals(part)
            self.manual_backward(self.loss(part) / 2)
        optimizer.step()


def history(module, ess=None, **kwargs):
    probe = Probe()
    gac, _, clipping = stabilizers()
    fit(module, probe, gac, ess or ESSLearningRate(), clipping, **kwargs)
    return [m["ess/ratio"] for m in probe.metrics if "ess/ratio" in m], weights(module)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_attribute_output_and_extract_are_the_same(accumulate):
    def extract(trainer, pl_module, batch, output):
        assert output["batch"] is batch
        return pl_module.signals(batch)

    ratios, result = history(Regression(), accumulate_grad_batches=accumulate)
    for module, ess in ((ByOutput(), None), (Untouched(), ESSLearningRate(extract=extract))):
        other_ratios, other = history(module, ess, accumulate_grad_batches=accumulate)
        assert other_ratios == ratios
        assert torch.equal(other, result)
        assert "training_step" not in vars(module), "the module was left wrapped"


def test_extract_goes_before_the_attribute():
    ess = ESSLearningRate(extract=lambda *args: {"log_ratio": torch.zeros(4)})
    assert set(history(Regression(), ess)[0]) == {1.0}


def test_manual_optimization_is_the_same_as_automatic():
    ratios, result = history(Regression())
    other_ratios, other = history(Manual())
    assert other_ratios == pytest.approx(ratios)
    torch.testing.assert_close(other, result)


class Two(Regression):
    """Two networks with an optimizer each."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.actor, self.critic = torch.nn.Linear(3, 1), torch.nn.Linear(3, 1)
        del self.net

    def training_step(self, batch, batch_idx):
        self.stabilizer_signals = self.signals(batch)
        for optimizer, net in zip(self.optimizers(), (self.actor, self.critic), strict=True):
            optimizer.zero_grad()
            self.manual_backward((net(batch["x"]).squeeze(-1) - batch["rewards"]).square().mean())
            optimizer.step()

    def configure_optimizers(self):
        return [torch.optim.SGD(net.parameters(), lr=0.1) for net in (self.actor, self.critic)]


@pytest.mark.parametrize("choice", [0, "actor"])
def test_only_the_chosen_optimizer_is_touched(choice):
    plain, chosen = Two(), Two()
    fit(plain)
    fit(chosen, *stabilizers(choice))
    assert torch.equal(weights(plain.critic), weights(chosen.critic))
    assert not torch.equal(weights(plain.actor), weights(chosen.actor))


def test_without_a_choice_each_optimizer_is_controlled_by_itself_and_logged_apart():
    both, one, probe = Two(), Two(), Probe()
    fit(both, probe, GradientAlignmentControl(low=0.1), GradientClipping(0.3))
    fit(one, GradientAlignmentControl(low=0.1, optimizer="actor"), GradientClipping(0.3, optimizer="actor"))
    assert torch.equal(weights(both.actor), weights(one.actor))
    assert not torch.equal(weights(both.critic), weights(one.critic))
    assert {"gac/norm/0", "gac/norm/1", "grad/norm/0", "grad/norm/1"} <= set(probe.metrics[-1])


def test_two_of_a_kind_for_two_optimizers_keep_their_states_apart():
    pair = [GradientAlignmentControl(optimizer="actor"), GradientAlignmentControl(optimizer="critic")]
    fit(Two(), *pair)
    assert pair[0].state_key != pair[1].state_key


@pytest.mark.parametrize("choice", ["nobody", 2])
@pytest.mark.parametrize("kind", [GradientAlignmentControl, ESSLearningRate, GradientClipping, CollapseAlarm])
def test_a_choice_that_means_nothing_is_refused_by_name(choice, kind):
    with pytest.raises(ValueError, match=rf"{kind.__name__}\.optimizer="):
        fit(Two(), kind(optimizer=choice))


@pytest.mark.parametrize("kind", [ESSLearningRate, CollapseAlarm])
def test_signals_without_a_choice_among_optimizers_are_refused(kind):
    with pytest.raises(ValueError, match="choose one"):
        fit(Two(), kind())


def test_a_fabric_loop_does_what_the_trainer_does():
    ratios, result = history(Regression())
    fabric = Fabric(accelerator="cpu", devices=1)
    plain = Regression()
    module, optimizer = fabric.setup(plain.net, plain.configure_optimizers())
    gac, ess, clipping = stabilizers()
    seen = []
    for batch in list(DataLoader(Rows(), batch_size=ROWS))[:6]:
        optimizer.zero_grad()
        fabric.backward((module(batch["x"]).squeeze(-1) - batch["rewards"]).square().mean())
        ess.add(plain.signals(batch))
        gac.apply(module, optimizer)
        seen.append(ess.apply(optimizer)["ess/ratio"])
        clipping.apply(module, optimizer)
        optimizer.step()
    assert seen == pytest.approx(ratios)
    assert torch.equal(weights(plain), result)


def test_unfreezing_in_mid_run_is_followed():
    class Unfreeze(pl.Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            if batch_idx == 2:
                pl_module.net[0].requires_grad_(True)
                trainer.optimizers[0].add_param_group({"params": list(pl_module.net[0].parameters())})

    module = Regression(lambda params: torch.optim.SGD(list(params)[2:], lr=0.1))
    module.net[0].requires_grad_(False)
    before = weights(module.net[0])
    fit(module, Unfreeze(), *stabilizers())
    assert not torch.equal(weights(module.net[0]), before)


def test_after_training_no_hook_is_left_on_the_optimizer():
    module = Regression()
    trainer = fit(module, *stabilizers())
    assert not trainer.optimizers[0]._optimizer_step_pre_hooks
    assert not trainer.optimizers[0]._optimizer_step_post_hooks


def test_a_rate_set_outside_a_step_acts_in_the_next_one_only():
    param = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([param], lr=1.0)
    rate = OneStepLearningRate(optimizer)
    rate.scale(0.5)
    assert optimizer.param_groups[0]["lr"] == 1.0
    for expected in (-0.5, -1.5):
        param.grad = torch.ones(1)
        optimizer.step()
        assert param.item() == expected


@pytest.mark.slow
def test_taking_one_stabilizer_loads_no_engine_and_no_model():
    script = """
import sys
from lit_async_rl.callbacks import GradientAlignmentControl
ours = {name.removeprefix("lit_async_rl.") for name in sys.modules if name.startswith("lit_async_rl")}
assert not ours & {"engines.base", "data.module", "models.loading", "training.module"}, ours
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)


def steps_of_fresh_ppo(control, num_batches, seed=0):
    """Metrics of a healthy PPO loop: each batch is fresh, and trained on in four passes."""
    torch.manual_seed(seed)
    policy = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 8))
    optimizer = torch.optim.AdamW(policy.parameters(), lr=0.01)
    target = torch.randn(6, 8)
    seen = []
    for states in torch.randn(num_batches, 128, 6):
        with torch.no_grad():
            sampler = Categorical(logits=policy(states))
            actions = sampler.sample()
        rewards = (actions == (states @ target).argmax(-1)).float()
        advantages = rewards - rewards.mean()
        for _ in range(4):
            ratio = (Categorical(logits=policy(states)).log_prob(actions) - sampler.log_prob(actions)).exp()
            optimizer.zero_grad()
            (-torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).mean()).backward()
            seen.append(control.apply(policy, optimizer))
            optimizer.step()
    return seen


@pytest.mark.slow
def test_default_thresholds_cut_healthy_ppo_and_calibrated_ones_leave_it_alone():
    """`docs/lightning.md` says so."""
    seen = steps_of_fresh_ppo(GradientAlignmentControl(), num_batches=40)
    assert sum(one["gac/regime"] == Regime.SKIP for one in seen) > len(seen) / 4
    projected = [one["gac/kept"] for one in seen if one["gac/regime"] == Regime.PROJECT]
    assert sum(projected) < len(projected) / 3
    control = GradientAlignmentControl(high=1.0, calibrate_steps=100, calibrate_quantile=0.95)
    seen = steps_of_fresh_ppo(control, num_batches=60)
    assert control.rule.low > 0.5
    assert control.rule.high == 1
    assert {one["gac/regime"] for one in seen} <= {Regime.APPLY, Regime.PROJECT}
    assert sum(one["gac/kept"] for one in seen) > 0.95 * len(seen)
