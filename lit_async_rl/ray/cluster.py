"""`RayCluster`: the one setting that places trainer ranks and engines on a Ray cluster. Does not import ray."""

from __future__ import annotations

import dataclasses
import importlib.util
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from lit_async_rl.engines.base import RolloutEngine
from lit_async_rl.environments.multi_request import MultiRequestEngine
from lit_async_rl.errors import SetupError
from lit_async_rl.ray import runtime
from lit_async_rl.utils.checks import check_range

DEFAULT_CPUS = 0.5  # of a rank and of a replica: two of each fit on a machine with two cores


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
        return DEFAULT_CPUS if self.resources is None else float(self.resources.get("CPU", 0.0))

    @property
    def least(self) -> int:
        """Fewest replicas."""
        return self.replicas if self.min is None else self.min

    @property
    def most(self) -> int:
        """Most replicas."""
        return self.replicas if self.max is None else self.max


class RayCluster:
    """Where trainer ranks and engines run: on a Ray cluster, or on a Ray that is started on this machine for the run.

    With more than one trainer rank, or with resources for one, Ray Train places the ranks; each is a process of its
    own that runs the same command as under torchrun, and Lightning connects them. Otherwise the trainer runs where it
    is started, with as many processes as `trainer.devices` says. `trainer.devices` and `trainer.num_nodes` are set to
    where the ranks are. With more than one engine replica `data.engine` is wrapped in `RayEngine`.

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
        max_failures: how often the ranks start again, from the run's newest checkpoint, after one of them was killed,
            lost its machine, or hung; -1 is without limit. A mistake (a setting out of range, a reward that raises)
            would come again, and ends the run at once.
        start_timeout_s: limit of the wait for the resources of the ranks, at the start and after a failure.

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
        max_failures: int = 3,
        start_timeout_s: float = 300.0,
    ) -> None:
        check_range("cluster", "integer >= 1", trainer_ranks=trainer_ranks)
        check_range("cluster", "integer >= -1", max_failures=max_failures)
        check_range("cluster", "positive", start_timeout_s=start_timeout_s)
        _check_resources("cluster.trainer_resources", trainer_resources)
        if address is not None and "://" in address:
            raise ValueError(
                f"cluster.address must be auto or HOST:PORT, got {address!r}: start the command on a node of the "
                "cluster, or with `ray job submit`; Ray Client is not supported"
            )
        self.address = address
        self.trainer_ranks = trainer_ranks
        self.trainer_resources = trainer_resources
        self.engines = engines or EngineReplicas()
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

    def check(self) -> None:
        """Refuses a cluster where Ray is needed and not installed; does not import it.

        Raises:
            SetupError: says how to install it.
        """
        if (self.places_ranks or self.has_replicas) and importlib.util.find_spec("ray") is None:
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

        resources = {name: float(amount) for name, amount in (self.engines.resources or {}).items()}
        return RayEngine(
            engine,
            self.engines.replicas,
            num_cpus=self.engines.num_cpus,
            num_gpus=resources.get("GPU", 0.0),
            resources={name: amount for name, amount in resources.items() if name not in ("CPU", "GPU")} or None,
            address=self.address,
            min_replicas=self.engines.least,
            delta=self.engines.delta,
        )

    def as_config(self) -> dict[str, Any]:
        """This setting as a configuration has it."""
        names = ("address", "trainer_ranks", "trainer_resources", "max_failures", "start_timeout_s")
        settings = {name: getattr(self, name) for name in names}
        return {"class_path": "RayCluster", "init_args": {**settings, "engines": dataclasses.asdict(self.engines)}}

    def rank_resources(self, has_gpus: bool) -> dict[str, float]:
        """Resources of one rank.

        Args:
            has_gpus: whether the trainer may use GPUs, and the cluster has some.
        """
        if self.trainer_resources is not None:
            return {name: float(amount) for name, amount in self.trainer_resources.items()}
        return {"CPU": DEFAULT_CPUS} | ({"GPU": 1.0} if has_gpus else {})


def _check_resources(setting: str, resources: Mapping[str, int | float] | None) -> None:
    for name, amount in (resources or {}).items():
        if isinstance(amount, bool) or not isinstance(amount, int | float) or not 0 <= amount < math.inf:
            raise ValueError(f"{setting}.{name} must be a number >= 0, got {amount!r}")
    if resources and (wrong := next((name for name in resources if name in ("cpu", "gpu", "cpus", "gpus")), "")):
        raise ValueError(f"{setting}.{wrong}: Ray calls it {wrong.rstrip('s').upper()}")
