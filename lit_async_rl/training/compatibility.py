"""Refuses combinations of loss, anchor, correction, advantage and averaging, and of data, that make no sense, by name.

Those are independent choices, and most combinations are methods of their own. Refused is what would silently do
something else than its names say: a part that cannot act, or a ratio that is counted twice or not at all.
"""

from __future__ import annotations

from lit_async_rl.advantages.group import AdvantageEstimator, GroupMean, LengthWeighted, LogMeanExp
from lit_async_rl.baselines.optimal import Norms, OptimalBaseline
from lit_async_rl.corrections import Correction
from lit_async_rl.corrections.proximal import BehaviorProximal, CurrentProximal, Proximal
from lit_async_rl.engines.base import RolloutEngine
from lit_async_rl.losses import OAPL, PolicyLoss, Reinforce, TrajectoryBalance
from lit_async_rl.losses.aggregation import Aggregation, PromptMean, SequenceMean
from lit_async_rl.models.packing import SharedPromptPacking
from lit_async_rl.replay.buffer import ReplayBuffer
from lit_async_rl.rollouts.intake import Intake


def check_compatibility(loss: PolicyLoss, proximal: Proximal, correction: Correction | None) -> None:
    """Checks that loss and correction together go the whole way from behavior to current policy, once.

    Raises:
        ValueError: they do not; says which, why, and what to use.
    """
    names = f"model.loss={_name(loss)} with model.proximal={_name(proximal)}"
    is_behavior, is_current = isinstance(proximal, BehaviorProximal), isinstance(proximal, CurrentProximal)
    if correction is not None and is_behavior:
        raise ValueError(
            f"model.correction={_name(correction)} with model.proximal=BehaviorProximal: the correction weighs "
            "proximal / behavior, which is 1 here. Use CurrentProximal (or InterpolatedProximal), or no correction."
        )
    if loss.needs_behavior_anchor and not is_behavior:
        raise ValueError(
            f"{names}: {_name(loss)} corrects for the policy that sampled by itself, so its ratio must be to that "
            "policy. Use BehaviorProximal, without correction."
        )
    if loss.needs_reference and not is_behavior:
        raise ValueError(f"{names}: {_name(loss)} is anchored at the reference policy. Leave model.proximal out.")
    if loss.anchored and is_current and correction is None:
        raise ValueError(
            f"{names} and no model.correction: the ratio is always 1, so {_name(loss)} is REINFORCE without any "
            "correction. Use BehaviorProximal, add a correction, or say Reinforce."
        )
    if loss.anchored and correction is None and not is_behavior:
        raise ValueError(
            f"{names} and no model.correction: the way from the behavior policy to the anchor is missing. Add a "
            "correction, or use BehaviorProximal."
        )
    if not loss.anchored and correction is None and not is_behavior:
        raise ValueError(
            f"{names} and no model.correction: nothing reads the anchor. Add a correction, or leave model.proximal out."
        )
    if not loss.anchored and correction is not None and not is_current:
        raise ValueError(
            f"{names} and model.correction={_name(correction)}: {_name(loss)} contains no ratio, so the correction "
            "must go all the way to the current policy. Use CurrentProximal."
        )


def check_baseline(
    loss: PolicyLoss, baseline: OptimalBaseline | None, packing: SharedPromptPacking | None = None
) -> None:
    """Checks that the loss is linear in the advantage, which is what makes a baseline optimal, and norms separable.

    Raises:
        ValueError: it is not, or gradient norms of trajectories are asked of layers that mix them.
    """
    if baseline is not None and packing is not None and baseline.norms is Norms.GHOST:
        raise ValueError(
            "model.packing with model.baseline.norms=GHOST: the norms need layers whose rows are trajectories, "
            "and packed rows hold a whole group. Use PER_TRAJECTORY, or model.packing: null."
        )
    if baseline is not None and not isinstance(loss, Reinforce):
        raise ValueError(
            f"model.baseline=OptimalBaseline with model.loss={_name(loss)}: its gradient is not linear in the "
            "advantage. Use Reinforce, with a correction and CurrentProximal for stale data."
        )


def check_step_compatibility(advantage: AdvantageEstimator, aggregation: Aggregation) -> None:
    """Checks that an advantage's assumption about the average holds.

    Raises:
        ValueError: it does not.
    """
    if isinstance(advantage, LengthWeighted) and isinstance(aggregation, SequenceMean):
        raise ValueError(
            "data.advantage=LengthWeighted with data.aggregation=SequenceMean: its baseline is for gradients that grow "
            "with the length of a rollout, which SequenceMean divides out. Use TokenMean, FixedLength or GroupMean."
        )


def check_data_compatibility(
    loss: PolicyLoss,
    baseline: OptimalBaseline | None,
    advantage: AdvantageEstimator,
    aggregation: Aggregation,
    keep_groups_whole: bool,
) -> None:
    """Checks that groups are whole where they must be, and that regression losses get what their formulas stand for.

    Raises:
        ValueError: they do not.
    """
    if loss.needs_whole_groups and not keep_groups_whole:
        raise ValueError(
            f"model.loss={_name(loss)} compares a group's completions: data.keep_groups_whole must be true"
        )
    if baseline is not None and not keep_groups_whole:
        raise ValueError("model.baseline needs data.keep_groups_whole=true: it compares a group's gradients")
    expected = {TrajectoryBalance: GroupMean, OAPL: LogMeanExp}
    for regression, estimator in expected.items():
        if not isinstance(loss, regression):
            continue
        if not isinstance(advantage, estimator):
            raise ValueError(
                f"model.loss={_name(loss)} with data.advantage={_name(advantage)}: its square is of rewards less "
                f"{estimator.__name__}'s baseline. Use that."
            )
        if isinstance(aggregation, SequenceMean | PromptMean):
            raise ValueError(
                f"model.loss={_name(loss)} with data.aggregation={_name(aggregation)}: its log-ratio is a sum over "
                "tokens, whose weights must not depend on the length. Use FixedLength, TokenMean or TokenBudget."
            )


def _name(choice: object) -> str:
    return type(choice).__name__


def check_sources(schedule: str, tape: str | None, replay: ReplayBuffer | None, stream_groups: bool) -> None:
    """Checks that the settings which say where a step's groups come from agree.

    Raises:
        ValueError: they do not.
    """
    if (schedule == "replay") != (tape is not None):
        raise ValueError(f"data.tape={tape}, but data.schedule={schedule}: a tape is what `replay` trains on")
    if replay is not None and tape is not None:
        raise ValueError(f"data.replay with data.tape={tape}: a tape holds whole steps. Leave one of them out.")
    if replay is not None and stream_groups:
        raise ValueError(
            "data.intake.stream_groups with data.replay: a step is mixed when all its new groups are there"
        )


def check_engine(engine: RolloutEngine, reward: object, schedule: str) -> None:
    """Checks that somebody gives rewards, and that a fixed lag can be kept.

    Raises:
        ValueError: nobody does, or both; or the engine changes weights within a completion.
    """
    if (reward is None) != engine.scores:
        does = "gives rewards itself" if engine.scores else "gives no rewards"
        raise ValueError(f"data.reward={reward}, but data.engine ({type(engine).__name__}) {does}")
    if schedule == "fixed_lag" and engine.in_flight_weight_updates:
        raise ValueError(
            "data.admission=FixedLag needs data.engine.in_flight_weight_updates=false: a completion must come from "
            "one version, or a run could not be repeated"
        )


def check_intake(intake: Intake, schedule: str) -> None:
    """Checks that filters which drop groups meet a schedule that can spare them.

    Raises:
        ValueError: they do not.
    """
    dropping = [one for one in intake.filters if one.drops]
    if dropping and schedule != "free":
        raise ValueError(
            f"data.schedule={schedule} with data.intake.filters holding {_name(dropping[0])}: which groups are "
            "dropped, and when others take their place, depends on timing. Use schedule=free."
        )
