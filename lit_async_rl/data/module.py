"""LightningDataModule of rollouts: settings of engine, producer and steps, and the parts made from them.

Training takes its micro-batches from `RolloutFeed`, validation its prompts from `HeldOut`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl

from lit_async_rl import rules
from lit_async_rl.advantages.group import AdvantageEstimator, GroupMeanStd
from lit_async_rl.data.collate import collate_step
from lit_async_rl.data.held_out import HeldOut
from lit_async_rl.data.rollout_source import RolloutFeed, RolloutSource
from lit_async_rl.data.settings import Limits, Scoring, Validation, open_tape, with_support
from lit_async_rl.distributed.scatter import connect
from lit_async_rl.engines.base import RolloutEngine
from lit_async_rl.engines.embedded.engine import EmbeddedEngine
from lit_async_rl.environments.episode_engine import EpisodeEngine
from lit_async_rl.environments.multi_request import MultiRequestEngine
from lit_async_rl.errors import SetupError
from lit_async_rl.losses.aggregation import Aggregation, TokenMean
from lit_async_rl.models.packing import TreeCosts
from lit_async_rl.models.run_clock import use_run_time
from lit_async_rl.models.tokenizer import TextCodec
from lit_async_rl.problem import Prompt
from lit_async_rl.prompts.curriculum import Curriculum
from lit_async_rl.prompts.records import Records
from lit_async_rl.prompts.sources import as_source
from lit_async_rl.prompts.stream import PromptStream
from lit_async_rl.replay.buffer import ReplayBuffer
from lit_async_rl.replay.tape_source import TAPE, NoEngine, Replay
from lit_async_rl.rewards import hooks
from lit_async_rl.rewards.calls import Reward, check_reward
from lit_async_rl.rewards.combined import CombinedReward, name_answers
from lit_async_rl.rewards.forms import as_reward_function
from lit_async_rl.rewards.reference_check import ReferenceCheck, sample_prompts
from lit_async_rl.rollouts.intake import GroupFilter, Intake
from lit_async_rl.rollouts.producer import Producer, identities_of
from lit_async_rl.rollouts.resume import START_ANEW, check_prompts, is_producer_state
from lit_async_rl.rollouts.totals import ProducerStats
from lit_async_rl.runtime.files import begin_here, expanded, return_to_begin
from lit_async_rl.scheduling.admission import AdmissionPolicy, Bounded, FromTape
from lit_async_rl.types import PromptBatch, RolloutBatch, RolloutGroup, SamplingParams
from lit_async_rl.utils.checks import MANY, check_kinds, check_range
from lit_async_rl.utils.lightning_types import AnyTrainer
from lit_async_rl.utils.logged_rows import LoggedRows

log = logging.getLogger(__name__)
REWARD_STATE = "reward_state"  # in a checkpoint: of a reward that has one
BEGAN = "began"  # in a checkpoint: when the run began, in local time


class RolloutDataModule(pl.LightningDataModule):
    """Rollouts of the policy in training, at most `max_staleness` versions old.

    Example:
        ```python
        import lit_async_rl as rl

        data = rl.RolloutDataModule(
            prompts=[{"prompt": "3142=", "answer": "1234"}],
            reward=lambda prompt, completion: float(completion.strip() == prompt.answer),
            max_staleness=2,
            groups_per_step=2,
            group_size=4,
        )
        ```

    Args:
        model: Hugging Face name or folder of tokenizer and architecture; None is the trained model's.
        prompts: training prompts: a source, a list of texts or dictionaries, a `datasets.Dataset`, the path of a file
            (`.jsonl`, `.json`, `.parquet`, `.csv`), or the name of a dataset of the hub (`org/name`).
        reward: `reward(prompt, completion) -> float`, plain or `async`: a function (in a configuration its dotted path)
            or a callable class; several by name (`CombinedReward`); or a batched one or one in TRL's form
            (`as_reward_function`). None only if the engine scores.
        engine: samples the completions; None is `EmbeddedEngine()`.
        max_staleness: bound on a token's age in versions when it is trained on; 0 is synchronous.
        admission: how far sampling may run ahead within that bound; None is `Bounded()`.
        groups_per_step: prompts of one optimizer step.
        group_size: completions of each prompt.
        micro_batches_per_step: forward-backward passes of one optimizer step.
        stream_groups: train on a micro-batch as soon as its groups have finished.
        weight_sync_steps: optimizer steps between publications of the weights.
        seed: of the order of the prompts.
        shuffle: False takes prompts in the order of their source, in every epoch.
        curriculum: which prompts are skipped; None skips none.
        filters: applied in turn to a group that has its rewards; each may change or drop it.
        sampling: sampling parameters of training completions.
        replicate_prompts: request each completion by itself, so that those of a prompt need not share place or time
            (ROLL Flash, arXiv:2510.11345).
        advantage: estimates advantages from the rewards of a group; None is `GroupMeanStd()`.
        aggregation: weight of each token in the average over the step; None is `TokenMean()`.
        scoring: worker threads, timeout and tries of the reward.
        validation: held-out prompts, and how they are sampled and scored.
        replay: mixes earlier groups into each step; `max_staleness` then bounds fresh groups only.
        limits: timeouts, and engine restarts before the run ends with an error.

    Attributes:
        keep_groups_whole: never split a group over micro-batches; set by `WeightSync` from the module.
        tree_costs: of a policy that computes prefixes once, so that micro-batches are cut along trees; likewise.
        needs_single_rows: setting that a rollout of several rows is refused with, and its remedy; likewise.
        source_of: number of the source of a prompt, where each has a teacher; likewise.
        configured_bound: `max_staleness` as given; callbacks may have lowered the present one.
        arrived_rewards: what `take_rewards` returned last, for the tape; None if nobody asked.

    Raises:
        ValueError: a setting is out of range, or two settings contradict each other.
    """

    _is_kept_open = False

    def __init__(
        self,
        model: str | None = None,
        prompts: Records | None = None,
        reward: Reward | Mapping[str, Reward] | None = None,
        engine: RolloutEngine | None = None,
        max_staleness: int = 4,
        admission: AdmissionPolicy | None = None,
        groups_per_step: int = 16,
        group_size: int = 8,
        micro_batches_per_step: int = 1,
        stream_groups: bool = False,
        weight_sync_steps: int = 1,
        seed: int = 0,
        shuffle: bool = True,
        curriculum: Curriculum | None = None,
        filters: list[GroupFilter] | None = None,
        sampling: SamplingParams = SamplingParams(),  # noqa: B008  frozen
        replicate_prompts: bool = False,
        advantage: AdvantageEstimator | None = None,
        aggregation: Aggregation | None = None,
        scoring: Scoring = Scoring(),  # noqa: B008  frozen
        validation: Validation = Validation(),  # noqa: B008  frozen
        replay: ReplayBuffer | None = None,
        limits: Limits = Limits(),  # noqa: B008  frozen
    ) -> None:
        given = dict(locals())
        super().__init__()
        model = None if model is None else expanded(model)
        self.model = model
        self._codec = None if model is None else TextCodec(model, scoring.special_tokens)
        self.prompts = as_source(prompts, "data.prompts")
        if isinstance(reward, Mapping):  # a file's is written out as the class, see `write_out_rewards`
            reward = CombinedReward(reward)
        if reward is not None:
            check_reward(reward)
            reward = as_reward_function(reward)
        check_kinds("data", RolloutDataModule.__init__, given)
        self.admission = admission or Bounded()
        self.intake = Intake(filters, curriculum, scoring.success_reward)
        self.stream_groups = stream_groups
        self.replicate_prompts = replicate_prompts
        self.val_sampling = validation.sampling or replace(sampling, head=None, experts=False)
        sampling = with_support(sampling, engine)
        is_sampled = not isinstance(engine, MultiRequestEngine)  # of a tape, too: validation has its environment
        self.tape = None
        if isinstance(self.admission, FromTape):
            self.tape = open_tape(self.admission, sampling, max_staleness)
        if self.tape is not None:
            engine = NoEngine(reward is None, engine)
        engine = engine or EmbeddedEngine(in_flight_weight_updates=not self.admission.in_order)
        for owner in (reward, getattr(engine, "environment", None), getattr(engine, "agent", None)):
            name_answers(owner, getattr(self.prompts, "answer_field", None))
        self.reward = reward
        self.groups_per_step = groups_per_step
        self.group_size = group_size
        self.micro_batches_per_step = micro_batches_per_step
        self.weight_sync_steps = weight_sync_steps
        check_range("data", "integer positive", groups_per_step=groups_per_step, group_size=group_size)
        check_range("data", "integer positive", micro_batches_per_step=micro_batches_per_step)
        check_range("data", "integer positive", weight_sync_steps=weight_sync_steps)
        check_range("data", f"<= {MANY}", groups_per_step=groups_per_step, group_size=group_size)
        check_range("data", f"<= {MANY}", **{"groups_per_step * group_size": groups_per_step * group_size})
        check_range("data", "integer", seed=seed)
        check_range("data", "integer >= 0", max_staleness=max_staleness)
        self.advantage = advantage or GroupMeanStd()
        self.aggregation = aggregation or TokenMean()
        self.sampling = sampling
        self.scoring = scoring
        self.limits = limits
        self.replay = replay
        self.validation = validation
        self.keep_groups_whole = False
        self.tree_costs: TreeCosts | None = None
        self._has_said_rows = False
        self.needs_single_rows = ""
        self.source_of: Callable[[Prompt], int] | None = None
        self.configured_bound = max_staleness
        rules.refuse(self._contradictions(engine, is_sampled))
        engine.check_sampling("data.sampling", sampling, 1 if replicate_prompts else group_size)
        self.fresh_per_step = groups_per_step if replay is None else replay.num_fresh(groups_per_step)
        self._began = datetime.now()
        use_run_time(self._began)
        self.stream = PromptStream(self.prompts, seed=seed, shuffle=shuffle)
        self._empty_replay = None if replay is None else replay.state_dict()
        self._reference_check = ReferenceCheck(None)
        self._make_source(engine)
        self._use_grader()

    def _contradictions(self, engine: RolloutEngine, is_sampled: bool) -> Iterator[str]:
        """Sentences of all broken rules; `is_sampled` says whether the engine itself samples held-out prompts."""
        filters = self.intake.filters
        yield from rules.of_engine(engine, self.reward, self.admission, sampling=self.sampling)
        yield from rules.of_rewards(
            self.reward,
            self.scoring.timeout_s,
            has_held_out=self.validation.source is not None,
            advantage=self.advantage,
            filters=filters,
        )
        yield from rules.of_validation(self.validation, self.sampling, is_sampled=is_sampled)
        yield from rules.of_order(
            self.admission,
            self.configured_bound,
            engine=engine,
            filters=filters,
            stream_groups=self.stream_groups,
            has_replay=self.replay is not None,
        )
        yield from rules.of_step(
            self.advantage,
            self.aggregation,
            stream_groups=self.stream_groups,
            groups_per_step=self.groups_per_step,
            group_size=self.group_size,
            micro_batches_per_step=self.micro_batches_per_step,
        )

    def __getstate__(self) -> Any:
        """Refuses to be pickled, as `ddp_spawn` of a Trainer would."""
        raise TypeError(
            "a RolloutDataModule cannot be pickled, because it holds locks, but trainer.strategy=ddp_spawn pickles it: "
            "use ddp, or ddp_notebook in a notebook"
        )

    def replace_engine(self, engine: RolloutEngine) -> None:
        """Lets another engine sample, before the first fit: one around the configured engine, say."""
        rules.refuse(rules.of_engine(engine, self.reward, self.admission, sampling=self.sampling))
        self._make_source(engine)
        self._use_grader()

    def replace_reward(self, reward: Reward) -> None:
        """Lets another reward score, before the first fit: one that calls the configured reward elsewhere, say."""
        self.reward = reward
        self._use_grader()

    def _use_grader(self) -> None:
        self._identities: dict[str, str | None] | None = None  # from the beginning on
        self.intake.use_grader(self._grader)
        # without spans: the reward workers' lanes of a timeline are those of training
        make_scorer = partial(self.scoring.make_scorer, self.reward, records_spans=False)
        self.held_out = HeldOut(self.validation, self.val_sampling, make_scorer, grader=self._grader)

    def _make_source(self, engine: RolloutEngine) -> None:
        """Makes the parts that serve a single fit."""
        self._logged_rows = LoggedRows()
        self.arrived_rewards: list[float] | None = None
        engine.special_tokens = self.scoring.special_tokens
        self._slots = self.admission.make(self.fresh_per_step * self.weight_sync_steps, self.configured_bound)
        self._source = RolloutSource(
            engine=engine,
            model=self.model,
            admission=self._slots,
            make_producer=self._make_producer,
            collate=self._collate,
            aggregation=self.aggregation,
            groups_per_step=self.groups_per_step,
            fresh_per_step=self.fresh_per_step,
            micro_batches_per_step=self.micro_batches_per_step,
            streams=self.stream_groups,
            replay=self.replay,
            limits=self.limits,
            should_stop=lambda: self.is_asked_to_stop or bool(self.trainer and self.trainer.received_sigterm),
        )
        self.feed = RolloutFeed(self._source, self.micro_batches_per_step)

    def _make_producer(self, step: int) -> Producer | Replay:
        if self.tape is not None:
            return Replay(self.tape, step, self._slots)
        producer = Producer(
            engine=self.engine,
            stream=self.stream,
            codec=self.codec,
            scorer=self.scoring.make_scorer(self.reward),
            admission=self._slots,
            group_size=self.group_size,
            sampling=self.sampling,
            timeout_s=self.limits.rollout_timeout_s,
            intake=self.intake,
            replicate_prompts=self.replicate_prompts,
            identities=self._identities,
        )
        self._check_references()
        return producer

    def _collate(self, groups: Sequence[RolloutGroup], **settings: Any) -> list[RolloutBatch]:
        batches = collate_step(
            groups,
            advantage=self.advantage,
            pad_token_id=self.codec.pad_token_id,
            temperature=self.sampling.temperature,
            truncated=self.sampling.truncates and self.engine.has_model,
            keep_groups_whole=self.keep_groups_whole,
            tree_costs=self.tree_costs,
            needs_single_rows=self.needs_single_rows,
            source_of=self.source_of,
            **settings,
        )
        if (reason := batches[0].as_rows) and not self._has_said_rows:
            self._has_said_rows = True
            log.warning(
                "model.packing: in steps like this one, rows are computed separately, not as trees of shared "
                "prefixes: %s",
                reason,
            )
        return batches

    @property
    def shares_prefixes(self) -> bool:
        """Whether prefixes are computed once."""
        return self.tree_costs is not None

    # -- model and tokenizer ------------------------------------------------------------------------------------------

    def use_model(self, model: str) -> None:
        """Sets the name of the model, unless one was given."""
        if self.model is None:
            self._codec = TextCodec(model, self.scoring.special_tokens)
            self.model = model
            self._source.use_model(model)

    @property
    def codec(self) -> TextCodec:
        """The model's tokenizer.

        Raises:
            SetupError: the model is not set yet.
        """
        if self._codec is None:
            raise SetupError(
                "data.model is not set: set it, or add the WeightSync callback, which sets it to model.model"
            )
        return self._codec

    # -- state of the run, for callbacks ------------------------------------------------------------------------------

    @property
    def validates(self) -> bool:
        """Whether there are held-out prompts."""
        return self.validation.source is not None

    def saved_state(self, checkpoint: Mapping[str, Any]) -> dict[str, Any] | None:
        """The state of a run in a checkpoint, also under the name of another class; None if this run needs none.

        Raises:
            ValueError: there is no such state, or several.
        """
        if self.tape is not None:
            return None
        own: dict[str, Any] | None = checkpoint.get(type(self).__qualname__)
        if own is not None:
            return own
        found: list[dict[str, Any]] = [value for value in checkpoint.values() if is_producer_state(value)]
        if not found and checkpoint["global_step"] == 0:  # saved before anything was sampled
            return None
        if len(found) != 1:
            raise ValueError(
                f"the checkpoint holds {len(found)} states of a RolloutDataModule instead of one, so rollouts "
                f"and the position in data.prompts would be lost. {START_ANEW}"
            )
        return found[0]

    def note_progress(self) -> None:
        """Reports that this rank is alive; for callbacks that run long while other ranks wait."""
        self.feed.ranks.progress.report_progress()

    @property
    def engine(self) -> RolloutEngine:
        """The engine in use; replaced by a new one after a restart."""
        return self._source.engine

    @property
    def engine_restarts(self) -> str:
        """Number of engines that failed in this run, and the last error; empty without one."""
        return self._source.engine_restarts

    @property
    def max_staleness(self) -> int:
        """Staleness bound of groups admitted from now on, in versions."""
        return self._source.max_staleness

    @property
    def groups_per_round(self) -> int:
        """Fresh groups trained on between two publications of the weights."""
        return self._slots.groups_per_round

    @property
    def _trainer(self) -> AnyTrainer:
        if self.trainer is None:
            raise SetupError("a RolloutDataModule was used without a Trainer: call `trainer.fit(..., datamodule=data)`")
        return self.trainer

    @property
    def is_asked_to_stop(self) -> bool:
        """Whether SIGTERM was received, on any rank of a distributed run."""
        return self.trainer is not None and self.feed.ranks.is_asked_to_stop(self.trainer)

    def set_max_staleness(self, max_staleness: int) -> None:
        """Changes the staleness bound during training; groups already admitted keep theirs."""
        rules.refuse(rules.of_new_bound(self.admission))
        check_range("data", "integer >= 0", max_staleness=max_staleness)
        if max_staleness != self.max_staleness:
            self.feed.set_max_staleness(max_staleness)

    def watch_rewards(self) -> None:
        """Keeps rewards by the version that sampled them, for `take_rewards`; called before training starts."""
        self.intake.arrived = {}

    def take_rewards(self) -> list[float]:
        """Mean reward of each version whose groups are all scored, oldest first, each once.

        Rewards count when they arrive, long before training, and before filters. Call it once a step. A collective;
        with in-order admission (`FixedLag`) it waits for all earlier versions.
        """
        self.arrived_rewards = rewards = self.feed.take_rewards()
        return rewards

    def discard_after(self, version: int) -> None:
        """Discards, at the next publication, what later versions have sampled; call it on all ranks."""
        self.feed.discard_after(version)

    @property
    def last_step_groups(self) -> Sequence[RolloutGroup]:
        """Groups of the current step; when groups are streamed, those received so far."""
        return self._source.groups

    def stats(self) -> ProducerStats | None:
        """Totals of sampling and scoring since the start; None before it."""
        return self._source.stats()

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Begins the next row of the loggers, in the first hook of a micro-batch."""
        if self.trainer is not None and self.trainer.training:
            self._logged_rows.begin(self.trainer)
        return batch

    def train_dataloader(self) -> Iterable[RolloutBatch]:
        """Collated micro-batches as a sized iterable, to which a `DataLoader` has nothing to add."""
        self.feed.trainer = self._trainer
        return self.feed

    def val_dataloader(self) -> Iterable[PromptBatch]:
        """Held-out prompts in batches."""
        return self.held_out.batches(self.codec, self._trainer.global_rank, self._trainer.world_size)

    def test_dataloader(self) -> Iterable[PromptBatch]:
        """Held-out prompts in batches, as in a validation.

        Raises:
            ValueError: there are none.
        """
        if self.validation.source is None:
            raise ValueError("data.validation.prompts is not set: there is nothing to test on")
        return self.val_dataloader()

    def predict_dataloader(self) -> Iterable[PromptBatch]:
        """Held-out prompts in batches or, without any, the training prompts in their order."""
        trainer = self._trainer
        source = self.validation.source or self.prompts
        return self.held_out.batches(self.codec, trainer.global_rank, trainer.world_size, source=source)

    def setup(self, stage: str) -> None:
        """Connects the ranks. A second fit starts over, from the first prompt and with a fresh engine."""
        rules.refuse(rules.of_tuner(self._trainer.callbacks))
        if not self._is_kept_open:
            self._begin()
        if stage == "fit" and self._source.has_begun:
            self.stream.position = 0
            self.intake.reset()
            if self.replay is not None and self._empty_replay is not None:
                self.replay.load_state_dict(self._empty_replay)
            self._make_source(self.engine.fresh())
            self._began = datetime.now()
        self._began = self._trainer.strategy.broadcast(self._began)  # ranks may start on two sides of midnight
        use_run_time(self._began)
        if hooks.wants_folder(self.reward) and self._trainer.loggers:
            folder = self._trainer.log_dir  # a collective; all ranks have the same reward
            if folder is not None and "://" not in folder:
                hooks.use_folder(self.reward, Path(folder))
        self.feed.ranks = connect(
            self._trainer,
            stall_s=self.limits.rollout_timeout_s,
            silence_s=self.limits.rank_timeout_s,
            on_abandon=self.stop,
        )

    @property
    def _grader(self) -> Any:
        """The source of rewards: `data.reward`, or the environment of the engine."""
        if self.reward is None and isinstance(self.engine, EpisodeEngine):
            return self.engine.grader()
        return self.reward

    def _check_references(self) -> None:
        """Begins to run a grader on its own references, in the background."""
        self._reference_check.close()
        self._reference_check = ReferenceCheck(self._grader, self.scoring.timeout_s)
        sources = [("data.prompts", self.prompts)]
        if (held_out := self.validation.source) is not None:
            sources.append(("data.validation.prompts", held_out))
        self._reference_check.start((name, sample_prompts(source)) for name, source in sources)

    def state_dict(self) -> dict[str, Any]:
        """Every group admitted and not yet trained on, see `lit_async_rl.rollouts.resume`."""
        state = self._source.state_dict(0 if self.trainer is None else self.trainer.global_step)
        reward_state = hooks.save_state(self.reward)
        state = state | {BEGAN: self._began.isoformat()}  # a new one: before the start it is what was loaded
        return state | {REWARD_STATE: reward_state} if reward_state else state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Stores the state; it is restored when the engine has its weights."""
        hooks.restore_state(self.reward, state_dict.get(REWARD_STATE, {}))
        self._go_on_from(state_dict)
        kept = {name: value for name, value in state_dict.items() if name not in (REWARD_STATE, BEGAN)}
        self._source.load_state_dict(kept)

    def _go_on_from(self, state: Mapping[str, Any]) -> None:
        """Tells chat templates when the checkpoint's run began; older checkpoints do not have it."""
        if BEGAN in state:
            self._began = datetime.fromisoformat(state[BEGAN])
            use_run_time(self._began)

    def check_resumable(self, state: Mapping[str, Any]) -> None:
        """Checks that this run, which has its model, can go on with a saved state's prompts and groups.

        Raises:
            ValueError: prompts, their order or the tokenizer have changed, or the state is from the middle of a round
                of another length.
        """
        self._go_on_from(state)
        if TAPE not in state:  # that of a replay says nothing of prompts
            check_prompts(state, self.stream, self.codec)
            self._slots.check_round(state["admission"])

    def stop(self) -> None:
        """Stops the background thread and closes the engine. Safe to call twice."""
        self._reference_check.close()
        self.held_out.close()
        self._source.stop()
        self._end()

    def _end(self) -> None:
        """Closes environment and reward, unless the run goes on after this fit."""
        if not self._is_kept_open:
            return_to_begin()
            self._source.end()
            hooks.close(self.reward)

    @contextmanager
    def kept_open(self) -> Iterator[None]:
        """Context of a run of several fits and validations: closes what their engines share at its end.

        Without it an environment is closed at the end of each of them.
        """
        self._is_kept_open = True
        self._begin()
        try:
            yield
        finally:
            self._is_kept_open = False
            self._end()

    def _begin(self) -> None:
        """Takes the identities of what makes rewards before the first reward, also in a validation before training."""
        begin_here()
        self._identities = identities_of(self.reward, self.engine, self.intake)

    def teardown(self, stage: str) -> None:
        if stage == "fit":
            self.stop()
        self.held_out.close()
        self._end()
        self.feed.ranks.close()

    def on_exception(self, exception: BaseException) -> None:
        """Tells the other ranks, then stops; Lightning does not call `teardown` after an exception."""
        self.feed.ranks.fail(exception)
        self.stop()
        self.feed.ranks.close()
