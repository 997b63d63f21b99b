"""Metrics over several scored completions of a prompt."""

from __future__ import annotations

from math import comb


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Unbiased estimate of the probability that at least one of k samples is correct.

    pass@k = 1 - C(n - c, k) / C(n, k), n samples of which c are correct. Chen et al. 2021, arXiv:2107.03374, eq. 1.

    Raises:
        ValueError: k is not in [1, n].
    """
    if not 0 < k <= num_samples:
        raise ValueError(f"pass@k needs 0 < k <= samples, got k={k} of {num_samples}")
    return 1.0 - comb(num_samples - num_correct, k) / comb(num_samples, k)
