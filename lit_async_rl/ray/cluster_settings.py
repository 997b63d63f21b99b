"""Settings of a Ray cluster, and the connection to it. Does not import ray."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from lit_async_rl.errors import SetupError
from lit_async_rl.ray import runtime
from lit_async_rl.ray.actors import Resources
from lit_async_rl.utils.checks import check_range

DEFAULT_CPUS = 0.5  # of a rank, a replica and an actor of a pool: two of each fit on a machine with two cores


class _Placed:
    """Actors, each with resources of its own."""

    resources: dict[str, int | float] | None

    @property
    def needs(self) -> Resources:
        """Resources of each actor, half a CPU where none are given."""
        return Resources({"CPU": DEFAULT_CPUS} if self.resources is None else self.resources)


@dataclass(frozen=True, kw_only=True)
class EngineReplicas(_Placed):
    """Replicas of the engine: `cluster.engines`.

    Args:
        replicas: number of engines, each an actor of Ray; 1 leaves the engine in the leading rank.
        min: fewest replicas; None is `replicas`. If it is less than `max`, `ReplicaScaling` is added to the callbacks.
        max: most replicas; None is `replicas`.
        resources: of one replica, as Ray counts them: `CPU`, `GPU`, `memory` in bytes, or a name of your own.
        delta: send only changes of weights between nodes, see `RayEngine`.

    Raises:
        ValueError: a setting is out of range.
    """

    replicas: int = 1
    min: int | None = None
    max: int | None = None
    resources: dict[str, int | float] | None = None
    delta: bool = False

    def __post_init__(self) -> None:
        owner = "cluster.engines"
        check_range(owner, "integer >= 1", replicas=self.replicas, min=self.min, max=self.max)
        if not self.least <= self.replicas <= self.most:
            raise ValueError(
                f"{owner}.replicas must be between min and max, got replicas={self.replicas}, min={self.least}, "
                f"max={self.most}"
            )
        check_resources(f"{owner}.resources", self.resources)

    @property
    def least(self) -> int:
        """Fewest replicas."""
        return self.replicas if self.min is None else self.min

    @property
    def most(self) -> int:
        """Most replicas."""
        return self.replicas if self.max is None else self.max


@dataclass(frozen=True, kw_only=True)
class RewardActors(_Placed):
    """Actors that call `data.reward`: `cluster.rewards`.

    Args:
        actors: processes, each with all parts of the reward. A part that counts something for the whole run, such as a
            judge with its budget, is called in one of them.
        resources: of one actor, as Ray counts them: `CPU`, `GPU`, `memory` in bytes, or a name of your own.
        calls: concurrent calls of a plain reward in one actor, in threads: more than one for a reward that waits, such
            as for programs in a sandbox. An `async` reward has its own number, or `data.scoring.workers` in all actors
            together.

    Raises:
        ValueError: a setting is out of range.
    """

    actors: int = 2
    resources: dict[str, int | float] | None = None
    calls: int = 1

    def __post_init__(self) -> None:
        check_range("cluster.rewards", "integer >= 1", actors=self.actors, calls=self.calls)
        check_resources("cluster.rewards.resources", self.resources)


@dataclass(frozen=True, kw_only=True)
class EnvironmentActors(_Placed):
    """Actors that play the episodes of an environment: `cluster.environments`.

    Args:
        actors: processes, each with the environment. An episode stays in the one that has started it.
        resources: of one actor, as Ray counts them: `CPU`, `GPU`, `memory` in bytes, or a name of your own.

    Raises:
        ValueError: a setting is out of range.
    """

    actors: int = 2
    resources: dict[str, int | float] | None = None

    def __post_init__(self) -> None:
        check_range("cluster.environments", "integer >= 1", actors=self.actors)
        check_resources("cluster.environments.resources", self.resources)


class ClusterSettings:
    """Settings of a `RayCluster`, whose constructor sets them."""

    address: str | None
    trainer_ranks: int
    trainer_resources: dict[str, int | float] | None
    engines: EngineReplicas
    rewards: RewardActors | None
    environments: EnvironmentActors | None
    dry_run: bool
    max_failures: int
    start_timeout_s: float

    @property
    def places_ranks(self) -> bool:
        """Whether Ray starts the trainer's processes: not for a single rank without `trainer_resources`."""
        return self.trainer_ranks > 1 or self.trainer_resources is not None

    @property
    def has_replicas(self) -> bool:
        """Whether there are, or can be, several engines."""
        return self.engines.most > 1

    @property
    def has_actors(self) -> bool:
        """Whether the process that samples uses actors."""
        return self.has_replicas or self.rewards is not None or self.environments is not None

    def check(self) -> None:
        """Refuses a cluster where Ray is needed and not installed; does not import it.

        Raises:
            SetupError: says how to install it.
        """
        if (self.places_ranks or self.has_actors) and importlib.util.find_spec("ray") is None:
            raise SetupError("cluster needs Ray, which is not installed: pip install 'lit-async-rl[ray]'")

    @contextmanager
    def connected(self) -> Iterator[Any]:
        """Context with the module `ray`, connected to the cluster; ends a Ray that it has started on this machine.

        Raises:
            SetupError: Ray is not installed or not reachable, or a node that other machines reach asks for no token.
        """
        num_ranks = self.trainer_ranks if self.places_ranks else 0
        num_cpus = num_ranks * self.needs_of_rank(has_gpus=False).num_cpus
        num_cpus += self.engines.most * self.engines.needs.num_cpus if self.has_replicas else 0.0
        num_cpus += sum(pool.actors * pool.needs.num_cpus for pool in (self.rewards, self.environments) if pool)
        ray = runtime.connect(self.address, num_cpus=num_cpus, what="cluster", user=self)
        try:
            yield ray
        finally:
            runtime.release(self)

    def needs_of_rank(self, has_gpus: bool) -> Resources:
        """Resources of one rank; `has_gpus` if the trainer may use GPUs, and the cluster has some."""
        given = {"CPU": DEFAULT_CPUS, "GPU": float(has_gpus)}
        return Resources(given if self.trainer_resources is None else self.trainer_resources)


def check_resources(setting: str, resources: Mapping[str, int | float] | None) -> None:
    """Refuses amounts that are no numbers, and names that Ray spells otherwise."""
    for name, amount in (resources or {}).items():
        if isinstance(amount, bool) or not isinstance(amount, int | float) or not 0 <= amount < math.inf:
            raise ValueError(f"{setting}.{name} must be a number >= 0, got {amount!r}")
    if resources and (wrong := next((name for name in resources if name in ("cpu", "gpu", "cpus", "gpus")), "")):
        raise ValueError(f"{setting}.{wrong}: Ray calls it {wrong.rstrip('s').upper()}")
