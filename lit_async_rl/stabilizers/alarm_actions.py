"""Actions of `CollapseAlarm`: warn, stop, or lower the staleness bound. Those that roll back are in `rollback`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from lit_async_rl.stabilizers.staleness_bound import bounded_data
from lit_async_rl.utils.checks import check_range
from lit_async_rl.utils.lightning_types import AnyModule, AnyTrainer


class AlarmAction(ABC):
    """Action taken after the step that raised an alarm; called on all ranks."""

    def begin(self, trainer: AnyTrainer) -> None:  # noqa: B027
        """Called when training starts: resets the state of an earlier run, and checks the trainer."""

    def healthy(self, trainer: AnyTrainer, pl_module: AnyModule) -> None:  # noqa: B027
        """Called before each update whose signals are within all limits; the current weights are good."""

    def unhealthy(self, trainer: AnyTrainer, pl_module: AnyModule) -> None:  # noqa: B027
        """Called before each other update: a limit is broken, or the cooldown after an alarm has not passed."""

    @abstractmethod
    def act(self, trainer: AnyTrainer, pl_module: AnyModule) -> str:
        """Takes the action; returns a sentence for the report."""

    def state_dict(self) -> dict[str, Any]:
        """State for the checkpoint: plain values, the same on all ranks."""
        return {}

    def resume(self, trainer: AnyTrainer, state_dict: dict[str, Any]) -> None:  # noqa: B027
        """Restores the state of a resumed run, after `begin`."""


class Warn(AlarmAction):
    """Reports the alarm only."""

    def act(self, trainer: AnyTrainer, pl_module: AnyModule) -> str:
        return "Training continues unchanged."


class Stop(AlarmAction):
    """Stops training after this step (`trainer.should_stop`)."""

    def act(self, trainer: AnyTrainer, pl_module: AnyModule) -> str:
        trainer.should_stop = True
        return "Training stops."


class LowerStaleness(AlarmAction):
    """Lowers the data module's `max_staleness`.

    Args:
        by: versions per alarm.
        minimum: lowest bound.

    Raises:
        ValueError: a setting is out of range; when training starts, the data module has no bound or cannot change it.
    """

    def __init__(self, by: int = 1, minimum: int = 0) -> None:
        check_range("LowerStaleness", "integer >= 1", by=by)
        check_range("LowerStaleness", "integer >= 0", minimum=minimum)
        self.by, self.minimum = by, minimum
        self._bound: int | None = None

    def begin(self, trainer: AnyTrainer) -> None:
        """Checks that the data module has a bound that can be changed."""
        data = bounded_data(trainer, "LowerStaleness")
        data.set_max_staleness(data.max_staleness)
        self._bound = None

    def act(self, trainer: AnyTrainer, pl_module: AnyModule) -> str:
        data = bounded_data(trainer, "LowerStaleness")
        before, after = data.max_staleness, max(self.minimum, data.max_staleness - self.by)
        if after >= before:
            return f"max_staleness stays at {before}, its minimum."
        data.set_max_staleness(after)
        self._bound = after
        return f"max_staleness was lowered from {before} to {after}."

    def state_dict(self) -> dict[str, Any]:
        return {"bound": self._bound}

    def resume(self, trainer: AnyTrainer, state_dict: dict[str, Any]) -> None:
        """Lowers the bound again, because the data module starts at its configured bound."""
        self._bound = state_dict["bound"]
        data = bounded_data(trainer, "LowerStaleness")
        if self._bound is not None and self._bound < data.max_staleness:
            data.set_max_staleness(self._bound)
