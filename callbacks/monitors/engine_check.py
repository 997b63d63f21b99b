"""Check of the engine: its log-probabilities against the trainer's, at equal weights."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.optim import Optimizer

from lit_async_rl.callbacks.parts import policy_module, rollout_data
from lit_async_rl.distributed.ranks import num_copies
from lit_async_rl.engines.base import default_bound
from lit_async_rl.errors import EngineError
from lit_async_rl.importance import sum_over_ranks
from lit_async_rl.models.weights import copy_weights, is_wrapped, num_bytes, with_weights
from lit_async_rl.training.module import PolicyModule
from lit_async_rl.training.probe import can_be_called, compute_dtype
from lit_async_rl.training.token_stats import token_stats
from lit_async_rl.types import RolloutBatch
from lit_async_rl.utils.checks import check_range
from lit_async_rl.utils.lightning_types import AnyModule, AnyTrainer

UPDATES_BETWEEN_LARGE_COPIES = 10  # publications between two checks if copies of the weights are large
MAX_FREQUENT_COPY_BYTES = 2**30  # largest size of all copies, on all ranks together, to check every version
OTHER_POLICY = 1.0  # nats: a mean difference that no precision explains, and with which nothing can be learned
SMALL_SAMPLE_TOKENS = 8  # number of tokens at which the bound doubles, because means of few tokens vary
log = logging.getLogger(__name__)


class EngineCheck(pl.Callback):
    """Replays a few completions with the weights that sampled them and compares log-probabilities.

    Wrong weights, a wrong model implementation or a wrong sampler setting show up as importance ratios other than 1 on
    data of the current version. Staleness hides them, so equal versions are compared: the trainer keeps a CPU copy of
    its weights until completions of that version arrive, and recomputes log-probabilities of a few with it before
    training on them. Tokens from the first one of another version on are left out, because their KV cache mixes
    versions. Neither random numbers nor weights change.

    Logs `engine/logprob_error`, the mean absolute difference in nats over the replayed tokens, and
    `engine/logprob_error_max`, the largest. Expected values are about 1e-6 to 1e-5 in float32, up to a few 1e-4 with
    TF32, and 2e-3 to 4e-2 in bfloat16. Above `bound` the run warns or ends.

    Tapes and engines without a model are not checked, and under FSDP1 only the current version is.

    Args:
        every_n_updates: weight publications between two checks; the first version is always checked. None checks every
            version if its copies take less than 1 GiB on all ranks together, else every 10th. Beyond 1 GiB, only a
            single copy is ever kept.
        num_rollouts: completions replayed per rank and check.
        bound: largest mean difference in nats; None is 1e-4 in float32 on CPUs, 2e-3 in float32 on accelerators, 0.03
            in float16 and 0.1 in bfloat16. It is multiplied by 1 + 8 / n for n tokens, because means of few vary: 4
            tokens of a correct engine in bfloat16 differed by 0.12.
        on_error: reaction to a larger difference: `warn`, or `stop` by raising `EngineError`. Above 1 nat the run
            always ends: the engine then samples from another policy.

    Attributes:
        num_checks: versions compared since training began.
        replayed: log-ratios and the engine's log-probabilities of this rank's tokens replayed with older weights in
            this step; `FreshDataMonitor` reads them.

    Raises:
        ValueError: a setting is out of range.
    """

    def __init__(
        self,
        every_n_updates: int | None = None,
        num_rollouts: int = 4,
        bound: float | None = None,
        on_error: Literal["warn", "stop"] = "warn",
    ) -> None:
        check_range("EngineCheck", "integer >= 1", every_n_updates=every_n_updates, num_rollouts=num_rollouts)
        check_range("EngineCheck", "> 0", bound=bound)
        self.every_n_updates = every_n_updates
        self.num_rollouts = num_rollouts
        self.bound = bound
        self.on_error = on_error
        self._is_enabled = False
        self.replayed: list[tuple[Tensor, Tensor]] = []
        self._num_restarts = 0
        self._reset()

    def _reset(self) -> None:
        self._copies: dict[int, dict[str, Tensor] | None] = {}  # versions to check; None before they are copied
        self.num_checks = 0
        self._version = -1
        self._published_at = -1
        self._last_planned = -1
        self._pending_metrics: dict[str, float] = {}

    def on_train_start(self, trainer: AnyTrainer, pl_module: AnyModule) -> None:
        """Plans the check of the first version."""
        module = policy_module(pl_module, "EngineCheck")
        data = rollout_data(trainer, "EngineCheck")
        self._is_enabled = data.tape is None and data.engine.has_model and can_be_called(module)
        self._num_restarts = data.feed.num_restarts
        self._reset()
        if module.is_changed:  # a resume: restored rollouts came from older weights with the same version number
            self._version = module.version
            self._last_planned = module.version

    def on_train_batch_start(self, trainer: AnyTrainer, pl_module: AnyModule, batch: Any, batch_idx: int) -> None:
        """Replays rollouts of the versions to be checked. A collective, once per step."""
        self.replayed = []
        if not self._is_enabled or not isinstance(batch, RolloutBatch) or batch.micro_batch != 0:
            return
        module = policy_module(pl_module, "EngineCheck")
        data = rollout_data(trainer, "EngineCheck")
        if module.version != self._version:
            self._plan(trainer, module, data.max_staleness)
        # an engine that was restarted since has the present weights, under the number of the last publication
        if data.feed.num_restarts != self._num_restarts:
            self._num_restarts = data.feed.num_restarts
            if not self._is_current(trainer, module):
                self._copies.pop(module.version, None)
        versions = sorted(self._copies)
        if not versions:
            return
        masks = [tokens_of(batch, version) for version in versions]
        present = torch.tensor([float(mask.any()) for mask in masks], device=module.device)
        # every rank must decide alike: the replay of a sharded model is a collective
        num_ranks = sum_over_ranks(present).tolist()  # with tokens of each version
        for version, mask, is_present in zip(versions, masks, num_ranks, strict=True):
            copies = self._copies[version]
            is_current = self._is_current(trainer, module) and version == module.version
            if is_present and (is_current or copies is not None):
                sums = self._compare(trainer, module, batch, mask=mask, copies=copies)
                self._check_version(trainer, data, version, sums=sums)
                del self._copies[version]

    def on_before_optimizer_step(self, trainer: AnyTrainer, pl_module: AnyModule, optimizer: Optimizer) -> None:
        """Copies the weights of a planned version before the update changes them."""
        module = policy_module(pl_module, "EngineCheck")
        version = module.version
        if is_wrapped(module.policy):
            return
        if version in self._copies and self._copies[version] is None and self._is_current(trainer, module):
            self._copies[version] = copy_weights(module.policy)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        for name, value in self._pending_metrics.items():
            pl_module.log(name, value)
        self._pending_metrics = {}

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._copies = {}

    def _plan(self, trainer: AnyTrainer, module: PolicyModule, max_staleness: int) -> None:
        """Records a new publication, and plans its check if one is due."""
        self._version = module.version
        self._published_at = trainer.global_step
        max_copies = max(1, MAX_FREQUENT_COPY_BYTES // num_bytes(module.policy))
        every = self.every_n_updates or (1 if max_staleness < max_copies else UPDATES_BETWEEN_LARGE_COPIES)
        late = [version for version in self._copies if version < module.version - 2 * max_staleness - 1]
        for version in late:  # none of its tokens came
            del self._copies[version]
        is_due = self._last_planned < 0 or module.version - self._last_planned >= every
        if is_due and len(self._copies) < max_copies:
            self._last_planned = module.version
            self._copies[module.version] = None

    def _is_current(self, trainer: AnyTrainer, module: PolicyModule) -> bool:
        """Whether the present weights equal the last publication. The same on every rank."""
        return trainer.global_step == self._published_at and not module.is_changed

    @torch.no_grad()
    def _compare(
        self,
        trainer: AnyTrainer,
        module: PolicyModule,
        batch: RolloutBatch,
        mask: Bool[Tensor, "B T"],
        copies: Mapping[str, Tensor] | None,
    ) -> Float[Tensor, " 3"]:
        """Sum of the absolute differences on this rank, their number and their maximum."""
        rows = torch.nonzero(mask.any(1))[: self.num_rollouts, 0]
        if not len(rows):  # a forward pass all the same: ranks of a sharded model wait for each other
            rows = torch.zeros(1, dtype=torch.long, device=mask.device)
        mask = mask[rows]
        length = max(2, int(mask.any(0).nonzero().max()) + 1) if mask.any() else 2
        few = batch.select(rows, length).replace(loss_mask=mask[:, :length])
        mask = few.loss_mask
        with with_weights(module.policy, copies), trainer.precision_plugin.train_step_context():
            stats = token_stats(module.policy, few, experts=few.experts)  # as in training
        log_ratio = torch.where(mask, stats.logprobs - few.behavior_logprobs, 0.0)
        if copies is not None:  # with the present weights they are fresh tokens of the step already
            self.replayed.append((log_ratio[mask], few.behavior_logprobs[mask]))
        error = log_ratio.abs().float()
        return torch.stack([error.sum(), mask.sum().float(), error.max()])

    def _check_version(self, trainer: AnyTrainer, data: Any, version: int, sums: Float[Tensor, " 3"]) -> None:
        """Compares the differences of all ranks with the bound. A collective: all ranks call."""
        dtypes = compute_dtype(policy_module(trainer.lightning_module, "EngineCheck")), str(data.engine.dtype)
        bound = self.bound or default_bound(*dtypes) if trainer.is_global_zero else 0.0
        total, number = (sum_over_ranks(sums[:2]) / num_copies(trainer)).tolist()
        largest = float(trainer.strategy.reduce(sums[2], reduce_op="max"))
        # the maximum hands the leading rank's bound to all others: it alone has set the engine up and knows its dtype
        bound = float(trainer.strategy.reduce(torch.as_tensor(bound, device=sums.device), reduce_op="max"))
        error = total / number if number else 0.0
        self.num_checks += 1
        self._pending_metrics = {"engine/logprob_error": error, "engine/logprob_error_max": largest}
        bound = allowed_error(bound, number)
        if error <= bound:
            return
        name = type(data.engine).__name__
        reason = (
            f"{name} and trainer disagree about version {version}: the log-probabilities of {int(number)} sampled "
            f"tokens differ by {error:.2g} on average and {largest:.2g} at most; {'/'.join(sorted(set(dtypes)))} "
            f"explains {bound:.2g} on average (engine/logprob_error). The engine has other weights, "
            "or computes the model or its sampling distribution otherwise"
        )
        if self.on_error == "stop" or not error <= allowed_error(OTHER_POLICY, number):
            raise EngineError(reason)
        if trainer.is_global_zero:
            log.warning("%s. defaults.engine_check.on_error=stop ends the run here", reason)


def allowed_error(bound: float, num_tokens: float) -> float:
    """Largest mean difference over `num_tokens` tokens: `bound` for many, more for few."""
    return bound * (1 + SMALL_SAMPLE_TOKENS / max(num_tokens, 1))


def tokens_of(batch: RolloutBatch, version: int) -> Bool[Tensor, "B T"]:
    """Mask of the trained tokens of each row before the first one of another version."""
    is_other = batch.loss_mask & (batch.versions != version)
    return batch.loss_mask & (is_other.cumsum(1) == 0)
