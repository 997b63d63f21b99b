"""Refuses combinations of loss, anchor and correction that make no sense, by name."""

from __future__ import annotations

from lit_async_rl.corrections import Correction
from lit_async_rl.losses import PolicyLoss
from lit_async_rl.proximal import BehaviorProximal, Proximal


def check_compatibility(loss: PolicyLoss, proximal: Proximal, correction: Correction | None) -> None:
    """Checks that a correction has something to correct.

    Raises:
        ValueError: the loss is anchored at the behavior policy and a correction was asked for as well, or a loss
            without ratio was given a correction that it would not need.
    """
    if correction is not None and isinstance(proximal, BehaviorProximal):
        raise ValueError(
            f"model.correction={type(correction).__name__} with model.proximal=BehaviorProximal: the correction weighs "
            "proximal / behavior, which is 1 here. Use CurrentProximal (or InterpolatedProximal), or no correction."
        )
