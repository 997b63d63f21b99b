"""Signals of a LightningModule for stabilizers, and their collection over a step.

In every `training_step` a module sets `self.stabilizer_signals`, a dict:

| key | meaning | shape |
|---|---|---|
| `log_ratio` | log pi - log mu of each sampled token, detached | Float [B, T], or [B] if already per sample |
| `mask` | True where a token counts; all tokens, if missing | Bool, as `log_ratio` |
| `entropy` | entropy of the policy at each position, in nats | Float, as `log_ratio` |
| `staleness` | age of the token's policy, in versions | Int, as `log_ratio` |
| `rollout` | number of each row's rollout in the micro-batch; each row is one, if missing | Int [B] |
| `rewards` | reward of each completion | Float [B] |
| `advantages`, `clipped`, `correction_weights` | used by monitors | as `log_ratio` |
| `version` | policy version | int |
| `num_tokens` | tokens that the pass computed on prefix trees, and that separate rows would; for monitors | 2 int |

Only the keys that a callback uses are required. For modules that cannot be changed, callbacks take
`extract=function(trainer, pl_module, batch, output)`, which returns such a dict or None. `training_step` may also
return these keys beside `loss`. Order of precedence: `extract`, the attribute, the output.
"""

from __future__ import annotations

import functools
from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from jaxtyping import Bool, Float, Float64, Shaped
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torch.optim import Optimizer

from lit_async_rl.distributed.ranks import num_copies
from lit_async_rl.errors import SetupError
from lit_async_rl.importance import ess_of_sums, kl_k3, weight_sums
from lit_async_rl.stabilizers.step_lr import check_choice, chosen_index, chosen_optimizers
from lit_async_rl.utils.lightning_types import AnyModule, AnyTrainer

Signals = Mapping[str, Any]
Extract = Callable[[Any, Any, Any, Any], Signals | None]


@dataclass(frozen=True, kw_only=True)
class StepSignals:
    """Signals of one optimizer step, over its micro-batches and all ranks; the same on every rank.

    Attributes:
        num_samples: completions with at least one token that counts.
        num_broken: completions among them whose log-weight is NaN or infinite.
        ess_ratio: effective sample size of raw sequence weights (VCPO, arXiv:2602.17616) over `num_samples`, from 1 /
            `num_samples` to 1; NaN weights are 0; None without samples.
        kl: mean k3 estimate of KL(mu || pi) per token, in nats; like those below, None without signals.
        entropy: mean per token, in nats.
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
    """Collects signals in `on_before_backward` of every micro-batch; `reduce` completes the step.

    Args:
        extract: adapter for modules that set no signals, see the module docstring.

    Attributes:
        num_copies: ranks that see the same data, as in a tensor-parallel group; they count once.
    """

    def __init__(self, extract: Extract | None = None) -> None:
        self.extract = extract
        self.num_copies = 1
        self._recorder: _StepRecorder | None = None
        self._seen: Any = None
        self._has_stale_signals = False  # pending signals belong to another optimizer's completed step
        self._num_kept = 0  # leading micro-batches that belong to the step of this collector's optimizer
        self._log_weights: list[Tensor] = []
        self._sums: list[Tensor] = []

    def attach(self, pl_module: AnyModule) -> None:
        """Starts recording batch and output of `training_step`, unless `stabilizer_signals` suffices."""
        if self.extract is not None or not hasattr(pl_module, "stabilizer_signals"):
            self._recorder = _StepRecorder.of(pl_module)

    def detach(self) -> None:
        """Restores the module and discards the collected signals."""
        if self._recorder is not None:
            self._recorder.release()
            self._recorder = None
        self._seen = None
        self._clear()

    def collect(self, trainer: AnyTrainer, pl_module: AnyModule) -> None:
        """Adds the signals of the last `training_step`, once."""
        signals = self._find(trainer, pl_module)
        if signals is not None and "log_ratio" in signals and signals["log_ratio"] is not self._seen:
            if self._has_stale_signals:
                del self._log_weights[self._num_kept :], self._sums[self._num_kept :]
                self._has_stale_signals = False
            self._seen = signals["log_ratio"]
            self.add(signals)

    def mark_stale(self) -> None:
        """Marks signals not yet kept as another optimizer's; the next `collect` discards them."""
        self._seen = None
        self._has_stale_signals = True

    def keep(self) -> None:
        """Marks the collected signals as those of the step that `reduce` completes."""
        self._num_kept = len(self._sums)

    def add(self, signals: Signals) -> None:
        """Adds the signals of one micro-batch, without a trainer."""
        log_ratio, mask = _checked(signals)
        tokens = log_ratio.isfinite() & mask
        is_sample = mask if mask.ndim == 1 else mask.any(-1)
        masked = torch.where(mask, log_ratio, 0.0)
        log_weights = masked if masked.ndim == 1 else masked.sum(-1)
        if (rollout := signals.get("rollout")) is not None:  # a token counts once, whichever row it trains in
            rollout = rollout.to(log_weights.device)
            log_weights = torch.zeros_like(log_weights).index_add(0, rollout, log_weights)
            is_sample = torch.zeros_like(log_weights).index_add(0, rollout, is_sample.to(log_weights.dtype)) > 0
        # rows that do not count get -inf (weight 0): removing them would synchronise with the device
        self._log_weights.append(torch.where(is_sample, log_weights, -torch.inf))
        kl = kl_k3(torch.where(tokens, log_ratio, 0.0)).sum()
        rewards = log_ratio.new_zeros(0) if signals.get("rewards") is None else _wide(signals["rewards"])
        entropy, num_entropies = _sum_and_count(signals, "entropy", mask)
        staleness, num_stalenesses = _sum_and_count(signals, "staleness", mask)
        broken = (is_sample & ~log_weights.isfinite()).sum()
        # the order is that in which `_summary` reads them: two counts, then pairs of sum and count
        sums = [is_sample.sum(), broken]
        sums += [kl, tokens.sum()]
        sums += [entropy, num_entropies]
        sums += [staleness, num_stalenesses]
        sums += [rewards.nan_to_num(0, 0, 0).sum(), rewards.isfinite().sum()]
        wide = [value.to(log_ratio.device, torch.float64) for value in sums]  # rewards, say, may be on the CPU
        self._sums.append(torch.stack(wide))  # float64: counts stay exact

    def reduce(self, device: torch.device | str) -> StepSignals:
        """Signals of the step over all ranks. A collective: every rank calls, with or without signals."""
        device = torch.device("cpu") if torch.device(device).type == "mps" else torch.device(device)  # no float64 there
        totals = torch.stack(self._sums).sum(0) if self._sums else torch.zeros(10, dtype=torch.float64)
        log_weights = torch.cat(self._log_weights) if self._log_weights else totals.new_zeros(0)
        self._clear()
        local = torch.cat([weight_sums(log_weights).to(device), totals.to(device)])
        return _summary(_all_gather(local).cpu(), self.num_copies)

    def _find(self, trainer: AnyTrainer, pl_module: AnyModule) -> Signals | None:
        recorder = self._recorder
        if self.extract is not None:
            if recorder is None:
                raise SetupError("SignalCollector.collect was called before attach")
            return self.extract(trainer, pl_module, recorder.batch, recorder.output)
        if hasattr(pl_module, "stabilizer_signals"):
            return pl_module.stabilizer_signals  # type: ignore[return-value]
        return recorder.output if recorder is not None and isinstance(recorder.output, Mapping) else None

    def _clear(self) -> None:
        self._log_weights = []
        self._sums = []
        self._has_stale_signals = False
        self._num_kept = 0


def _summary(ranks: Float64[Tensor, "R 13"], num_copies: int) -> StepSignals:
    samples, broken, *means = (ranks[:, 3:].sum(0) / num_copies).tolist()
    kl, entropy, staleness, reward = (means[n] / means[n + 1] if means[n + 1] else None for n in (0, 2, 4, 6))
    ess = ess_of_sums(ranks[:, :3]).item() / num_copies
    return StepSignals(
        num_samples=round(samples),
        num_broken=round(broken),
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
    """Detached values in float64: float32 would round sums over thousands of tokens."""
    tensor = tensor.detach()
    return (tensor.cpu() if tensor.device.type == "mps" else tensor).double()  # MPS has no float64


def _sum_and_count(signals: Signals, name: str, mask: Bool[Tensor, "*shape"]) -> tuple[Tensor, Tensor]:
    if signals.get(name) is None:
        return mask.new_zeros((), dtype=torch.float64), mask.new_zeros((), dtype=torch.float64)
    values = _wide(signals[name]).to(mask.device)
    counted = mask & values.isfinite()
    return torch.where(counted, values, 0.0).sum(), counted.sum()


def _all_gather(local: Float[Tensor, " K"]) -> Float[Tensor, "R K"]:
    """Row of each rank. Not summed, because sums of weights are relative to each rank's own maximum."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return local[None]
    gathered = [torch.empty_like(local) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, local)
    return torch.stack(gathered)


class _StepRecorder:
    """Wraps `training_step` to record its batch and output; one per module, shared by all collectors."""

    def __init__(self, pl_module: AnyModule) -> None:
        self.batch: Any = None
        self.output: Any = None
        self._pl_module = pl_module
        self._users = 0
        original = pl_module.training_step

        @functools.wraps(original)
        def training_step(*args: Any, **kwargs: Any) -> Any:
            self.output = None
            self.batch = args[0] if args else None
            self.output = original(*args, **kwargs)
            return self.output

        training_step._recorder = self  # type: ignore[attr-defined]
        pl_module.training_step = training_step  # type: ignore[method-assign]

    @classmethod
    def of(cls, pl_module: AnyModule) -> _StepRecorder:
        """Recorder of the module, created on first use."""
        step = vars(pl_module).get("training_step")
        recorder = step._recorder if hasattr(step, "_recorder") else cls(pl_module)  # type: ignore[union-attr]
        recorder._users += 1
        return recorder

    def release(self) -> None:
        """Restores the module's own method after the last release."""
        self._users -= 1
        if self._users == 0:
            del self._pl_module.training_step


# -- Base of callbacks that act on the stabilizer signals of one optimizer's steps ------------------------------------


class _AccumulationWatch:
    """Watches whether gradients of one optimizer accumulate, by hooks on its parameters."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._has_accumulated = False
        parameters = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
        self._hooks = [p.register_post_accumulate_grad_hook(self._note) for p in parameters]

    def _note(self, parameter: Tensor) -> None:
        self._has_accumulated = True

    def take(self) -> bool:
        """True if gradients accumulated since the last call; clears the flag."""
        has_accumulated = self._has_accumulated
        self._has_accumulated = False
        return has_accumulated

    def stop(self) -> None:
        """Removes the hooks."""
        for hook in self._hooks:
            hook.remove()


HOW_TO_SIGNAL = (
    "set self.stabilizer_signals = {'log_ratio': new_logprobs.detach() - sampling_logprobs, 'mask': is_completion} in "
    "training_step (both [batch, tokens]), return these keys beside 'loss', or give the callback extract=function("
    "trainer, pl_module, batch, output) that returns them"
)


class SignalCallback(pl.Callback):
    """Collects the signals of each micro-batch, and calls `on_signals_complete` before each step of one optimizer.

    Warns once of a step without signals, with what the module has to set.

    Args:
        optimizer: position, or name of the submodule it trains; None if there is only one.
        extract: adapter for modules that set no signals, see `lit_async_rl.stabilizers.signals`.

    Raises:
        ValueError: when training starts, the choice matches no optimizer, or there are several and no choice.
    """

    def __init__(self, optimizer: int | str | None, extract: Extract | None) -> None:
        self.optimizer = optimizer
        self.extract = extract
        self._signals = SignalCollector(extract)
        self._has_trained = False
        self._accumulation: _AccumulationWatch | None = None  # only with several optimizers
        self._has_missed = False
        self._has_stepped = False

    @abstractmethod
    def on_signals_complete(self, trainer: AnyTrainer, pl_module: AnyModule, optimizer: Optimizer) -> None:
        """Called before each step of the chosen optimizer; must call `reduce_signals`, on all ranks."""

    def on_step_complete(self, trainer: AnyTrainer, pl_module: AnyModule) -> None:
        """Called after each such step, when the data module collates no batch."""

    def reduce_signals(self, optimizer: Optimizer) -> StepSignals:
        """Signals of the step over its micro-batches and all ranks. A collective: all ranks call."""
        device = next(param.device for group in optimizer.param_groups for param in group["params"])
        signals = self._signals.reduce(device)
        if signals.num_samples == 0 and self.without_signals and not self._has_missed:
            self._has_missed = True
            rank_zero_warn(
                f"{type(self).__name__}: a step had no log_ratio signals for unmasked tokens, so the callback "
                f"{self.without_signals}. To provide these signals, {HOW_TO_SIGNAL}"
            )
        return signals

    @property
    def without_signals(self) -> str:
        """Effect of a step without signals, completing "so the callback ..."; empty if none are needed."""
        return "does nothing"

    def reset(self) -> None:
        """Resets the state of an earlier run; a resume restores its state afterwards."""

    def close(self) -> None:
        """Restores the module, after training or an exception."""
        self._signals.detach()
        if self._accumulation is not None:
            self._accumulation.stop()
            self._accumulation = None

    def setup(self, trainer: AnyTrainer, pl_module: AnyModule, stage: str) -> None:
        if stage == "fit":
            if self._has_trained:
                self.reset()
            self._signals.attach(pl_module)

    def on_train_start(self, trainer: AnyTrainer, pl_module: AnyModule) -> None:
        owner = type(self).__name__
        check_choice(trainer, pl_module, self.optimizer, owner=owner)
        if self.optimizer is None and len(trainer.optimizers) > 1:
            raise ValueError(f"{owner}: several optimizers, choose one: optimizer=<position or submodule name>")
        self._has_trained = True
        self._has_stepped = False
        self._signals.num_copies = num_copies(trainer)
        if len(trainer.optimizers) > 1:
            self._accumulation = _AccumulationWatch(chosen_optimizers(trainer, pl_module, self.optimizer)[0])

    def on_before_backward(self, trainer: AnyTrainer, pl_module: AnyModule, loss: Tensor) -> None:
        if self._accumulation is not None and self._accumulation.take():
            self._signals.keep()
        self._signals.collect(trainer, pl_module)

    def on_before_optimizer_step(self, trainer: AnyTrainer, pl_module: AnyModule, optimizer: Optimizer) -> None:
        has_accumulated = self._accumulation is not None and self._accumulation.take()
        if chosen_index(trainer, pl_module, optimizer, choice=self.optimizer) is not None:
            self.on_signals_complete(trainer, pl_module, optimizer)
            self._has_stepped = True
        elif has_accumulated:  # this optimizer accumulates micro-batches while another one steps at each
            self._signals.keep()
        else:
            self._signals.mark_stale()

    def on_train_batch_end(
        self, trainer: AnyTrainer, pl_module: AnyModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._has_stepped:
            self._has_stepped = False
            self.on_step_complete(trainer, pl_module)

    def teardown(self, trainer: AnyTrainer, pl_module: AnyModule, stage: str) -> None:
        self.close()

    def on_exception(self, trainer: AnyTrainer, pl_module: AnyModule, exception: BaseException) -> None:
        self.close()

    @property
    def state_key(self) -> str:
        """Key of the checkpointed state; distinguishes instances for different optimizers."""
        return self._generate_state_key(optimizer=self.optimizer)
