"""Engines that outlive their trainer, seen from the trainer: how they are named, found again, left and ended.

| trainer | its replicas | are ended by |
|---|---|---|
| in a process that Ray did not place | belong to it | Ray, with the trainer |
| in ranks that Ray has placed | are detached, with the run's name: a rank that starts again finds them | the command |
| with `keep_engines` | are detached, named by model and settings: the next run finds them | `HOW_TO_END` |

Whatever ends these, detached replicas end themselves after the lease, see `tenancy.py`.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import socket
import threading
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lit_async_rl.engines.base import RolloutEngine
from lit_async_rl.errors import SetupError
from lit_async_rl.ray.runtime import NAMESPACE
from lit_async_rl.ray.supervise import RUN_ID
from lit_async_rl.ray.tenancy import Lease

LEASE_S = 600.0
STOP_S = 5.0  # for an engine to close before its actor is killed
NAME = "lit_async_rl"
KEPT = f"{NAME}.kept."
HOW_TO_END = "python -m lit_async_rl.cli.kept_engines --end"
log = logging.getLogger(__name__)
_in_use: set[str] = set()  # prefixes of this process: a judge may have the same engine as the policy
_lock = threading.Lock()


@dataclass(frozen=True, kw_only=True)
class Residence:
    """Names and lease of the replicas of one engine.

    Attributes:
        prefix: of their names.
        lease: None where Ray ends them with their trainer.
        is_kept: whether they stay for the next run.
        owner: this trainer.
        run: that this trainer is of.
        who: it is, for messages.
    """

    prefix: str
    lease: Lease | None
    is_kept: bool
    owner: str
    run: str
    who: str

    @property
    def outlives(self) -> bool:
        """Whether the replicas outlive the trainer."""
        return self.lease is not None

    def options(self, number: int) -> dict[str, Any]:
        """Of the actor of a replica; one that is there already is found instead."""
        if self.lease is None:
            return {"name": f"{self.prefix}{number}.{uuid.uuid4().hex[:4]}"}
        return {
            "name": f"{self.prefix}{number}",
            "namespace": NAMESPACE,
            "lifetime": "detached",
            "get_if_exists": True,
        }

    def leave(self) -> None:
        """This process uses the names no longer."""
        with _lock:
            _in_use.discard(self.prefix)


def find_residence(
    engine: RolloutEngine, model: Mapping[str, Any], *, keep_engines: bool, lease_s: float | None
) -> Residence:
    """Where the replicas of an engine are to live.

    Args:
        engine: that they have.
        model: its name, and whatever else must be the same for the next run to find them.
        keep_engines: whether they stay for it.
        lease_s: seconds without a trainer after which they end; None is `LEASE_S`, or no limit with `keep_engines`.
    """
    placed = os.environ.get(RUN_ID)
    host = f"{socket.gethostname()}:{os.getpid()}"
    digest = digest_of(engine, model)
    if keep_engines:
        prefix = f"{KEPT}{digest}"
        lease = Lease(seconds=lease_s, run=None, namespace=NAMESPACE)
    elif placed:
        prefix = f"{prefix_of(placed)}{digest}"
        lease = Lease(seconds=LEASE_S if lease_s is None else lease_s, run=placed, namespace=NAMESPACE)
    else:
        prefix = f"{NAME}.{uuid.uuid4().hex[:8]}"
        lease = None
    with _lock:
        number = next(n for n in range(1, len(_in_use) + 2) if f"{prefix}.{n}." not in _in_use)
        prefix = f"{prefix}.{number}."
        _in_use.add(prefix)
    return Residence(
        prefix=prefix,
        lease=lease,
        is_kept=keep_engines,
        owner=uuid.uuid4().hex,
        run=placed or host,
        who=f"the run of {placed or 'process'} {host}",
    )


def prefix_of(run: str) -> str:
    """Of the names of all replicas of a run that Ray has placed."""
    return f"{NAME}.{run}."


def digest_of(engine: RolloutEngine, model: Mapping[str, Any]) -> str:
    """Of an engine's class and settings, and of its model."""
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
    """Whether a field of a setting says what it is; locks and open files do not."""
    return value is None or isinstance(value, bool | int | float | str | list | tuple | dict | set | frozenset | type)


def check_kept(keep_engines: bool, address: str | None, *, owner: str, address_setting: str) -> None:
    """Refuses to keep engines on a Ray that ends with the run.

    Args:
        keep_engines: the setting.
        address: of a running cluster; None without one.
        owner: path of the setting in messages.
        address_setting: path of the address in messages.

    Raises:
        SetupError: there is no address of a running cluster.
    """
    if keep_engines and address is None and "RAY_ADDRESS" not in os.environ:
        raise SetupError(
            f"{owner}.keep_engines=true needs a Ray that outlives the run, and one that is started for it does not: "
            f"`ray start --head`, and {address_setting}=auto"
        )


def leave_actors(ray: Any, actors: Sequence[Any], residence: Residence) -> None:
    """Has replicas end what this trainer has asked for, and leaves them to the next one."""
    releases = [actor.release.remote(residence.owner) for actor in actors]
    done = ray.wait(releases, num_returns=len(releases), timeout=STOP_S)[0] if releases else []
    if residence.is_kept and done:
        log.warning(
            "%d engines stay on the cluster with their weights, for the next run with this model and this engine "
            "(keep_engines); this ends them: %s",
            len(done),
            HOW_TO_END,
        )


# -- Their end --------------------------------------------------------------------------------------------------------


def names_with(ray: Any, prefix: str) -> list[str]:
    """Names of the replicas on the cluster that begin so."""
    found = ray.util.list_named_actors(all_namespaces=True)
    return sorted(one["name"] for one in found if one["namespace"] == NAMESPACE and one["name"].startswith(prefix))


def end_replicas(ray: Any, names: list[str]) -> int:
    """Ends the replicas of these names; how many there were."""
    actors = []
    for name in names:
        try:
            actors.append(ray.get_actor(name, namespace=NAMESPACE))
        except ValueError:  # it has ended meanwhile
            continue
    stop_actors(ray, actors)
    for actor in actors:
        ray.kill(actor, no_restart=True)
    return len(actors)


def stop_actors(ray: Any, actors: Sequence[Any]) -> None:
    """Has engines end their own processes; the actors may be killed then."""
    stops = [actor.stop.remote() for actor in actors]
    if stops:
        ray.wait(stops, num_returns=len(stops), timeout=STOP_S)


def end_unwanted(ray: Any, residence: Residence, replicas: int) -> None:
    """Ends replicas of the run beyond so many, which an earlier start of the trainer had, and this one has not."""
    if not residence.is_kept:
        wanted = {f"{residence.prefix}{number}" for number in range(replicas)}
        end_replicas(ray, [name for name in names_with(ray, residence.prefix) if name not in wanted])
