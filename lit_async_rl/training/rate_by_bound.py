"""Learning rate by staleness bound: by which factor the rate of a synchronous run has to be lowered.

The bias of a stale gradient is of order S eta, the bound times the rate (arXiv:2607.01083): from some bound S_0 on, twice
the lag asks for half of the rate,

    factor(S) = max(F, min(1, S_0 / S))

S_0 depends on what the loss does about stale data. F is where the runs that S_0 was fitted to end: no lower rate was
searched, and from lag 16 to 64 the best rate did not fall further. `benchmarks/staleness/rate_by_bound.py` fits and tests
it; docs/stabilizers.md says how good it is.
"""

from __future__ import annotations

from enum import Enum

from lit_async_rl.baselines.optimal import OptimalBaseline
from lit_async_rl.corrections import Correction
from lit_async_rl.losses import GSPO, TOPR, VESPO, GSPOToken, PolicyLoss, Reinforce

LOWEST_FACTOR = 0.3


class Handling(Enum):
    """What a loss does about stale data; the value says it in words."""

    NOTHING = "nothing corrects stale data"
    WEIGHTS = "importance weights or a clip"
    SEQUENCE_LOSS = "a loss on the ratios of whole completions"
    OPTIMAL_BASELINE = "the optimal baseline"


# S_0: the largest bound at which the rate of a synchronous run can stay. Where nothing corrects stale data the runs at
# several rates fit 4 as well as 2 or 1; at lag 4 the whole rate keeps 0.51 +- 0.27 of the synchronous gain, so it is 2.
WHOLE_RATE_UP_TO = {
    Handling.NOTHING: 2,
    Handling.WEIGHTS: 4,
    Handling.SEQUENCE_LOSS: 64,
    Handling.OPTIMAL_BASELINE: 64,
}


def handling(
    loss: PolicyLoss, correction: Correction | None = None, baseline: OptimalBaseline | None = None
) -> Handling | None:
    """What these parts of an objective do about stale data; None for losses of which nothing was measured."""
    if baseline is not None:
        return Handling.OPTIMAL_BASELINE
    if isinstance(loss, GSPO | GSPOToken | TOPR | VESPO):
        return Handling.SEQUENCE_LOSS
    if correction is not None:
        return Handling.WEIGHTS
    if isinstance(loss, Reinforce):
        return Handling.NOTHING
    if loss.uses_proximal and not loss.needs_reference:
        return Handling.WEIGHTS
    return None


def rate_factor(max_staleness: int, kind: Handling | None) -> float:
    """Factor on the learning rate of a synchronous run at this bound; 1 where nothing is known.

    Args:
        max_staleness: S, in versions.
        kind: what the loss does about stale data, see `handling`.
    """
    if kind is None or max_staleness <= WHOLE_RATE_UP_TO[kind]:
        return 1.0
    return max(LOWEST_FACTOR, WHOLE_RATE_UP_TO[kind] / max_staleness)
