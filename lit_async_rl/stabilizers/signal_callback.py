"""Base of callbacks that act on the stabilizer signals of one optimizer's steps."""

from __future__ import annotations

from abc import abstractmethod

import lightning.pytorch as pl
from torch import Tensor
from torch.optim import Optimizer

from lit_async_rl.stabilizers.signals import Extract, SignalCollector, StepSignals
from lit_async_rl.stabilizers.step_lr import check_choice, chosen_index
from lit_async_rl.utils.lightning_types import AnyModule, AnyTrainer


class _Growth:
    """Whether something was added to the gradients of an optimizer."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._has_grown = False
        parameters = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
        self._hooks = [p.register_post_accumulate_grad_hook(self._note) for p in parameters]

    def _note(self, parameter: Tensor) -> None:
        self._has_grown = True

    def take(self) -> bool:
        """Whether that was since the last call."""
        has_grown, self._has_grown = self._has_grown, False
        return has_grown

    def stop(self) -> None:
        """Removes the hooks."""
        for hook in self._hooks:
            hook.remove()


class SignalCallback(pl.Callback):
    """Collects the signals of each micro-batch, and calls `on_signals_complete` before each step of one optimizer.

    Args:
        optimizer: position, or name of the submodule it trains; None where there is only one.
        extract: adapter for modules that set no signals, see `lit_async_rl.stabilizers.signals`.

    Raises:
        ValueError: when training starts, the choice matches no optimizer, or there are several and none was chosen.
    """

    def __init__(self, optimizer: int | str | None, extract: Extract | None) -> None:
        self.optimizer = optimizer
        self.extract = extract
        self._signals = SignalCollector(extract)
        self._has_trained = False
        self._growth: _Growth | None = None  # of the optimizer's gradients, where there are several optimizers

    @abstractmethod
    def on_signals_complete(self, trainer: AnyTrainer, pl_module: AnyModule, optimizer: Optimizer) -> None:
        """Called before each step of the chosen optimizer; must call `reduce_signals`, on all ranks."""

    def reduce_signals(self, optimizer: Optimizer) -> StepSignals:
        """Signals of the step over its micro-batches and all ranks. A collective: all ranks call."""
        return self._signals.reduce(optimizer.param_groups[0]["params"][0].device)

    def forget(self) -> None:
        """Forgets an earlier run, before another begins; a resume restores its state after this."""

    def close(self) -> None:
        """Restores the module, after training or an exception."""
        self._signals.detach()
        if self._growth is not None:
            self._growth.stop()
            self._growth = None

    def setup(self, trainer: AnyTrainer, pl_module: AnyModule, stage: str) -> None:
        if stage == "fit":
            if self._has_trained:
                self.forget()
            self._signals.attach(pl_module)

    def on_train_start(self, trainer: AnyTrainer, pl_module: AnyModule) -> None:
        owner = type(self).__name__
        check_choice(trainer, pl_module, self.optimizer, owner)
        if self.optimizer is None and len(trainer.optimizers) > 1:
            raise ValueError(f"{owner}: several optimizers, choose one: optimizer=<position or submodule name>")
        self._has_trained = True
        if len(trainer.optimizers) > 1:
            chosen = (o for o in trainer.optimizers if chosen_index(trainer, pl_module, o, self.optimizer) is not None)
            self._growth = _Growth(next(chosen))

    def on_before_backward(self, trainer: AnyTrainer, pl_module: AnyModule, loss: Tensor) -> None:
        if self._growth is not None and self._growth.take():
            self._signals.keep()
        self._signals.collect(trainer, pl_module)

    def on_before_optimizer_step(self, trainer: AnyTrainer, pl_module: AnyModule, optimizer: Optimizer) -> None:
        has_grown = self._growth is not None and self._growth.take()
        if chosen_index(trainer, pl_module, optimizer, self.optimizer) is not None:
            self.on_signals_complete(trainer, pl_module, optimizer)
        elif has_grown:  # gradients of several micro-batches are added up, while another optimizer steps at each
            self._signals.keep()
        else:
            self._signals.pass_over()

    def teardown(self, trainer: AnyTrainer, pl_module: AnyModule, stage: str) -> None:
        self.close()

    def on_exception(self, trainer: AnyTrainer, pl_module: AnyModule, exception: BaseException) -> None:
        self.close()

    @property
    def state_key(self) -> str:
        """Key of the checkpointed state; distinguishes instances for different optimizers."""
        return self._generate_state_key(optimizer=self.optimizer)
