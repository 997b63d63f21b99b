"""Data module, policy module and weight sync of the state machine, and the settings they are made from.

The data module is the real one without tokenizer and ranks; of the policy module the checkpoint and step logic is real.
The policy is a single number; its next value depends on every token it is trained on.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor

from lit_async_rl.advantages.group import Raw
from lit_async_rl.callbacks.run.weight_sync import WeightSync
from lit_async_rl.data.collate import collate_step
from lit_async_rl.data.module import RolloutDataModule
from lit_async_rl.data.rollout_source import RolloutFeed, RolloutSource
from lit_async_rl.data.settings import Limits
from lit_async_rl.engines.base import RolloutEngine
from lit_async_rl.errors import InvariantError, RewardError
from lit_async_rl.losses.aggregation import TokenMean
from lit_async_rl.models.end_tokens import EndTokens
from lit_async_rl.models.tokenizer import TextCodec
from lit_async_rl.problem import Prompt
from lit_async_rl.prompts.sources import PromptSource
from lit_async_rl.prompts.stream import PromptStream
from lit_async_rl.rewards.calls import score
from lit_async_rl.rewards.scorer import Scorer
from lit_async_rl.rollouts.engine_listener import EngineListener
from lit_async_rl.rollouts.group_wait import GroupWait
from lit_async_rl.rollouts.intake import Intake
from lit_async_rl.rollouts.producer import Producer
from lit_async_rl.runtime.retries import Retries, TryPolicy
from lit_async_rl.scheduling.admission import Admission, AdmissionPolicy, Bounded, Drop, FixedLag, Retry, Ring
from lit_async_rl.training.module import PolicyModule
from lit_async_rl.training.whole_steps import WholeSteps
from lit_async_rl.types import Completion, GenerationRequest, RolloutBatch, SamplingParams

# -- Listener, scorer and producer without threads: every transition is an explicit call ------------------------------
# Producer, group book, intake, admission and the bookkeeping of listener and scorer are the real ones.


class _NoThread:
    """Replaces a thread."""

    def __init__(self) -> None:
        self._alive = False

    def start(self) -> None:
        self._alive = True

    def join(self, timeout: float) -> None:
        self._alive = False

    def is_alive(self) -> bool:
        return self._alive


class VirtualListener(EngineListener):
    """Polls when `turn` is called."""

    def _new_thread(self) -> Any:
        return _NoThread()

    def turn(self) -> None:
        """One iteration of the thread's loop."""
        engine = self.engine
        try:
            if self.engine_error is None:
                for completion in self._poll(engine):
                    self._on_completion(completion)
            self._on_turn()
        except (RewardError, InvariantError, KeyError, ValueError) as error:
            self.error = error


class VirtualScorer(Scorer):
    """Scores one completion with each call of `step`."""

    def __init__(self, max_tries: int | None) -> None:
        self.reward = _reward
        self.max_tries = max_tries
        self.timeout_s = 1.0
        self.num_workers = 1
        self.identity = None
        self.keeps_rewards = False
        self.jobs: list[Any] = []
        self.given_up: list[int] = []  # groups
        self._busy_s = 0.0
        self._running = {}
        self._error = None
        self._is_closed = False
        self.policy = TryPolicy(owner="data.scoring", tries=max_tries)
        self._workers = {}
        self._retries = Retries(self.policy)
        self._pausing = []

    def _put(self, job: Any) -> None:
        """Queues a job; called by `submit` and for another try."""
        self.jobs.append(job)

    def step(self, chosen: int, fails: bool = False) -> None:
        """Scores one of the queued completions, or fails to."""
        job = self.jobs.pop(chosen % len(self.jobs))
        if not job.is_wanted():
            return
        try:
            if fails:
                self._fail(job, RewardError("a reward that fails"))
                if job.num_tries == self.max_tries:
                    self.given_up.append(job.give_up.args[0].index)
            else:
                job.done(score(_reward, job.prompt, job.completions[0]))
                self._retries.succeed()
        except RewardError as error:
            self._error = error


def _reward(prompt: Prompt, completion: str) -> float:
    return float(len(completion) % 2)


class VirtualWait(GroupWait):
    """Runs background transitions while the trainer waits."""

    background: Callable[[], bool]

    def until(self, ready: Callable[[], int | None], should_stop: Callable[[], bool] = lambda: False) -> int | None:
        """First number returned by `ready`; None to stop.

        Raises:
            InvariantError: no transition is left, so the wait would never end.
        """
        while True:
            self._listener.check_thread()
            if (found := ready()) is not None:
                return found
            if should_stop():
                return None
            self._listener.check_engine()
            if not self.background():
                raise InvariantError(f"the trainer waits for ever: {self._message(0.0)}")


class VirtualProducer(Producer):
    """A producer whose listener and waiting have no threads."""

    def __init__(self, background: Callable[[], bool], **settings: Any) -> None:
        super().__init__(**settings)
        self.changed = threading.Condition(threading.RLock())
        self.listener: VirtualListener = VirtualListener(
            settings["engine"], self.changed, self._collect, self.scorer.check
        )
        self.wait = VirtualWait(self.listener, self.book, self.scorer, 1.0, lambda: self._num_scored)
        self.wait.background = background


# -- Prompts, tokenizer and engine of the state machine: a token depends on weights, prompt, draw and position only


MODULUS = 2**61 - 1
LONGEST = 3  # tokens of a completion


def mix(*values: int) -> int:
    """Hash of integers, which depends on their order."""
    mixed = 1469598103
    for value in values:
        mixed = (mixed * 6364136223846793005 + value + 1442695040888963407) % MODULUS
        mixed ^= mixed >> 29
    return mixed


def sample_length(draw: int) -> int:
    """Number of tokens of a completion."""
    return 1 + mix(draw) % LONGEST


def sample_token(weights: int, prompt: int, draw: int, position: int) -> int:
    """A token of a completion; it depends on the weights that sampled it."""
    return mix(weights, prompt, draw, position) % 100_000


class NumberedPrompts(PromptSource):
    """Prompts whose single token is their number."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Prompt:
        return Prompt(text=str(index))


class NumberCodec(TextCodec):
    """Tokenizer of numbers."""

    vocab_size = 2**62
    special_tokens = "none"
    model = ""
    ends = EndTokens(ids=())
    vocabulary_digest = "numbers"

    def __init__(self) -> None:
        """Needs no tokenizer."""

    def encode(self, prompt: Prompt) -> tuple[int, ...]:
        return (int(prompt.text),)

    def decode(self, token_ids: Sequence[int], stop: Sequence[str] = (), stop_token_ids: Sequence[int] = ()) -> str:
        return ",".join(map(str, token_ids))


@dataclass
class _Running:
    request: GenerationRequest
    number: int
    draw: int
    tokens: list[int] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)

    def completion(self, reason: Any) -> Completion:
        return Completion(
            request_id=self.request.id,
            sample_index=self.number,
            token_ids=tuple(self.tokens),
            logprobs=(-1.0,) * len(self.tokens),
            versions=tuple(self.versions),
            finish_reason=reason,
        )


class VirtualEngine(RolloutEngine):
    """Engine that samples one token per call of `step`; its weights are a number."""

    busy_s = 0.0
    num_tokens = 0
    max_model_len = 2**31 - 1

    def __init__(self, in_flight_weight_updates: bool) -> None:
        self.in_flight_weight_updates = in_flight_weight_updates
        self.running: list[_Running] = []
        self.outbox: list[Completion] = []
        self.fault: Exception | None = None
        self.num_draws = self.weights = self.version = 0

    def setup(self, model: str) -> None:
        """Does nothing."""

    def _check(self) -> None:
        if self.fault is not None:
            raise self.fault

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """Starts all samples; their random draws depend only on their order."""
        self._check()
        for request in requests:
            for number in range(request.num_samples):
                self.running.append(_Running(request, number, self.num_draws))
                self.num_draws += 1

    def step(self, chosen: int) -> None:
        """Samples one token of a running sample."""
        sample = self.running[chosen % len(self.running)]
        known = sample.request.prompt_ids
        limit = sample.request.sampling.max_tokens
        sample.tokens.append(sample_token(self.weights, known[0], sample.draw, len(known) - 1 + len(sample.tokens)))
        sample.versions.append(self.version)
        self.num_tokens += 1
        if len(sample.tokens) >= min(limit, sample_length(sample.draw)):
            self.running.remove(sample)
            self.outbox.append(sample.completion("stop"))

    def poll(self, timeout_s: float) -> list[Completion]:
        self._check()
        found = self.outbox
        self.outbox = []
        return found

    def load_weights(self, version: int, weights: Iterable[tuple[str, Any]]) -> None:
        """Without in-flight updates finishes all running samples first."""
        self._check()
        while self.running and not self.in_flight_weight_updates:
            self.step(0)
        ((_, self.weights),) = list(weights)
        self.version = version

    def abort(self, request_ids: Sequence[int]) -> None:
        self._check()
        self.running = [sample for sample in self.running if sample.request.id not in request_ids]
        self.outbox = [completion for completion in self.outbox if completion.request_id not in request_ids]

    def partial_completions(self) -> list[Completion]:
        self._check()
        return [sample.completion("abort") for sample in self.running if sample.tokens]

    def random_state(self) -> Tensor:
        return torch.tensor([self.num_draws])

    def set_random_state(self, state: Tensor) -> None:
        self.num_draws = int(state[0])

    def close(self) -> None:
        """Does nothing."""


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
        self.settings = settings
        self.background = background
        self.admission = FixedLag() if settings.is_exact else Bounded()
        self.micro_batches_per_step = settings.micro_batches
        self.weight_sync_steps = settings.sync_steps
        self._slots = settings.admission()
        self.intake = Intake()
        self.stream = PromptStream(NumberedPrompts(11), seed=3)
        self.scorer = VirtualScorer(settings.reward_tries)
        self.tape = None
        self.reward = None
        self._began = datetime(2026, 1, 1)
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
            replicate_prompts=self.settings.replicates,
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
        pl.LightningModule.__init__(self)
        self.steps = WholeSteps()
        self.given = {}
        self.objective: Any = SimpleNamespace(distiller=None)
        self.version = 0
        self.weights = 1
        self.gradient = 0
        self.scheduler = None
        self._updated = False  # type: ignore[assignment]
        self._saw = saw
        self.policy = None
        self.saved_weights = VirtualSavedWeights()  # type: ignore[assignment]

    def setup(self, stage: str) -> None:
        self.steps.begin_fit(self.trainer)

    def training_step(self, batch: RolloutBatch, batch_idx: int) -> Any:
        """Checks the micro-batch as the real one does."""
        self.steps.guard.admit(batch, batch_idx, self.trainer.global_step, self.version)
        self._saw(batch, self.version)

    def on_after_backward(self) -> None:
        self.steps.guard.accumulated()

    def stream_weights(self, adapters: bool = False, known: Any = None) -> Iterator[tuple[str, Any]]:
        yield "weights", self.weights

    def log(self, *args: Any, **kwargs: Any) -> None:
        """Does nothing."""


def rows_of(batch: RolloutBatch) -> list[tuple[int, tuple[int, ...], tuple[int, ...]]]:
    """Group, tokens and versions of each row that is not padding."""
    masks = batch.loss_mask.tolist()
    tokens = batch.input_ids.tolist()
    versions = batch.versions.tolist()
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
