"""Settings that contradict each other, each with the sentence that says so: one table for the whole run.

A function here is a group of rules; it yields the sentence of every broken rule, and `refuse` raises the first. Each
group is asked once on every way to a run (command line, `fit`, a Trainer of Lightning's), where the last of its
settings becomes known:

| rules | about | asked by |
|---|---|---|
| `of_objective`, `of_distillation`, `of_weights`, `of_compilation` | `model` | `PolicyModule()` |
| `of_truncation`, `of_tape`, `of_engine`, `of_rewards`, `of_order`, `of_step` | `data` | `RolloutDataModule()` |
| `of_validation` | `data` | the same |
| `of_new_bound` | `data` | `RolloutDataModule.set_max_staleness` |
| `of_limits`, `of_processes` | `trainer` | `lit_async_rl.Trainer()` |
| `of_callbacks`, `of_tuner` | `trainer.callbacks` | the same; the latter by `RolloutDataModule.setup`, too |
| `of_any_run` | `model`, `data` and `trainer` of any stage | `of_run`, and `SFTDataModule.setup` |
| `of_run`, `of_estimates`, `of_signal`, `of_teacher` | those of RL | `WeightSync.setup` |
| `of_fit`, `of_norms`, `of_rate`, `of_schedule` | `model` and `trainer` | `PolicyModule.setup`, of a fit |
| `of_length`, `of_loop` | `trainer` and `data` | `api.run.run`, before it validates; the former by `WeightSync`, too |

Elsewhere: the range of one setting, and arguments of one class that do not go together (its constructor, by
`lit_async_rl.utils.checks`); what a callback, an engine or a cluster needs of a run (that class); what a checkpoint
allows (`lit_async_rl.api.resume_check`), and a tokenizer of `data.sampling` (`lit_async_rl.data.settings.check_ends`).
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from lightning.fabric.plugins.environments import LightningEnvironment, TorchElasticEnvironment
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    BatchSizeFinder,
    GradientAccumulationScheduler,
    LearningRateFinder,
    LearningRateMonitor,
)
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from torch.optim import Optimizer

from lit_async_rl.advantages.group import (
    GDPO,
    AdvantageEstimator,
    GroupMean,
    LengthWeighted,
    LogMeanExp,
    TurnAdvantageEstimator,
)
from lit_async_rl.baselines.optimal import Norms, OptimalBaseline
from lit_async_rl.corrections import BlendedIS, Correction
from lit_async_rl.corrections.weights import BehaviorProximal, CurrentProximal, Proximal
from lit_async_rl.distributed.ranks import num_copies
from lit_async_rl.engines.base import RolloutEngine
from lit_async_rl.environments.multi_request import MultiRequestEngine
from lit_async_rl.losses import OAPL, PolicyLoss, Reinforce, TrajectoryBalance
from lit_async_rl.losses.aggregation import Aggregation, PromptMean, SequenceMean, within_sources
from lit_async_rl.models.loading import has_adapter
from lit_async_rl.models.lora import LoRA
from lit_async_rl.rewards import hooks
from lit_async_rl.rewards.combined import CombinedReward
from lit_async_rl.rollouts.intake import GroupFilter, OverlongPenalty
from lit_async_rl.scheduling.admission import AdmissionPolicy, Bounded, FromTape
from lit_async_rl.types import Rollout, SamplingParams
from lit_async_rl.utils.lightning_types import AnyModule, AnyTrainer


def refuse(*groups: Iterable[str]) -> None:
    """Raises the first sentence of some groups of rules.

    Raises:
        ValueError: two settings contradict each other; names both, with their values.
    """
    for sentence in chain(*groups):
        raise ValueError(sentence)


def _name(choice: object) -> str:
    return type(choice).__name__


# -- model: loss, proximal policy, correction and baseline ------------------------------------------------------------
# These are independent choices, and most combinations are methods of their own. A combination is refused if a part has
# no effect, or if the ratio of current to behavior policy is counted twice or not at all.


def of_objective(
    loss: PolicyLoss, proximal: Proximal, correction: Correction | None, baseline: OptimalBaseline | None = None
) -> Iterator[str]:
    """Parts of `model` that make its loss."""
    names = f"model.loss={_name(loss)} with model.proximal={_name(proximal)}"
    is_behavior = isinstance(proximal, BehaviorProximal)
    is_current = isinstance(proximal, CurrentProximal)
    if correction is not None and is_behavior:
        yield (
            f"model.correction={_name(correction)} with model.proximal=BehaviorProximal: the correction weighs "
            "proximal / behavior, which is 1 here. Use CurrentProximal (or InterpolatedProximal), or no correction."
        )
    if loss.needs_behavior_proximal and not is_behavior:
        yield (
            f"{names}: {_name(loss)} corrects for the policy that sampled by itself, so its ratio must be to that "
            "policy. Use BehaviorProximal, without correction."
        )
    if loss.needs_reference and not is_behavior:
        yield f"{names}: {_name(loss)} takes its ratio to the reference policy. Leave model.proximal out."
    if loss.uses_proximal and is_current and correction is None:
        yield (
            f"{names} and no model.correction: the ratio is always 1, so {_name(loss)} is REINFORCE without any "
            "correction. Use BehaviorProximal, add a correction, or say Reinforce."
        )
    if loss.uses_proximal and correction is None and not is_behavior:
        yield (
            f"{names} and no model.correction: the ratio of proximal to behavior policy is missing. Add a "
            "correction, or use BehaviorProximal."
        )
    if not loss.uses_proximal and correction is None and not is_behavior:
        yield (
            f"{names} and no model.correction: nothing reads the proximal policy. Add a correction, or leave "
            "model.proximal out."
        )
    if not loss.uses_proximal and correction is not None and not is_current:
        yield (
            f"{names} and model.correction={_name(correction)}: {_name(loss)} contains no ratio, so the correction "
            "must go all the way to the current policy. Use CurrentProximal."
        )
    if isinstance(correction, BlendedIS) and baseline is None:
        yield "model.correction=BlendedIS needs model.baseline=OptimalBaseline, the advantage of its first estimator"
    if baseline is not None and not isinstance(loss, Reinforce):
        yield (
            f"model.baseline=OptimalBaseline with model.loss={_name(loss)}: its gradient is not linear in the "
            "advantage. Use Reinforce, with a correction and CurrentProximal for stale data."
        )


def of_distillation(distillation: Any, baseline: OptimalBaseline | None) -> Iterator[str]:
    """Distillation without rewards in the loss, and what only rewards need."""
    if distillation is not None and not distillation.with_reward and baseline is not None:
        yield (
            "model.baseline=OptimalBaseline with model.distillation.with_reward=false: rewards do not train, so the "
            "baseline has no effect. Leave it out, or set with_reward: true"
        )


def of_teacher(distillation: Any, sampling: SamplingParams) -> Iterator[str]:
    """Distributions of an external teacher, at temperature 1 and over all tokens."""
    if distillation is None or distillation.source.any_temperature:
        return
    name = f"model.distillation.teacher={_name(distillation.source)}"
    if sampling.temperature not in (0, 1):
        yield (
            f"{name} with data.sampling.temperature={sampling.temperature:g}: it gives log-probabilities at "
            "temperature 1. Use that, or a LocalTeacher"
        )
    truncation = {"top_p": sampling.top_p != 1, "top_k": sampling.top_k != 0, "min_p": sampling.min_p != 0}
    for setting in (setting for setting, is_set in truncation.items() if is_set and distillation.gradient == "sampled"):
        yield (
            f"{name} with data.sampling.{setting}={getattr(sampling, setting):g} and gradient=sampled: it cannot know "
            "which tokens truncation left out. Sample from all tokens, or use a LocalTeacher"
        )


def of_weights(model: str, on_meta_device: bool, random_init: bool, lora: LoRA | None) -> Iterator[str]:
    """Weights that are made here, not loaded, and would have to be on the meta device."""
    if on_meta_device and (random_init or lora):
        yield "model.sharding.meta_device=true goes with neither model.random_init nor model.lora: set it to false"
    if on_meta_device and has_adapter(model):
        yield (
            f"model.sharding.meta_device=true reads files, and model.model={model!r} holds an adapter beside them: "
            "merge it first, or set meta_device to false"
        )


def of_compilation(torch_compile: bool, baseline: OptimalBaseline | None) -> Iterator[str]:
    """Compiled blocks, and norms that need what a compiled backward pass frees."""
    if torch_compile and baseline is not None and baseline.norms is not Norms.SCORE:
        yield (
            f"model.torch_compile=true with model.baseline.norms={baseline.norms.name}: these norms need activations "
            "that compiled blocks do not keep. Use SCORE, or set torch_compile to false."
        )


# -- data: engine, tape, reward, admission and the step ---------------------------------------------------------------


def of_truncation(sampling: SamplingParams, engine: RolloutEngine | None) -> Iterator[str]:
    """A truncated sampler, whose choice of tokens must be recorded; the default engine, None, does that."""
    if sampling.truncates and engine is not None and engine.has_model and not engine.records_heads:
        yield (
            f"{truncations(sampling)} with data.engine={_name(engine)}, which does not record the tokens that a "
            "truncated sampler can choose: the importance ratios of fresh data would not be 1. Use EmbeddedEngine or "
            "vLLM, or leave it out."
        )


def truncations(sampling: SamplingParams) -> str:
    """The settings that truncate a sampler, with their values."""
    cuts = {"top_p": sampling.top_p < 1, "top_k": sampling.top_k > 0, "min_p": sampling.min_p > 0}
    return ", ".join(f"data.sampling.{name}={getattr(sampling, name)}" for name, is_set in cuts.items() if is_set)


def of_tape(folder: str, sampling: SamplingParams, rollouts: Sequence[Rollout]) -> Iterator[str]:
    """A tape that lacks what the sampling settings say is recorded.

    Args:
        folder: `data.admission.folder`.
        sampling: `data.sampling`.
        rollouts: some of the tape's.
    """
    wanted = {"head": sampling.head, "experts": sampling.experts or None}
    for name, value in wanted.items():
        if value is not None and any(getattr(rollout, name) is None for rollout in rollouts):
            needed = name == "head" and sampling.truncates
            instead = "Record" if needed else f"Leave data.sampling.{name} out, or record"
            why = ", and its sampler was truncated: its importance ratios would be wrong" if needed else ""
            yield (
                f"data.sampling.{name}={value} with data.admission.folder={folder!r}: this tape was recorded "
                f"without{why}. {instead} another tape with it."
            )


def of_engine(
    engine: RolloutEngine, reward: object, admission: AdmissionPolicy, sampling: SamplingParams
) -> Iterator[str]:
    """An engine that cannot do what is asked of it, or an unclear choice of who scores."""
    if sampling.head is not None and not engine.records_heads:
        yield (
            f"data.sampling.head={sampling.head} with data.engine={_name(engine)}, which does not record the "
            "distributions that it samples from. Use EmbeddedEngine, or leave data.sampling.head out."
        )
    if sampling.experts and not engine.records_experts:
        yield (
            f"data.sampling.experts=true with data.engine={_name(engine)}, which does not record the experts "
            "that its routers choose. Use EmbeddedEngine, or leave data.sampling.experts out."
        )
    if (reward is None) != engine.scores:
        does = "gives rewards itself" if engine.scores else "gives no rewards"
        yield f"data.reward={reward}, but data.engine ({_name(engine)}) {does}"
    if admission.in_order and not isinstance(admission, FromTape) and engine.in_flight_weight_updates:
        yield (
            f"data.admission={_name(admission)} needs data.engine.in_flight_weight_updates=false: a completion "
            "must come from one version, or a run could not be repeated"
        )
    if hooks.wants_policy(reward) and not engine.in_flight_weight_updates:
        yield (
            "JudgeReward.engine=policy needs data.engine.in_flight_weight_updates=true, and so an admission that is "
            "not in order: its questions come while batches of rollouts run, each under one version of the weights"
        )


def of_rewards(
    reward: object,
    scoring_timeout_s: float,
    has_held_out: bool,
    advantage: AdvantageEstimator,
    filters: Sequence[GroupFilter],
) -> Iterator[str]:
    """A reward against the limit of its calls, validation, and an advantage of its parts.

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
    """
    call_timeout_s = getattr(reward, "call_timeout_s", None)
    if call_timeout_s is not None and call_timeout_s >= scoring_timeout_s:
        # instead of a reward of 0, or a failed try with its reason, the run would see a reward that hangs
        yield (
            f"data.reward.timeout_s={call_timeout_s:g} must be less than data.scoring.timeout_s={scoring_timeout_s:g}: "
            f"{_name(reward)} could no longer end its call. Raise data.scoring.timeout_s."
        )
    if has_held_out and hooks.wants_policy(reward):
        yield (
            "JudgeReward.engine=policy with data.validation.prompts: the engine of the policy runs during training "
            "only, and validations come before and after it, too. Leave the prompts out, and use the Evaluation "
            "callback, which samples held-out prompts during training"
        )
    if isinstance(advantage, GDPO) and not isinstance(reward, CombinedReward):
        yield (
            "data.advantage=GDPO normalises each part of a reward by itself, but data.reward has no parts. Give "
            "data.reward as several rewards by name, or use data.advantage=GroupMeanStd."
        )
    if isinstance(advantage, GDPO) and isinstance(reward, CombinedReward):
        known = [*reward.rewards, *(["overlong"] if any(isinstance(f, OverlongPenalty) for f in filters) else [])]
        if unknown := sorted(set(advantage.weights) - set(known)):
            yield f"data.advantage.weights names {', '.join(unknown)}, but data.reward has {', '.join(known)}"


def of_validation(validation: Any, sampling: SamplingParams, is_sampled: bool) -> Iterator[str]:
    """Completions of a held-out prompt that cannot differ.

    Args:
        validation: `data.validation`.
        sampling: `data.sampling`, which holds where `data.validation` has none.
        is_sampled: as in `of_signal`.
    """
    name = "data.sampling" if validation.sampling is None else "data.validation.sampling"
    if is_sampled and validation.num_samples > 1 and (validation.sampling or sampling).temperature == 0:
        yield (
            f"data.validation.num_samples={validation.num_samples} with {name}.temperature=0: the samples of a prompt "
            "would be identical. Use num_samples: 1, or a data.validation.sampling.temperature > 0"
        )


def of_order(
    admission: AdmissionPolicy,
    max_staleness: int,
    engine: RolloutEngine,
    filters: Sequence[GroupFilter],
    stream_groups: bool,
    has_replay: bool,
) -> Iterator[str]:
    """How far sampling runs ahead, against what needs it to wait, or an order independent of timing."""
    ratio = admission.async_ratio if isinstance(admission, Bounded) else None
    if ratio is not None and ratio > max_staleness:
        yield f"data.admission.async_ratio must be <= data.max_staleness={max_staleness}, got {ratio}"
    sleep = f"data.engine.sleep_level={engine.sleep_level}"
    if engine.sleep_level and max_staleness:
        yield (
            f"{sleep} with data.max_staleness={max_staleness}: the engine samples while the trainer trains, and would "
            "never sleep. Use max_staleness=0, or sleep_level=0."
        )
    if engine.sleep_level and stream_groups:
        yield f"{sleep} with data.stream_groups: training begins while the engine is still awake"
    dropping = [group_filter for group_filter in filters if group_filter.drops]
    is_from_tape = isinstance(admission, FromTape)  # its groups were filtered when it was recorded
    if dropping and admission.in_order and not is_from_tape:
        yield (
            f"data.admission={_name(admission)} with data.filters holding {_name(dropping[0])}: which groups are "
            "dropped, and when others take their place, depends on timing. Use data.admission=Bounded."
        )
    if has_replay and is_from_tape:
        yield f"data.replay with data.admission={_name(admission)}: a tape replays whole steps. Leave one of them out."
    if has_replay and stream_groups:
        yield "data.stream_groups with data.replay: a step is mixed when all its new groups are there"


def of_step(
    advantage: AdvantageEstimator,
    aggregation: Aggregation,
    stream_groups: bool,
    groups_per_step: int,
    group_size: int,
    micro_batches_per_step: int,
) -> Iterator[str]:
    """Advantage, averaging and micro-batches of a step.

    A step can be streamed if a group's gradient does not depend on later groups, but for a common factor.
    """
    if micro_batches_per_step > groups_per_step * group_size:
        yield (
            f"data.micro_batches_per_step must be <= data.groups_per_step * data.group_size = {groups_per_step} * "
            f"{group_size}, got {micro_batches_per_step}"
        )
    if isinstance(advantage, LengthWeighted) and isinstance(within_sources(aggregation), SequenceMean):
        yield (
            f"data.advantage=LengthWeighted with data.aggregation={_name(aggregation)}: its baseline is for "
            "gradients that grow with the length of a rollout, which SequenceMean divides out. Use TokenMean, "
            "FixedLength or GroupMean."
        )
    if not stream_groups:
        return
    if micro_batches_per_step > groups_per_step:
        yield (
            f"data.stream_groups with data.micro_batches_per_step={micro_batches_per_step}: a micro-batch needs "
            f"a group at least, and data.groups_per_step={groups_per_step}"
        )
    rewards = [[0.0, 1.0, 3.0], [5.0, 5.0, 4.0]]
    lengths = [[1, 2, 3], [4, 5, 6]]
    apart = [advantage([group], [tokens])[0] for group, tokens in zip(rewards, lengths, strict=True)]
    if advantage(rewards, lengths) != apart:
        yield (
            f"data.stream_groups with data.advantage={_name(advantage)}: the advantages of a group "
            "depend on other groups of the step, which are not there yet. Use one of single groups: GroupMeanStd."
        )
    aggregation.divisor(lengths[0], [len(lengths[0])])  # raises where it depends on other groups


def of_new_bound(admission: AdmissionPolicy) -> Iterator[str]:
    """A bound that is to change during training, against an admission whose lag is fixed."""
    if admission.in_order:
        yield f"data.admission={_name(admission)} has no bound to change: its lag is data.max_staleness"


# -- trainer: limits, callbacks and processes -------------------------------------------------------------------------


def of_limits(settings: Mapping[str, Any]) -> Iterator[str]:
    """Contradictions among settings of the Trainer that Lightning accepts."""
    get = settings.get
    if get("barebones"):
        yield (
            "trainer.barebones=True switches off callbacks, loggers and checkpoints, and callbacks run the training: "
            "leave it out"
        )
    for unit in ("steps", "epochs"):
        least = get(f"min_{unit}")
        most = get(f"max_{unit}")
        if least is not None and most is not None and 0 <= most < least:
            yield f"trainer.min_{unit}={least} is more than trainer.max_{unit}={most}, where training ends"
    algorithm = get("gradient_clip_algorithm")
    if algorithm is not None and not get("gradient_clip_val"):
        yield f"trainer.gradient_clip_algorithm={algorithm} clips nothing without trainer.gradient_clip_val"
    interval = get("val_check_interval")
    counts_steps = settings.get("check_val_every_n_epoch", 1) is None
    if isinstance(interval, float) and counts_steps:
        yield f"trainer.val_check_interval must be a whole number of steps, got {interval}: no epoch ends"


TUNERS = {
    BatchSizeFinder: (
        "Tuner.scale_batch_size is not for this module: a step has data.groups_per_step * data.group_size completions "
        "whatever fits. Where memory ends, raise data.micro_batches_per_step, which changes no result"
    ),
    LearningRateFinder: (
        "Tuner.lr_find is not for this module: the loss of a policy gradient does not fall where the rate is good, and "
        "each trial step would train on rollouts of other weights. Set model.learning_rate, and compare the rewards of "
        "runs"
    ),
}


def of_callbacks(callbacks: Iterable[Any]) -> Iterator[str]:
    """Callbacks of Lightning that do not fit a run on rollouts."""
    callbacks = list(callbacks)
    yield from of_tuner(callbacks)
    for callback in callbacks:
        if isinstance(callback, BaseFinetuning):
            yield f"trainer.callbacks holds {_name(callback)}: leave it out; layers are frozen by model.lora"


def of_tuner(callbacks: Iterable[Any]) -> Iterator[str]:
    """Trials of Lightning's `Tuner`, which puts its callback among those of the Trainer."""
    for callback in callbacks:
        for kind, why in TUNERS.items():
            if isinstance(callback, kind):
                yield f"trainer.callbacks holds {_name(callback)}, and {why}"


def of_processes(trainer: AnyTrainer) -> Iterator[str]:
    """Processes that would not come together or share what a run has, and files written after they are named."""
    strategy = trainer.strategy
    if (method := getattr(strategy, "_start_method", None)) in ("spawn", "forkserver"):
        yield (
            f"trainer.strategy=ddp_{method} starts processes with pickles of module and data, which hold locks: use "
            "ddp, or ddp_notebook in a notebook"
        )
    # each machine would wait for the others for half an hour, as machine 0
    is_alone = isinstance(getattr(strategy, "cluster_environment", None), LightningEnvironment)
    if trainer.num_nodes > 1 and is_alone and not os.environ.keys() & {"NODE_RANK", "GROUP_RANK"}:
        yield (
            f"trainer.num_nodes={trainer.num_nodes}, but nothing says which machine this is: start with torchrun or "
            "srun on each (docs/hardware.md), or set NODE_RANK, MASTER_ADDR and MASTER_PORT"
        )
    started = os.environ.get("WORLD_SIZE", "1") if TorchElasticEnvironment.detect() else "1"
    if trainer.world_size == 1 and started != "1":
        local = os.environ.get("LOCAL_WORLD_SIZE", started)
        yield (
            f"torchrun has started {started} processes, but trainer.devices={trainer.num_devices} and "
            f"trainer.num_nodes={trainer.num_nodes} ask for one: each would train alone. Set trainer.devices={local} "
            "(and trainer.num_nodes), or start independent runs with python"
        )
    if isinstance(strategy.checkpoint_io, AsyncCheckpointIO):
        yield (
            "trainer.plugins holds AsyncCheckpointIO, whose files are not there when they are linked to: leave it "
            "out. Checkpoints are written in the background, and atomically, by default"
        )


def of_length(trainer: AnyTrainer) -> Iterator[str]:
    """A run that would never end: epochs are endless, and `max_epochs` is fine only as the default of 1000."""
    # a float is a share of all batches, of which there is no end
    is_endless = trainer.max_steps < 0 and isinstance(trainer.limit_train_batches, float)
    if is_endless and trainer.max_epochs not in (None, -1, 1000):
        yield (
            f"trainer.max_epochs={trainer.max_epochs} without trainer.max_steps: an epoch of rollouts never ends; "
            "set trainer.max_steps, or trainer.limit_train_batches, the batches of an epoch"
        )


def of_loop(trainer: AnyTrainer, micro_batches_per_step: int) -> Iterator[str]:
    """Contradictions that Lightning finds only in `fit`, minutes late, after held-out accuracy."""
    yield from of_length(trainer)
    num_batches = trainer.max_steps * micro_batches_per_step
    share = trainer.limit_train_batches
    if num_batches > 0 and isinstance(share, float) and 0 < share * num_batches < 1:
        yield f"trainer.limit_train_batches={share} of {num_batches} batches is less than one"
    limit = share if isinstance(share, int) else int(share * num_batches)
    in_epoch = min(limit, num_batches) if num_batches > 0 else limit
    interval = trainer.val_check_interval
    every = trainer.check_val_every_n_epoch
    if isinstance(interval, int) and every is not None and trainer.limit_val_batches and 0 < in_epoch < interval:
        yield (
            f"trainer.val_check_interval={interval} is more than the {in_epoch} batches of an epoch, and "
            f"trainer.check_val_every_n_epoch={every} counts within epochs: leave the latter out"
        )
    if not trainer.loggers and any(isinstance(one, LearningRateMonitor) for one in trainer.callbacks):
        yield "trainer.callbacks holds LearningRateMonitor, which needs trainer.logger: leave it out"


# -- model, data and trainer of one run -------------------------------------------------------------------------------


def of_any_run(trainer: AnyTrainer, module: AnyModule, data: Any) -> Iterator[str]:
    """A `PolicyModule`, a data module of any stage that knows its model, and their Trainer."""
    if str(trainer.precision) in ("bf16-true", "16-true"):
        yield (
            f"trainer.precision={trainer.precision} would cast weights that engine and validation know in another "
            "dtype: use model.dtype=bfloat16, or trainer.precision=bf16-mixed"
        )
    if not module.automatic_optimization:
        yield (
            f"{_name(module)}.automatic_optimization=False: a step trains on all of its micro-batches, "
            "which automatic optimization counts. Change gradients in callbacks or in optimizer_step instead"
        )
    if trainer.overfit_batches:
        yield (
            f"trainer.overfit_batches={trainer.overfit_batches} would repeat batches, and every step samples new "
            "rollouts: leave it out; to overfit deliberately, use few prompts (data.prompts) and trainer.max_steps"
        )
    if data.model != module.model:
        yield f"data.model={data.model!r}, but model.model={module.model!r}: prompts need its tokenizer"
    wanted = data.micro_batches_per_step
    if trainer.accumulate_grad_batches not in (1, wanted):
        yield (
            f"trainer.accumulate_grad_batches={trainer.accumulate_grad_batches}, but "
            f"data.micro_batches_per_step={wanted}: leave the former out"
        )
    if any(isinstance(one, GradientAccumulationScheduler) for one in trainer.callbacks):
        yield (
            "trainer.callbacks holds GradientAccumulationScheduler, but every step has "
            f"data.micro_batches_per_step={wanted} batches: set that, and leave the callback out"
        )


def of_run(trainer: AnyTrainer, module: AnyModule, data: Any) -> Iterator[str]:
    """A `PolicyModule`, a `RolloutDataModule` that knows its model, and their Trainer."""
    yield from of_any_run(trainer, module, data)
    objective = module.objective
    callbacks = {_name(callback) for callback in trainer.callbacks}
    if isinstance(objective.correction, BlendedIS) and "EstimatorBlend" not in callbacks:
        yield "model.correction=BlendedIS needs EstimatorBlend in trainer.callbacks, which chooses its share"
    yield from of_estimates(
        objective.loss, data.advantage, data.aggregation, head=data.sampling.head, engine=data.engine
    )
    yield from of_teacher(objective.distillation, data.sampling)
    if data.tape is None and objective.trains_rewards:
        advantage = data.advantage if objective.baseline is None else None  # which the baseline replaces
        is_sampled = not isinstance(data.engine, MultiRequestEngine)
        yield from of_signal(advantage, data.group_size, data.sampling.temperature, is_sampled=is_sampled)


def of_estimates(
    loss: PolicyLoss, advantage: AdvantageEstimator, aggregation: Aggregation, head: int | None, engine: RolloutEngine
) -> Iterator[str]:
    """A loss against the advantages, token weights and recorded distributions that its formula assumes."""
    if loss.needs_head is not None and (head is None or head < loss.needs_head):
        yield (
            f"data.sampling.head must be >= {loss.needs_head} with model.loss={_name(loss)}, which needs the "
            f"distributions that the tokens were sampled from, got {head}"
        )
    if loss.needs_entropy and not engine.records_entropy:
        yield (
            f"model.loss={_name(loss)} with data.engine={_name(engine)}: it needs the entropy of the sampling "
            "distributions, and this engine knows only their likeliest tokens. Use EmbeddedEngine."
        )
    for regression, estimator in {TrajectoryBalance: GroupMean, OAPL: LogMeanExp}.items():
        if not isinstance(loss, regression):
            continue
        if not isinstance(advantage, estimator):
            yield (
                f"model.loss={_name(loss)} with data.advantage={_name(advantage)}: its square is of rewards less "
                f"{estimator.__name__}'s baseline. Use that."
            )
        if isinstance(inner := within_sources(aggregation), SequenceMean | PromptMean):
            yield (
                f"model.loss={_name(loss)} with data.aggregation={_name(aggregation)}: its log-ratio is a sum over "
                f"tokens, whose weights must not depend on the length, as {_name(inner)}'s do. Use FixedLength, "
                "TokenMean or TokenBudget."
            )


def of_signal(
    advantage: AdvantageEstimator | None, group_size: int, temperature: float, is_sampled: bool
) -> Iterator[str]:
    """Rollouts that cannot differ from those they are compared with, so that every advantage is 0.

    Args:
        advantage: compares them; None is `model.baseline`.
        group_size: completions of each prompt.
        temperature: of the training samples.
        is_sampled: whether only the policy's samples make completions differ: no environment or agent.
    """
    name = f"data.advantage={_name(advantage)}"
    instead = ", or data.advantage=Raw or GlobalMeanStd"
    if advantage is None:
        name = "model.baseline=OptimalBaseline"
        instead = ""
        advantage = GroupMean()
    if isinstance(advantage, TurnAdvantageEstimator):  # compares turns, not whole rollouts only
        return
    if group_size == 1 and not _any_signal(advantage([[0.0], [1.0]])):
        yield (
            f"data.group_size=1 with {name}: a rollout is compared with the others of its group, and alone its "
            f"advantage is 0. Use a group_size >= 2{instead}."
        )
    if temperature == 0 and is_sampled and not _any_signal(advantage([[0.0] * group_size, [1.0] * group_size])):
        yield (
            f"data.sampling.temperature=0 with {name}: the completions of a prompt are all equal, so every advantage "
            "is 0. Use a temperature > 0 (data.validation.sampling has its own)."
        )


def _any_signal(advantages: list[list[float]]) -> bool:
    return any(value != 0 for group in advantages for value in group)


def of_fit(trainer: AnyTrainer, module: AnyModule) -> Iterator[str]:
    """A `PolicyModule` that cannot train on the Trainer's device or in its precision."""
    attention = module.policy.causal_lm.config._attn_implementation
    if trainer.strategy.root_device.type == "cpu" and attention == "flex_attention":
        yield (
            "model.attn_implementation=flex_attention cannot train on a CPU: its kernel has no backward pass there. "
            "Leave it out, or train on a GPU."
        )
    yield from of_norms(module.objective.baseline, str(trainer.precision), tensor_parallel_size=num_copies(trainer))
    # AdamW's eps of 1e-8 is 0 in float16, so that weights with a vanishing gradient move without bound. Gradients below
    # 6e-8 vanish, unless `precision: 16-mixed` scales the loss. DeepSpeed keeps float32 weights of its own.
    has_scaler = getattr(trainer.precision_plugin, "scaler", None) is not None
    halves = (one for one in module.policy.parameters() if one.dtype == torch.float16)
    is_deepspeed = _name(trainer.strategy).startswith("DeepSpeed")
    if not is_deepspeed and any(one.requires_grad or not has_scaler for one in halves):
        yield (
            "model.dtype must be float32 or bfloat16 to train, got float16, in which the eps of optimizers and "
            "small gradients are 0. For products in float16 use model.dtype: float32 with trainer.precision: "
            "16-mixed, which scales the loss on a GPU"
        )


def of_norms(baseline: OptimalBaseline | None, precision: str, tensor_parallel_size: int = 1) -> Iterator[str]:
    """Gradients of the baseline's norms: of whole layers, and without a loss scaler against vanishing."""
    if baseline is not None and baseline.norms is Norms.GHOST and tensor_parallel_size > 1:
        yield (
            f"model.baseline.norms=GHOST with trainer.strategy.tensor_parallel_size={tensor_parallel_size}: its norms "
            "are of whole layers, which tensor parallelism divides. Use norms=SCORE, or FSDP alone."
        )
    if baseline is not None and baseline.reads_weights and precision == "16-mixed":
        yield (
            f"model.baseline.norms={baseline.norms.name} with trainer.precision={precision}: its norms are of single "
            "gradients, which vanish in float16 without the loss scaler. Use bf16-mixed, or norms=SCORE."
        )


RUN_SCHEDULES_ADVICE = (
    "use a schedule that takes rate and length from the run (model.scheduler=OneCycle, Cosine, Linear)"
)


def of_rate(optimizer: Optimizer, learning_rate: float | None) -> Iterator[str]:
    """A rate that is given twice, by `model.learning_rate` and as an argument of `model.optimizer`."""
    present = optimizer.param_groups[0]["lr"]
    if learning_rate is not None and present != learning_rate:
        yield (
            f"model.learning_rate={learning_rate:g}, but model.optimizer={_name(optimizer)} has "
            f"lr={present:g}: leave one of them out"
        )


def of_schedule(scheduler: Any, optimizer: Optimizer, learning_rate: float | None, max_steps: int) -> Iterator[str]:
    """A schedule whose length or peak is not the run's.

    Args:
        scheduler: a `RateSchedule`, or one of torch's.
        optimizer: of the run.
        learning_rate: `model.learning_rate`; None if it is not set.
        max_steps: `trainer.max_steps`; -1 is endless.
    """
    name = f"model.scheduler={_name(scheduler)}"
    if getattr(scheduler, "needs_length", False) and max_steps <= 0:
        yield f"trainer.max_steps must be set, got {max_steps}: {name} spans the run"
    instead = f"make them equal, or {RUN_SCHEDULES_ADVICE}"
    length = getattr(scheduler, "total_steps", None)
    if length is not None and max_steps > 0 and length != max_steps:
        yield f"{name} has total_steps={length}, but trainer.max_steps={max_steps}: {instead}"
    peaks = [group["max_lr"] for group in optimizer.param_groups if "max_lr" in group]
    if learning_rate is not None and any(peak != learning_rate for peak in peaks):
        yield f"{name} has max_lr={peaks[0]:g}, but model.learning_rate={learning_rate:g}: {instead}"
