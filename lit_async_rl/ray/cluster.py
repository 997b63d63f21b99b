"""`RayCluster`: the one setting that places trainer ranks, engines, rewards and environments on a Ray cluster.

Does not import ray.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl

from lit_async_rl.api.cluster import Cluster, Outcome, Place
from lit_async_rl.data.module import RolloutDataModule
from lit_async_rl.engines.base import RolloutEngine
from lit_async_rl.environments.episode_engine import EpisodeEngine
from lit_async_rl.environments.multi_request import MultiRequestEngine
from lit_async_rl.ray.cluster_settings import (
    ClusterSettings,
    EngineReplicas,
    EnvironmentActors,
    RewardActors,
    check_resources,
)
from lit_async_rl.ray.dry_run import connected_with_room, print_dry_run
from lit_async_rl.utils.checks import check_range
from lit_async_rl.utils.secrets import without_secrets

if TYPE_CHECKING:  # a run without pools needs none of it
    from lit_async_rl.ray.pool import PoolSettings


class RayCluster(ClusterSettings, Cluster):
    """Places trainer ranks, engines, rewards and environments on a Ray cluster, or on a Ray of this machine.

    With more than one trainer rank, or with resources for one, Ray places the ranks: each is a process that runs the
    same command, as under torchrun, and Lightning connects them. `trainer.devices` and `trainer.num_nodes` are set to
    match. Otherwise the trainer runs where it is started, with as many processes as `trainer.devices` says. With more
    than one engine replica, `data.engine` is wrapped in `RayEngine`. With `rewards`, actors call `data.reward`; with
    `environments`, they play the episodes of `data.engine`. Both serve the leading rank, which samples.

    Every node needs this package, the model and the configuration's files under the same paths, and a shared folder of
    runs.

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
            lost its machine, or hung; -1 is without limit. An error that would recur (a setting out of range, a reward
            that raises) ends the run at once.
        start_timeout_s: longest wait for room on the cluster, at the start and for the ranks after a failure; also the
            longest time without an actor for rewards or environments while one is needed.
        dry_run: prints what would be placed where, and whether the cluster can hold it, instead of training.

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
        check_resources("cluster.trainer_resources", trainer_resources)
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

    def actors_connected(self) -> AbstractContextManager[Any]:
        """Context in which the run's actors can be set up; empty if there are none.

        Raises:
            SetupError: as `connected`, or there is no room.
        """
        return connected_with_room(self) if self.has_actors else nullcontext()

    def print_dry_run(self, *, uses_gpus: bool) -> None:
        """Prints what would be placed where, see `lit_async_rl.ray.dry_run`."""
        print_dry_run(self, uses_gpus=uses_gpus)

    def launch(self, job: Callable[[Place], None], *, uses_gpus: bool) -> Outcome:
        """Runs `job` in each trainer rank, see `lit_async_rl.ray.launcher`."""
        from lit_async_rl.ray.launcher import launch  # imports ray

        return launch(self, job, uses_gpus=uses_gpus)

    def place_actors(self, trainer: pl.Trainer, data: RolloutDataModule) -> None:
        """Has a data module use the cluster's engines, rewards and environments in place of its own.

        Only the rank that samples uses the actors of rewards and environments: the others, which score a part of the
        held-out completions, would need their own.
        """
        if trainer.is_global_zero:
            scoring = data.scoring
            if self.rewards is not None:
                data.replace_reward(
                    self.with_reward_actors(data.reward, workers=scoring.calls, timeout_s=scoring.timeout_s)
                )
            if self.environments is not None:
                data.replace_engine(self.with_environment_actors(data.engine))
        if not self.has_replicas:
            return
        from lit_async_rl.ray.replica_scaling import ReplicaScaling

        data.replace_engine(self.replicate(data.engine))
        engines = self.engines
        callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]
        if engines.least < engines.most and not any(isinstance(one, ReplicaScaling) for one in callbacks):
            callbacks.insert(0, ReplicaScaling(min_replicas=engines.least, max_replicas=engines.most))

    def replicate(self, engine: RolloutEngine) -> RolloutEngine:
        """The engine in replicas that Ray places, or as it is; an environment stays in this process."""
        if not self.has_replicas:
            return engine
        if isinstance(engine, MultiRequestEngine):
            return engine.with_engine(self.replicate(engine.engine))
        from lit_async_rl.ray.engine import RayEngine

        needs = {name: float(amount) for name, amount in self.engines.needs.amounts.items()}
        return RayEngine(
            engine,
            self.engines.replicas,
            num_cpus=needs.pop("CPU", 0.0),
            num_gpus=needs.pop("GPU", 0.0),
            resources=needs or None,
            address=self.address,
            min_replicas=self.engines.least,
            delta=self.engines.delta,
        )

    def with_reward_actors(self, reward: Any, *, workers: int, timeout_s: float) -> Any:
        """The reward as the actors of `rewards` call it, or as it is; `workers` and `timeout_s` are of `data.scoring`.

        Raises:
            ValueError: there is no reward.
        """
        actors = self.rewards
        if actors is None:
            return reward
        if reward is None:
            raise ValueError(
                "cluster.rewards is set, but data.reward is not: without data.reward, the engine computes the rewards. "
                "Leave cluster.rewards out"
            )
        from lit_async_rl.ray.reward_pool import in_pool

        settings = self._pool("rewards", actors)
        return in_pool(reward, settings, calls=actors.calls, workers=workers, timeout_s=timeout_s)

    def with_environment_actors(self, engine: RolloutEngine) -> RolloutEngine:
        """The engine with its environment in the actors of `environments`, or as it is.

        Raises:
            ValueError: it has no environment.
        """
        if self.environments is None:
            return engine
        if not isinstance(engine, EpisodeEngine):
            raise ValueError(
                f"cluster.environments is set, but data.engine ({type(engine).__name__}) has no environment: "
                "data.engine must be an EpisodeEngine"
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
