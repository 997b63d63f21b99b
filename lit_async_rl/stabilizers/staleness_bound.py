"""Protocol of data modules whose staleness bound can change during training."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from lit_async_rl.utils.lightning_types import AnyTrainer


@runtime_checkable
class BoundedData(Protocol):
    """Data module with a bound on staleness, in versions; `RolloutDataModule` implements it.

    It starts at its configured bound, also after a resume: callbacks that change the bound restore their change.
    """

    @property
    def max_staleness(self) -> int:
        """Staleness bound of rollouts admitted from now on, in versions."""

    def set_max_staleness(self, max_staleness: int) -> None:
        """Changes the bound, on all ranks. Called before training, too: with the present bound, or a resumed run's."""


def bounded_data(trainer: AnyTrainer, owner: str) -> BoundedData:
    """Returns the trainer's data module, for the callback `owner`.

    Raises:
        ValueError: the data module has no staleness bound to change.
    """
    data = trainer.datamodule  # type: ignore[attr-defined]
    if not isinstance(data, BoundedData):
        raise ValueError(
            f"{owner} needs a data module with `max_staleness` and `set_max_staleness(int)`, got {type(data).__name__}"
        )
    return data
