"""How far log-probabilities of engine and trainer may differ, by their precision."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

BOUNDS = {"float32": 1e-4, "tf32": 2e-3, "float16": 0.03, "bfloat16": 0.1}  # nats, of the mean absolute difference
PROBE_TOKENS = 48


def default_bound(*dtypes: str) -> float:
    """Largest mean absolute difference, in nats, that the coarsest of these dtypes explains.

    On CPUs float32 agrees to about 1e-5; accelerators may multiply it in TF32, to a few 1e-4; bfloat16 agrees to 2e-3
    ... 4e-2. Unknown names count as the coarsest.
    """
    return max(BOUNDS.get(dtype, max(BOUNDS.values())) for dtype in dtypes)


@dataclass(frozen=True)
class Probe:
    """Log-probabilities of a fixed token sequence under the trainer's weights of one version.

    Attributes:
        version: of the weights.
        token_ids: the sequence.
        logprobs: of all its tokens but the first, at temperature 1.
        dtype: the trainer computes in it.
    """

    version: int
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    dtype: str

    def error(self, logprobs: Sequence[float]) -> float:
        """Mean absolute difference from other log-probabilities of the same tokens."""
        differences = [abs(a - b) for a, b in zip(self.logprobs, logprobs, strict=True)]
        return sum(differences) / len(differences)


def probe_tokens(vocab_size: int, max_length: int = PROBE_TOKENS) -> tuple[int, ...]:
    """A fixed sequence of random tokens."""
    rng = random.Random(vocab_size)
    return tuple(rng.randrange(vocab_size) for _ in range(min(PROBE_TOKENS, max_length)))
