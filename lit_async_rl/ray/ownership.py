"""The actors of an engine's replicas, and their owner: Ray ends an actor with the process that has made it.

| trainer | its replicas are made by | and end with |
|---|---|---|
| in a process that Ray did not place | that process | it, whatever ends it |
| in ranks that Ray has placed | the coordinator, an actor that the command owns | the command, whatever ends it |

In the second case a rank that starts again finds the earlier replicas, by the engine's digest and their number, with
process and weights.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
import uuid
from collections.abc import Mapping
from functools import partial
from typing import Any

from lit_async_rl.engines.base import RolloutEngine
from lit_async_rl.ray.actors import Resources, kill_actor
from lit_async_rl.ray.process import make_actor, stop_actors
from lit_async_rl.ray.runtime import NAMESPACE
from lit_async_rl.ray.supervise import ANSWER_S, RUN_ID

_in_use: set[str] = set()  # prefixes of this process: a judge may have the same engine as the policy
_lock = threading.Lock()


class ReplicaActors:
    """Makes, finds and ends the actors of one engine's replicas, each with its own engine of the same arguments.

    Attributes:
        trainer: this start of the trainer; unique.
    """

    def __init__(self, ray: Any, engine: RolloutEngine, *, model: str, resources: Resources) -> None:
        from lit_async_rl.ray.replica import Recipe

        self.trainer = uuid.uuid4().hex
        self._ray = ray
        self._recipe = Recipe.of(engine)
        self._options = resources.restarting
        run = os.environ.get(RUN_ID)
        self._coordinator = None if run is None else ray.get_actor(run, namespace=NAMESPACE)
        digest = digest_of(engine, {"name": model, "needs": vars(resources)})
        with _lock:
            number = next(n for n in range(1, len(_in_use) + 2) if f"{digest}.{n}." not in _in_use)
            self._prefix = f"{digest}.{number}."
            _in_use.add(self._prefix)

    @property
    def outlive_the_trainer(self) -> bool:
        """Whether they belong to the command, so that the trainer's next start finds them."""
        return self._coordinator is not None

    def actor(self, number: int) -> Any:
        """The actor of a replica, made unless an earlier start of the trainer has left one."""
        from ray import cloudpickle

        from lit_async_rl.ray.replica import Replica

        made = cloudpickle.dumps(partial(Replica, self._recipe, number))
        if self._coordinator is None:
            return make_actor(self._ray, made, self._options)
        return self._ask("replica", self._name(number), made, self._options)

    def end(self, number: int, actor: Any) -> None:
        """Kills the actor of a replica for good."""
        if self._coordinator is None or actor is None:
            kill_actor(self._ray, actor, is_for_good=True)
        else:
            self._coordinator.end_replicas.remote([self._name(number)])

    def end_beyond(self, number: int) -> None:
        """Ends replicas beyond so many, which an earlier start of the trainer has left."""
        if self._coordinator is not None:
            wanted = {self._name(n) for n in range(number)}
            found = self._ask("replicas", self._prefix)
            beyond = {name: actor for name, actor in found.items() if name not in wanted}
            stop_actors(self._ray, list(beyond.values()))
            self._ask("end_replicas", list(beyond))

    def leave(self) -> None:
        """Lets another engine of this process use the names."""
        with _lock:
            _in_use.discard(self._prefix)

    def _name(self, number: int) -> str:
        return f"{self._prefix}{number}"

    def _ask(self, method: str, *args: Any) -> Any:
        return self._ray.get(getattr(self._coordinator, method).remote(*args), timeout=ANSWER_S)


def digest_of(engine: RolloutEngine, model: Mapping[str, Any]) -> str:
    """Digest of an engine's class and settings, and of its model."""
    from lit_async_rl.ray.replica import Recipe

    described = json.dumps([_as_plain(Recipe.of(engine)), _as_plain(model)], sort_keys=True)
    return hashlib.sha256(described.encode()).hexdigest()[:12]


def _as_plain(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return {str(name): _as_plain(part) for name, part in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_as_plain(part) for part in (value if isinstance(value, list | tuple) else sorted(value, key=str))]
    if isinstance(value, type):
        return f"{value.__module__}.{value.__qualname__}"
    fields = {name: _as_plain(part) for name, part in getattr(value, "__dict__", {}).items() if _is_plain(part)}
    return [_as_plain(type(value)), fields]


def _is_plain(value: Any) -> bool:
    """Whether a field is plain data; locks and open files are not."""
    return value is None or isinstance(value, bool | int | float | str | list | tuple | dict | set | frozenset | type)
