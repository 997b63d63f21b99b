"""The contract between stabilizers and anybody's LightningModule, and the collection of what it delivers.

A module takes part by leaving a dict in `self.stabilizer_signals` in every `training_step`:

| key | what | shape |
|---|---|---|
| `log_ratio` | log pi - log mu of each sampled token, detached | Float [B, T], or [B] if already per sample |
| `mask` | True where a token counts; everything, if left out | Bool, as `log_ratio` |
| `entropy` | of the policy at each position | Float, as `log_ratio` |
| `staleness` | age of the token's policy, in versions | Int, as `log_ratio` |
| `rewards` | of each completion | Float [B] |
| `advantages`, `clipped`, `correction_weights` | for monitors | as `log_ratio` |
| `version` | of the policy | int |

Only what a callback uses must be there. Code that cannot be changed is adapted from outside: callbacks take
`extract=function(trainer, pl_module, batch, output)`, which returns such a dict, or None for nothing. Or
`training_step` returns these keys beside `loss`. The order of precedence is: `extract`, the attribute, the output.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Bool, Float, Float64, Shaped
from torch import Tensor

from lit_async_rl.errors import SetupError
from lit_async_rl.importance import kl_k3
from lit_async_rl.utils.lightning_types import AnyModule, AnyTrainer

Signals = Mapping[str, Any]
Extract = Callable[[Any, Any, Any, Any], Signals | None]


@dataclass(frozen=True, kw_only=True)
class StepSignals:
    """The signals of one optimizer step, over its micro-batches and all ranks; the same on every rank.

    Attributes:
        num_samples: completions with at least one token that counts.
        num_broken: those among them whose log-weight is NaN or infinite.
        ess_ratio: effective sample size of raw sequence weights (VCPO, arXiv:2602.17616) over `num_samples`, between
            1 / `num_samples` and 1; NaN weights count as 0; None without samples.
        kl: mean k3 estimate of KL(mu || pi) per token; the following are None where no signal says anything.
        entropy: mean per token.
        reward: mean per completion.
        staleness: mean per token, in versions.
    """

    num_samples: int
    num_broken: int
    ess_ratio: float | None
    kl: float | None
    entropy: float | None
    reward: float | None
    staleness: float | None


class SignalCollector:
    """Gathers signals in `on_before_backward` of every micro-batch; `reduce` closes the step.

    Args:
        extract: adapter for modules that leave no signals themselves, see the module docstring.
    """

    def __init__(self, extract: Extract | None = None) -> None:
        self.extract = extract
        self._recorder: _StepRecorder | None = None
        self._seen: Any = None
        self._log_weights: list[Tensor] = []
        self._sums: list[Tensor] = []

    def attach(self, pl_module: AnyModule) -> None:
        """Starts to record what `training_step` gets and returns, where the attribute alone will not do."""
        if self.extract is not None or not hasattr(pl_module, "stabilizer_signals"):
            self._recorder = _StepRecorder.of(pl_module)

    def detach(self) -> None:
        """Leaves the module as it was and forgets what was collected."""
        if self._recorder is not None:
            self._recorder.release()
            self._recorder = None
        self._clear()

    def collect(self, trainer: AnyTrainer, pl_module: AnyModule) -> None:
        """Takes the signals of the `training_step` that just ran; those it has already taken count once."""
        signals = self._find(trainer, pl_module)
        if signals is not None and "log_ratio" in signals and signals["log_ratio"] is not self._seen:
            self._seen = signals["log_ratio"]
            self.add(signals)

    def add(self, signals: Signals) -> None:
        """Adds one micro-batch; for loops without a trainer."""
        log_ratio, mask = _checked(signals)
        tokens = log_ratio.isfinite() & mask
        is_sample = mask if mask.ndim == 1 else mask.any(-1)
        masked = torch.where(mask, log_ratio, 0.0)
        log_weights = masked if masked.ndim == 1 else masked.sum(-1)
        # rows that do not count are marked -inf (weight 0) instead of taken out, which would wait for the device
        self._log_weights.append(torch.where(is_sample, log_weights, -torch.inf))
        kl = kl_k3(torch.where(tokens, log_ratio, 0.0)).sum()
        rewards = _wide(signals["rewards"]) if "rewards" in signals else log_ratio.new_zeros(0)
        per_token = [_sum_and_count(signals, name, mask) for name in ("entropy", "staleness")]
        broken = (is_sample & ~log_weights.isfinite()).sum()
        sums = [is_sample.sum(), broken, kl, tokens.sum(), *per_token[0], *per_token[1]]
        sums += [rewards.nan_to_num(0, 0, 0).sum(), rewards.isfinite().sum()]
        self._sums.append(torch.stack([value.double() for value in sums]))

    def reduce(self, device: torch.device | str) -> StepSignals:
        """The step's totals over all ranks. One collective: every rank calls it, whether or not it has signals."""
        device = torch.device("cpu") if torch.device(device).type == "mps" else torch.device(device)
        totals = torch.stack(self._sums).sum(0) if self._sums else torch.zeros(10, dtype=torch.float64)
        log_weights = torch.cat(self._log_weights) if self._log_weights else totals.new_zeros(0)
        self._clear()
        local = torch.cat([weight_sums(log_weights).to(device), totals.to(device)])
        return _summary(_all_gather(local).cpu())

    def _find(self, trainer: AnyTrainer, pl_module: AnyModule) -> Signals | None:
        recorder = self._recorder
        if self.extract is not None:
            if recorder is None:
                raise SetupError("signals are collected after `attach` only")
            return self.extract(trainer, pl_module, recorder.batch, recorder.output)
        if hasattr(pl_module, "stabilizer_signals"):
            return pl_module.stabilizer_signals  # type: ignore[return-value]
        return recorder.output if recorder is not None and isinstance(recorder.output, Mapping) else None

    def _clear(self) -> None:
        self._log_weights, self._sums = [], []


def weight_sums(log_weights: Float64[Tensor, " B"]) -> Float64[Tensor, "3"]:
    """Maximum M of the log-weights, sum of exp(l - M) and of its square; NaN counts as weight 0, so does -inf."""
    if log_weights.numel() == 0:
        return log_weights.new_tensor([-torch.inf, 0.0, 0.0])
    largest = torch.finfo(torch.float64).max / 4
    log_weights = log_weights.nan_to_num(nan=-torch.inf, posinf=largest, neginf=-torch.inf)
    top = log_weights.max()
    weights = torch.where(top > -torch.inf, (log_weights - top).exp(), 0.0)
    return torch.stack([top, weights.sum(), weights.square().sum()])


def _summary(ranks: Float64[Tensor, "R 13"]) -> StepSignals:
    """Combines ranks in log space: each rank's sums are relative to its own largest weight."""
    top = ranks[:, 0].max()
    shift = torch.where(ranks[:, 0] > -torch.inf, (ranks[:, 0] - top).exp(), 0.0)
    weights, squares = (ranks[:, 1] * shift).sum().item(), (ranks[:, 2] * shift.square()).sum().item()
    samples, broken, *means = ranks[:, 3:].sum(0).tolist()
    kl, entropy, staleness, reward = (means[n] / means[n + 1] if means[n + 1] else None for n in (0, 2, 4, 6))
    # where no weight is left, all but one sample are as good as lost
    ess = weights**2 / squares if squares > 0 else 1.0
    return StepSignals(
        num_samples=int(samples),
        num_broken=int(broken),
        ess_ratio=min(max(ess, 1.0) / samples, 1.0) if samples else None,
        kl=kl,
        entropy=entropy,
        reward=reward,
        staleness=staleness,
    )


def _checked(signals: Signals) -> tuple[Float64[Tensor, "*shape"], Bool[Tensor, "*shape"]]:
    log_ratio = _wide(signals["log_ratio"])
    if log_ratio.ndim not in (1, 2):
        raise ValueError(f"stabilizer_signals['log_ratio'] must be [B, T] or [B], got {tuple(log_ratio.shape)}")
    mask = signals.get("mask")
    if mask is None:
        return log_ratio, torch.ones_like(log_ratio, dtype=torch.bool)
    if mask.shape != log_ratio.shape:
        raise ValueError(
            f"stabilizer_signals['mask'] is {tuple(mask.shape)}, but 'log_ratio' is {tuple(log_ratio.shape)}"
        )
    return log_ratio, mask.bool().to(log_ratio.device)


def _wide(tensor: Shaped[Tensor, "*shape"]) -> Float64[Tensor, "*shape"]:
    tensor = tensor.detach()
    return (tensor.cpu() if tensor.device.type == "mps" else tensor).double()  # which has no float64


def _sum_and_count(signals: Signals, name: str, mask: Bool[Tensor, "*shape"]) -> tuple[Tensor, Tensor]:
    if signals.get(name) is None:
        return mask.new_zeros((), dtype=torch.float64), mask.new_zeros((), dtype=torch.float64)
    values = _wide(signals[name])
    counted = mask & values.isfinite()
    return torch.where(counted, values, 0.0).sum(), counted.sum()


def _all_gather(local: Float[Tensor, " K"]) -> Float[Tensor, "R K"]:
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return local[None]
    gathered = [torch.empty_like(local) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, local)
    return torch.stack(gathered)


class _StepRecorder:
    """Stands in for `training_step` to see its batch and output; one for each module, shared by all collectors."""

    def __init__(self, pl_module: AnyModule) -> None:
        self.batch: Any = None
        self.output: Any = None
        self._pl_module = pl_module
        self._users = 0
        original = pl_module.training_step

        @functools.wraps(original)
        def training_step(*args: Any, **kwargs: Any) -> Any:
            self.output, self.batch = None, args[0] if args else None
            self.output = original(*args, **kwargs)
            return self.output

        training_step._recorder = self  # type: ignore[attr-defined]
        pl_module.training_step = training_step  # type: ignore[method-assign]

    @classmethod
    def of(cls, pl_module: AnyModule) -> _StepRecorder:
        """The module's recorder, made by the first who asks."""
        step = vars(pl_module).get("training_step")
        recorder = step._recorder if hasattr(step, "_recorder") else cls(pl_module)  # type: ignore[union-attr]
        recorder._users += 1
        return recorder

    def release(self) -> None:
        """The last one to leave puts the module's own method back."""
        self._users -= 1
        if self._users == 0:
            del self._pl_module.training_step
