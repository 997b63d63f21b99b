"""Run-time invariant: fresh data have importance ratios of mean 1."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import lightning.pytorch as pl
import torch
from jaxtyping import Float, Float64
from torch import Tensor

from lit_async_rl.callbacks.monitors.engine_check import EngineCheck, tokens_of
from lit_async_rl.callbacks.monitors.ratio_parts import RatioSplit, stale_sums
from lit_async_rl.callbacks.parts import callbacks_of, policy_module, rollout_data
from lit_async_rl.distributed.ranks import num_copies
from lit_async_rl.errors import EngineError
from lit_async_rl.importance import safe_exp, sum_over_ranks
from lit_async_rl.training.module import PolicyModule
from lit_async_rl.training.probe import compute_dtype
from lit_async_rl.types import RolloutBatch
from lit_async_rl.utils.checks import check_choice, check_range
from lit_async_rl.utils.lightning_types import AnyModule, AnyTrainer

MIN_TOKENS_AT_END = 1000  # to check a run that ends before its first window is full
SINGLE_PRECISION = {"float32", "tf32"}  # all other dtypes are half precision, or unknown
MIN_SPREAD = 0.05  # nats: smallest standard deviation of log-probabilities for a regression slope
CAUSES = (
    "Candidates: a sampler that truncates or reweighs tokens on one side (top_p, top_k, min_p, penalties, allowed "
    "tokens), another temperature, a soft cap or scaling that one side drops, other weights than the engine says. Loss "
    "and correction take this for stale data"
)
log = logging.getLogger(__name__)


class Bounds(NamedTuple):
    """Allowed deviations of fresh data from the identities of `FreshDataMonitor`.

    Attributes:
        ratio: deviation of the mean ratio from 1, in addition to three standard errors.
        log_ratio: lower limit of the mean log-ratio, in nats.
        slope: deviation of the slope from 0, in addition to five standard errors.
    """

    ratio: float
    log_ratio: float
    slope: float = 0.1


SINGLE_PRECISION_BOUNDS = Bounds(1e-5, -1e-5)
HALF_PRECISION_BOUNDS = Bounds(2e-3, -1e-2)


class FreshStatistics(NamedTuple):
    """Statistics of l = log p - log q over n tokens drawn from q, see `FreshDataMonitor`.

    Attributes:
        n: number of tokens.
        ratio: mean of exp l.
        ratio_error: its standard error.
        log_ratio: mean of l, in nats.
        slope: slope of l over (log p + log q) / 2.
        slope_error: its standard error.
    """

    n: float
    ratio: float
    ratio_error: float
    log_ratio: float
    slope: float
    slope_error: float

    def faults(self, bounds: Bounds) -> list[str]:
        """A sentence for each violated identity."""
        faults = []
        if not abs(self.ratio - 1) <= 3 * self.ratio_error + bounds.ratio:  # `not <=`, so that NaN is a fault
            faults.append(f"their mean importance ratio is {self.ratio:.6g} +- {self.ratio_error:.1g}, and must be 1")
        if not self.log_ratio >= bounds.log_ratio:
            faults.append(f"their mean log-ratio is {self.log_ratio:.3g}, and must be above {bounds.log_ratio:g}")
        if not abs(self.slope) <= 5 * self.slope_error + bounds.slope:
            faults.append(
                f"their log-ratio changes by {self.slope:.2f} per nat of log-probability, and must not change"
            )
        return faults


def moments(log_ratio: Float[Tensor, " N"], behavior: Float[Tensor, " N"]) -> Float64[Tensor, " 8"]:
    """Sums over tokens, additive over batches and ranks, on the CPU; `statistics` reads them.

    The first is their number, the fifth the sum of their squared log-ratios.

    Args:
        log_ratio: l = log p - log q of each token.
        behavior: log q of each token.
    """
    # float64: variances below are differences of nearly equal means, which float32 would lose
    difference = log_ratio.detach().cpu().double()
    behavior = behavior.detach().cpu().double()
    ratio = safe_exp(difference)
    middle = behavior + difference / 2
    terms = [
        torch.ones_like(ratio),
        ratio,
        ratio.square(),
        difference,
        difference.square(),
        middle,
        middle.square(),
        middle * difference,
    ]
    return torch.stack([term.sum() for term in terms])


def statistics(sums: Float64[Tensor, " 8"]) -> FreshStatistics:
    """Statistics from `moments` of at least one token; the slope is 0 where log-probabilities hardly differ."""
    n = float(sums[0])
    _, *means = (sums / sums[0]).tolist()
    ratio, ratio_square, difference, square, middle, middle_square, product = means
    spread = middle_square - middle**2
    slope = slope_error = 0.0
    if spread > MIN_SPREAD**2:
        slope = (product - middle * difference) / spread
        slope_error = math.sqrt(max(0.0, square - difference**2) / spread / n)
    ratio_error = math.sqrt(max(0.0, ratio_square - ratio**2) / n)
    return FreshStatistics(n, ratio, ratio_error, log_ratio=difference, slope=slope, slope_error=slope_error)


class FreshDataMonitor(pl.Callback):
    """Checks in every run that engine and trainer have the same distribution, by identities of fresh data.

    Tokens are fresh if they and all trained tokens before them were sampled with the weights in training. Let q be the
    engine's sampling distribution, p the trainer's, and l = log p - log q of a sampled token. For any prefix:

    * E[exp l] = sum of q (p / q) = p(S), S the tokens that q can choose. It is 1 if S is the whole support of p, and
      below 1 for a truncated sampler: a top-p of 0.95 makes it about 0.95.
    * E[l] = -KL(q || p) <= log p(S) <= 0, and 0 for equal distributions only. A temperature on one side violates it,
      but not the first identity, as both distributions stay normalised.
    * A temperature changes l in proportion to log q: p is q to the power 1 / t, normalised. With t = 1.2 the slope of l
      over log q is -1/6. Rounding has no slope, so in half precision the slope shows what the mean does not. The
      regression is over (log p + log q) / 2, where equal rounding errors of both sides cancel.

    Rounding errors e make l = e with both sides normalised: the first identity is unchanged, and E[l] becomes
    -E[e^2] / 2, about -5e-11 in float32 and above -5e-3 in bfloat16. The deviations of exp l from 1 are martingale
    differences along a completion, so their mean has the standard error of independent tokens.

    Over `num_tokens` tokens, the mean ratio must be within three standard errors and 1e-5 (2e-3 in half precision) of
    1, the mean log-ratio above -1e-5 (-1e-2) and the slope within five standard errors and 0.1 of 0. Else the run warns
    once, or ends, and the summary reports it. A run that ends with fewer tokens is checked at its end if it had at
    least 1,000. Logs the means over the tokens since the last check, `fresh/ratio_mean`, `fresh/log_ratio_mean` and
    `fresh/log_ratio_slope`.

    If all training data are stale, as with a fixed lag, the tokens are those that `EngineCheck` replays. Tapes, engines
    without a model and greedy sampling (where rounding errors choose the token) are not checked.

    It also logs the two parts of all log-ratios (`RatioSplit`), `ratio/discrepancy` and `ratio/staleness`, root mean
    squares in nats; a resumed run does so from its first fresh tokens on.

    Args:
        num_tokens: tokens per check, of all ranks together.
        on_error: reaction to a violated identity: `warn`, or `stop` by raising `EngineError`.

    Attributes:
        broken: description of the first violation; empty if there is none.
        num_checked_tokens: tokens checked so far.

    Raises:
        ValueError: a setting is out of range.
    """

    def __init__(self, num_tokens: int = 20_000, on_error: Literal["warn", "stop"] = "warn") -> None:
        check_range("FreshDataMonitor", "integer >= 1", num_tokens=num_tokens)
        check_choice("FreshDataMonitor", ("warn", "stop"), on_error=on_error)
        self.num_tokens = num_tokens
        self.on_error = on_error
        self._is_enabled = False
        self._step = -1
        self._version = -1
        self._reset()

    def _reset(self) -> None:
        self._is_current = False
        self._published_at = -1
        self._micro = self._window = torch.zeros(8, dtype=torch.float64)
        self._stale = torch.zeros(3, dtype=torch.float64)
        self._split = RatioSplit()
        self.broken = ""
        self.num_checked_tokens = 0

    def on_train_start(self, trainer: AnyTrainer, pl_module: AnyModule) -> None:
        """Discards the tokens and results of an earlier run."""
        module = policy_module(pl_module, "FreshDataMonitor")
        data = rollout_data(trainer, "FreshDataMonitor")
        self._is_enabled = data.tape is None and data.engine.has_model and data.sampling.temperature > 0
        self._step = trainer.global_step
        # a resume: restored rollouts came from older weights with the same version number, and are not fresh
        self._version = module.version if module.is_changed else -1
        self._reset()

    def on_train_batch_start(self, trainer: AnyTrainer, pl_module: AnyModule, batch: Any, batch_idx: int) -> None:
        """Records whether the present weights equal the last publication."""
        module = policy_module(pl_module, "FreshDataMonitor")
        if module.version != self._version:
            self._version = module.version
            self._published_at = trainer.global_step
        self._is_current = trainer.global_step == self._published_at and not module.is_changed

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Adds the fresh tokens of a micro-batch; at the end of a step checks a full window, a collective."""
        if not self._is_enabled or not isinstance(batch, RolloutBatch):
            return
        module = policy_module(pl_module, "FreshDataMonitor")
        signals: Mapping[str, Any] = module.stabilizer_signals
        fresh = torch.zeros_like(batch.loss_mask)
        if self._is_current:
            fresh = tokens_of(batch, signals["version"])
            self._micro = self._micro + moments(signals["log_ratio"][fresh], batch.behavior_logprobs[fresh])
        self._stale = self._stale + stale_sums(signals["log_ratio"], batch.loss_mask, fresh)
        for check in callbacks_of(trainer, EngineCheck):
            for replayed in check.replayed:
                self._micro = self._micro + moments(*replayed)
            check.replayed = []
        if trainer.global_step == self._step:
            return
        self._step = trainer.global_step
        sums, stale = self._sums_over_ranks(trainer, module)
        self._window = self._window + sums
        parts = self._split.update(float(sums[0]), float(sums[4]), stale)
        if parts is not None:
            module.log("ratio/discrepancy", parts.discrepancy)
            module.log("ratio/staleness", parts.staleness)
        if self._window[0] < 1:
            return
        found = statistics(self._window)
        values = {"ratio_mean": found.ratio, "log_ratio_mean": found.log_ratio, "log_ratio_slope": found.slope}
        for name, value in values.items():
            module.log(f"fresh/{name}", value)
        if found.n >= self.num_tokens:
            self._check_window(trainer, module, found)

    def on_train_end(self, trainer: AnyTrainer, pl_module: AnyModule) -> None:
        """Checks a short run, in which no window was full."""
        if self._is_enabled and not self.num_checked_tokens and self._window[0] >= MIN_TOKENS_AT_END:
            self._check_window(trainer, policy_module(pl_module, "FreshDataMonitor"), statistics(self._window))

    def _sums_over_ranks(
        self, trainer: AnyTrainer, module: PolicyModule
    ) -> tuple[Float64[Tensor, " 8"], Float64[Tensor, " 3"]]:
        """`moments` of the step's fresh tokens and its `stale_sums`, over all ranks, on the CPU."""
        sums = torch.cat([self._micro, self._stale])
        self._micro = torch.zeros(8, dtype=torch.float64)
        self._stale = torch.zeros(3, dtype=torch.float64)
        if trainer.world_size > 1:
            sums = sum_over_ranks(sums.to(module.device)).cpu() / num_copies(trainer)
        return sums[:8], sums[8:]

    def _check_window(self, trainer: AnyTrainer, module: PolicyModule, found: FreshStatistics) -> None:
        data = rollout_data(trainer, "FreshDataMonitor")
        self.num_checked_tokens += int(found.n)
        self._window = torch.zeros(8, dtype=torch.float64)
        dtypes = {compute_dtype(module), str(data.engine.dtype)}
        is_half = torch.tensor(float(trainer.is_global_zero and not dtypes <= SINGLE_PRECISION), device=module.device)
        # the maximum hands the leading rank's answer to all others: it alone has set the engine up and knows its dtype
        bounds = (
            HALF_PRECISION_BOUNDS
            if float(trainer.strategy.reduce(is_half, reduce_op="max"))
            else SINGLE_PRECISION_BOUNDS
        )
        faults = found.faults(bounds)
        if not faults:
            return
        reason = (
            f"engine ({type(data.engine).__name__}) and trainer have different distributions: of {int(found.n)} tokens "
            f"that were trained on or replayed with the weights that sampled them, {'; '.join(faults)}"
        )
        if self.on_error == "stop":
            raise EngineError(f"{reason}. {CAUSES}")
        if not self.broken and trainer.is_global_zero:
            log.warning("%s. %s. defaults.fresh_data.init_args.on_error=stop ends the run here", reason, CAUSES)
        self.broken = self.broken or "; ".join(faults)
