"""Checks of data settings that depend on each other; messages name both settings."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence

from lit_async_rl.advantages.group import GDPO, AdvantageEstimator, GroupMean, LengthWeighted, TurnAdvantageEstimator
from lit_async_rl.data.collate import check_streamable
from lit_async_rl.engines.base import RolloutEngine, SamplingParams
from lit_async_rl.losses.aggregation import Aggregation, SequenceMean, within_sources
from lit_async_rl.models.tokenizer import TextCodec
from lit_async_rl.prompts.sources import PromptSource
from lit_async_rl.replay.tape import Tape
from lit_async_rl.rewards import hooks
from lit_async_rl.rewards.combined import CombinedReward
from lit_async_rl.rollouts.intake import GroupFilter, OverlongPenalty
from lit_async_rl.scheduling.admission import AdmissionPolicy, Bounded, FromTape
from lit_async_rl.utils.checks import check_range

NUM_INSPECTED = 100  # prompts that are looked at for messages
log = logging.getLogger(__name__)


def with_support(sampling: SamplingParams, engine: RolloutEngine | None) -> SamplingParams:
    """Adds the recording of the tokens that a truncated sampler could choose; logs what was set.

    Without it importance ratios would compare a distribution over a few tokens with one over all. Engines without a
    model are left alone.

    Raises:
        ValueError: sampling is truncated, and the engine does not record what it samples from.
    """
    if not sampling.truncates or (engine is not None and not engine.has_model):
        return sampling
    cuts = {"top_p": sampling.top_p < 1, "top_k": sampling.top_k > 0, "min_p": sampling.min_p > 0}
    names = ", ".join(f"data.sampling.{name}={getattr(sampling, name)}" for name, is_set in cuts.items() if is_set)
    if engine is not None and not engine.records_heads:
        raise ValueError(
            f"{names} with data.engine={type(engine).__name__}, which does not record the tokens that a truncated "
            "sampler can choose: the importance ratios of fresh data would not be 1. Use EmbeddedEngine or vLLM, or "
            "leave it out."
        )
    recorded = sampling.recorded
    if recorded != sampling:
        log.warning(
            "%s: of each distribution the %s likeliest tokens are recorded (data.sampling.head=%s)%s",
            names,
            recorded.head,
            recorded.head,
            "" if sampling.top_k else ", and tokens are chosen among these (data.sampling.top_k; or set a larger head)",
        )
    return recorded


def check_engine(engine: RolloutEngine, reward: object, admission: AdmissionPolicy, sampling: SamplingParams) -> None:
    """Checks that exactly one of reward and engine scores, and that the engine can do what is asked of it.

    Raises:
        ValueError: none or both score; the engine may change weights within a completion, though the admission is in
            order; or it does not record what `sampling` asks for.
    """
    if sampling.head is not None and not engine.records_heads:
        raise ValueError(
            f"data.sampling.head={sampling.head} with data.engine={type(engine).__name__}, which does not record the "
            "distributions that it samples from. Use EmbeddedEngine, or leave data.sampling.head out."
        )
    if sampling.experts and not engine.records_experts:
        raise ValueError(
            f"data.sampling.experts=true with data.engine={type(engine).__name__}, which does not record the experts "
            "that its routers choose. Use EmbeddedEngine, or leave data.sampling.experts out."
        )
    if (reward is None) != engine.scores:
        does = "gives rewards itself" if engine.scores else "gives no rewards"
        raise ValueError(f"data.reward={reward}, but data.engine ({type(engine).__name__}) {does}")
    if admission.in_order and not isinstance(admission, FromTape) and engine.in_flight_weight_updates:
        raise ValueError(
            f"data.admission={type(admission).__name__} needs data.engine.in_flight_weight_updates=false: a completion "
            "must come from one version, or a run could not be repeated"
        )
    if hooks.wants_policy(reward) and not engine.in_flight_weight_updates:
        raise ValueError(
            "JudgeReward.engine=policy needs data.engine.in_flight_weight_updates=true, and so an admission that is "
            "not in order: its questions come while batches of rollouts run, each under one version of the weights"
        )


def check_validation(reward: object, has_prompts: bool) -> None:
    """Checks that what scores held-out completions is there when they are scored.

    Args:
        reward: `data.reward`.
        has_prompts: whether `data.validation.prompts` is set.

    Raises:
        ValueError: the policy in training is the judge, whose engine runs during a fit only; validations come before
            and after it, too, and on every rank.
    """
    if has_prompts and hooks.wants_policy(reward):
        raise ValueError(
            "JudgeReward.engine=policy with data.validation.prompts: the engine of the policy runs during training "
            "only, and validations come before and after it, too. Leave the prompts out, and use the Evaluation "
            "callback, which samples held-out prompts while training goes on"
        )


def check_limits(reward: object, scoring_timeout_s: float) -> None:
    """Checks that the limit of a reward's process is less than that of the reward.

    | limit | of | together with the others |
    |---|---|---|
    | `data.limits.rollout_timeout_s` | the engine: no token | stands still while a reward or environment is at work |
    | `data.scoring.timeout_s` | each try of a reward | its own; may be longer than `rollout_timeout_s` |
    | `timeout_s` of `IsolatedReward`, `MathVerify`, ... | the process of a try | less than that of the try |
    | `data.engine.step_timeout_s` | each answer of an environment | its own; may be longer than `rollout_timeout_s` |
    | `data.engine.update_timeout_s` | calls of the engine | the longer one of it and `rollout_timeout_s` counts |
    | `data.engine.startup_timeout_s` | the start of an engine | its own |
    | `Evaluation.timeout_s` | an evaluation during training | its own; one that is late is given up, and said to be |
    | `data.limits.rank_timeout_s` | signs of life of a process | its own; a waiting process is alive |

    Args:
        reward: `data.reward`.
        scoring_timeout_s: `data.scoring.timeout_s`.

    Raises:
        ValueError: a reward would time out before its process is ended: instead of a reward of 0, or a failed try with
            its reason, the run would see a reward that hangs.
    """
    inner_s = getattr(reward, "call_timeout_s", None)
    if inner_s is not None and inner_s >= scoring_timeout_s:
        raise ValueError(
            f"data.reward.timeout_s={inner_s:g} must be less than data.scoring.timeout_s={scoring_timeout_s:g}: "
            f"{type(reward).__name__} could not end its call any more. Raise data.scoring.timeout_s."
        )


def check_parts(advantage: AdvantageEstimator, reward: object, filters: Sequence[GroupFilter]) -> None:
    """Checks that the parts which `GDPO` weighs are those of the reward.

    Raises:
        ValueError: the reward has no parts, or not all of them.
    """
    if not isinstance(advantage, GDPO):
        return
    if not isinstance(reward, CombinedReward):
        raise ValueError(
            "data.advantage=GDPO normalises each part of a reward by itself, but data.reward has no parts. Give "
            "data.reward as several rewards by name, or use data.advantage=GroupMeanStd."
        )
    known = [*reward.rewards, *(["overlong"] if any(isinstance(f, OverlongPenalty) for f in filters) else [])]
    if unknown := sorted(set(advantage.weights) - set(known)):
        raise ValueError(f"data.advantage.weights names {', '.join(unknown)}, but data.reward has {', '.join(known)}")


def check_sleep(engine: RolloutEngine, max_staleness: int, stream_groups: bool) -> None:
    """Checks that the engine has nothing to do while the trainer trains, if it is to sleep then.

    Raises:
        ValueError: sampling runs ahead, or training begins before sampling ends.
    """
    if not engine.sleep_level:
        return
    name = f"data.engine.sleep_level={engine.sleep_level}"
    if max_staleness:
        raise ValueError(
            f"{name} with data.max_staleness={max_staleness}: the engine samples while the trainer trains, and would "
            "never sleep. Use max_staleness=0, or sleep_level=0."
        )
    if stream_groups:
        raise ValueError(f"{name} with data.stream_groups: training begins while the engine is still awake")


def check_groups(
    filters: Sequence[GroupFilter], admission: AdmissionPolicy, stream_groups: bool, has_replay: bool
) -> None:
    """Checks filters, replay and streaming against the admission policy.

    Raises:
        ValueError: filters drop groups although the admission is in order, or replay is combined with a tape or with
            streaming.
    """
    name = type(admission).__name__
    dropping = [group_filter for group_filter in filters if group_filter.drops]
    if (
        dropping and admission.in_order and not isinstance(admission, FromTape)
    ):  # whose groups were filtered when it was recorded
        raise ValueError(
            f"data.admission={name} with data.filters holding {type(dropping[0]).__name__}: which groups are "
            "dropped, and when others take their place, depends on timing. Use data.admission=Bounded."
        )
    if has_replay and isinstance(admission, FromTape):
        raise ValueError(f"data.replay with data.admission={name}: a tape replays whole steps. Leave one of them out.")
    if has_replay and stream_groups:
        raise ValueError("data.stream_groups with data.replay: a step is mixed when all its new groups are there")


def open_tape(admission: FromTape, sampling: SamplingParams) -> Tape:
    """The tape that is replayed.

    Raises:
        FileNotFoundError: there is none; names the setting.
        ValueError: its first step was sampled with other settings, or lacks what they say is recorded.
    """
    try:
        tape = Tape(admission.folder, sampling.distribution)
    except FileNotFoundError as error:
        raise FileNotFoundError(f"data.admission.folder={admission.folder!r}: {error}") from error
    wanted = {"head": sampling.head, "experts": sampling.experts or None}
    wanted = {name: value for name, value in wanted.items() if value is not None}
    rollouts = [
        r for step in tape.evenly_spaced_steps(1) for group in step.groups for r in group.rollouts if r.token_ids
    ]
    for name, value in wanted.items():
        if any(getattr(rollout, name) is None for rollout in rollouts):
            needed = name == "head" and sampling.truncates
            instead = "" if needed else f"Leave data.sampling.{name} out, or record"
            why = ", and its sampler was truncated: its importance ratios would be wrong" if needed else ""
            raise ValueError(
                f"data.sampling.{name}={value} with data.admission.folder={admission.folder!r}: this tape was recorded "
                f"without{why}. {instead or 'Record'} another tape with it."
            )
    return tape


def check_micro_batches(num_micro_batches: int, num_groups: int, group_size: int) -> None:
    """Checks that each micro-batch of a step has a rollout at least.

    Raises:
        ValueError: there are fewer rollouts than micro-batches.
    """
    if num_micro_batches > num_groups * group_size:
        raise ValueError(
            f"data.micro_batches_per_step must be <= data.groups_per_step * data.group_size = {num_groups} * "
            f"{group_size}, got {num_micro_batches}"
        )


def check_step(
    advantage: AdvantageEstimator,
    aggregation: Aggregation,
    stream_groups: bool,
    num_groups: int,
    num_micro_batches: int,
) -> None:
    """Checks that advantage, aggregation and streaming of a step go together.

    Raises:
        ValueError: `LengthWeighted` is combined with `SequenceMean`, or a streamed step cannot be split (see
            `check_streamable`).
    """
    if isinstance(advantage, LengthWeighted) and isinstance(within_sources(aggregation), SequenceMean):
        raise ValueError(
            f"data.advantage=LengthWeighted with data.aggregation={type(aggregation).__name__}: its baseline is for "
            "gradients that grow with the length of a rollout, which SequenceMean divides out. Use TokenMean, "
            "FixedLength or GroupMean."
        )
    if stream_groups:
        check_streamable(advantage, aggregation, num_groups, micro_batches_per_step=num_micro_batches)


def check_signal(advantage: AdvantageEstimator | None, group_size: int, temperature: float, is_sampled: bool) -> None:
    """Checks that rollouts can differ from those that they are compared with.

    Args:
        advantage: compares them; None is `model.baseline`.
        group_size: completions of each prompt.
        temperature: of the training samples.
        is_sampled: whether nothing but the policy's samples makes completions differ: no environment, no tape.

    Raises:
        ValueError: every advantage would be 0.
    """
    name = f"data.advantage={type(advantage).__name__}"
    instead = ", or data.advantage=Raw or GlobalMeanStd"
    if advantage is None:
        name = "model.baseline=OptimalBaseline"
        instead = ""
        advantage = GroupMean()
    if isinstance(advantage, TurnAdvantageEstimator):  # compares turns, not whole rollouts only
        return
    if group_size == 1 and not _any_signal(advantage([[0.0], [1.0]])):
        raise ValueError(
            f"data.group_size=1 with {name}: a rollout is compared with the others of its group, and alone its "
            f"advantage is 0. Use a group_size >= 2{instead}."
        )
    if temperature == 0 and is_sampled and not _any_signal(advantage([[0.0] * group_size, [1.0] * group_size])):
        raise ValueError(
            f"data.sampling.temperature=0 with {name}: the completions of a prompt are all equal, so every advantage "
            "is 0. Use a temperature > 0 (data.validation.sampling has its own)."
        )


def _any_signal(advantages: list[list[float]]) -> bool:
    return any(value != 0 for group in advantages for value in group)


def check_max_staleness(admission: AdmissionPolicy, max_staleness: int) -> None:
    """Checks the staleness bound, and the async ratio against it.

    Raises:
        ValueError: the bound is negative, or smaller than the async ratio.
    """
    check_range("data", "integer >= 0", max_staleness=max_staleness)
    ratio = admission.async_ratio if isinstance(admission, Bounded) else None
    if ratio is not None and ratio > max_staleness:
        raise ValueError(f"data.admission.async_ratio must be <= data.max_staleness={max_staleness}, got {ratio}")


def check_new_max_staleness(admission: AdmissionPolicy, max_staleness: int) -> None:
    """Checks a staleness bound that is set during training.

    Raises:
        ValueError: it is negative, or the admission's lag is fixed.
    """
    if admission.in_order:
        kind = type(admission).__name__
        raise ValueError(f"data.admission={kind} has no bound to change: its lag is data.max_staleness")
    check_range("data", "integer >= 0", max_staleness=max_staleness)


def check_ends(codec: TextCodec, sampling: SamplingParams, source: PromptSource) -> None:
    """Refuses what cannot end a completion: stop strings that texts do not contain, a chat template without an end.

    Raises:
        ValueError: see `TextCodec.check_stop` and `TextCodec.check_turn_end`.
    """
    codec.check_stop(sampling.stop, (*sampling.stop_token_ids, *(sampling.end_token_ids or ())))
    can_stop = bool(sampling.stop or sampling.stop_token_ids) or sampling.end_token_ids is not None
    codec.check_turn_end(_holds_messages(source), can_stop)


def _holds_messages(source: PromptSource) -> bool:
    """Whether one of the first usable prompts is messages."""
    for number in range(min(len(source), NUM_INSPECTED)):
        with contextlib.suppress(ValueError):  # a bad prompt, which is refused or left out elsewhere
            if source[number].messages is not None:
                return True
    return False
