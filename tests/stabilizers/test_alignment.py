"""The rule by which a gradient is applied, projected or skipped: what it promises about each cosine."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lit_async_rl.callbacks import GradientAlignmentControl
from lit_async_rl.stabilizers.alignment import (
    AlignmentRule,
    ExactResidual,
    FixedResidual,
    FullRemoval,
    Regime,
)

RESIDUALS = [FullRemoval(), ExactResidual(), FixedResidual(0.3)]


def rule(**changes):
    defaults = dict(
        low=0.1, high=1.0, residual=ExactResidual(), two_sided=False, max_consecutive_skips=1, min_remainder=0.05
    )
    return AlignmentRule(**(defaults | changes))


@given(st.floats(0.0, 0.9), st.floats(0.0, 1.0), st.sampled_from(RESIDUALS))
def test_projection_never_turns_against_the_gradient_nor_grows(low, cosine, residual):
    regime, kept = rule(low=low, residual=residual, max_consecutive_skips=0).decide(cosine, 0)
    assert 0 <= kept <= 1 + 1e-12
    assert (regime == Regime.APPLY) == (cosine <= low)
    assert 1 - cosine**2 + kept * cosine**2 >= -1e-12


@given(st.floats(0.01, 0.9), st.floats(0.02, 0.98))
def test_exact_residual_leaves_a_cosine_of_exactly_low(low, cosine):
    if cosine <= low:
        return
    kept = ExactResidual().share(cosine, low)
    parallel, orthogonal = kept * cosine, math.sqrt(1 - cosine**2)
    assert parallel / math.hypot(parallel, orthogonal) == pytest.approx(low, rel=1e-9)


@given(st.floats(-1, 1))
def test_one_sided_leaves_opposed_gradients_alone_two_sided_does_not_care_for_the_sign(cosine):
    if cosine <= 0:
        assert rule().decide(cosine, 0) == (Regime.APPLY, 1.0)
    assert rule(two_sided=True).decide(cosine, 0) == rule(two_sided=True).decide(-cosine, 0)


def test_beyond_high_skips_until_the_limit_then_projects():
    limited = rule(high=0.5, max_consecutive_skips=2)
    assert [limited.decide(0.8, n)[0] for n in range(3)] == [Regime.SKIP, Regime.SKIP, Regime.PROJECT]
    assert rule(high=0.5, max_consecutive_skips=0).decide(0.8, 0)[0] == Regime.PROJECT


def test_a_projection_that_would_leave_only_noise_is_a_skip():
    assert rule(residual=FullRemoval(), high=0.99999).decide(0.9999, 0)[0] == Regime.SKIP


@given(st.floats(0.0, 0.999), st.floats(0.0, 1.0), st.integers(0, 3), st.sampled_from(RESIDUALS), st.booleans())
def test_nothing_is_skipped_up_to_a_cosine_of_one_and_a_part_of_each_gradient_is_kept(low, size, skips, residual, flip):
    cosine = -size if flip else size
    regime, kept = rule(low=low, residual=residual, two_sided=flip).decide(cosine, skips)
    assert regime == (Regime.APPLY if size <= low else Regime.PROJECT)
    assert math.hypot(kept * size, math.sqrt(1 - size**2)) >= 0.05 * (1 - 1e-9)


@pytest.mark.parametrize(("low", "high"), [(-0.1, 0.5), (0.6, 0.5), (0.1, 1.1)])
def test_senseless_thresholds_are_refused(low, high):
    with pytest.raises(ValueError, match=r"GradientAlignmentControl\.(low|high) must be in \["):
        GradientAlignmentControl(low=low, high=high)


@given(st.floats(0.0, 0.9), st.floats(0.01, 0.999), st.sampled_from([0.5, 0.99]), st.sampled_from(RESIDUALS))
def test_a_projection_leaves_at_least_the_smallest_share_of_the_gradient_or_is_a_skip(low, cosine, factor, residual):
    """The gradient has length 1; along the direction it has c, of which the projection keeps a share."""
    if cosine <= low:
        return
    share = residual.share(cosine, low)
    left = math.hypot(share * cosine, math.sqrt(1 - cosine**2))
    for smallest, expected in ((left * factor, Regime.PROJECT), (left / factor, Regime.SKIP)):
        if smallest <= 1:
            decided = rule(low=low, high=0.9999, residual=residual, min_remainder=smallest).decide(cosine, 0)
            assert decided[0] == expected


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"low": -0.1}, "low must be in"),
        ({"low": 0.5, "high": 0.4}, "high must be in"),
        ({"max_consecutive_skips": -1}, "max_consecutive_skips must be"),
        ({"min_remainder": 0.0}, "min_remainder must be in"),
        ({"min_remainder": 1.5}, "min_remainder must be in"),
    ],
    ids=str,
)
def test_settings_out_of_range_are_refused(changes, words):
    with pytest.raises(ValueError, match=f"GradientAlignmentControl.*{words}"):
        rule(**changes)
