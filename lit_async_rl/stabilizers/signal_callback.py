"""Base of callbacks that act on the stabilizer signals of one optimizer's steps."""

from __future__ import annotations

from abc import abstractmethod

import lightning.pytorch as pl
from torch import Tensor
from torch.optim import Optimizer

from lit_async_rl.stabilizers.signals import Extract, SignalCollector, StepSignals
from lit_async_rl.stabilizers.step_lr import check_choice, chosen_index
from lit_async_rl.utils.lightning_types import AnyModule, AnyTrainer


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
        self._signals = SignalCollector(extract)
        self._has_trained = False

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

    def on_before_backward(self, trainer: AnyTrainer, pl_module: AnyModule, loss: Tensor) -> None:
        self._signals.collect(trainer, pl_module)

    def on_before_optimizer_step(self, trainer: AnyTrainer, pl_module: AnyModule, optimizer: Optimizer) -> None:
        if chosen_index(trainer, pl_module, optimizer, self.optimizer) is None:
            self._signals.pass_over()
        else:
            self.on_signals_complete(trainer, pl_module, optimizer)

    def teardown(self, trainer: AnyTrainer, pl_module: AnyModule, stage: str) -> None:
        self.close()

    def on_exception(self, trainer: AnyTrainer, pl_module: AnyModule, exception: BaseException) -> None:
        self.close()

    @property
    def state_key(self) -> str:
        """Key of the checkpointed state; distinguishes instances for different optimizers."""
        return self._generate_state_key(optimizer=self.optimizer)
