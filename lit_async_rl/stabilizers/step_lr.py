"""Optimizer utilities of callbacks: selection, gradient unscaling, a learning rate for one step."""

from __future__ import annotations

import functools
import math
from typing import Any
from weakref import WeakKeyDictionary

from torch.amp.grad_scaler import _refresh_per_optimizer_state
from torch.optim import Optimizer

from lit_async_rl.utils.lightning_types import AnyModule, AnyTrainer

# settings that decide on which device and in which layout an optimizer keeps its moments
STATE_LAYOUT_SETTINGS = {"fused", "foreach", "capturable", "differentiable"}
_unscaled_in: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()  # batch, counted over epochs


def raw_optimizer(optimizer: Optimizer) -> Optimizer:
    """Unwraps the optimizers that `self.optimizers()` and `fabric.setup` return."""
    # lightning.pytorch, pytorch_lightning and Fabric have a wrapper class each; all keep it under this name
    while "Lightning" in type(optimizer).__name__ or "Fabric" in type(optimizer).__name__:
        optimizer = optimizer.optimizer  # type: ignore[attr-defined]
    return optimizer


def optimizer_index(trainer: AnyTrainer, optimizer: Optimizer) -> int:
    """Position of `optimizer` in `trainer.optimizers`."""
    return next(n for n, known in enumerate(trainer.optimizers) if raw_optimizer(known) is raw_optimizer(optimizer))


def chosen_index(
    trainer: AnyTrainer, pl_module: AnyModule, optimizer: Optimizer, choice: int | str | None
) -> int | None:
    """Position of `optimizer` among the trainer's if `choice` selects it, else None.

    Args:
        trainer: trainer of `pl_module`.
        pl_module: module in training.
        optimizer: optimizer about to step.
        choice: position; name of a submodule, for the optimizers of its parameters; or None for all.
    """
    index = optimizer_index(trainer, optimizer)
    if isinstance(choice, str):
        wanted = {id(p) for p in pl_module.get_submodule(choice).parameters()}
        return index if any(id(p) in wanted for group in optimizer.param_groups for p in group["params"]) else None
    return index if choice is None or choice == index else None


def chosen_optimizers(trainer: AnyTrainer, pl_module: AnyModule, choice: int | str | None) -> list[Optimizer]:
    """The trainer's optimizers that `choice` selects, see `chosen_index`, in their order."""
    return [one for one in trainer.optimizers if chosen_index(trainer, pl_module, one, choice=choice) is not None]


def check_choice(trainer: AnyTrainer, pl_module: AnyModule, choice: int | str | None, owner: str) -> None:
    """Checks that `choice` can select an optimizer, for the callback `owner`.

    Raises:
        ValueError: no submodule has the name, or no optimizer the position.
    """
    if isinstance(choice, str):
        names = [name.replace("_fsdp_wrapped_module.", "") for name, _ in pl_module.named_modules() if name]
        if choice not in names:
            raise ValueError(f"{owner}.optimizer={choice!r} is not a submodule of {type(pl_module).__name__}")
    elif choice is not None and not 0 <= choice < len(trainer.optimizers):
        raise ValueError(f"{owner}.optimizer={choice}, but there are {len(trainer.optimizers)} optimizers")


def metric_suffix(trainer: AnyTrainer, choice: int | str | None, index: int) -> str:
    """Suffix of metric names, `/<index>`; empty for a chosen or only optimizer."""
    return f"/{index}" if choice is None and len(trainer.optimizers) > 1 else ""


def loss_scaler(trainer: AnyTrainer) -> Any:
    """Loss scaler of the run (`precision: 16-mixed`); None without one, or if it is disabled."""
    scaler = getattr(trainer.precision_plugin, "scaler", None)  # several plugin classes of both packages have one
    return scaler if scaler is not None and scaler.is_enabled() else None


def unscale_gradients(trainer: AnyTrainer, optimizer: Optimizer) -> None:
    """Divides gradients by the loss scale for fused optimizers, which unscale only within their step. Idempotent.

    Lightning unscales for all others before `on_before_optimizer_step`, unless `training_step` returned None: it then
    skips the step, without touching the scaler.
    """
    scaler = loss_scaler(trainer)
    if scaler is None or not getattr(optimizer, "_step_supports_amp_scaling", False):
        return
    states = scaler._per_optimizer_states  # no public way to ask
    batch = trainer.fit_loop.total_batch_idx
    if states[id(optimizer)]["stage"].name == "UNSCALED" and _unscaled_in.get(optimizer) != batch:
        states[id(optimizer)] = _refresh_per_optimizer_state()  # the step of that batch was skipped
    has_gradients = any(param.grad is not None for group in optimizer.param_groups for param in group["params"])
    if states[id(optimizer)]["stage"].name == "READY" and has_gradients and scaler._scale is not None:
        scaler.unscale_(optimizer)
        _unscaled_in[optimizer] = batch


def is_left_out(trainer: AnyTrainer, optimizer: Optimizer) -> bool:
    """Whether the step is skipped with gradients that are still multiplied by the loss scale.

    That is so if the last micro-batch's `training_step` returned None, except with fused optimizers, see
    `unscale_gradients`.
    """
    scaler = loss_scaler(trainer)
    if scaler is None or getattr(optimizer, "_step_supports_amp_scaling", False):
        return False
    return bool(scaler._per_optimizer_states[id(optimizer)]["stage"].name == "READY")


def overflows(trainer: AnyTrainer, optimizer: Optimizer) -> bool:
    """Whether the loss scaler will skip the step for NaN or infinity; False without a scaler."""
    scaler = loss_scaler(trainer)
    if scaler is None:
        return False
    unscale_gradients(trainer, optimizer)
    return any(bool(found) for found in scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"].values())


def finds_scale(trainer: AnyTrainer, optimizer: Optimizer) -> bool:
    """Whether the loss scaler skips the step and lowers its scale, as it does until it has found the right one.

    An overflow with a scale of at most 1 has another cause.
    """
    scaler = loss_scaler(trainer)
    return scaler is not None and overflows(trainer, optimizer) and bool(scaler.get_scale() > 1)


def has_plain_settings(optimizer: Optimizer) -> bool:
    """Whether parameter groups hold settings only (torch's optimizers and ours), and no state."""
    return type(optimizer).__module__.startswith(("torch.optim.", "lit_async_rl."))


def group_settings(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Settings of each parameter group; only the learning rate for optimizers of other libraries."""
    if not has_plain_settings(optimizer):
        return [{"lr": group["lr"]} for group in optimizer.param_groups]
    left_out = {"params", *STATE_LAYOUT_SETTINGS}
    return [{name: group[name] for name in group.keys() - left_out} for group in optimizer.param_groups]


def tolerate_dropped_gradients(trainer: AnyTrainer) -> None:
    """Makes `gradient_clip_algorithm: value` skip updates without gradients, where torch raises IndexError."""
    precision: Any = trainer.precision_plugin
    clip = precision.clip_grad_by_value
    if hasattr(clip, "_tolerates_dropped_gradients"):
        return

    @functools.wraps(clip)
    def clip_grad_by_value(optimizer: Optimizer, clip_val: float) -> None:
        if any(p.grad is not None for group in optimizer.param_groups for p in group["params"]):
            clip(optimizer, clip_val)

    clip_grad_by_value._tolerates_dropped_gradients = True  # type: ignore[attr-defined]
    precision.clip_grad_by_value = clip_grad_by_value


class OneStepLearningRate:
    """Multiplies an optimizer's learning rate during exactly one `step`; several of them multiply.

    The learning rate changes within `optimizer.step` only, invisible to schedulers, checkpoints and loggers. If
    Lightning runs the closure inside the step, `scale` applies at once; otherwise (loss scaling, manual optimization,
    Fabric) when the step begins. A step that the loss scaler skips changes nothing, and the next call replaces the
    factor.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._step = _StepRate.of(optimizer)
        self._step.factors[self] = 1.0

    def scale(self, factor: float) -> None:
        """Sets the factor of the running step or else of the next one."""
        self._step.scale(self, factor)

    def close(self) -> None:
        """Restores the learning rate; the last one removes the hooks."""
        self._step.leave(self)


class _StepRate:
    """Rate of an optimizer's step, with the factor of each `OneStepLearningRate`.

    One for each optimizer: of two, one would restore a rate that the other had scaled, and it would stay.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.factors: dict[OneStepLearningRate, float] = {}
        self._optimizer = optimizer
        self._in_step = False
        self._original: list[Any] | None = None
        self._handles = [
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
        ]

    @classmethod
    def of(cls, optimizer: Optimizer) -> _StepRate:
        """The optimizer's, made on first use."""
        if not hasattr(optimizer, "_step_rate"):
            optimizer._step_rate = cls(optimizer)  # type: ignore[attr-defined]
        return optimizer._step_rate  # type: ignore[attr-defined,no-any-return]

    def scale(self, owner: OneStepLearningRate, factor: float) -> None:
        self._restore()
        self.factors[owner] = factor
        if self._in_step:
            self._apply()

    def leave(self, owner: OneStepLearningRate) -> None:
        self._restore()
        self.factors.pop(owner, None)
        if self.factors or not self._handles:
            return
        for handle in self._handles:
            handle.remove()
        self._handles = []
        del self._optimizer._step_rate  # type: ignore[attr-defined]

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._restore()  # after a step that raised
        self._in_step = True
        self._apply()

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._restore()
        self._in_step = False
        self.factors = dict.fromkeys(self.factors, 1.0)

    def _apply(self) -> None:
        factor = math.prod(self.factors.values())
        if factor == 1:
            return
        self._original = [group["lr"] for group in self._optimizer.param_groups]
        for group in self._optimizer.param_groups:
            group["lr"] = group["lr"] * factor  # out of place: fused optimizers may keep it in a tensor

    def _restore(self) -> None:
        if self._original is not None:
            for group, lr in zip(self._optimizer.param_groups, self._original, strict=True):
                group["lr"] = lr
            self._original = None
