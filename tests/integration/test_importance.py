"""Estimators against closed forms and loops."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lit_async_rl.importance import (
    effective_sample_size,
    entropy,
    ess_ratio,
    geometric_log_ratio,
    kl_k1,
    kl_k2,
    kl_k3,
    masked_quantiles,
    safe_exp,
    sequence_log_ratio,
)

log_weights = st.lists(st.floats(-80, 80), min_size=1, max_size=20)


def tensor(values: list[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


@given(values=log_weights)
def test_effective_sample_size_is_between_one_and_the_number(values: list[float]) -> None:
    assert 1 <= effective_sample_size(tensor(values)).item() <= len(values)
    assert 1 / len(values) <= ess_ratio(tensor(values)).item() * (1 + 1e-6) <= 1 + 1e-5


@given(values=st.lists(st.floats(-3, 3), min_size=1, max_size=20))
def test_effective_sample_size_is_kishs_formula(values: list[float]) -> None:
    weights = [math.exp(value) for value in values]
    expected = sum(weights) ** 2 / sum(w * w for w in weights)
    assert effective_sample_size(tensor(values)).item() == pytest.approx(expected, rel=1e-5)


@given(values=log_weights, shift=st.floats(-1000, 1000))
def test_effective_sample_size_ignores_a_common_factor_of_any_size(values: list[float], shift: float) -> None:
    shifted = effective_sample_size(tensor(values) + shift).item()
    assert shifted == pytest.approx(effective_sample_size(tensor(values)).item(), rel=1e-5)


@given(size=st.integers(1, 50), value=st.floats(-80, 80))
def test_equal_weights_have_full_effective_sample_size(size: int, value: float) -> None:
    assert effective_sample_size(torch.full((size,), value)).item() == pytest.approx(size, rel=1e-5)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([], 0.0),
        ([-math.inf, -math.inf], 0.0),
        ([math.nan], 0.0),
        ([0.0, math.nan, 0.0, -math.inf], 2.0),
        ([math.inf, 0.0], 1.0),
        ([1e30, 1e30, 0.0], 2.0),
        ([80.0, -80.0], 1.0),
    ],
)
def test_effective_sample_size_of_broken_weights(values: list[float], expected: float) -> None:
    assert effective_sample_size(tensor(values)).item() == pytest.approx(expected)
    assert ess_ratio(tensor(values)).item() == pytest.approx(expected / max(1, len(values)))


def test_ess_ratio_of_log_normal_weights_is_exp_of_minus_the_variance() -> None:
    values = torch.randn(200_000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert ess_ratio(0.5**0.5 * values).item() == pytest.approx(math.exp(-0.5), rel=0.02)


def test_ratios_of_completions_skip_masked_tokens_whatever_stands_there() -> None:
    log_ratio = torch.tensor([[1.0, math.nan, 2.0], [math.inf, -3.0, math.nan], [math.nan] * 3])
    mask = torch.tensor([[True, False, True], [False, True, False], [False] * 3])
    assert sequence_log_ratio(log_ratio, mask).tolist() == [3.0, -3.0, 0.0]
    assert geometric_log_ratio(log_ratio, mask).tolist() == [1.5, -3.0, 0.0]


@given(values=st.lists(st.floats(-1000, 1000), min_size=1))
def test_kl_estimates_are_finite_and_k2_and_k3_never_negative(values: list[float]) -> None:
    log_ratio = torch.tensor(values)
    for estimate in (kl_k1, kl_k2, kl_k3):
        assert estimate(log_ratio).isfinite().all()
    assert (kl_k2(log_ratio) >= 0).all()
    assert (kl_k3(log_ratio) >= 0).all()


def test_kl_estimates_and_ess_ratio_approach_the_exact_values() -> None:
    generator = torch.Generator().manual_seed(0)
    mu, pi = (torch.randn(5, generator=generator, dtype=torch.float64).mul(0.5).softmax(0) for _ in range(2))
    samples = torch.multinomial(mu, 400_000, replacement=True, generator=generator)
    log_ratio = (pi / mu).log()[samples]
    exact_kl = (mu * (mu / pi).log()).sum().item()
    assert kl_k1(log_ratio).mean().item() == pytest.approx(exact_kl, rel=0.03)
    assert kl_k3(log_ratio).mean().item() == pytest.approx(exact_kl, rel=0.03)
    exact_chi2 = (pi**2 / mu).sum().item() - 1
    assert ess_ratio(log_ratio).item() == pytest.approx(1 / (1 + exact_chi2), rel=0.03)


def test_gradient_of_k3_is_the_ratio_less_one_and_keeps_its_sign_at_any_distance() -> None:
    log_ratio = torch.tensor([0.5, -0.5, -1000.0, 19.0, 21.0, 1000.0], requires_grad=True)
    kl_k3(log_ratio).sum().backward()
    beyond = math.exp(20.0) - 1
    expected = torch.tensor([math.exp(0.5) - 1, math.exp(-0.5) - 1, -1.0, math.exp(19.0) - 1, beyond, beyond])
    torch.testing.assert_close(log_ratio.grad, expected)


@pytest.mark.parametrize("junk", [math.nan, math.inf, -math.inf])
def test_quantiles_skip_masked_tokens(junk: float) -> None:
    values, mask = torch.tensor([[1.0, junk, 3.0, 2.0]]), torch.tensor([[True, False, True, True]])
    assert masked_quantiles(values, mask, [0.0, 0.5, 1.0]).tolist() == [1.0, 2.0, 3.0]


def test_nothing_to_estimate_gives_zero() -> None:
    values, mask = torch.full((2, 3), math.nan), torch.zeros(2, 3, dtype=torch.bool)
    assert masked_quantiles(values, mask, [0.5, 0.95]).tolist() == [0, 0]


@pytest.mark.parametrize("size", [80.0, 1e30])
def test_ratios_of_extreme_values_are_finite(size: float) -> None:
    log_ratio = torch.tensor([[size, -size]])
    assert safe_exp(log_ratio).isfinite().all()


@settings(deadline=None)
@given(seed=st.integers(0, 2**31), scale=st.sampled_from([0.01, 1.0, 100.0]))
def test_entropy_is_that_of_torchs_distribution(seed: int, scale: float) -> None:
    logits = scale * torch.randn(3, 4, 7, generator=torch.Generator().manual_seed(seed))
    exact = torch.distributions.Categorical(logits=logits.double()).entropy()  # its own float32 errs by up to 1.4e-5
    torch.testing.assert_close(entropy(logits), exact.float())


def test_entropy_ignores_impossible_tokens_in_value_and_gradient() -> None:
    logits = torch.tensor([0.3, -math.inf, 0.1, -math.inf], requires_grad=True)
    possible = torch.tensor([0.3, 0.1], requires_grad=True)
    entropy(logits).backward()
    entropy(possible).backward()
    torch.testing.assert_close(entropy(logits), entropy(possible))
    assert logits.grad is not None
    torch.testing.assert_close(logits.grad[[0, 2]], possible.grad)
