"""Lightning's fit loop as a generator that stops at every hook, around the real data module, weight sync and guard.

What is ours is the real thing: `RolloutDataModule` (without tokenizer and ranks), its feed, source, batches and
producer, `PolicyModule`'s checkpoint and step logic, `WeightSync`. Lightning is a model of what its 2.6 loops do with
their counters. The policy is a number, and what it becomes depends on every token it was trained on.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.loops.progress import _BatchProgress
from torch.optim import Optimizer

from benchmarks.state_machine.parts import (
    NumberCodec,
    NumberedPrompts,
    VirtualEngine,
    VirtualProducer,
    VirtualScorer,
    mix,
)
from lit_async_rl.advantages.group import Raw
from lit_async_rl.callbacks.run.weight_sync import WeightSync
from lit_async_rl.data.collate import collate_step
from lit_async_rl.data.dataloaders import StepFeed
from lit_async_rl.data.module import RolloutDataModule
from lit_async_rl.data.rollout_source import RolloutSource
from lit_async_rl.data.step_batches import StepBatches
from lit_async_rl.distributed.scatter import OneProcess
from lit_async_rl.engines.base import SamplingParams
from lit_async_rl.losses.aggregation import TokenMean
from lit_async_rl.prompts.stream import PromptStream
from lit_async_rl.rollouts.intake import Intake
from lit_async_rl.scheduling.admission import Admission
from lit_async_rl.scheduling.policies import AdmissionPolicy, Bounded, Drop, FixedLag, Retry, Ring
from lit_async_rl.training.module import PolicyModule
from lit_async_rl.training.whole_steps import WholeSteps
from lit_async_rl.types import RolloutBatch

MODEL = "RolloutDataModule"  # key of the data module's state


@dataclass(frozen=True, kw_only=True)
class VirtualSettings:
    """Of a run; `kind` is `fixed_lag`, `free`, `ratio`, `redundant`, `ring`, `drop` or `retry`."""

    kind: str = "free"
    max_staleness: int = 1
    groups_per_step: int = 2
    group_size: int = 2
    micro_batches: int = 1
    sync_steps: int = 1
    streams: bool = False
    in_flight: bool = False
    replicates: bool = False
    max_steps: int = 8
    skips: bool = False
    reward_tries: int | None = 3

    @property
    def is_exact(self) -> bool:
        """Whether the run must equal the plain loop."""
        return self.kind == "fixed_lag"

    @property
    def is_lossless(self) -> bool:
        """Whether every group that was admitted must be trained on."""
        return self.kind in ("fixed_lag", "free", "ratio")

    def admission(self) -> Admission:
        """The rule."""
        per_round = self.groups_per_step * self.sync_steps
        policies: dict[str, AdmissionPolicy] = {
            "fixed_lag": FixedLag(),
            "ratio": Bounded(async_ratio=self.max_staleness / 2),
            "redundant": Bounded(redundant_groups=1),
            "drop": Drop(ahead=2.0),
            "retry": Retry(ahead=2.0),
            "ring": Ring(num_sampling=per_round + 1, capacity=per_round),
        }
        return policies.get(self.kind, Bounded()).make(per_round, self.max_staleness)

    def skips_step(self, step: int) -> bool:
        """Whether a stabilizer drops the gradient of a step."""
        return self.skips and mix(step, 17) % 5 == 0


class VirtualData(RolloutDataModule):
    """The data module around virtual parts."""

    def __init__(self, settings: VirtualSettings, background: Callable[[], bool]) -> None:
        pl.LightningDataModule.__init__(self)
        self.settings, self.background = settings, background
        self.admission = FixedLag() if settings.is_exact else Bounded()
        self.micro_batches_per_step = settings.micro_batches
        self.weight_sync_steps, self._slots = settings.sync_steps, settings.admission()
        self.intake = Intake(replicate_prompts=settings.replicates)
        self.stream = PromptStream(NumberedPrompts(11), seed=3)
        self.scorer = VirtualScorer(settings.reward_tries)
        self.tape = None
        groups = settings.groups_per_step
        engine = VirtualEngine(settings.in_flight)
        self._source = RolloutSource(engine, "", self._slots, self._make_producer, groups, groups, None, 3)
        collate = partial(collate_step, advantage=Raw(), pad_token_id=0, temperature=1.0)
        self._batches = StepBatches(
            self._source, collate, TokenMean(), groups, settings.micro_batches, settings.streams
        )
        self._ranks, self._stream_weights = OneProcess(), None

    def _make_producer(self, step: int) -> VirtualProducer:
        return VirtualProducer(
            self.background,
            engine=self._source.engine,
            stream=self.stream,
            codec=NumberCodec(),
            scorer=self.scorer,
            admission=self._slots,
            group_size=self.settings.group_size,
            sampling=SamplingParams(max_tokens=8),
            timeout_s=1.0,
            intake=self.intake,
        )


class VirtualSync(WeightSync):
    """Publishes numbers."""

    def link(self, trainer: Any, module: PolicyModule, data: RolloutDataModule) -> None:
        """There is no tokenizer and no accumulation to agree on."""


class VirtualPolicy(PolicyModule):
    """A number that is trained by adding numbers."""

    def __init__(self, saw: Callable[[RolloutBatch, int], None]) -> None:
        WholeSteps.__init__(self)
        self.version, self.weights, self.gradient = 0, 1, 0
        self._updated, self._saw = False, saw

    def setup(self, stage: str) -> None:
        """There is no tokenizer to check."""
        WholeSteps.setup(self, stage)

    def training_step(self, batch: RolloutBatch, batch_idx: int) -> Any:
        """Checks as the real one does."""
        self.guard.admit(batch, batch_idx, self.trainer.global_step, self.version)
        self._saw(batch, self.version)

    def on_after_backward(self) -> None:
        """There is no gradient to scale."""
        WholeSteps.on_after_backward(self)

    def stream_weights(self) -> Iterator[tuple[str, Any]]:
        """The number."""
        yield "weights", self.weights

    def log(self, *args: Any, **kwargs: Any) -> None:
        """Nobody reads it."""


def rows_of(batch: RolloutBatch) -> list[tuple[int, tuple[int, ...], tuple[int, ...]]]:
    """Group, tokens and versions of each row that is not padding."""
    masks, tokens, versions = batch.loss_mask.tolist(), batch.input_ids.tolist(), batch.versions.tolist()
    return [
        (
            group,
            tuple(t for t, m in zip(ids, mask, strict=True) if m),
            tuple(v for v, m in zip(vs, mask, strict=True) if m),
        )
        for group, ids, vs, mask in zip(batch.group_index.tolist(), tokens, versions, masks, strict=True)
        if group >= 0
    ]


def gradient_of(group: int, tokens: tuple[int, ...]) -> int:
    """What a rollout adds to the gradient: a sum, so that order and micro-batches do not matter."""
    return mix(group, *tokens)


class VirtualOptimizer(Optimizer):
    """Shows what it would step."""

    def __init__(self, parameter: Any) -> None:
        self.param_groups = [{"params": [parameter]}]


@dataclass
class VirtualTrainer:
    """As much of `lightning.pytorch.Trainer` as the parts around it look at; `fit` stops at every hook.

    Attributes:
        files: what `save_checkpoint` wrote.
        note: what the caller adds to a file.
    """

    settings: VirtualSettings
    datamodule: VirtualData
    module: VirtualPolicy
    note: Callable[[], dict[str, Any]]
    max_steps: int
    files: dict[str, Any] = field(default_factory=dict)
    global_step: int = 0
    should_stop: bool = False
    received_sigterm: bool = False
    sanity_checking: bool = False
    world_size: int = 1

    def __post_init__(self) -> None:
        self.accumulate_grad_batches = self.settings.micro_batches
        self.sync, self.state = VirtualSync(), SimpleNamespace(fn="fit")
        self.progress = _BatchProgress()
        self.parameter = SimpleNamespace(grad=None)
        self.optimizers = [VirtualOptimizer(self.parameter)]
        self.datamodule.trainer = self  # type: ignore[assignment]
        self.module._trainer = self  # type: ignore[assignment]

    def save_checkpoint(self, path: str, weights_only: bool | None = None, storage_options: Any = None) -> None:
        """In the order in which Lightning asks for states."""
        optimizer = {"global_step": self.global_step, "weights": self.module.weights}
        loops = {"fit_loop": {"epoch_loop.batch_progress": self.progress.state_dict()}}
        checkpoint: dict[str, Any] = {"loops": loops, "state_dict": {}, **optimizer, "note": self.note()}
        self.sync.on_save_checkpoint(self, self.module, checkpoint)  # type: ignore[arg-type]
        checkpoint[MODEL] = self.datamodule.state_dict()
        self.module.on_save_checkpoint(checkpoint)
        self.files[path] = copy.deepcopy(checkpoint)

    def _load(self, checkpoint: dict[str, Any]) -> None:
        self.datamodule.load_state_dict(checkpoint[MODEL])
        self.module.on_load_checkpoint(checkpoint)
        self.sync.on_load_checkpoint(self, self.module, checkpoint)  # type: ignore[arg-type]
        self.module.weights, self.global_step = checkpoint["weights"], checkpoint["global_step"]
        self.progress.load_state_dict(checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"])

    def _begin(self, length: int) -> None:
        """`_TrainingEpochLoop.reset` after a resume."""
        total: Any = self.progress.total
        is_at_batch_end = total.ready == total.started == total.processed == total.completed + 1
        if is_at_batch_end:
            self.progress.increment_completed()
            if self.progress.current.completed >= length:
                self.progress.reset_on_run()
        self.progress.reset_on_restart()

    @property
    def _is_done(self) -> bool:
        return self.global_step >= self.max_steps or self.should_stop

    def fit(self, checkpoint: dict[str, Any] | None = None) -> Iterator[str]:
        """Stops in every hook, and says which."""
        module, sync = self.module, self.sync
        module.setup("fit")
        sync.setup(self, module, "fit")  # type: ignore[arg-type]
        if checkpoint is not None:
            self._load(checkpoint)
        yield "on_fit_start"
        feed = self.datamodule.train_dataloader()
        if not self._is_done:
            self._begin(len(feed))
            yield "on_train_start, first"
            sync.on_train_start(self, module)  # type: ignore[arg-type]
            yield "on_train_start"
        while not self._is_done:
            yield from self._epoch(feed)
            self.progress.reset_on_run()
        yield "on_train_end"
        module.teardown("fit")

    def _epoch(self, feed: StepFeed) -> Iterator[str]:
        fetched, current, length = self.progress.current.ready, self.progress.current, len(feed)
        while not self._is_done and not self.progress.is_last_batch:
            try:
                batch = next(feed)
            except StopIteration:
                return
            fetched += 1
            self.progress.is_last_batch = fetched >= length
            batch_idx = current.ready
            self.progress.increment_ready()
            yield "on_train_batch_start"
            self.progress.increment_started()
            yield from self._micro_batch(batch, batch_idx)
            self.progress.increment_processed()
            yield "on_train_batch_end, first"
            self.sync.on_train_batch_end(self, self.module, None, batch, batch_idx)  # type: ignore[arg-type]
            yield "on_train_batch_end"
            self.module.on_train_batch_end(None, batch, batch_idx)
            self.progress.increment_completed()
            yield "on_advance_end"

    def _micro_batch(self, batch: RolloutBatch, batch_idx: int) -> Iterator[str]:
        module = self.module
        module.training_step(batch, batch_idx)
        if batch_idx % self.accumulate_grad_batches == 0:
            yield "on_before_zero_grad"
            module.gradient = 0
        yield "on_before_backward"
        module.gradient += sum(gradient_of(group, tokens) for group, tokens, _ in rows_of(batch))
        self.parameter.grad = None if self.settings.skips_step(self.global_step) else module.gradient
        yield "on_after_backward"
        module.on_after_backward()
        if self.progress.current.ready % self.accumulate_grad_batches and not self.progress.is_last_batch:
            return
        yield "on_before_optimizer_step"
        module.on_before_optimizer_step(self.optimizers[0])  # type: ignore[arg-type]
        if self.parameter.grad is not None:
            module.weights = mix(module.weights, module.gradient)
        yield "after the optimizer's step"
        self.global_step += 1
