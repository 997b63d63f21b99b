"""The actor that outlives a run's ranks, and owns the replicas of their engines, see `ownership.py`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


class Coordinator:
    """State of one run, its job, folder and result, in an actor that the command owns, and that ends with it.

    Args:
        job: list with the reference of the function that a rank calls; not opened here.
    """

    def __init__(self, job: list[Any]) -> None:
        self._job = job
        self._folder: str | None = None
        self._result: Any = None
        self._replicas: dict[str, Any] = {}

    def job(self) -> list[Any]:
        """The job, as given."""
        return self._job

    def tell_folder(self, folder: str) -> None:
        """Notes the folder of the run's checkpoints."""
        self._folder = folder

    def folder(self) -> str | None:
        """Folder of the run's checkpoints; None before training began."""
        return self._folder

    def give(self, result: Any) -> None:
        """Takes what rank 0 returns: plain data."""
        self._result = result

    def result(self) -> Any:
        """Return value of rank 0; None before it has returned."""
        return self._result

    # -- the ranks' engines -------------------------------------------------------------------------------------------

    def replica(self, name: str, made: bytes, options: Mapping[str, Any]) -> Any:
        """The actor of a replica, made unless there is one of this name; Ray ends it with this one."""
        if name not in self._replicas:
            import ray

            from lit_async_rl.ray.process import make_actor

            self._replicas[name] = make_actor(ray, made, options)
        return self._replicas[name]

    def replicas(self, prefix: str = "") -> dict[str, Any]:
        """Actors of the replicas whose names begin so."""
        return {name: actor for name, actor in self._replicas.items() if name.startswith(prefix)}

    def end_replicas(self, names: Sequence[str]) -> None:
        """Kills replicas for good."""
        import ray

        for name in names:
            if name in self._replicas:
                ray.kill(self._replicas.pop(name), no_restart=True)
