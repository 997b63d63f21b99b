"""Every correction against a reference written as loops, and against what all of them have in common.

A new correction joins by one line in `CASES`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import slow_corrections as slow
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonargparse import ArgumentParser
from torch import Tensor

import lit_async_rl.corrections as corrections_package
from lit_async_rl.corrections import (
    BatchNormalized,
    BlendedIS,
    Correction,
    GeometricMaskedIS,
    GeometricRejection,
    GeometricTruncatedIS,
    IcePop,
    Product,
    SecondMomentMask,
    SequenceMaskedIS,
    SequenceRejection,
    SequenceTruncatedIS,
    TokenRejection,
    TokenTruncatedIS,
    Veto,
)


@dataclass(frozen=True)
class Case:
    correction: Correction
    reference: Callable[..., Any]


TIS, ICEPOP = slow.truncated_is(slow.of_token), slow.masked_is(slow.of_token)
BLEND = BlendedIS()
BLEND.share = 0.25
CASES = [
    Case(TokenTruncatedIS(), TIS),
    Case(TokenTruncatedIS(cap=math.inf), TIS),
    Case(TokenTruncatedIS(cap=1.2, floor=0.8), TIS),
    Case(SequenceTruncatedIS(), slow.truncated_is(slow.of_sequence)),
    Case(GeometricTruncatedIS(cap=1.1), slow.truncated_is(slow.of_mean)),
    Case(IcePop(), ICEPOP),
    Case(IcePop(low=0.8, high=1.2), ICEPOP),  # SAO's mask
    Case(SequenceMaskedIS(), slow.masked_is(slow.of_sequence)),
    Case(GeometricMaskedIS(low=0.9, high=1.2), slow.masked_is(slow.of_mean)),
    Case(TokenRejection(max_k3=0.05), slow.rejection(slow.of_token)),
    Case(TokenRejection(min_ratio=0.8), slow.rejection(slow.of_token)),
    Case(SequenceRejection(min_ratio=0.5, max_ratio=2.0), slow.rejection(slow.of_sequence)),
    Case(SequenceRejection(max_k2=0.5), slow.rejection(slow.of_sequence)),
    Case(GeometricRejection(max_ratio=1.1), slow.rejection(slow.of_mean)),
    Case(GeometricRejection(max_k3=0.01), slow.rejection(slow.of_mean)),
    Case(Veto(min_ratio=0.5), slow.veto),
    Case(Veto(min_ratio=0.0, max_k2=0.3), slow.veto),
    Case(Veto(min_ratio=0.3, max_ratio=2.0, max_k3=0.4), slow.veto),
    Case(SecondMomentMask(), slow.second_moment_mask),
    Case(Product([Veto(min_ratio=0.3), TokenTruncatedIS()]), slow.product(slow.veto, TIS)),
    Case(Product([IcePop()]), slow.product(ICEPOP)),
    Case(BLEND, slow.blended(slow.truncated_is(slow.of_sequence), TIS)),
    Case(BatchNormalized(TokenTruncatedIS()), slow.batch_normalized(TIS)),
    Case(BatchNormalized(IcePop()), slow.batch_normalized(ICEPOP)),
]
every_correction = pytest.mark.parametrize("case", CASES, ids=lambda case: str(case.correction))
spreads = st.sampled_from([0.001, 0.1, 0.5, 2.0])


def make(seed: int, shape: tuple[int, int] = (4, 6), spread: float = 0.5) -> tuple[Tensor, Tensor]:
    """Random log-ratios in float64, and a mask."""
    generator = torch.Generator().manual_seed(seed)
    log_ratio = spread * torch.randn(shape, generator=generator, dtype=torch.float64)
    return log_ratio, torch.rand(shape, generator=generator) < 0.7


@every_correction
@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**31), shape=st.tuples(st.integers(1, 5), st.integers(1, 7)), spread=spreads)
def test_weights_and_rejections_equal_the_slow_reference(case: Case, seed: int, shape: tuple, spread: float) -> None:
    log_ratio, mask = make(seed, shape, spread)
    output = case.correction(log_ratio, mask)
    weights, rejected = case.reference(case.correction, log_ratio.tolist(), mask.tolist())
    torch.testing.assert_close(output.weights, torch.tensor(weights, dtype=torch.float64), rtol=1e-9, atol=1e-12)
    assert output.rejected.tolist() == rejected


@every_correction
def test_equal_policies_have_weight_one_so_that_decoupled_ppo_is_ppo(case: Case) -> None:
    _, mask = make(0)
    output = case.correction(torch.zeros(4, 6), mask)
    assert torch.equal(output.weights, mask.float())
    assert not output.rejected.any()


@every_correction
@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**31), size=st.sampled_from([0.5, 80.0, 1e4]))
def test_weights_are_finite_nonnegative_constant_and_zero_where_nothing_trains(
    case: Case, seed: int, size: float
) -> None:
    log_ratio, mask = make(seed, spread=size)
    output = case.correction(log_ratio.float().requires_grad_(), mask)
    assert output.weights.isfinite().all()
    assert (output.weights >= 0).all()
    assert not output.weights.requires_grad
    assert (output.weights[~mask | output.rejected] == 0).all()
    assert not output.rejected[~mask].any()


@every_correction
@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**31), junk=st.sampled_from([math.nan, math.inf, -math.inf, 1e30]))
def test_what_stands_at_masked_tokens_never_matters(case: Case, seed: int, junk: float) -> None:
    log_ratio, mask = make(seed)
    output, spoiled = case.correction(log_ratio, mask), case.correction(torch.where(mask, log_ratio, junk), mask)
    assert torch.equal(output.weights, spoiled.weights)
    assert torch.equal(output.rejected, spoiled.rejected)


@every_correction
@pytest.mark.parametrize("junk", [math.nan, math.inf, -math.inf])
def test_a_completion_with_a_broken_log_ratio_is_rejected_and_spoils_no_other(case: Case, junk: float) -> None:
    log_ratio, mask = make(1)
    mask[1, 2] = True
    left_out = mask.clone()
    left_out[1] = False
    expected = case.correction(log_ratio, left_out)
    log_ratio[1, 2] = junk
    output = case.correction(log_ratio, mask)
    assert torch.equal(output.rejected[1], mask[1])
    assert torch.equal(output.weights, expected.weights)


@every_correction
def test_order_of_completions_and_padding_change_nothing(case: Case) -> None:
    log_ratio, mask = make(2)
    output = case.correction(log_ratio, mask)
    order = torch.tensor([2, 0, 3, 1])
    moved = case.correction(*(torch.nn.functional.pad(x[order], (1, 3, 0, 2)) for x in (log_ratio, mask)))
    torch.testing.assert_close(moved.weights[:4, 1:-3], output.weights[order])
    assert torch.equal(moved.rejected[:4, 1:-3], output.rejected[order])


@every_correction
@pytest.mark.parametrize("shape", [(1, 1), (3, 4), (2, 0)])
def test_a_batch_without_tokens_gives_zero(case: Case, shape: tuple[int, int]) -> None:
    output = case.correction(torch.full(shape, math.nan), torch.zeros(shape, dtype=torch.bool))
    assert (output.weights == 0).all()
    assert not output.rejected.any()


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**31), spread=spreads)
def test_normalized_weights_average_to_one_over_what_is_kept(seed: int, spread: float) -> None:
    log_ratio, mask = make(seed, spread=spread)
    output = BatchNormalized(IcePop())(log_ratio, mask)
    kept = mask & ~output.rejected
    if kept.any():
        assert output.weights[kept].mean().item() == pytest.approx(1.0)


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**31), shift=st.floats(-1, 1))
def test_normalizing_takes_out_what_all_ratios_share(seed: int, shift: float) -> None:
    log_ratio, mask = make(seed)
    correction = BatchNormalized(TokenTruncatedIS(cap=math.inf))
    torch.testing.assert_close(correction(log_ratio + shift, mask).weights, correction(log_ratio, mask).weights)


def test_every_exported_correction_is_held_to_all_of_this() -> None:
    exported = {getattr(corrections_package, name) for name in corrections_package.__all__}
    assert {c for c in exported if issubclass(c, Correction) and c is not Correction} == {
        type(case.correction) for case in CASES
    }


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"class_path": "SequenceTruncatedIS", "init_args": {"cap": 5}}, SequenceTruncatedIS(cap=5.0)),
        ({"class_path": "IcePop"}, IcePop()),
        ({"class_path": "Veto", "init_args": {"min_ratio": 1e-5}}, Veto(min_ratio=1e-5)),
        (
            {"class_path": "Product", "init_args": {"corrections": [{"class_path": "Veto"}, {"class_path": "IcePop"}]}},
            Product([Veto(), IcePop()]),
        ),
        (
            {"class_path": "BatchNormalized", "init_args": {"correction": {"class_path": "TokenTruncatedIS"}}},
            BatchNormalized(TokenTruncatedIS()),
        ),
    ],
)
def test_corrections_are_named_and_built_by_yaml(config: dict, expected: Correction) -> None:
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--correction", type=Correction)
    assert parser.instantiate_classes(parser.parse_object({"correction": config})).correction == expected


@pytest.mark.parametrize(
    ("build", "setting"),
    [
        (lambda: TokenTruncatedIS(cap=0.0), r"TokenTruncatedIS\.cap must be > 0, got 0\.0"),
        (lambda: SequenceTruncatedIS(floor=9.0), r"SequenceTruncatedIS\.floor must be in \[0, 8\.0\], got 9\.0"),
        (lambda: IcePop(low=6.0), r"IcePop\.high must be > 6\.0, got 5\.0"),
        (lambda: GeometricRejection(), "GeometricRejection has no limits"),
        (lambda: TokenRejection(max_k2=-1.0), "max_k2"),
        (lambda: Veto(min_ratio=2.0, max_ratio=1.0), r"Veto\.max_ratio must be > 2\.0, got 1\.0"),
        (lambda: SecondMomentMask(budget=-1.0), "budget"),
        (lambda: Product([]), "corrections"),
    ],
)
def test_a_setting_out_of_range_is_refused_by_name(build: Callable[[], Correction], setting: str) -> None:
    with pytest.raises(ValueError, match=setting):
        build()
