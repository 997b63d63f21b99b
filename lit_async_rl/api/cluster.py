"""Interface of a cluster to a run, and what they exchange. `RayCluster` of `lit_async_rl.ray` implements it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl

from lit_async_rl.data.module import RolloutDataModule


@dataclass(frozen=True)
class Place:
    """Where a rank is among the others, and how it reports to the command.

    Args:
        num_local: ranks on this node: `trainer.devices`.
        num_nodes: nodes with ranks: `trainer.num_nodes`.
        resume_from: checkpoint of an earlier start of the same run; None at the first.
        tell_folder: takes the folder of the run's checkpoints.
        give: takes plain data for the command.
    """

    num_local: int
    num_nodes: int
    resume_from: str | None
    tell_folder: Callable[[str], None]
    give: Callable[[Any], None]


@dataclass(frozen=True)
class Outcome:
    """How a run of placed ranks ended.

    Args:
        status: exit status of rank 0, as a shell counts it; any message has been shown.
        result: what rank 0 gave; None if it gave nothing.
        folder: of the run's checkpoints; None before training began.
    """

    status: int
    result: Any
    folder: str | None


class Cluster(ABC):
    """Places trainer ranks, and actors for engines, rewards and environments."""

    dry_run: bool

    @property
    @abstractmethod
    def places_ranks(self) -> bool:
        """Whether it starts the trainer's processes."""

    @abstractmethod
    def check(self) -> None:
        """Refuses a cluster that cannot be used here.

        Raises:
            SetupError: says what is missing.
        """

    @abstractmethod
    def print_dry_run(self, *, uses_gpus: bool) -> None:
        """Prints what would be placed where.

        Raises:
            SetupError: it does not fit, or the cluster is not reachable.
        """

    @abstractmethod
    def launch(self, job: Callable[[Place], None], *, uses_gpus: bool) -> Outcome:
        """Runs `job` in each of the trainer's ranks, until all have ended.

        Raises:
            SetupError: the cluster is not reachable, or has no room.
            RankError: the ranks failed too often.
        """

    @abstractmethod
    def actors_connected(self) -> AbstractContextManager[Any]:
        """Context in which actors of this process's run can be set up."""

    @abstractmethod
    def place_actors(self, trainer: pl.Trainer, data: RolloutDataModule) -> None:
        """Makes a data module use actors instead of its own engine, reward and environment."""

    @abstractmethod
    def as_config(self) -> dict[str, Any]:
        """This setting as a configuration has it."""
