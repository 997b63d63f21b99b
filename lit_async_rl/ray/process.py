"""The actor of a replica. Imports nothing large, so that its owner, such as the coordinator, need not either."""

from __future__ import annotations

import pickle
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

STOP_S = 5.0  # for an engine to close before its actor is killed
# thread by method of `Replica`; in that of `control` requests may wait for weights
GROUPS = {
    "claim": "claim",
    "load": "update",
    "prove": "update",
    "take": "poll",
    "hand_back": "poll",
    "partial_completions": "poll",
}
OTHER_GROUP = "control"


class TakenOver(Exception):
    """A trainer calls a replica that another start of it has claimed since."""


class ReplicaProcess:
    """The actor. It makes the replica from bytes, so that its owner imports nothing of it.

    Args:
        made: pickled function that makes the replica.
    """

    def __init__(self, made: bytes) -> None:
        self._replica = pickle.loads(made)()

    def call(self, method: str, *args: Any) -> Any:
        """Calls a method of the replica."""
        return getattr(self._replica, method)(*args)


def make_actor(ray: Any, made: bytes, options: Mapping[str, Any]) -> Any:
    """An actor that Ray starts when it has room, and again whenever its process or node is gone.

    `options` are those of `Resources.restarting`; for `made` see `ReplicaProcess`.
    """
    groups = {OTHER_GROUP: 1} | dict.fromkeys(GROUPS.values(), 1)
    kind = ray.remote(concurrency_groups=groups)(ReplicaProcess)
    return kind.options(name=f"lit_async_rl.replica.{uuid.uuid4().hex[:8]}", **options).remote(made)


def call_actor(actor: Any, method: str, *args: Any) -> Any:
    """Reference of the answer of a replica's method, which runs in the thread of its group."""
    return actor.call.options(concurrency_group=GROUPS.get(method, OTHER_GROUP)).remote(method, *args)


def stop_actors(ray: Any, actors: Sequence[Any]) -> None:
    """Has engines end their own processes; the actors may be killed then."""
    stops = [call_actor(actor, "stop") for actor in actors]
    if stops:
        ray.wait(stops, num_returns=len(stops), timeout=STOP_S)
