"""The DataModule: owns engine and producer, and hands out the micro-batches of one optimizer step after the other.

Who waits for what: Lightning's loop waits in `next(feed)` for a whole step of groups (`Producer.take`: has a timeout,
notices SIGTERM and dead threads). Nothing here waits for the trainer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, Literal

import lightning.pytorch as pl
from torch import Tensor

from lit_async_rl.advantages.group import AdvantageEstimator, GroupMeanStd
from lit_async_rl.data.collate import collate_step
from lit_async_rl.data.dataloaders import PromptFeed, StepFeed
from lit_async_rl.data.rollout_source import RolloutSource
from lit_async_rl.data.step_batches import StepBatches
from lit_async_rl.data.streaming import check_streamable
from lit_async_rl.distributed.scatter import RELOAD, Exchanged, OneProcess, StepScatter, connect
from lit_async_rl.engines.base import RolloutEngine, SamplingParams
from lit_async_rl.engines.embedded.engine import EmbeddedEngine
from lit_async_rl.errors import EngineDown
from lit_async_rl.losses.aggregation import Aggregation, TokenMean
from lit_async_rl.models.tokenizer import TextCodec
from lit_async_rl.prompts.sources import PromptSource
from lit_async_rl.prompts.stream import PromptStream
from lit_async_rl.prompts.usable import UsableSubset
from lit_async_rl.replay.buffer import ReplayBuffer
from lit_async_rl.replay.tape import Tape
from lit_async_rl.replay.tape_source import NoEngine, Replay
from lit_async_rl.rewards.scorer import Reward, Scorer
from lit_async_rl.rollouts.evaluation import EvaluationPlan, EvaluationRun
from lit_async_rl.rollouts.intake import Intake
from lit_async_rl.rollouts.producer import Producer
from lit_async_rl.rollouts.stats import ProducerStats
from lit_async_rl.scheduling.ring import RingBuffer, make_admission
from lit_async_rl.training.compatibility import check_engine, check_intake, check_sources, check_step_compatibility
from lit_async_rl.types import PromptBatch, RolloutBatch, RolloutGroup
from lit_async_rl.utils.checks import check_not_negative, check_positive

POSITIVE = (
    *("groups_per_step", "group_size", "micro_batches_per_step", "weight_sync_steps", "num_val_samples"),
    *("val_batch_size", "reward_workers", "reward_timeout_s", "rollout_timeout_s", "rank_timeout_s"),
)
Weights = Iterator[tuple[str, Tensor]]


class RolloutDataModule(pl.LightningDataModule):
    """Rollouts of the policy that is being trained, at most `max_staleness` versions old.

    Args:
        model: Hugging Face name or folder; gives the tokenizer and the engine's architecture.
        prompts: training prompts.
        reward: `reward(prompt, completion) -> float`, a function named by its dotted path or a callable class; None
            only where the engine scores.
        val_prompts: held-out prompts for validation.
        engine: where completions come from; None is `EmbeddedEngine()`.
        max_staleness: how many versions older than the policy a token may be when it is trained on; 0 is synchronous.
        schedule: `free` samples as fast as the bound allows; `fixed_lag` trains step n on what version
            n - `max_staleness` sampled, reproducible to the bit (needs an engine without in-flight updates); `replay`
            trains on `tape`, without an engine.
        tape: folder that the `RolloutTape` callback wrote.
        groups_per_step: prompts in one optimizer step.
        group_size: completions of each prompt.
        micro_batches_per_step: forward-backward passes of one optimizer step.
        weight_sync_steps: optimizer steps between publications of the weights.
        sampling: how training completions are sampled.
        advantage: what a reward is worth relative to others.
        aggregation: what a token counts in the average over the step.
        keep_groups_whole: never split a group over micro-batches (`model.baseline` and `packing` need it, and set it).
        use_chat_template: wrap each prompt that is text as a user's turn with the tokenizer's chat template.
        seed: order of the prompts.
        num_val_samples: completions of each held-out prompt.
        val_batch_size: held-out prompts sampled together.
        val_sampling: how held-out completions are sampled; None is `sampling`.
        success_reward: a held-out completion with at least this reward counts as correct.
        reward_workers: completions scored at the same time, each as soon as it is there.
        reward_timeout_s: longest that scoring one may take.
        reward_tries: a prompt whose completions cannot be scored (the reward raises, or does not return) so often is
            left out, with a line in the log, and another takes its place; null ends the run at the first time.
        rollout_timeout_s: longest time in which nothing may happen while the trainer waits.
        engine_restarts: an engine that hangs so long, or breaks, is replaced by a new one with the current weights, so
            often in a row (without a step in between); then, or with 0 at once, the run ends.
        rank_timeout_s: a training process that is not heard from for so long counts as dead, and ends the run.
        async_ratio: sample at most this fraction (or multiple) of a round ahead; None is `max_staleness`.
        replay: train on earlier groups again; `max_staleness` then bounds the new ones, `replay.max_staleness` those.
        stream_groups: train on a micro-batch as soon as its groups have finished, not when the whole step has.
        redundant_groups: sample so many more groups than are needed, and abort the last of each round.
        replicate_prompts: ask the engine for each completion by itself.
        ring: never let sampling wait, and drop what is too old; see `lit_async_rl.scheduling.ring`.
        intake: which prompts are sampled and which groups kept (dynamic sampling, overlong rollouts, a curriculum, what
            happens at the bound); None takes all.

    Raises:
        ValueError: a setting is out of range, or the engine cannot keep a fixed lag.
    """

    def __init__(
        self,
        model: str,
        prompts: PromptSource,
        reward: Reward | None = None,
        val_prompts: PromptSource | None = None,
        engine: RolloutEngine | None = None,
        max_staleness: int = 4,
        schedule: Literal["free", "fixed_lag", "replay"] = "free",
        tape: str | None = None,
        groups_per_step: int = 16,
        group_size: int = 8,
        micro_batches_per_step: int = 1,
        weight_sync_steps: int = 1,
        sampling: SamplingParams = SamplingParams(),  # noqa: B008  frozen
        advantage: AdvantageEstimator | None = None,
        aggregation: Aggregation | None = None,
        keep_groups_whole: bool = False,
        use_chat_template: bool = False,
        seed: int = 0,
        num_val_samples: int = 1,
        val_batch_size: int = 128,
        val_sampling: SamplingParams | None = None,
        success_reward: float = 1.0,
        reward_workers: int = 1,
        reward_timeout_s: float = 60.0,
        reward_tries: int | None = None,
        rollout_timeout_s: float = 600.0,
        rank_timeout_s: float = 60.0,
        async_ratio: float | None = None,
        replay: ReplayBuffer | None = None,
        stream_groups: bool = False,
        redundant_groups: int = 0,
        replicate_prompts: bool = False,
        ring: RingBuffer | None = None,
        intake: Intake | None = None,
        engine_restarts: int = 3,
    ) -> None:
        super().__init__()
        check_sources(schedule, tape, replay, stream_groups)
        if schedule == "replay":
            engine = NoEngine(scores=reward is None)
        self.tape = None if tape is None else Tape(tape)
        engine = engine or EmbeddedEngine(in_flight_weight_updates=schedule == "free")
        check_engine(engine, reward, schedule)
        self.model, self.prompts, self.val_prompts, self.reward = model, prompts, val_prompts, reward
        self.schedule = schedule
        self.groups_per_step, self.group_size = groups_per_step, group_size
        self.micro_batches_per_step, self.weight_sync_steps = micro_batches_per_step, weight_sync_steps
        self.sampling, self.val_sampling = sampling, val_sampling or sampling
        self.advantage, self.aggregation = advantage or GroupMeanStd(), aggregation or TokenMean()
        check_step_compatibility(self.advantage, self.aggregation)
        self.keep_groups_whole = keep_groups_whole
        self.num_val_samples, self.val_batch_size = num_val_samples, val_batch_size
        self.success_reward = success_reward
        self.reward_workers, self.reward_timeout_s = reward_workers, reward_timeout_s
        self.reward_tries = reward_tries
        self.rollout_timeout_s, self.rank_timeout_s = rollout_timeout_s, rank_timeout_s
        check_positive("data", **{name: vars(self)[name] for name in POSITIVE})
        check_not_negative("data", engine_restarts=engine_restarts)
        if stream_groups:
            check_streamable(self.advantage, self.aggregation, groups_per_step, micro_batches_per_step)
        self.replay, self.replicate_prompts = replay, replicate_prompts
        self.fresh_per_step = groups_per_step if replay is None else replay.num_fresh(groups_per_step)
        per_round = self.fresh_per_step * weight_sync_steps
        others: dict[str, Any] = dict(async_ratio=async_ratio, redundant_groups=redundant_groups)
        self.intake = intake or Intake()
        check_intake(self.intake, schedule)
        self.admission = make_admission(per_round, max_staleness, schedule, ring, self.intake.at_bound, **others)
        made = engine, model, self.admission, self._make_producer
        self._source = RolloutSource(*made, groups_per_step, self.fresh_per_step, replay, engine_restarts)
        self.stream = PromptStream(prompts, seed=seed)
        self.codec = TextCodec(model, use_chat_template)
        collate = partial(
            collate_step,
            advantage=self.advantage,
            pad_token_id=self.codec.pad_token_id,
            temperature=sampling.temperature,
            keep_groups_whole=keep_groups_whole,
        )
        sizes = groups_per_step, micro_batches_per_step
        self._batches = StepBatches(self._source, collate, self.aggregation, *sizes, stream_groups)
        self._ranks: StepScatter | OneProcess = OneProcess()
        self._stream_weights: Callable[[], Weights] | None = None

    # -- what WeightSync calls ----------------------------------------------------------------------------------------

    def publish(self, version: int, weights: Weights) -> None:
        """Gives the engine new weights; sets it up first, when they are the first ones. All ranks read the weights."""
        self._give(weights, partial(self._source.publish, version))

    def _give(self, weights: Weights, take: Callable[[Weights], None]) -> None:
        """Has the leading rank take weights; all ranks read them."""
        try:
            if self._ranks.leads:
                take(weights)
        finally:
            deque(weights, maxlen=0)  # to the end even in an error: gathering them is a collective

    def any_rank(self, value: bool) -> bool:
        """Whether `value` is true on any rank. A collective."""
        return self._ranks.any(value)

    def start(self, version: int, stream_weights: Callable[[], Weights]) -> None:
        """Starts the background thread; the engine has the weights of `version`.

        Args:
            version: of the policy.
            stream_weights: the current weights, for an engine that is restarted; called and read on all ranks.
        """
        assert self.trainer is not None
        self._stream_weights = stream_weights
        self._ranks.take_over_sigterm()
        if self._ranks.leads:
            self._source.start(version, self.trainer.global_step)

    def advance(self, version: int) -> None:
        """Gives back the slots of the groups trained on."""
        if self._ranks.leads:
            self._source.advance(version)

    def evaluate(self, plan: EvaluationPlan) -> EvaluationRun:
        """Begins to sample held-out prompts beside the rollouts; on rank 0 only."""
        return self._source.evaluate(plan)

    # -- what monitors and stabilizers use ----------------------------------------------------------------------------

    @property
    def engine(self) -> RolloutEngine:
        """Where completions come from now: another one after a restart."""
        return self._source.engine

    @property
    def max_staleness(self) -> int:
        """The bound for groups admitted from now on, in versions."""
        return self.admission.max_staleness

    @property
    def is_asked_to_stop(self) -> bool:
        """Whether SIGTERM has come, on any rank where several train."""
        return self.trainer is not None and self._ranks.is_asked_to_stop(self.trainer)

    def set_max_staleness(self, max_staleness: int) -> None:
        """Changes the bound while running; groups admitted before keep theirs."""
        if self.schedule == "fixed_lag":
            raise ValueError("data.schedule=fixed_lag has no bound to change: its lag is data.max_staleness")
        if max_staleness < 0:
            raise ValueError(f"max_staleness must be >= 0, got {max_staleness}")
        if max_staleness == self.max_staleness:
            return
        if self._ranks.leads:
            self._source.set_max_staleness(max_staleness)
        else:
            self.admission.max_staleness = max_staleness

    @property
    def last_step_groups(self) -> Sequence[RolloutGroup]:
        """What the last step is trained on; where groups are streamed, as much of it as has come."""
        return self._batches.groups

    def stats(self) -> ProducerStats | None:
        """Totals of the background side; None before it started."""
        return self._source.stats()

    # -- Lightning ----------------------------------------------------------------------------------------------------

    def train_dataloader(self) -> Iterable[RolloutBatch]:
        """Micro-batches; a plain sized iterable, because there is nothing for workers, samplers or collation to do."""
        return StepFeed(self)

    def val_dataloader(self) -> Iterable[PromptBatch]:
        """Held-out prompts in batches."""
        if self.val_prompts is None:
            return []
        assert self.trainer is not None
        usable = UsableSubset(self.val_prompts, self.codec.encode)
        return PromptFeed(usable, self.val_batch_size, self.trainer.global_rank, self.trainer.world_size)

    def setup(self, stage: str) -> None:
        """Joins the ranks of the run."""
        assert self.trainer is not None
        self._ranks = connect(self.trainer, self.rollout_timeout_s, self.rank_timeout_s, on_abandon=self.stop)

    def next_step(self) -> list[RolloutBatch] | None:
        """This rank's micro-batches of the next optimizer step, or the next one of them where groups are streamed.

        None when the run is asked to stop.
        """
        while (batches := self._ranks.exchange(self._make_batches)) == RELOAD:
            assert self._stream_weights is not None
            self._give(self._stream_weights(), self._source.restart_engine)
        return batches

    def _make_batches(self) -> Exchanged:
        trainer, ranks = self.trainer, self._ranks
        assert trainer is not None
        try:
            return self._batches.next(trainer.global_step, ranks.num_places, lambda: ranks.is_asked_to_stop(trainer))
        except EngineDown:
            return RELOAD

    def _make_producer(self, step: int) -> Producer | Replay:
        if self.tape is not None:
            return Replay(self.tape, step, self.admission)
        return Producer(
            engine=self.engine,
            stream=self.stream,
            codec=self.codec,
            scorer=Scorer(self.reward, self.reward_workers, self.reward_timeout_s, self.reward_tries),
            admission=self.admission,
            group_size=self.group_size,
            sampling=self.sampling,
            timeout_s=self.rollout_timeout_s,
            replicate_prompts=self.replicate_prompts,
            intake=self.intake,
        )

    def state_dict(self) -> dict[str, Any]:
        """All that was admitted and not trained on, see `lit_async_rl.rollouts.checkpoint`."""
        return self._source.state_dict(0 if self.trainer is None else self.trainer.global_step)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Kept until the engine has weights."""
        self._source.load_state_dict(state_dict)

    def stop(self) -> None:
        """Ends the background thread and frees the engine. Safe to call twice."""
        self._source.stop()

    def teardown(self, stage: str) -> None:
        """Called by Lightning at the end of a run."""
        if stage == "fit":
            self.stop()
        self._ranks.close()

    def on_exception(self, exception: BaseException) -> None:
        """Called by Lightning when a run breaks (teardown is not); tells the other ranks first."""
        self._ranks.fail(exception)
        self.stop()
        self._ranks.close()
