"""`RayCluster`: the one setting that places trainer ranks, engines, rewards and environments on a Ray cluster.

Does not import ray.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lit_async_rl.engines.base import RolloutEngine
from lit_async_rl.environments.episode_engine import EpisodeEngine
from lit_async_rl.environments.multi_request import MultiRequestEngine
from lit_async_rl.errors import SetupError
from lit_async_rl.ray import runtime
from lit_async_rl.ray.actors import Resources
from lit_async_rl.utils.checks import check_range
from lit_async_rl.utils.secrets import without_secrets

if TYPE_CHECKING:  # a run without pools needs none of it
    from lit_async_rl.ray.pool import PoolSettings

DEFAULT_CPUS = 0.5  # of a rank, a replica and an actor of a pool: two of each fit on a machine with two cores


@dataclass(frozen=True, kw_only=True)
class EngineReplicas:
    """Replicas of the engine: `cluster.engines`.

    Args:
        replicas: number of engines, each an actor of Ray; 1 leaves the engine in the leading rank.
        min: fewest of them; None is `replicas`. Where it is less than `max`, `ReplicaScaling` is among the callbacks.
        max: most of them; None is `replicas`.
        resources: of one replica, as Ray counts them: `CPU`, `GPU`, `memory` in bytes, or a name of your own.
        delta: between nodes only what has changed of the weights travels, see `RayEngine`.

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
        _check_resources(f"{owner}.resources", self.resources)

    @property
    def num_cpus(self) -> float:
        """CPUs of one replica, as Ray counts them."""
        return self.needs.num_cpus

    @property
    def needs(self) -> Resources:
        """Resources of each replica."""
        return _as_needs(self.resources)

    @property
    def least(self) -> int:
        """Fewest replicas."""
        return self.replicas if self.min is None else self.min

    @property
    def most(self) -> int:
        """Most replicas."""
        return self.replicas if self.max is None else self.max


@dataclass(frozen=True, kw_only=True)
class RewardActors:
    """Actors that call `data.reward`: `cluster.rewards`.

    Args:
        actors: processes, each with the reward and all of its parts. A part that counts something for the whole run,
            such as a judge with its budget, is called in one of them.
        resources: of one actor, as Ray counts them: `CPU`, `GPU`, `memory` in bytes, or a name of your own.
        calls: of plain rewards that one actor makes at a time, in threads: more than one for those that wait, such as
            for programs in a sandbox. An `async` reward has its own number, or `data.scoring.workers` in all actors
            together.

    Raises:
        ValueError: a setting is out of range.
    """

    actors: int = 2
    resources: dict[str, int | float] | None = None
    calls: int = 1

    def __post_init__(self) -> None:
        check_range("cluster.rewards", "integer >= 1", actors=self.actors, calls=self.calls)
        _check_resources("cluster.rewards.resources", self.resources)

    @property
    def needs(self) -> Resources:
        """Resources of each actor."""
        return _as_needs(self.resources)


@dataclass(frozen=True, kw_only=True)
class EnvironmentActors:
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
        _check_resources("cluster.environments.resources", self.resources)

    @property
    def needs(self) -> Resources:
        """Resources of each actor."""
        return _as_needs(self.resources)


class RayCluster:
    """Where trainer ranks, engines, rewards and environments run.

    That is a Ray cluster, or a Ray that is started on this machine for the run.

    With more than one trainer rank, or with resources for one, Ray places the ranks; each is a process of its own that
    runs the same command as under torchrun, and Lightning connects them. Otherwise the trainer runs where it is
    started, with as many processes as `trainer.devices` says. `trainer.devices` and `trainer.num_nodes` are set to
    where the ranks are. With more than one engine replica `data.engine` is wrapped in `RayEngine`. With `rewards`
    actors call `data.reward`, with `environments` they play the episodes of the environment of `data.engine`; both for
    the leading rank, which samples.

    Every node needs this package, the model and the configuration's files under the same paths, and a folder of runs
    that all nodes share.

    Example:
        ```python
        import lit_async_rl as rl

        cluster = rl.RayCluster(trainer_ranks=2, engines=rl.EngineReplicas(replicas=2))
        ```

    Args:
        address: of a running cluster, `auto` or `HOST:PORT`; None is that of `RAY_ADDRESS`, or else a Ray on this
            machine, on loopback, that ends with the run.
        trainer_ranks: number of trainer processes.
        trainer_resources: of one rank, as Ray counts them; None is half a CPU, and one GPU unless `trainer.accelerator`
            is `cpu` or the cluster has none.
        engines: replicas of the engine; None is one, in the leading rank.
        rewards: actors that call the reward; None calls it in the leading rank.
        environments: actors that play episodes; None plays them in the leading rank.
        max_failures: how often the ranks start again, from the run's newest checkpoint, after one of them was killed,
            lost its machine, or hung; -1 is without limit. A mistake (a setting out of range, a reward that raises)
            would come again, and ends the run at once.
        start_timeout_s: limit of the wait for room on the cluster, at the start, and for the ranks after a failure, and
            of the time in which no actor for rewards or environments is there while one is needed.
        dry_run: says what would be placed where, and whether the cluster can hold it, and does not train.

    Raises:
        ValueError: a setting is out of range.
    """

    def __init__(
        self,
        *,
        address: str | None = None,
        trainer_ranks: int = 1,
        trainer_resources: dict[str, int | float] | None = None,
        engines: EngineReplicas | None = None,
        rewards: RewardActors | None = None,
        environments: EnvironmentActors | None = None,
        max_failures: int = 3,
        start_timeout_s: float = 300.0,
        dry_run: bool = False,
    ) -> None:
        check_range("cluster", "integer >= 1", trainer_ranks=trainer_ranks)
        check_range("cluster", "integer >= -1", max_failures=max_failures)
        check_range("cluster", "positive", start_timeout_s=start_timeout_s)
        _check_resources("cluster.trainer_resources", trainer_resources)
        if address is not None and address != "auto" and ("://" in address or not re.search(r".:\d+$", address)):
            shown = without_secrets(repr(address))
            raise ValueError(
                f"cluster.address must be auto or HOST:PORT, got {shown}: start the command on a node of the "
                "cluster, or with `ray job submit`; Ray Client is not supported"
            )
        self.address = address
        self.trainer_ranks = trainer_ranks
        self.trainer_resources = trainer_resources
        self.engines = engines or EngineReplicas()
        self.rewards = rewards
        self.environments = environments
        self.dry_run = dry_run
        self.max_failures = max_failures
        self.start_timeout_s = start_timeout_s

    @property
    def places_ranks(self) -> bool:
        """Whether Ray starts the trainer's processes; a single rank without needs of its own never does."""
        return self.trainer_ranks > 1 or self.trainer_resources is not None

    @property
    def has_replicas(self) -> bool:
        """Whether there are, or can be, several engines."""
        return self.engines.most > 1

    @property
    def has_actors(self) -> bool:
        """Whether the process that samples uses actors: engines, rewards or environments."""
        return self.has_replicas or self.rewards is not None or self.environments is not None

    def check(self) -> None:
        """Refuses a cluster where Ray is needed and not installed; does not import it.

        Raises:
            SetupError: says how to install it.
        """
        if (self.places_ranks or self.has_actors) and importlib.util.find_spec("ray") is None:
            raise SetupError("cluster is set, and Ray is not installed here: pip install 'lit-async-rl[ray]'")

    @contextmanager
    def connected(self) -> Iterator[Any]:
        """Context with the module `ray`, connected to the cluster; what it starts on this machine, it ends.

        Raises:
            SetupError: Ray is not installed or not reachable, or a node asks for no token that other machines reach.
        """
        self.check()
        num_ranks = self.trainer_ranks if self.places_ranks else 0
        num_cpus = num_ranks * self.rank_resources(has_gpus=False).get("CPU", 0.0)
        num_cpus += self.engines.most * self.engines.num_cpus if self.has_replicas else 0.0
        num_cpus += sum(pool.actors * pool.needs.num_cpus for pool in (self.rewards, self.environments) if pool)
        ray = runtime.connect(self.address, num_cpus=num_cpus, what="cluster", user=self)
        try:
            yield ray
        finally:
            runtime.release(self)

    def replicate(self, engine: RolloutEngine) -> RolloutEngine:
        """The engine in several replicas that Ray places, or as it is; an environment stays where the engine is."""
        if not self.has_replicas:
            return engine
        if isinstance(engine, MultiRequestEngine):
            return engine.with_engine(self.replicate(engine.engine))
        from lit_async_rl.ray.engine import RayEngine

        needs = self.engines.needs
        return RayEngine(
            engine,
            self.engines.replicas,
            num_cpus=needs.num_cpus,
            num_gpus=needs.num_gpus,
            resources=needs.others,
            address=self.address,
            min_replicas=self.engines.least,
            delta=self.engines.delta,
        )

    def with_reward_actors(self, reward: Any, *, workers: int, timeout_s: float) -> Any:
        """A reward that the actors of `rewards` call, or as it is.

        Args:
            reward: `data.reward`.
            workers: `data.scoring.workers`.
            timeout_s: `data.scoring.timeout_s`.

        Raises:
            ValueError: there is no reward.
        """
        actors = self.rewards
        if actors is None:
            return reward
        if reward is None:
            raise ValueError("cluster.rewards is set, and there is no data.reward: the engine gives the rewards")
        from lit_async_rl.ray.reward_pool import RewardPool, in_pool

        settings = self._pool("rewards", actors)

        def pool(parts: Any) -> RewardPool:
            return RewardPool(settings, parts, calls=actors.calls, workers=workers, timeout_s=timeout_s)

        return in_pool(reward, pool)

    def with_environment_actors(self, engine: RolloutEngine) -> RolloutEngine:
        """An engine whose environment the actors of `environments` play, or as it is.

        Raises:
            ValueError: it has no environment.
        """
        if self.environments is None:
            return engine
        if not isinstance(engine, EpisodeEngine):
            raise ValueError(
                f"cluster.environments is set, and data.engine ({type(engine).__name__}) has no environment: "
                "it must be an EpisodeEngine"
            )
        from lit_async_rl.ray.environment_pool import EnvironmentPool, RayEnvironment

        pool = EnvironmentPool(self._pool("environments", self.environments), engine.environment)
        return engine.with_engine(engine.engine, environment=RayEnvironment(pool, engine.environment))

    def _pool(self, name: str, actors: RewardActors | EnvironmentActors) -> PoolSettings:
        from lit_async_rl.ray.pool import PoolSettings

        return PoolSettings(
            name=f"cluster.{name}",
            actors=actors.actors,
            resources=actors.needs,
            address=self.address,
            start_timeout_s=self.start_timeout_s,
        )

    def as_config(self) -> dict[str, Any]:
        """This setting as a configuration has it."""
        names = ("address", "trainer_ranks", "trainer_resources", "max_failures", "start_timeout_s")
        settings = {name: getattr(self, name) for name in names}
        for name in ("engines", "rewards", "environments"):
            value = getattr(self, name)
            settings[name] = None if value is None else dataclasses.asdict(value)
        return {"class_path": "RayCluster", "init_args": settings}

    def rank_resources(self, has_gpus: bool) -> dict[str, float]:
        """Resources of one rank.

        Args:
            has_gpus: whether the trainer may use GPUs, and the cluster has some.
        """
        if self.trainer_resources is not None:
            return {name: float(amount) for name, amount in self.trainer_resources.items()}
        return {"CPU": DEFAULT_CPUS} | ({"GPU": 1.0} if has_gpus else {})


def _as_needs(resources: Mapping[str, int | float] | None) -> Resources:
    """Resources of an actor, half a CPU where none are given."""
    given = {"CPU": DEFAULT_CPUS} if resources is None else resources
    others = {name: float(amount) for name, amount in given.items() if name not in ("CPU", "GPU")}
    return Resources(
        num_cpus=float(given.get("CPU", 0.0)),
        num_gpus=float(given.get("GPU", 0.0)),
        others=others or None,
        spread=True,
    )


def _check_resources(setting: str, resources: Mapping[str, int | float] | None) -> None:
    for name, amount in (resources or {}).items():
        if isinstance(amount, bool) or not isinstance(amount, int | float) or not 0 <= amount < math.inf:
            raise ValueError(f"{setting}.{name} must be a number >= 0, got {amount!r}")
    if resources and (wrong := next((name for name in resources if name in ("cpu", "gpu", "cpus", "gpus")), "")):
        raise ValueError(f"{setting}.{wrong}: Ray calls it {wrong.rstrip('s').upper()}")
