"""Checks of combinations of loss, proximal policy, correction, advantage and aggregation; messages name the settings.

These are independent choices, and most combinations are methods of their own. A combination is refused if a part has no
effect, or if an importance ratio is counted twice or not at all.
"""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from lit_async_rl.advantages.group import AdvantageEstimator, GroupMean, LogMeanExp
from lit_async_rl.baselines.optimal import OptimalBaseline
from lit_async_rl.corrections import Correction
from lit_async_rl.corrections.weights import BehaviorProximal, CurrentProximal, Proximal
from lit_async_rl.engines.base import RolloutEngine
from lit_async_rl.losses import OAPL, PolicyLoss, Reinforce, TrajectoryBalance
from lit_async_rl.losses.aggregation import Aggregation, PromptMean, SequenceMean, within_sources


def check_compatibility(loss: PolicyLoss, proximal: Proximal, correction: Correction | None) -> None:
    """Checks that loss and correction together cover the ratio of current to behavior policy exactly once.

    Raises:
        ValueError: they do not; names the settings, the reason and the alternatives.
    """
    names = f"model.loss={_name(loss)} with model.proximal={_name(proximal)}"
    is_behavior = isinstance(proximal, BehaviorProximal)
    is_current = isinstance(proximal, CurrentProximal)
    if correction is not None and is_behavior:
        raise ValueError(
            f"model.correction={_name(correction)} with model.proximal=BehaviorProximal: the correction weighs "
            "proximal / behavior, which is 1 here. Use CurrentProximal (or InterpolatedProximal), or no correction."
        )
    if loss.needs_behavior_proximal and not is_behavior:
        raise ValueError(
            f"{names}: {_name(loss)} corrects for the policy that sampled by itself, so its ratio must be to that "
            "policy. Use BehaviorProximal, without correction."
        )
    if loss.needs_reference and not is_behavior:
        raise ValueError(f"{names}: {_name(loss)} takes its ratio to the reference policy. Leave model.proximal out.")
    if loss.uses_proximal and is_current and correction is None:
        raise ValueError(
            f"{names} and no model.correction: the ratio is always 1, so {_name(loss)} is REINFORCE without any "
            "correction. Use BehaviorProximal, add a correction, or say Reinforce."
        )
    if loss.uses_proximal and correction is None and not is_behavior:
        raise ValueError(
            f"{names} and no model.correction: the ratio of proximal to behavior policy is missing. Add a "
            "correction, or use BehaviorProximal."
        )
    if not loss.uses_proximal and correction is None and not is_behavior:
        raise ValueError(
            f"{names} and no model.correction: nothing reads the proximal policy. Add a correction, or leave "
            "model.proximal out."
        )
    if not loss.uses_proximal and correction is not None and not is_current:
        raise ValueError(
            f"{names} and model.correction={_name(correction)}: {_name(loss)} contains no ratio, so the correction "
            "must go all the way to the current policy. Use CurrentProximal."
        )


def check_baseline(loss: PolicyLoss, baseline: OptimalBaseline | None) -> None:
    """Checks the assumption of the optimal baseline: a loss linear in the advantage.

    Raises:
        ValueError: the loss is not linear.
    """
    if baseline is not None and not isinstance(loss, Reinforce):
        raise ValueError(
            f"model.baseline=OptimalBaseline with model.loss={_name(loss)}: its gradient is not linear in the "
            "advantage. Use Reinforce, with a correction and CurrentProximal for stale data."
        )


def check_norms(baseline: OptimalBaseline | None, precision: str) -> None:
    """Checks that gradients of the baseline's norms do not vanish: no loss scaler applies to them.

    Raises:
        ValueError: they are computed in float16, where 1e-8 is 0.
    """
    if baseline is not None and baseline.reads_weights and precision == "16-mixed":
        raise ValueError(
            f"model.baseline.norms={baseline.norms.name} with trainer.precision={precision}: its norms are of single "
            "gradients, which vanish in float16 without the loss scaler. Use bf16-mixed, or norms=SCORE."
        )


def check_data_compatibility(
    loss: PolicyLoss,
    advantage: AdvantageEstimator,
    aggregation: Aggregation,
    head: int | None,
    engine: RolloutEngine,
) -> None:
    """Checks that losses get the advantages, token weights and recorded distributions that their formulas assume.

    Raises:
        ValueError: advantage, aggregation, `data.sampling.head` or engine does not fit the loss.
    """
    if loss.needs_head is not None and (head is None or head < loss.needs_head):
        raise ValueError(
            f"data.sampling.head must be >= {loss.needs_head} with model.loss={_name(loss)}, which needs the "
            f"distributions that the tokens were sampled from, got {head}"
        )
    if loss.needs_entropy and not engine.records_entropy:
        raise ValueError(
            f"model.loss={_name(loss)} with data.engine={_name(engine)}: it needs the entropy of the sampling "
            "distributions, and this engine knows only their likeliest tokens. Use EmbeddedEngine."
        )
    expected = {TrajectoryBalance: GroupMean, OAPL: LogMeanExp}
    for regression, estimator in expected.items():
        if not isinstance(loss, regression):
            continue
        if not isinstance(advantage, estimator):
            raise ValueError(
                f"model.loss={_name(loss)} with data.advantage={_name(advantage)}: its square is of rewards less "
                f"{estimator.__name__}'s baseline. Use that."
            )
        if isinstance(inner := within_sources(aggregation), SequenceMean | PromptMean):
            raise ValueError(
                f"model.loss={_name(loss)} with data.aggregation={_name(aggregation)}: its log-ratio is a sum over "
                f"tokens, whose weights must not depend on the length, as {_name(inner)}'s do. Use FixedLength, "
                "TokenMean or TokenBudget."
            )


def check_trainable_attention(lm: PreTrainedModel, device: torch.device) -> None:
    """Checks that the attention kernel has a backward pass on this device.

    Raises:
        ValueError: it is FlexAttention on a CPU.
    """
    if device.type == "cpu" and lm.config._attn_implementation == "flex_attention":
        raise ValueError(
            "model.attn_implementation=flex_attention cannot train on a CPU: its kernel has no backward pass there. "
            "Leave it out, or train on a GPU."
        )


def _name(choice: object) -> str:
    return type(choice).__name__
