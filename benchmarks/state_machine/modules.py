"""Data module, policy module and weight sync of the state machine, and the settings they are made from.

The data module is the real one without tokenizer and ranks; of the policy module the checkpoint and step logic is real.
The policy is a single number; its next value depends on every token it is trained on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import lightning.pytorch as pl

from benchmarks.state_machine.background import VirtualProducer, VirtualScorer
from benchmarks.state_machine.engine import NumberCodec, NumberedPrompts, VirtualEngine, mix
from lit_async_rl.advantages.group import Raw
from lit_async_rl.callbacks.run.weight_sync import WeightSync
from lit_async_rl.data.collate import collate_step
from lit_async_rl.data.module import RolloutDataModule
from lit_async_rl.data.rollout_source import RolloutFeed, RolloutSource
from lit_async_rl.data.settings import Limits
from lit_async_rl.engines.base import SamplingParams
from lit_async_rl.losses.aggregation import TokenMean
from lit_async_rl.prompts.stream import PromptStream
from lit_async_rl.rollouts.intake import Intake
from lit_async_rl.scheduling.admission import Admission, AdmissionPolicy, Bounded, Drop, FixedLag, Retry, Ring
from lit_async_rl.training.module import PolicyModule
from lit_async_rl.training.whole_steps import WholeSteps
from lit_async_rl.types import RolloutBatch


@dataclass(frozen=True, kw_only=True)
class VirtualSettings:
    """Settings of a run; `kind` is `fixed_lag`, `free`, `ratio`, `redundant`, `ring`, `drop` or `retry`."""

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
        """Whether every admitted group must be trained on."""
        return self.kind in ("fixed_lag", "free", "ratio")

    def admission(self) -> Admission:
        """Admission of these settings."""
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
    """The data module with virtual engine, scorer and tokenizer."""

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
        self._source = RolloutSource(
            engine=VirtualEngine(settings.in_flight),
            model="",
            admission=self._slots,
            make_producer=self._make_producer,
            collate=partial(collate_step, advantage=Raw(), pad_token_id=0, temperature=1.0),
            aggregation=TokenMean(),
            groups_per_step=settings.groups_per_step,
            fresh_per_step=settings.groups_per_step,
            micro_batches_per_step=settings.micro_batches,
            streams=settings.streams,
            replay=None,
            limits=Limits(),
        )
        self.feed = RolloutFeed(self._source, settings.micro_batches)

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
    """Weight sync without tokenizer and accumulation."""

    def link(self, trainer: Any, module: PolicyModule, data: RolloutDataModule) -> None:
        """Does nothing."""


class VirtualSavedWeights:
    """A number has nothing frozen."""

    def reduce(self, checkpoint: dict[str, Any], policy: Any) -> None:
        """Keeps everything."""

    def check(self, checkpoint: Any, policy: Any) -> None:
        """Accepts everything."""


class VirtualPolicy(PolicyModule):
    """Policy that is a number, trained by adding numbers."""

    def __init__(self, saw: Callable[[RolloutBatch, int], None]) -> None:
        WholeSteps.__init__(self)
        self.version, self.weights, self.gradient, self.scheduler = 0, 1, 0, None
        self._updated, self._saw, self.policy = False, saw, None  # type: ignore[assignment]
        self.saved_weights = VirtualSavedWeights()  # type: ignore[assignment]

    def setup(self, stage: str) -> None:
        WholeSteps.setup(self, stage)

    def training_step(self, batch: RolloutBatch, batch_idx: int) -> Any:
        """Checks the micro-batch as the real one does."""
        self.guard.admit(batch, batch_idx, self.trainer.global_step, self.version)
        self._saw(batch, self.version)

    def on_after_backward(self) -> None:
        WholeSteps.on_after_backward(self)

    def stream_weights(self, adapters: bool = False, known: Any = None) -> Iterator[tuple[str, Any]]:
        yield "weights", self.weights

    def log(self, *args: Any, **kwargs: Any) -> None:
        """Does nothing."""


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
    """Gradient of a rollout; a step's is the sum, so that order and micro-batches do not matter."""
    return mix(group, *tokens)
