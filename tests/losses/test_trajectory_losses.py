"""Trajectory balance and OAPL: the papers' own formulas, their closed-form gradients, and what moves around them."""

import math
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from flow import fit, make_data, make_module, parameters
from hypothesis import given, settings
from hypothesis import strategies as st
from launch import launch
from lightning.pytorch.callbacks import ModelCheckpoint

from lit_async_rl.advantages.group import GroupMean, LogMeanExp
from lit_async_rl.callbacks import CollapseAlarm, ReferenceReset
from lit_async_rl.losses import OAPL, LossInputs, TrajectoryBalance, TrajectoryBalancePrime
from lit_async_rl.losses.aggregation import FixedLength, SequenceMean
from lit_async_rl.stabilizers.rollback import RollBack, RollBackToCheckpoint

K, T = 5, 6  # completions of each of two prompts, tokens
betas = st.floats(0.01, 2.0)


def make(seed, estimator):
    """log pi (with gradient), log of the proximal, mask, rewards, and the loss's inputs."""
    generator = torch.Generator().manual_seed(seed)
    logprobs = (-3 * torch.rand(2 * K, T, generator=generator, dtype=torch.float64)).requires_grad_()
    proximal = -3 * torch.rand(2 * K, T, generator=generator, dtype=torch.float64)
    mask = torch.arange(T) < torch.randint(1, T + 1, (2 * K, 1), generator=generator)
    rewards = torch.rand(2 * K, generator=generator, dtype=torch.float64)
    advantages = torch.tensor(estimator(rewards.view(2, K).tolist()), dtype=torch.float64).view(-1, 1)
    inputs = LossInputs(
        logprobs=logprobs,
        proximal_logprobs=proximal,
        behavior_logprobs=proximal,
        advantages=advantages.expand(2 * K, T),
        loss_mask=mask,
        staleness=torch.zeros(2 * K, T, dtype=torch.long),
        token_weights=mask.double() / (2 * K),
        group_index=torch.arange(2 * K) // K,
    )
    return logprobs, proximal, mask, rewards, inputs


def value_and_gradient(loss, inputs, logprobs):
    total = (inputs.token_weights * loss(inputs).per_token).sum()
    (gradient,) = torch.autograd.grad(total, logprobs)
    return total.detach(), gradient


def sums(values, mask):
    return torch.where(mask, values, 0.0).sum(-1)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**31), beta=betas)
def test_trajectory_balance_is_the_papers_square_and_has_its_closed_form_gradient(seed, beta):
    logprobs, proximal, mask, rewards, inputs = make(seed, GroupMean())
    value, gradient = value_and_gradient(TrajectoryBalance(beta), inputs, logprobs)
    log_pi, log_ref = sums(logprobs, mask), sums(proximal, mask)
    log_z = (log_ref - log_pi + rewards / beta).view(2, K).mean(1).repeat_interleave(K).detach()
    paper = (log_z + log_pi - log_ref - rewards / beta).square().mean()
    (paper_gradient,) = torch.autograd.grad(paper, logprobs)
    torch.testing.assert_close(value, paper.detach(), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(gradient, paper_gradient, rtol=1e-9, atol=1e-9)
    k = (log_pi - log_ref).detach()
    centered = [x - x.view(2, K).mean(1).repeat_interleave(K) for x in (rewards, k)]
    closed = -(2 / (beta * 2 * K)) * (centered[0] - beta * centered[1])  # times grad log pi(y_i), which is 1 a token
    torch.testing.assert_close(gradient, torch.where(mask, closed[:, None], 0.0), rtol=1e-9, atol=1e-9)
    prime, prime_gradient = value_and_gradient(TrajectoryBalancePrime(beta), inputs, logprobs)
    torch.testing.assert_close(prime, ((beta * (log_z + k) - rewards).square() / (2 * beta)).mean().detach())
    torch.testing.assert_close(prime_gradient, beta / 2 * gradient)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**31), beta=betas, tau=betas)
def test_oapl_is_the_papers_square_and_has_its_gradient(seed, beta, tau):
    logprobs, proximal, mask, rewards, inputs = make(seed, LogMeanExp(tau))
    value, gradient = value_and_gradient(OAPL(beta), inputs, logprobs)
    soft = tau * ((rewards / tau).view(2, K).logsumexp(1) - math.log(K)).repeat_interleave(K)
    paper = (beta * (sums(logprobs, mask) - sums(proximal, mask)) - (rewards - soft)).square().mean()
    (paper_gradient,) = torch.autograd.grad(paper, logprobs)
    torch.testing.assert_close(value, paper.detach(), rtol=1e-7, atol=1e-9)
    torch.testing.assert_close(gradient, paper_gradient, rtol=1e-7, atol=1e-9)


def test_the_optimum_of_each_is_the_reference_tilted_by_reward():
    """At pi* = ref exp(r / beta) / Z both losses and their gradients are 0, whatever was sampled."""
    rewards = torch.tensor([0.0, 1.0, 0.3, 0.8, 0.1, 0.9, 0.2, 0.7, 0.4, 0.6], dtype=torch.float64)
    _, proximal, mask, _, inputs = make(0, GroupMean())
    for loss, shift in ((TrajectoryBalance(0.5), 0.7), (OAPL(0.5), 0.0)):
        advantages = rewards - rewards.view(2, K).mean(1).repeat_interleave(K) if shift else rewards
        tilted = (proximal + ((advantages / 0.5 + shift) / mask.sum(-1))[:, None]).requires_grad_()
        best = LossInputs(**{**vars(inputs), "logprobs": tilted, "advantages": advantages[:, None].expand(2 * K, T)})
        value, gradient = value_and_gradient(loss, best, tilted)
        assert value < 1e-20
        assert gradient.abs().max() < 1e-10


def regression_data(**changes):
    settings = dict(advantage=GroupMean(), aggregation=FixedLength(10), max_staleness=0)
    return make_data(**(settings | changes))


@pytest.mark.slow
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_in_a_run_the_gradient_does_not_depend_on_micro_batches(micro_batches):
    modules = []
    for number in (1, micro_batches):
        module = make_module(loss=TrajectoryBalance(0.1), optimizer=lambda p: torch.optim.SGD(p, lr=1e-3))
        fit(module, regression_data(micro_batches_per_step=number), 2)
        modules.append(module)
    torch.testing.assert_close(parameters(modules[0]), parameters(modules[1]), atol=1e-6, rtol=0)
    assert "ref_log_ratio" in modules[0].stabilizer_signals


@pytest.mark.slow
def test_a_reset_reference_is_the_policy_and_survives_a_resume(tmp_path):
    module = make_module(loss=TrajectoryBalance(0.1))
    trainer = fit(module, regression_data(), 3, [ReferenceReset(2)])
    trainer.save_checkpoint(tmp_path / "x.ckpt")
    reference = torch.cat([p.flatten() for p in module.reference.parameters()])
    start = torch.cat([p.detach().flatten() for p in make_module().policy.parameters()])
    assert not torch.equal(reference, start)
    assert not torch.equal(reference, parameters(module)), "a step was made since"
    again = make_module(loss=TrajectoryBalance(0.1))
    fit(again, regression_data(), 3, [ReferenceReset(2)], ckpt_path=str(tmp_path / "x.ckpt"))
    assert torch.equal(torch.cat([p.flatten() for p in again.reference.parameters()]), reference)
    with pytest.raises(ValueError, match="needs a reference policy"):
        fit(make_module(), make_data(), 1, [ReferenceReset(2)])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:CollapseAlarm")
@pytest.mark.parametrize("action", [RollBack(every_n_steps=1), RollBackToCheckpoint()], ids=lambda a: type(a).__name__)
def test_a_rollback_restores_the_reference_of_the_weights_that_it_restores(action, tmp_path):
    """Else it stays a copy of the weights that the alarm condemned, and the loss leads back to them."""

    def extract(trainer, pl_module, batch, output):
        return {"log_ratio": torch.tensor([0.0, 0.0, 30.0 * (trainer.global_step >= 3)])}

    seen = []

    class Watch(pl.Callback):
        def on_train_batch_end(self, trainer, module, *_):
            seen.append((parameters(module), torch.cat([p.flatten() for p in module.reference.parameters()])))

    alarm = CollapseAlarm(action, min_ess_ratio=0.5, patience=1, extract=extract)
    save = ModelCheckpoint(tmp_path, every_n_train_steps=2, save_top_k=-1)
    module = make_module(loss=TrajectoryBalance(0.1))
    fit(module, regression_data(), 4, [alarm, ReferenceReset(3), Watch(), save], enable_checkpointing=True)
    weights, references = zip(*seen, strict=True)
    assert torch.equal(references[2], weights[2])
    assert torch.equal(weights[3], weights[1]), "rolled back to those after step 2"
    assert torch.equal(references[3], references[1])
    assert not torch.equal(references[3], references[2])


@pytest.mark.slow
def test_a_sharded_reference_is_refused_before_training():
    with pytest.raises(AssertionError, match=r"whole weights, but trainer\.strategy=ModelParallelStrategy shards"):
        launch(Path(__file__).parents[1] / "helpers" / "sharded_reference.py", [], 1, timeout_s=150)


@pytest.mark.parametrize(
    ("loss", "changes", "message"),
    [
        (TrajectoryBalance(), {"advantage": None}, "TrajectoryBalance.*GroupMeanStd.*GroupMean"),
        (TrajectoryBalance(), {"aggregation": SequenceMean()}, "TrajectoryBalance.*SequenceMean"),
        (OAPL(), {}, "OAPL.*GroupMean.*LogMeanExp"),
    ],
)
def test_what_the_formula_does_not_stand_for_is_refused(loss, changes, message):
    with pytest.raises(ValueError, match=message):
        fit(make_module(loss=loss), regression_data(**changes), 1)


def test_a_bad_setting_is_named():
    with pytest.raises(ValueError, match=r"ReferenceReset\.every_n_steps must be"):
        ReferenceReset(0)
