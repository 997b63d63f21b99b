"""Learning rate by staleness bound: the factor on the rate of a synchronous run.

The bias of a stale gradient is of order S eta, the bound times the rate (arXiv:2607.01083): from some bound S_0 on,
twice the lag asks for half the rate,

    factor(S) = max(F, min(1, S_0 / S))

S_0 depends on what the loss does about stale data, and was fitted to the staleness benchmark. F is the lowest rate
searched there; between the lags of 16 and 64 the best rate did not fall further. The rule is fitted and tested in
`benchmarks/staleness/rate_by_bound.py`; docs/stabilizers.md says how good it is.
"""

from __future__ import annotations

from enum import Enum

from lit_async_rl.baselines.optimal import OptimalBaseline
from lit_async_rl.corrections import Correction
from lit_async_rl.losses import (
    BAPO,
    CISPO,
    DPPO,
    ESTR,
    GSPO,
    M2PO,
    PNPO,
    SAT,
    TOPR,
    VESPO,
    GSPOToken,
    MinPRO,
    PolicyLoss,
    PPOClip,
    Reinforce,
    ScoreCentering,
)

LOWEST_FACTOR = 0.3
SEQUENCE_LOSSES = (GSPO, GSPOToken, TOPR, VESPO)
TOKEN_LOSSES = (PPOClip, CISPO, SAT, ESTR, MinPRO, PNPO, BAPO, DPPO, M2PO, ScoreCentering)


class Handling(Enum):
    """Treatment of stale data by an objective; the value describes it."""

    NOTHING = "nothing that corrects stale data"
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
    """Treatment of stale data by an objective; None for losses that were not measured."""
    if baseline is not None:
        return Handling.OPTIMAL_BASELINE
    if isinstance(loss, SEQUENCE_LOSSES):
        return Handling.SEQUENCE_LOSS
    if isinstance(loss, TOKEN_LOSSES):
        return Handling.WEIGHTS
    if isinstance(loss, Reinforce):
        return Handling.NOTHING if correction is None else Handling.WEIGHTS
    return None


def rate_factor(max_staleness: int, kind: Handling | None, weight_sync_steps: int = 1) -> float:
    """Factor on the learning rate of a synchronous run at this bound; 1 where nothing is known.

    The lag counts optimizer steps: with weights published every k steps it is up to (S + 1) k - 1. Only k = 1 was
    measured.

    Example:
        ```python
        from lit_async_rl.training.rate_by_bound import Handling, rate_factor

        assert rate_factor(8, Handling.WEIGHTS) == 0.5
        assert rate_factor(8, Handling.OPTIMAL_BASELINE) == 1.0
        ```

    Args:
        max_staleness: S, in versions.
        kind: treatment of stale data, see `handling`.
        weight_sync_steps: k, optimizer steps between publications.
    """
    lag = (max_staleness + 1) * weight_sync_steps - 1
    if kind is None or lag <= WHOLE_RATE_UP_TO[kind]:
        return 1.0
    return max(LOWEST_FACTOR, WHOLE_RATE_UP_TO[kind] / lag)
