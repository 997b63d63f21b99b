"""The KL penalty against exact gradients: expectations over all completions of a tiny vocabulary, in float64."""

from __future__ import annotations

import itertools
import math
from typing import get_args

import lightning.pytorch as pl
import pytest
import torch
from flow import fit, make_data, make_module
from torch import Tensor

from lit_async_rl.callbacks import RolloutMonitor
from lit_async_rl.importance import kl_k3
from lit_async_rl.losses.reference_kl import KLEstimator, reference_kl
from lit_async_rl.types import RolloutBatch
from lit_async_rl.utils.checks import check_choice

V, T, END = 3, 3, 0  # vocabulary, longest completion, and the token that ends one

# All completions: sequences that end with END, or have T tokens without one.
COMPLETIONS = [
    y
    for n in range(1, T + 1)
    for y in itertools.product(range(V), repeat=n)
    if END not in y[:-1] and (y[-1] == END or n == T)
]
PREFIXES = sorted({y[:n] for y in COMPLETIONS for n in range(len(y))})


def table(seed: int, scale: float = 1.0) -> Tensor:
    """Logits [prefixes, V] of a policy that knows its whole prefix."""
    generator = torch.Generator().manual_seed(seed)
    return scale * torch.randn(len(PREFIXES), V, generator=generator, dtype=torch.float64)


def token_logprobs(logits: Tensor, completions: list[tuple[int, ...]]) -> tuple[Tensor, Tensor]:
    """Log-probabilities [N, T] of the tokens, 0 behind the end, and the mask of tokens."""
    log_p = logits.log_softmax(-1)
    mask = torch.tensor([[t < len(y) for t in range(T)] for y in completions])
    places = [[PREFIXES.index(y[:t]) if t < len(y) else 0 for t in range(T)] for y in completions]
    tokens = [[y[t] if t < len(y) else 0 for t in range(T)] for y in completions]
    return torch.where(mask, log_p[torch.tensor(places), torch.tensor(tokens)], 0.0), mask


def gradient(loss: Tensor, logits: Tensor) -> Tensor:
    (found,) = torch.autograd.grad(loss, logits)
    return found


def expected_gradient(estimator: str, policy: Tensor, reference: Tensor, behavior: Tensor) -> tuple[Tensor, Tensor]:
    """Mean gradient and mean value of the penalty, over all groups of two completions that mu samples."""
    pairs = list(itertools.product(COMPLETIONS, repeat=2))
    rows = [y for pair in pairs for y in pair]
    logits = policy.clone().requires_grad_()
    (logprobs, mask), (ref, _), (mu, _) = (token_logprobs(each, rows) for each in (logits, reference, behavior))
    probability = mu.sum(-1).view(-1, 2).sum(-1).exp()
    assert float(probability.sum()) == pytest.approx(1.0)
    penalty = reference_kl(
        estimator,
        logprobs=logprobs,
        reference_logprobs=ref,
        behavior_logprobs=mu,
        loss_mask=mask,
        group_index=torch.arange(len(pairs)).repeat_interleave(2),
    )
    mean = (probability * penalty.sum(-1).view(-1, 2).mean(-1)).sum()
    return gradient(mean, logits), mean.detach()


def exact_sequence(policy: Tensor, reference: Tensor, swapped: bool = False) -> tuple[Tensor, Tensor]:
    """KL(pi || ref) of completions (or KL(ref || pi)), and its gradient."""
    logits = policy.clone().requires_grad_()
    log_pi, log_ref = (token_logprobs(each, COMPLETIONS)[0].sum(-1) for each in (logits, reference))
    kl = (log_ref.exp() * (log_ref - log_pi)).sum() if swapped else (log_pi.exp() * (log_pi - log_ref)).sum()
    return gradient(kl, logits), kl.detach()


def exact_token(policy: Tensor, reference: Tensor, behavior: Tensor) -> tuple[Tensor, Tensor]:
    """Sum over prefixes of the probability that mu visits one times KL(pi || ref) of the next token; its gradient."""
    logits = policy.clone().requires_grad_()
    visits = torch.zeros(len(PREFIXES), dtype=torch.float64)
    for y, log_mu in zip(COMPLETIONS, token_logprobs(behavior, COMPLETIONS)[0].sum(-1), strict=True):
        for n in range(len(y)):
            visits[PREFIXES.index(y[:n])] += log_mu.exp()
    log_pi, log_ref = logits.log_softmax(-1), reference.log_softmax(-1)
    kl = (visits * (log_pi.exp() * (log_pi - log_ref)).sum(-1)).sum()
    return gradient(kl, logits), kl.detach()


POLICY, REFERENCE = table(0), table(1, scale=1.5)
BEHAVIORS = {"fresh": POLICY, "stale": POLICY + table(2, scale=0.7), "very stale": table(3, scale=2.0)}


@pytest.mark.parametrize("name", BEHAVIORS)
def test_the_token_estimator_is_unbiased_for_the_next_tokens_kl_where_the_data_goes(name):
    found = expected_gradient("token", POLICY, REFERENCE, BEHAVIORS[name])
    torch.testing.assert_close(found, exact_token(POLICY, REFERENCE, BEHAVIORS[name]), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", BEHAVIORS)
def test_the_sequence_estimator_is_unbiased_for_the_kl_of_completions(name):
    found = expected_gradient("sequence", POLICY, REFERENCE, BEHAVIORS[name])
    torch.testing.assert_close(found, exact_sequence(POLICY, REFERENCE), rtol=1e-9, atol=1e-12)


def test_k3_has_the_other_kls_gradient_on_fresh_data_and_neither_on_stale():
    """Of single tokens, where sequence and token are the same."""
    one = [(v,) for v in range(V)]
    logits = POLICY[:1].clone().requires_grad_()
    log_pi, log_ref = logits.log_softmax(-1)[0], REFERENCE[0].log_softmax(-1)

    def mean(estimator: str, log_mu: Tensor) -> Tensor:
        penalty = reference_kl(
            estimator,
            logprobs=log_pi[:, None],
            reference_logprobs=log_ref[:, None],
            behavior_logprobs=log_mu[:, None],
            loss_mask=torch.ones(len(one), 1, dtype=torch.bool),
            group_index=torch.arange(len(one)),
        )
        (found,) = torch.autograd.grad((log_mu.exp() * penalty[:, 0]).sum(), logits, retain_graph=True)
        return found

    fresh = log_pi.detach()
    stale = (log_pi.detach() + torch.tensor([1.0, -1.0, 0.3], dtype=torch.float64)).log_softmax(-1)
    (reverse,) = torch.autograd.grad((log_pi.exp() * (log_pi - log_ref)).sum(), logits, retain_graph=True)
    (forward,) = torch.autograd.grad((log_ref.exp() * (log_ref - log_pi)).sum(), logits, retain_graph=True)
    for log_mu in (fresh, stale):
        for estimator in ("token", "sequence"):
            torch.testing.assert_close(mean(estimator, log_mu), reverse, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(mean("k3", fresh), forward, rtol=1e-9, atol=1e-12)
    assert (mean("k3", stale) - forward).abs().max() > 0.01


@pytest.mark.parametrize("estimator", ["token", "sequence", "k3"])
def test_the_penalty_pulls_towards_the_reference_at_any_distance(estimator):
    for gap in (1.0, 19.0, 21.0, 400.0):
        for sign in (1, -1):
            logprobs = torch.full((1, 1), -gap - 1.0 if sign > 0 else -1.0, requires_grad=True)
            reference = torch.full((1, 1), -1.0 if sign > 0 else -gap - 1.0)
            rest = dict(loss_mask=torch.ones(1, 1, dtype=torch.bool), group_index=torch.zeros(1, dtype=torch.long))
            penalty = reference_kl(
                estimator,
                logprobs=logprobs,
                reference_logprobs=reference,
                behavior_logprobs=logprobs.detach(),
                **rest,
            )
            penalty.sum().backward()
            assert float(penalty.detach()) > 0
            assert logprobs.grad is not None
            assert math.isfinite(float(logprobs.grad))
            assert sign * float(logprobs.grad) < 0, f"{estimator}: the wrong way at a distance of {sign * gap} nats"


@pytest.mark.parametrize("estimator", ["token", "sequence", "k3"])
@pytest.mark.parametrize("junk", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", ["logprobs", "reference_logprobs", "behavior_logprobs"])
def test_a_completion_with_a_value_that_is_not_finite_has_no_penalty_and_no_gradient(estimator, junk, place):
    values = {name: torch.randn(2, 3) for name in ("logprobs", "reference_logprobs", "behavior_logprobs")}
    values[place][0, 1] = junk
    values["logprobs"].requires_grad_()
    mask = torch.ones(2, 3, dtype=torch.bool)
    penalty = reference_kl(estimator, **values, loss_mask=mask, group_index=torch.zeros(2, dtype=torch.long))
    penalty.sum().backward()
    assert (penalty[0] == 0).all()
    assert (penalty[1] != 0).any()
    grad = values["logprobs"].grad
    assert grad is not None
    assert (grad[0] == 0).all()
    assert grad.isfinite().all()


@pytest.mark.parametrize("estimator", ["token", "sequence"])
def test_the_objective_has_the_exact_gradient_on_stale_data_of_a_real_model(estimator):
    """All next tokens of one prompt, weighted by the probability with which an older policy samples them."""
    module = make_module(kl_coefficient=0.5, kl_estimator=estimator)
    size = module.policy.causal_lm.config.vocab_size
    with torch.no_grad():  # away from the reference
        for parameter in module.policy.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0)))
    prompt = [5, 6, 7]
    ids = torch.tensor([[*prompt, token] for token in range(size)])
    mask = torch.tensor([[False] * len(prompt) + [True]]).expand(size, -1)
    log_mu = torch.randn(size, generator=torch.Generator().manual_seed(1)).log_softmax(-1)
    batch = RolloutBatch(
        input_ids=ids,
        attention_mask=torch.ones_like(mask),
        loss_mask=mask,
        behavior_logprobs=torch.where(mask, log_mu[:, None], 0.0),
        versions=torch.zeros_like(ids),
        advantages=torch.zeros(mask.shape),
        token_weights=torch.where(mask, log_mu.exp()[:, None], 0.0),
        rewards=torch.zeros(size),
        group_index=torch.arange(size),
    )
    loss, signals = module.objective(module.policy, module.reference, batch, version=1)
    parameters = list(module.policy.parameters())
    found = torch.autograd.grad(loss, parameters)
    log_pi, log_ref = (
        policy.causal_lm(input_ids=ids[:1, :-1]).logits[0, -1].float().log_softmax(-1)
        for policy in (module.policy, module.reference)
    )
    kl = (log_pi.exp() * (log_pi - log_ref.detach())).sum()
    assert float(loss.detach()) == pytest.approx(0.5 * float(kl.detach()), rel=1e-4)
    assert float(kl.detach()) > 0.01
    assert torch.equal(signals["loss"], loss.detach())
    for part, expected in zip(found, torch.autograd.grad(0.5 * kl, parameters), strict=True):
        torch.testing.assert_close(part, expected, rtol=1e-3, atol=1e-5 * float(expected.abs().max() + 1))


def test_the_sequence_estimator_keeps_groups_whole_and_other_names_are_refused():
    assert not make_module(kl_coefficient=0.1).wants_whole_groups
    assert make_module(kl_coefficient=0.1, kl_estimator="sequence").wants_whole_groups
    assert not make_module(kl_estimator="sequence").wants_whole_groups, "no penalty, nothing to compare"
    with pytest.raises(ValueError, match=r"model\.kl_estimator must be token, sequence or k3, got 'k1'"):
        check_choice("model", get_args(KLEstimator), kl_estimator="k1")


class Losses(pl.Callback):
    """Sums the losses of the micro-batches of each step, and keeps what the monitor logs of it."""

    def __init__(self) -> None:
        self.sum, self.kl, self.num_tokens = 0.0, 0.0, 0
        self.steps: list[tuple[float, float, float, float]] = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        signals = pl_module.stabilizer_signals
        self.sum += float(signals["loss"])
        ratio = signals["log_ratio"][batch.loss_mask].exp()
        self.kl += float((ratio * kl_k3(-signals["ref_log_ratio"][batch.loss_mask])).sum())
        self.num_tokens += int(batch.loss_mask.sum())
        if trainer.global_step > len(self.steps):
            logged = [float(trainer.callback_metrics[f"policy/{name}"]) for name in ("loss", "reference_kl")]
            self.steps.append((self.sum * batch.gradient_scale, self.kl / self.num_tokens, *logged))
            self.sum, self.kl, self.num_tokens = 0.0, 0.0, 0


@pytest.mark.slow
@pytest.mark.parametrize("stream_groups", [False, True])
def test_loss_and_kl_to_the_reference_are_logged(stream_groups):
    losses = Losses()
    data = make_data(max_staleness=1, stream_groups=stream_groups, micro_batches_per_step=2)
    fit(make_module(kl_coefficient=5.0), data, 3, [RolloutMonitor(), losses])
    assert len(losses.steps) == 3
    for loss, kl, logged_loss, logged_kl in losses.steps:
        assert logged_loss == pytest.approx(loss, rel=1e-5, abs=1e-7)
        assert logged_kl == pytest.approx(kl, rel=1e-4, abs=1e-8)
    assert losses.steps[-1][1] > losses.steps[0][1]
