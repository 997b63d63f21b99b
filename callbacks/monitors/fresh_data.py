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
from lit_async_rl.callbacks.parts import policy_module, rollout_data
from lit_async_rl.errors import EngineError
from lit_async_rl.importance import safe_exp, sum_over_ranks
from lit_async_rl.training.module import PolicyModule
from lit_async_rl.training.probe import compute_dtype
from lit_async_rl.types import RolloutBatch
from lit_async_rl.utils.checks import check_range
from lit_async_rl.utils.lightning_types import AnyModule, AnyTrainer

FEW_TOKENS = 1000  # at the end of a run that had no whole window
SINGLE = {"float32", "tf32"}  # all others are of half precision, or unknown
MIN_SPREAD = 0.05  # nats, of log-probabilities that a slope can be taken over
CAUSES = (
    "Candidates: a sampler that truncates or reweighs tokens on one side (top_p, top_k, min_p, penalties, allowed "
    "tokens), another temperature, a soft cap or scaling that one side drops, other weights than the engine says. Loss "
    "and correction take this for stale data"
)
log = logging.getLogger(__name__)


class Bounds(NamedTuple):
    """How far fresh data may be from the identities of `FreshDataMonitor`.

    Attributes:
        ratio: of the mean ratio, beside three standard errors.
        log_ratio: of the mean log-ratio, in nats.
        slope: of the slope, beside five standard errors.
    """

    ratio: float
    log_ratio: float
    slope: float = 0.1


FLOAT32 = Bounds(1e-5, -1e-5)
HALF = Bounds(2e-3, -1e-2)


class FreshStatistics(NamedTuple):
    """Moments of l = log p - log q over n tokens drawn from q, see `FreshDataMonitor`."""

    n: float
    ratio: float
    ratio_error: float
    log_ratio: float
    slope: float
    slope_error: float

    def faults(self, bounds: Bounds) -> list[str]:
        """Identities that the bounds do not allow, in words."""
        found = []
        if not abs(self.ratio - 1) <= 3 * self.ratio_error + bounds.ratio:  # NaN is a fault
            found.append(f"their mean importance ratio is {self.ratio:.6g} +- {self.ratio_error:.1g}, and must be 1")
        if not self.log_ratio >= bounds.log_ratio:
            found.append(f"their mean log-ratio is {self.log_ratio:.3g}, and must be above {bounds.log_ratio:g}")
        if not abs(self.slope) <= 5 * self.slope_error + bounds.slope:
            found.append(f"their log-ratio changes by {self.slope:.2f} per nat of log-probability, and must not change")
        return found


def moments(log_ratio: Float[Tensor, " N"], behavior: Float[Tensor, " N"]) -> Float64[Tensor, " 8"]:
    """Sums over tokens, of which those of several batches and ranks can be added; see `statistics`. On the CPU."""
    difference = log_ratio.detach().cpu().double()
    behavior = behavior.detach().cpu().double()
    ratio = safe_exp(difference)
    middle = behavior + difference / 2
    values = (torch.ones_like(ratio), ratio, ratio.square(), difference, difference.square())
    return torch.stack([v.sum() for v in (*values, middle, middle.square(), middle * difference)])


def statistics(sums: Float64[Tensor, " 8"]) -> FreshStatistics:
    """Statistics from `moments` of at least one token; the slope is 0 where log-probabilities hardly differ."""
    n, *means = (float(value) for value in (sums / sums[0]))
    n = float(sums[0])
    ratio, ratio_square, difference, square, middle, middle_square, product = means
    spread = middle_square - middle**2
    slope = slope_error = 0.0
    if spread > MIN_SPREAD**2:
        slope = (product - middle * difference) / spread
        slope_error = math.sqrt(max(0.0, square - difference**2) / spread / n)
    ratio_error = math.sqrt(max(0.0, ratio_square - ratio**2) / n)
    return FreshStatistics(n, ratio, ratio_error, log_ratio=difference, slope=slope, slope_error=slope_error)


class FreshDataMonitor(pl.Callback):
    """Checks in every run that engine and trainer have the same distribution, by an identity of fresh data.

    Tokens are fresh if the weights in training sampled them and all trained tokens before them. With q the
    distribution that the engine sampled from, p the trainer's, and l = log p - log q of a sampled token, whatever came
    before it:

    * E[exp l] = sum of q (p / q) = p(S), S the tokens that q can choose. It is 1 if S is the whole support of p, and
      below 1 for a truncated sampler: top-p of 0.95 makes it about 0.95.
    * E[l] = -KL(q || p) <= log p(S) <= 0, and 0 for equal distributions only. A temperature on one side leaves the mean
      ratio at exactly 1 (both distributions are normalised) and is seen here alone.
    * A temperature changes l in proportion to log q: p is q to the power 1 / t, normalised. With t = 1.2 the slope of l
      over log q is -1/6. Rounding has no such slope, and in half precision the slope stands out where the mean does
      not. The slope is taken over (log p + log q) / 2, in which equal rounding errors of both sides cancel.

    Rounding errors e make l = e with both sides normalised: the first identity stays as it is, the second becomes
    -E[e^2] / 2, about -5e-11 in float32 and above -5e-3 in bfloat16. The deviations of exp l from 1 are martingale
    differences along a completion, so the standard error of their mean is that of independent tokens.

    Over `num_tokens` tokens, the mean ratio must be within three standard errors and 1e-5 (2e-3 in half precision) of
    1, the mean log-ratio above -1e-5 (-1e-2) and the slope within five standard errors and 0.1 of 0. Else the run warns
    once, or ends, and the summary says so. At the end a run without that many tokens is judged by those it had, if
    these are 1,000. Logs the means over the tokens since the last judgement, `fresh/ratio_mean`,
    `fresh/log_ratio_mean` and `fresh/log_ratio_slope`.

    Where training is always on stale data, as with a fixed lag, the tokens are those that `EngineCheck` replays with
    the weights that sampled them. Not watched are tapes, engines without a model and greedy sampling, which chooses
    by rounding errors.

    Args:
        num_tokens: tokens of one judgement, of all ranks together.
        on_error: what happens if they break the identity: `warn`, or `stop`, which raises `EngineError`.

    Attributes:
        broken: what was found; empty if nothing was.
        num_judged: tokens judged so far.

    Raises:
        ValueError: a setting is out of range.
    """

    def __init__(self, num_tokens: int = 20_000, on_error: Literal["warn", "stop"] = "warn") -> None:
        check_range("FreshDataMonitor", "integer >= 1", num_tokens=num_tokens)
        if on_error not in ("warn", "stop"):
            raise ValueError(f"FreshDataMonitor.on_error must be 'warn' or 'stop', got {on_error!r}")
        self.num_tokens = num_tokens
        self.on_error = on_error
        self._is_on = False
        self._is_current = False
        self._step = -1
        self._version = -1
        self._published_at = -1
        self._micro = self._window = torch.zeros(8, dtype=torch.float64)
        self.broken = ""
        self.num_judged = 0

    def on_train_start(self, trainer: AnyTrainer, pl_module: AnyModule) -> None:
        """Begins with no tokens."""
        module = policy_module(pl_module, "FreshDataMonitor")
        data = rollout_data(trainer, "FreshDataMonitor")
        self._is_on = data.tape is None and data.engine.has_model and data.sampling.temperature > 0
        self._step = trainer.global_step
        self._is_current = False
        self._version = module.version if module.is_changed else -1  # a resume: that number names older weights, too
        self._published_at = -1
        self._micro = self._window = torch.zeros(8, dtype=torch.float64)
        self.broken = ""
        self.num_judged = 0

    def on_train_batch_start(self, trainer: AnyTrainer, pl_module: AnyModule, batch: Any, batch_idx: int) -> None:
        """Notes whether the weights are those that were published last."""
        module = policy_module(pl_module, "FreshDataMonitor")
        if module.version != self._version:
            self._version = module.version
            self._published_at = trainer.global_step
        self._is_current = trainer.global_step == self._published_at and not module.is_changed

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Adds the fresh tokens of a micro-batch; judges at the end of a step, a collective."""
        if not self._is_on or not isinstance(batch, RolloutBatch):
            return
        module = policy_module(pl_module, "FreshDataMonitor")
        signals: Mapping[str, Any] = module.stabilizer_signals
        if self._is_current:
            fresh = tokens_of(batch, signals["version"])
            self._micro = self._micro + moments(signals["log_ratio"][fresh], batch.behavior_logprobs[fresh])
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, EngineCheck):
                for replayed in callback.replayed:
                    self._micro = self._micro + moments(*replayed)
                callback.replayed = []
        if trainer.global_step == self._step:
            return
        self._step = trainer.global_step
        self._window = self._window + self._over_ranks(trainer, module)
        if self._window[0] < 1:
            return
        found = statistics(self._window)
        values = {"ratio_mean": found.ratio, "log_ratio_mean": found.log_ratio, "log_ratio_slope": found.slope}
        for name, value in values.items():
            module.log(f"fresh/{name}", value)
        if found.n >= self.num_tokens:
            self._judge(trainer, module, found)

    def on_train_end(self, trainer: AnyTrainer, pl_module: AnyModule) -> None:
        """Judges a short run by what it had."""
        if self._is_on and not self.num_judged and self._window[0] >= FEW_TOKENS:
            self._judge(trainer, policy_module(pl_module, "FreshDataMonitor"), statistics(self._window))

    def _over_ranks(self, trainer: AnyTrainer, module: PolicyModule) -> Float64[Tensor, " 8"]:
        """Sums of the step over all ranks, on the CPU."""
        sums = self._micro
        self._micro = torch.zeros(8, dtype=torch.float64)
        return sums if trainer.world_size == 1 else sum_over_ranks(sums.to(module.device)).cpu()

    def _judge(self, trainer: AnyTrainer, module: PolicyModule, found: FreshStatistics) -> None:
        data = rollout_data(trainer, "FreshDataMonitor")
        self.num_judged += int(found.n)
        self._window = torch.zeros(8, dtype=torch.float64)
        dtypes = {compute_dtype(module), str(data.engine.dtype)}
        is_half = torch.tensor(float(trainer.is_global_zero and not dtypes <= SINGLE), device=module.device)
        # the leading rank alone has set the engine up
        bounds = HALF if float(trainer.strategy.reduce(is_half, reduce_op="max")) else FLOAT32
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
