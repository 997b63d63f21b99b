"""Guard against an engine that samples from other weights, or computes other log-probabilities, than it says."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.optim import Optimizer

from lit_async_rl.callbacks.parts import policy_module, rollout_data
from lit_async_rl.engines.base import default_bound
from lit_async_rl.errors import EngineError
from lit_async_rl.importance import sum_over_ranks
from lit_async_rl.models.weights import copy_weights, is_wrapped, num_bytes, with_weights
from lit_async_rl.training.module import PolicyModule
from lit_async_rl.training.objective import on_support
from lit_async_rl.training.probe import can_be_called, compute_dtype
from lit_async_rl.types import RolloutBatch
from lit_async_rl.utils.checks import check_range
from lit_async_rl.utils.lightning_types import AnyModule, AnyTrainer

RARELY = 10  # updates between two checks where copies of the weights are large
SMALL_BYTES = 2**30  # of all copies, on all ranks together
FEW_TOKENS = 8  # of which the mean may be twice as large
log = logging.getLogger(__name__)


class EngineCheck(pl.Callback):
    """Replays a few completions with the weights that sampled them and compares log-probabilities.

    Wrong weights, a wrong implementation of the model, or a wrong setting of the sampler show up as importance ratios
    that are not 1 where they should be. Staleness hides that, so the comparison is between equal versions: the trainer
    keeps a copy of its weights in CPU memory until completions of that version arrive, and computes the
    log-probabilities of a few of them with it before it trains on them. Only tokens up to the first one of another
    version count, because later ones were sampled from a KV cache of several versions. Neither random numbers nor
    weights change.

    Logs `engine/logprob_error`, the mean absolute difference in nats over the replayed tokens, and
    `engine/logprob_error_max`, the largest. Expected are about 1e-6 to 1e-5 in float32, up to a few 1e-4 with TF32, and
    2e-3 to 4e-2 in bfloat16. Above `bound` the run warns or ends.

    Not checked are tapes, engines without a model, and under FSDP1 all versions but the current one.

    Args:
        every_n_updates: publications of weights between two checks, of which the first is that of the first version;
            None checks every version while the copies that this needs take less than 1 GiB on all ranks together,
            otherwise every 10th. There are never more copies than that, or one at a time.
        num_rollouts: completions of each rank that are replayed.
        bound: largest mean difference in nats; None is 1e-4 in float32 on CPUs, 2e-3 on accelerators,
            0.03 in float16 and 0.1 in bfloat16. The mean of n tokens may be 1 + 8 / n times as large, since that of few
            varies: 4 tokens in bfloat16 were 0.12 apart where everything was right.
        on_error: what happens above it: `warn`, or `stop`, which raises `EngineError`.

    Attributes:
        num_checks: versions compared since training began.
        replayed: log-ratios and the engine's log-probabilities of the tokens of this step that were replayed with older
            weights, on this rank; `FreshDataMonitor` reads them.

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
        self._copies: dict[int, dict[str, Tensor] | None] = {}  # versions to check; None before they are copied
        self._is_on = False
        self.num_checks = 0
        self._version = -1
        self._published_at = -1
        self._last = -1
        self._found: dict[str, float] = {}
        self.replayed: list[tuple[Tensor, Tensor]] = []
        self._num_restarts = 0

    def on_train_start(self, trainer: AnyTrainer, pl_module: AnyModule) -> None:
        """Plans the check of the first version."""
        module = policy_module(pl_module, "EngineCheck")
        data = rollout_data(trainer, "EngineCheck")
        self._is_on = data.tape is None and data.engine.has_model and can_be_called(module)
        self._copies = {}
        self._found = {}
        self._version = -1
        self._last = -1
        self._num_restarts = data.feed.num_restarts
        self.num_checks = 0
        if module.is_changed:  # a resume: what was sampled before came from older weights with the same number
            self._version = module.version
            self._last = module.version

    def on_train_batch_start(self, trainer: AnyTrainer, pl_module: AnyModule, batch: Any, batch_idx: int) -> None:
        """Replays rollouts of the versions to be checked. A collective, once per step."""
        self.replayed = []
        if not self._is_on or not isinstance(batch, RolloutBatch) or batch.micro_batch != 0:
            return
        module = policy_module(pl_module, "EngineCheck")
        data = rollout_data(trainer, "EngineCheck")
        if module.version != self._version:
            self._plan(trainer, module, data.max_staleness)
        if data.feed.num_restarts != self._num_restarts:  # it has the present weights under the last's number
            self._num_restarts = data.feed.num_restarts
            if not self._is_current(trainer, module):
                self._copies.pop(module.version, None)
        versions = sorted(self._copies)
        if not versions:
            return
        masks = [tokens_of(batch, version) for version in versions]
        present = torch.tensor([float(mask.any()) for mask in masks], device=module.device)
        for version, mask, found in zip(versions, masks, sum_over_ranks(present).tolist(), strict=True):
            copies = self._copies[version]
            is_current = self._is_current(trainer, module) and version == module.version
            if found and (is_current or copies is not None):
                self._judge(
                    trainer, data, version, sums=self._compare(trainer, module, batch, mask=mask, copies=copies)
                )
                del self._copies[version]

    def on_before_optimizer_step(self, trainer: AnyTrainer, pl_module: AnyModule, optimizer: Optimizer) -> None:
        """Copies the weights of a version that is to be checked later, before they change."""
        module = policy_module(pl_module, "EngineCheck")
        version = module.version
        if is_wrapped(module.policy):
            return
        if version in self._copies and self._copies[version] is None and self._is_current(trainer, module):
            self._copies[version] = copy_weights(module.policy)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        for name, value in self._found.items():
            pl_module.log(name, value)
        self._found = {}

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._copies = {}

    def _plan(self, trainer: AnyTrainer, module: PolicyModule, max_staleness: int) -> None:
        """Notes that a new version was published, and whether it is to be checked."""
        self._version = module.version
        self._published_at = trainer.global_step
        room = max(1, SMALL_BYTES // num_bytes(module.policy))  # copies
        every = self.every_n_updates or (1 if max_staleness < room else RARELY)
        late = [version for version in self._copies if version < module.version - 2 * max_staleness - 1]
        for version in late:  # none of its tokens came
            del self._copies[version]
        is_due = self._last < 0 or module.version - self._last >= every
        if is_due and len(self._copies) < room:
            self._last = module.version
            self._copies[module.version] = None

    def _is_current(self, trainer: AnyTrainer, module: PolicyModule) -> bool:
        """Whether the weights are those that were published last. The same on every rank."""
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
        """Sum, number and largest of the absolute differences on this rank."""
        rows = torch.nonzero(mask.any(1))[: self.num_rollouts, 0]
        if not len(rows):  # sharded ranks wait for each other
            rows = torch.zeros(1, dtype=torch.long, device=mask.device)
        mask = mask[rows]
        length = max(2, int(mask.any(0).nonzero().max()) + 1) if mask.any() else 2
        few = batch.select(rows, length).replace(loss_mask=mask[:, :length])
        mask = few.loss_mask
        with with_weights(module.policy, copies), trainer.precision_plugin.train_step_context():
            stats = module.policy(
                few.input_ids,
                mask,
                few.temperature,
                entropy_grad=False,
                group_index=few.group_index,
                head_ids=few.head_ids,
            )
            stats = on_support(stats, few)
        log_ratio = torch.where(mask, stats.logprobs - few.behavior_logprobs, 0.0)
        if copies is not None:  # those of the present weights are the step's own
            self.replayed.append((log_ratio[mask], few.behavior_logprobs[mask]))
        error = log_ratio.abs().float()
        return torch.stack([error.sum(), mask.sum().float(), error.max()])

    def _judge(self, trainer: AnyTrainer, data: Any, version: int, sums: Float[Tensor, " 3"]) -> None:
        dtypes = compute_dtype(policy_module(trainer.lightning_module, "EngineCheck")), str(data.engine.dtype)
        bound = self.bound or default_bound(*dtypes) if trainer.is_global_zero else 0.0
        total, number = sum_over_ranks(sums[:2]).tolist()
        largest, bound = (
            float(trainer.strategy.reduce(torch.as_tensor(value, device=sums.device), reduce_op="max"))
            for value in (sums[2], bound)  # the leading rank alone has set the engine up
        )
        error = total / number if number else 0.0
        self.num_checks += 1
        self._found = {"engine/logprob_error": error, "engine/logprob_error_max": largest}
        if error <= allowed(bound, number):
            return
        name = type(data.engine).__name__
        reason = (
            f"{name} and trainer disagree about version {version}: the log-probabilities of {int(number)} sampled "
            f"tokens differ by {error:.2g} on average and {largest:.2g} at most; {'/'.join(sorted(set(dtypes)))} "
            f"explains {allowed(bound, number):.2g} on average (engine/logprob_error). The engine has other weights, "
            "or computes the model or its sampling distribution otherwise"
        )
        if self.on_error == "stop" or not math.isfinite(error):
            raise EngineError(reason)
        if trainer.is_global_zero:
            log.warning("%s. defaults.engine_check.on_error=stop ends the run here", reason)


def allowed(bound: float, num_tokens: float) -> float:
    """Largest mean difference of so many tokens, of which a large number may differ by `bound` on average."""
    return bound * (1 + FEW_TOKENS / max(num_tokens, 1))


def tokens_of(batch: RolloutBatch, version: int) -> Bool[Tensor, "B T"]:
    """Mask of the trained tokens of each row before the first one of another version."""
    is_other = batch.loss_mask & (batch.versions != version)
    return batch.loss_mask & (is_other.cumsum(1) == 0)
