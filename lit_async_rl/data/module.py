"""The DataModule: owns engine and producer, and hands out the micro-batches of one optimizer step after the other.

Who waits for what: Lightning's loop waits in `next(feed)` for a whole step of groups (`Producer.take`: has a timeout,
notices SIGTERM and dead threads). Nothing here waits for the trainer.
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import lightning.pytorch as pl
from torch import Tensor

from lit_async_rl.advantages.group import AdvantageEstimator, GroupMeanStd
from lit_async_rl.data.collate import collate_step
from lit_async_rl.data.compatibility import check_average, check_bound, check_engine, check_intake, check_streamable
from lit_async_rl.data.dataloaders import PromptFeed, StepFeed
from lit_async_rl.data.rollout_source import RolloutSource
from lit_async_rl.data.settings import Limits, Scoring, Validation
from lit_async_rl.data.step_batches import StepBatches
from lit_async_rl.distributed.scatter import RELOAD, Exchanged, OneProcess, StepScatter, connect
from lit_async_rl.engines.base import RolloutEngine, SamplingParams
from lit_async_rl.engines.embedded.engine import EmbeddedEngine
from lit_async_rl.errors import EngineDown, SetupError
from lit_async_rl.losses.aggregation import Aggregation, TokenMean
from lit_async_rl.models.tokenizer import TextCodec
from lit_async_rl.prompts.sources import PromptSource
from lit_async_rl.prompts.stream import PromptStream
from lit_async_rl.prompts.usable import UsableSubset
from lit_async_rl.replay.buffer import ReplayBuffer
from lit_async_rl.replay.tape import Tape
from lit_async_rl.replay.tape_source import NoEngine, Replay
from lit_async_rl.rewards.scorer import Reward, Scorer, score_all
from lit_async_rl.rollouts.evaluation import EvaluationPlan, EvaluationRun
from lit_async_rl.rollouts.intake import Intake
from lit_async_rl.rollouts.producer import Producer
from lit_async_rl.rollouts.stats import ProducerStats
from lit_async_rl.scheduling.policies import AdmissionPolicy, Bounded, FromTape
from lit_async_rl.types import Prompt, PromptBatch, RolloutBatch, RolloutGroup
from lit_async_rl.utils.checks import check_positive
from lit_async_rl.utils.lightning_types import AnyTrainer

POSITIVE = ("groups_per_step", "group_size", "micro_batches_per_step", "weight_sync_steps")
Weights = Iterator[tuple[str, Tensor]]


class RolloutDataModule(pl.LightningDataModule):
    """Rollouts of the policy that is being trained, at most `max_staleness` versions old.

    Args:
        model: Hugging Face name or folder; gives the tokenizer and the engine's architecture.
        prompts: training prompts.
        reward: `reward(prompt, completion) -> float`, a function named by its dotted path or a callable class; None
            only where the engine scores.
        engine: where completions come from; None is `EmbeddedEngine()`.
        max_staleness: how many versions older than the policy a token may be when it is trained on; 0 is synchronous.
        admission: how far sampling may run ahead of training within that bound; None is `Bounded()`.
        groups_per_step: prompts in one optimizer step.
        group_size: completions of each prompt.
        micro_batches_per_step: forward-backward passes of one optimizer step.
        weight_sync_steps: optimizer steps between publications of the weights.
        sampling: how training completions are sampled.
        advantage: estimator of advantages from the rewards of a group; None is `GroupMeanStd()`.
        aggregation: weight of each token in the average over the step; None is `TokenMean()`.
        scoring: threads, time limit and tries of the reward.
        validation: held-out prompts, and how they are sampled and judged.
        intake: which prompts are sampled and which groups kept (order, dynamic sampling, overlong rollouts, a
            curriculum), and how they reach a step; None takes all.
        replay: train on earlier groups again; `max_staleness` then bounds the new ones, `replay.max_staleness` those.
        limits: how long is waited, and how often an engine is restarted, before the run ends with an error.

    Attributes:
        keep_groups_whole: never split a group over micro-batches; set from the module that is trained (see
            `PolicyModule.wants_whole_groups`).

    Raises:
        ValueError: a setting is out of range, or two of them contradict each other.
    """

    def __init__(
        self,
        model: str,
        prompts: PromptSource,
        reward: Reward | None = None,
        engine: RolloutEngine | None = None,
        max_staleness: int = 4,
        admission: AdmissionPolicy | None = None,
        groups_per_step: int = 16,
        group_size: int = 8,
        micro_batches_per_step: int = 1,
        weight_sync_steps: int = 1,
        sampling: SamplingParams = SamplingParams(),  # noqa: B008  frozen
        advantage: AdvantageEstimator | None = None,
        aggregation: Aggregation | None = None,
        scoring: Scoring = Scoring(),  # noqa: B008  frozen
        validation: Validation = Validation(),  # noqa: B008  frozen
        intake: Intake | None = None,
        replay: ReplayBuffer | None = None,
        limits: Limits = Limits(),  # noqa: B008  frozen
    ) -> None:
        super().__init__()
        self.admission, self.intake = admission or Bounded(), intake or Intake()
        self.tape = Tape(self.admission.folder) if isinstance(self.admission, FromTape) else None
        if self.tape is not None:
            engine = NoEngine(scores=reward is None)
        engine = engine or EmbeddedEngine(in_flight_weight_updates=not self.admission.in_order)
        self.model, self.prompts, self.reward = model, prompts, reward
        self.groups_per_step, self.group_size = groups_per_step, group_size
        self.micro_batches_per_step, self.weight_sync_steps = micro_batches_per_step, weight_sync_steps
        check_positive("data", **{name: vars(self)[name] for name in POSITIVE})
        self.advantage, self.aggregation = advantage or GroupMeanStd(), aggregation or TokenMean()
        self.sampling, self.scoring, self.limits, self.replay = sampling, scoring, limits, replay
        self.validation, self.val_sampling = validation, validation.sampling or sampling
        check_bound(self.admission, max_staleness)
        check_engine(engine, reward, self.admission)
        check_intake(self.intake, self.admission, replay is not None)
        check_average(self.advantage, self.aggregation)
        if self.intake.stream_groups:
            check_streamable(self.advantage, self.aggregation, groups_per_step, micro_batches_per_step)
        self.keep_groups_whole = False
        self.fresh_per_step = groups_per_step if replay is None else replay.num_fresh(groups_per_step)
        self.stream = PromptStream(prompts, seed=self.intake.seed)
        self.codec = TextCodec(model)
        self._bound, self._empty_replay = max_staleness, None if replay is None else replay.state_dict()
        self._make_source(engine)
        self._ranks: StepScatter | OneProcess = OneProcess()
        self._stream_weights: Callable[[], Weights] | None = None
        self._val_scorer: Scorer | None = None

    def _make_source(self, engine: RolloutEngine) -> None:
        """Makes all that a fit uses up."""
        self._slots = self.admission.make(self.fresh_per_step * self.weight_sync_steps, self._bound)
        made = engine, self.model, self._slots, self._make_producer, self.groups_per_step, self.fresh_per_step
        limits = self.limits.engine_restarts, self.limits.rollout_timeout_s
        self._source = RolloutSource(*made, self.replay, *limits)
        sizes = self.groups_per_step, self.micro_batches_per_step, self.intake.stream_groups
        self._batches = StepBatches(self._source, self._collate, self.aggregation, *sizes)

    def _collate(self, groups: Sequence[RolloutGroup], **settings: Any) -> list[RolloutBatch]:
        return collate_step(
            groups,
            advantage=self.advantage,
            pad_token_id=self.codec.pad_token_id,
            temperature=self.sampling.temperature,
            keep_groups_whole=self.keep_groups_whole,
            **settings,
        )

    # -- what WeightSync calls ----------------------------------------------------------------------------------------

    def publish(self, version: int, weights: Weights) -> None:
        """Gives the engine new weights; sets it up first, when they are the first ones. All ranks read the weights."""
        self._give(weights, partial(self._source.publish, version))

    def _give(self, weights: Weights, take: Callable[[Weights], None]) -> None:
        """Has the leading rank take weights; all ranks read them."""
        progress = self._ranks.progress
        weights = progress.over(weights, "gathering the weights")
        try:
            if self._ranks.leads:
                with progress.own_limit("the engine takes the weights"):
                    take(weights)
        finally:
            deque(weights, maxlen=0)  # to the end even in an error: gathering them is a collective

    def note_progress(self) -> None:
        """Keeps this rank from being taken for hung; for callbacks that are busy for long while other ranks wait."""
        self._ranks.progress.sign()

    def bounded_wait(self, what: str) -> AbstractContextManager[None]:
        """The same, where a callback waits for something with a timeout of its own."""
        return self._ranks.progress.own_limit(what)

    def any_rank(self, value: bool) -> bool:
        """Whether `value` is true on any rank. A collective."""
        return self._ranks.any(value)

    def start(self, version: int, stream_weights: Callable[[], Weights]) -> None:
        """Starts the background thread; the engine has the weights of `version`.

        Args:
            version: of the policy.
            stream_weights: the current weights, for an engine that is restarted; called and read on all ranks.
        """
        self._stream_weights = stream_weights
        self._ranks.take_over_sigterm()
        if self._ranks.leads:
            self._source.start(version, self._trainer.global_step)

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
        return self._slots.max_staleness

    @property
    def groups_per_round(self) -> int:
        """New groups that are trained on between two publications of the weights."""
        return self._slots.groups_per_round

    @property
    def _trainer(self) -> AnyTrainer:
        if self.trainer is None:
            raise SetupError("a RolloutDataModule feeds a Trainer: give it to `trainer.fit(..., datamodule=data)`")
        return self.trainer

    @property
    def is_asked_to_stop(self) -> bool:
        """Whether SIGTERM has come, on any rank where several train."""
        return self.trainer is not None and self._ranks.is_asked_to_stop(self.trainer)

    def set_max_staleness(self, max_staleness: int) -> None:
        """Changes the bound while running; groups admitted before keep theirs."""
        if self.admission.in_order:
            kind = type(self.admission).__name__
            raise ValueError(f"data.admission={kind} has no bound to change: its lag is data.max_staleness")
        if max_staleness < 0:
            raise ValueError(f"data.max_staleness must be >= 0, got {max_staleness}")
        if max_staleness == self.max_staleness:
            return
        if self._ranks.leads:
            self._source.set_max_staleness(max_staleness)
        else:
            self._slots.max_staleness = max_staleness

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
        return StepFeed(self._trainer, self.micro_batches_per_step, self.next_step)

    def val_dataloader(self) -> Iterable[PromptBatch]:
        """Held-out prompts in batches."""
        trainer, prompts = self._trainer, self.validation.prompts
        if prompts is None:
            warnings.filterwarnings("ignore", message=r".*Total length of `list` across ranks is zero")  # as it should
            return []
        usable = UsableSubset(prompts, self.codec.encode)
        return PromptFeed(usable, self.validation.batch_size, trainer.global_rank, trainer.world_size)

    def setup(self, stage: str) -> None:
        """Joins the ranks of the run. A second fit begins anew: with the first prompt, and a fresh engine."""
        if stage == "fit" and self._source.has_begun:
            self.stream.position = 0
            self.intake.reset()
            if self.replay is not None and self._empty_replay is not None:
                self.replay.load_state_dict(self._empty_replay)
            self._make_source(self.engine.fresh())
        limits = self.limits.rollout_timeout_s, self.limits.rank_timeout_s
        self._ranks = connect(self._trainer, *limits, on_abandon=self.stop)

    def next_step(self) -> list[RolloutBatch] | None:
        """This rank's micro-batches of the next optimizer step, or the next one of them where groups are streamed.

        None when the run is asked to stop.
        """
        while (batches := self._ranks.exchange(self._make_batches)) == RELOAD:
            if self._stream_weights is None:
                raise SetupError("add the WeightSync callback: it gives the engine its weights")
            self._give(self._stream_weights(), self._source.restart_engine)
        return batches

    def _make_batches(self) -> Exchanged:
        trainer, ranks = self._trainer, self._ranks
        try:
            return self._batches.next(trainer.global_step, ranks.num_places, lambda: ranks.is_asked_to_stop(trainer))
        except EngineDown:
            return RELOAD

    def _make_producer(self, step: int) -> Producer | Replay:
        if self.tape is not None:
            return Replay(self.tape, step, self._slots)
        return Producer(
            engine=self.engine,
            stream=self.stream,
            codec=self.codec,
            scorer=self._make_scorer(),
            admission=self._slots,
            group_size=self.group_size,
            sampling=self.sampling,
            timeout_s=self.limits.rollout_timeout_s,
            intake=self.intake,
        )

    def _make_scorer(self) -> Scorer:
        return Scorer(self.reward, self.scoring.workers, self.scoring.timeout_s, self.scoring.tries)

    def score(self, completions: Sequence[tuple[Prompt, str]]) -> list[float | None]:
        """Rewards of held-out completions, on any rank; None for those that could not be scored in `reward_tries`."""
        if self._val_scorer is None:  # kept, because isolated rewards have a process for each of its threads
            self._val_scorer = self._make_scorer()
        return score_all(self._val_scorer, completions, self.note_progress)

    def state_dict(self) -> dict[str, Any]:
        """All that was admitted and not trained on, see `lit_async_rl.rollouts.checkpoint`."""
        return self._source.state_dict(0 if self.trainer is None else self.trainer.global_step)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Kept until the engine has weights."""
        self._source.load_state_dict(state_dict)

    def stop(self) -> None:
        """Ends the background thread and frees the engine. Safe to call twice."""
        self._close_val_scorer()
        self._source.stop()

    def _close_val_scorer(self) -> None:
        if self._val_scorer is not None:
            self._val_scorer.close()
            self._val_scorer = None

    def teardown(self, stage: str) -> None:
        """Called by Lightning at the end of a run."""
        if stage == "fit":
            self.stop()
        self._close_val_scorer()
        self._ranks.close()

    def on_exception(self, exception: BaseException) -> None:
        """Called by Lightning when a run breaks (teardown is not); tells the other ranks first."""
        self._ranks.fail(exception)
        self.stop()
        self._ranks.close()
