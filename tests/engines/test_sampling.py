"""Truncation against slow loops, and frequencies against the log-probabilities that are reported with them."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lit_async_rl.engines.base import SamplingParams
from lit_async_rl.engines.embedded.sampling import RowParams, RowState, draw, parts, processed_logprobs


def row_params(n, temperature=1.0, top_p=1.0, top_k=0, min_p=0.0) -> RowParams:
    return RowParams(
        torch.full((n,), float(temperature)),
        torch.full((n,), float(top_p)),
        torch.full((n,), top_k),
        torch.full((n,), float(min_p)),
        truncates=top_p < 1 or top_k > 0 or min_p > 0,
    )


def numbers(n: int, seed: int) -> torch.Tensor:
    return torch.rand(n, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def softmax(values: list[float]) -> list[float]:
    shifted = [math.exp(v - max(values)) for v in values]
    return [v / sum(shifted) for v in shifted]


def slow_distribution(logits: list[float], temperature: float, top_p: float, top_k: int, min_p: float) -> list[float]:
    """Temperature, top-k, top-p, min-p, one after the other, each on the renormalised rest."""
    p = softmax([x / (temperature or 1.0) for x in logits])

    def keep(tokens) -> list[float]:
        total = sum(p[v] for v in tokens)
        return [p[v] / total if v in tokens else 0.0 for v in range(len(p))]

    likeliest_first = sorted(range(len(p)), key=lambda v: -p[v])
    if top_k:
        p = keep(likeliest_first[:top_k])
    if top_p < 1:
        kept, total = [], 0.0
        for v in likeliest_first:
            if p[v] == 0 or total >= top_p:
                break
            kept.append(v)
            total += p[v]
        p = keep(kept)
    return keep([v for v in range(len(p)) if p[v] > 0 and p[v] >= min_p * max(p)])


# Distinct by more than rounding, so that "the k likeliest" is one set.
distinct_logits = st.lists(st.integers(-60, 60), min_size=2, max_size=12, unique=True).map(
    lambda xs: [x / 7.0 for x in xs]
)
# No cumulative sum of these falls exactly on one of those thresholds.
top_ps = st.sampled_from([0.0123457, 0.3141593, 0.6180339, 0.9123457, 1.0])
min_ps = st.sampled_from([0.0, 0.0123457, 0.3141593, 0.9])


@settings(deadline=None)
@given(distinct_logits, st.sampled_from([0.0, 0.3, 1.0, 2.5]), top_ps, st.integers(0, 14), min_ps)
def test_distribution_is_the_one_of_the_slow_reference(logits, temperature, top_p, top_k, min_p):
    fast = processed_logprobs(torch.tensor([logits]), row_params(1, temperature, top_p, top_k, min_p))[0].exp()
    slow = torch.tensor(slow_distribution(logits, temperature, top_p, top_k, min_p))
    torch.testing.assert_close(fast, slow, atol=2e-6, rtol=1e-4)
    assert (fast == 0).tolist() == (slow == 0).tolist()


@given(st.data())
@settings(max_examples=30, deadline=None)
def test_rows_with_different_settings_do_not_touch_each_other(data):
    logits = torch.randn(4, 9, generator=torch.Generator().manual_seed(data.draw(st.integers(0, 1000))))
    settings_of = [
        (
            data.draw(st.sampled_from([0.0, 0.7, 1.0])),
            data.draw(top_ps),
            data.draw(st.integers(0, 9)),
            data.draw(min_ps),
        )
        for _ in range(4)
    ]
    columns = list(zip(*settings_of, strict=True))
    together = RowParams(*(torch.tensor(column) for column in columns), truncates=True)
    mixed = processed_logprobs(logits, together)
    for n, one in enumerate(settings_of):
        alone = processed_logprobs(logits[n : n + 1], row_params(1, *one))
        torch.testing.assert_close(mixed[n : n + 1], alone, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("kwargs", [{}, {"temperature": 0.6}, {"top_p": 0.7, "min_p": 0.05}, {"top_k": 4}])
def test_frequencies_are_the_reported_probabilities(kwargs):
    """Chi-square: the statistic of 200,000 draws lies below its 1 - 1e-6 quantile (Wilson-Hilferty)."""
    n = 200_000
    logits = torch.tensor([1.3, -0.4, 0.2, 2.0, -1.5, 0.9, 0.0, -3.0])
    params = row_params(n, **kwargs)
    log_p = processed_logprobs(logits.expand(n, -1), params)
    tokens, logprobs = draw(log_p, params, numbers(len(log_p), seed=0))
    torch.testing.assert_close(logprobs, log_p[0, tokens])
    expected = log_p[0].double().exp() * n
    counts = tokens.bincount(minlength=8).double()
    possible = expected > 0
    assert counts[~possible].sum() == 0
    statistic = ((counts - expected)[possible] ** 2 / expected[possible]).sum().item()
    freedom = int(possible.sum()) - 1
    quantile = freedom * (1 - 2 / (9 * freedom) + 4.753 * math.sqrt(2 / (9 * freedom))) ** 3
    assert statistic < quantile


@pytest.mark.slow
def test_tokens_with_no_probability_are_never_drawn():
    """Also when almost nothing is left, and in a large vocabulary, where a coarse random number would show."""
    log_p = torch.full((20_000, 1000), -torch.inf)
    log_p[:, 999], log_p[:, 500] = math.log(1e-7), 0.0
    tokens, _ = draw(log_p, row_params(20_000), numbers(len(log_p), seed=0))
    assert set(tokens.tolist()) <= {500, 999}
    assert (tokens == 999).sum() <= 2


def test_greedy_rows_take_the_likeliest_token_among_sampled_ones():
    logits = torch.randn(50, 11, generator=torch.Generator().manual_seed(1))
    params = row_params(50)
    params.temperature[::2] = 0.0
    log_p = processed_logprobs(logits, params)
    tokens, logprobs = draw(log_p, params, numbers(len(log_p), seed=1))
    assert (tokens[::2] == logits[::2].argmax(-1)).all()
    assert (tokens[1::2] != logits[1::2].argmax(-1)).any()
    torch.testing.assert_close(logprobs[::2], logits[::2].log_softmax(-1).amax(-1))


def test_only_the_given_generator_is_used():
    rows, before = RowState(5, torch.device("cpu")), torch.random.get_rng_state()
    logits = torch.randn(5, 7, generator=torch.Generator().manual_seed(0))
    first = rows.sample(slice(0, 5), logits, torch.Generator().manual_seed(5))[0]
    again = rows.sample(slice(0, 5), logits, torch.Generator().manual_seed(5))[0]
    assert torch.equal(first, again)
    assert torch.equal(before, torch.random.get_rng_state())


@pytest.mark.parametrize("kwargs", [{}, {"temperature": 0.6}, {"top_k": 50}])
def test_a_large_vocabulary_is_sampled_from_in_parts_with_the_same_tokens_as_at_once(kwargs):
    n, size = 23, 70_000
    logits = torch.randn(n, size, generator=torch.Generator().manual_seed(2)) * 3
    assert len(parts(logits)) > 3
    rows = RowState(n, torch.device("cpu"))
    rows.open(rows.all_rows, SamplingParams(max_tokens=2, head=3, **kwargs), (), (1, 2))
    tokens, logprobs = rows.sample(slice(0, n), logits, torch.Generator().manual_seed(3))
    log_p = processed_logprobs(logits, row_params(n, **kwargs))
    expected, their_logprobs = draw(log_p, row_params(n, **kwargs), numbers(len(log_p), seed=3))
    assert torch.equal(tokens, expected)
    assert torch.equal(logprobs, their_logprobs)
    for row in range(n):
        assert torch.equal(rows.heads.of(row, 1, 3).logprobs[0], log_p[row].topk(3).values)
