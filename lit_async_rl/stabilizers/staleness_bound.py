"""What a data module offers to those who change the staleness bound while it runs."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from lit_async_rl.utils.lightning_types import AnyTrainer


@runtime_checkable
class BoundedData(Protocol):
    """A data module with a bound on staleness, in versions; `RolloutDataModule` is one.

    It starts at its configured bound, after a resume too: who changed the bound restores the change.
    """

    @property
    def max_staleness(self) -> int:
        """The bound for what is sampled from now on."""

    def set_max_staleness(self, max_staleness: int) -> None:
        """Changes it; before training, with the present bound: nothing, or a refusal. Called alike on all ranks."""


def bounded_data(trainer: AnyTrainer, owner: str) -> BoundedData:
    """The trainer's data module.

    Raises:
        ValueError: it has no bound to change.
    """
    data = trainer.datamodule  # type: ignore[attr-defined]
    if not isinstance(data, BoundedData):
        raise ValueError(
            f"{owner} needs a data module with `max_staleness` and `set_max_staleness(int)`, got {type(data).__name__}"
        )
    return data
