"""Room on a cluster: what it lacks, and what Ray would place where. Asks Ray only for its nodes."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

from lit_async_rl.errors import SetupError
from lit_async_rl.ray.cluster_settings import ClusterSettings
from lit_async_rl.ray.security import is_loopback
from lit_async_rl.runtime.waiting import announced

ROUNDING = 1e-9
PAUSE_S = 0.2  # between two looks at the nodes
ASK_AGAIN_S = 5.0  # for nodes: there is one request for a cluster, which another run may replace by its own


@dataclass(frozen=True)
class Role:
    """Processes that do the same.

    Args:
        setting: of their number.
        number: how many.
        needs: of each, by Ray's name of the resource.
        is_packed: on as few nodes as possible, instead of as many.
    """

    setting: str
    number: int
    needs: Mapping[str, float]
    is_packed: bool = False

    @property
    def each(self) -> str:
        """Resources of each, in words."""
        return _listed(self.needs)

    @property
    def all(self) -> str:
        """Resources of all together, in words."""
        return _listed({name: self.number * amount for name, amount in self.needs.items()})


@dataclass
class Node:
    """A machine of the cluster, with its free resources."""

    name: str
    left: dict[str, float]
    held: Counter[str] = field(default_factory=Counter)

    def has_room(self, needs: Mapping[str, float]) -> bool:
        """Whether one more process fits."""
        return self.room_for(needs) >= 1

    def room_for(self, needs: Mapping[str, float]) -> float:
        """How many more processes fit."""
        rooms = [(self.left.get(name, 0.0) + ROUNDING) // amount for name, amount in needs.items() if amount]
        return min(rooms, default=math.inf)

    def take(self, role: Role) -> None:
        """Gives a process of the role its resources."""
        for name, amount in role.needs.items():
            self.left[name] -= amount
        self.held[role.setting] += 1


def roles_of(cluster: ClusterSettings, has_gpus: bool, *, at_least: bool = False) -> list[Role]:
    """Roles that Ray would place; with `at_least` only as many engines as a run begins with."""
    roles = []
    if cluster.places_ranks:
        needs = cluster.needs_of_rank(has_gpus=has_gpus).by_name
        roles.append(Role("cluster.trainer_ranks", cluster.trainer_ranks, needs, is_packed=True))
    if cluster.has_replicas:
        engines = cluster.engines
        is_fewer = at_least and engines.least < engines.replicas
        setting, number = ("min", engines.least) if is_fewer else ("replicas", engines.replicas)
        roles.append(Role(f"cluster.engines.{setting}", number, engines.needs.by_name))
    for name in ("rewards", "environments"):
        if (pool := getattr(cluster, name)) is not None:
            roles.append(Role(f"cluster.{name}.actors", pool.actors, pool.needs.by_name))
    return roles


def find_lack(roles: Sequence[Role], nodes: Sequence[Node]) -> str:
    """Why nodes cannot hold the roles in any placement, even if nothing else runs there; empty if they may."""
    for role in roles:
        room = sum(node.room_for(role.needs) for node in nodes)
        if room < role.number:
            return (
                f"{role.setting}={role.number} with {role.each} each need {role.all}, and the cluster has "
                f"{_total(role.needs, nodes)} on {_nodes(len(nodes))}: there is room for {room:g}"
            )
    together: dict[str, float] = {}
    for role in roles:
        for name, amount in role.needs.items():
            together[name] = together.get(name, 0.0) + role.number * amount
    if any(sum(node.left.get(name, 0.0) for node in nodes) + ROUNDING < amount for name, amount in together.items()):
        settings = ", ".join(f"{role.setting}={role.number} with {role.each} each" for role in roles)
        return f"{settings} need {_listed(together)} together, and the cluster has {_total(together, nodes)}"
    return ""


def _total(names: Iterable[str], nodes: Sequence[Node]) -> str:
    return _listed({name: sum(node.left.get(name, 0.0) for node in nodes) for name in names})


def nodes_of(ray: Any) -> list[Node]:
    """The live machines of a cluster, with all their resources."""
    alive = [node for node in ray.nodes() if node["Alive"]]
    return [Node(f"{node['NodeManagerAddress']} ({node['NodeID'][:8]})", dict(node["Resources"])) for node in alive]


@contextmanager
def connected_with_room(cluster: ClusterSettings, *, uses_gpus: bool = False) -> Iterator[Any]:
    """As `ClusterSettings.connected`, after `await_room`."""
    with cluster.connected() as ray:
        await_room(ray, cluster, uses_gpus=uses_gpus)
        yield ray


def await_room(ray: Any, cluster: ClusterSettings, *, uses_gpus: bool) -> None:
    """Waits until a cluster has enough for a run to begin, even if others use it at the moment.

    Meanwhile it asks an autoscaler for what the run needs, because placement groups come later. It does not wait on
    this machine alone, where no node joins. With `uses_gpus`, a rank gets a GPU by default if the cluster has some.

    Raises:
        SetupError: it has not enough after `cluster.start_timeout_s`; names setting and numbers.
    """
    from ray.autoscaler.sdk import request_resources

    began = time.monotonic()
    asked_at: float | None = None
    lack = ""
    with ExitStack() as stack:
        stack.enter_context(announced(lambda: f"room on the Ray cluster: {lack}"))
        while True:
            nodes = nodes_of(ray)
            has_gpus = uses_gpus and any(node.left.get("GPU", 0.0) > 0 for node in nodes)
            roles = roles_of(cluster, has_gpus=has_gpus, at_least=True)
            lack = find_lack(roles, nodes)
            if not lack:
                return
            is_local = all(is_loopback(node.name.split()[0]) for node in nodes)
            if is_local or time.monotonic() - began >= cluster.start_timeout_s:
                waited = "" if is_local else f", after cluster.start_timeout_s={cluster.start_timeout_s:g}"
                raise SetupError(
                    f"{lack}{waited}. Reduce the number of processes or the resources of each, or add nodes"
                )
            if asked_at is None:
                stack.callback(request_resources, bundles=[])  # else its nodes would stay after the run
            if asked_at is None or time.monotonic() - asked_at >= ASK_AGAIN_S:
                request_resources(bundles=[dict(role.needs) for role in roles for _ in range(role.number)])
                asked_at = time.monotonic()
            time.sleep(PAUSE_S)


def place(roles: Sequence[Role], nodes: Sequence[Node]) -> None:
    """Fills the nodes as Ray would: ranks packed, all others spread.

    Raises:
        SetupError: they do not fit; names the setting, the need and the supply.
    """
    for role in roles:
        for number in range(role.number):
            free = [node for node in nodes if node.has_room(role.needs)]
            if not free:
                had = {name: sum(node.left.get(name, 0.0) for node in nodes) for name in role.needs}
                had = {name: amount + number * role.needs[name] for name, amount in had.items()}
                left = " left" if role is not roles[0] else ""
                raise SetupError(
                    f"{role.setting}={role.number}: not all of these processes fit on the cluster. Each process needs "
                    f"{role.each}, and all of them need {role.all}. The cluster has {_listed(had)}{left} on "
                    f"{_nodes(len(nodes))}, enough for {number} of the processes"
                )
            held = [node.held[role.setting] for node in free]
            wanted = max(held) if role.is_packed else min(held)
            free[held.index(wanted)].take(role)
        on_each = {node.held[role.setting] for node in nodes if node.held[role.setting]}
        if role.is_packed and len(on_each) > 1:
            raise SetupError(
                f"{role.setting}={role.number}: Ray would place the ranks as {_where(role, nodes)} (each rank needs "
                f"{role.each}), but every node must have the same number of ranks: set cluster.trainer_resources "
                "accordingly"
            )


def described(cluster: ClusterSettings, roles: Sequence[Role], nodes: Sequence[Node]) -> list[str]:
    """Lines about a placement."""
    rows = [("", "number", "each", "where")]
    if not cluster.places_ranks:
        rows.append(("trainer", "-", "-", "in the process of the command, not placed by Ray"))
    rows += [(role.setting, str(role.number), role.each, _where(role, nodes)) for role in roles]
    if not cluster.has_replicas:
        rows.append(("engine", "-", "-", "with the trainer"))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    if cluster.has_replicas and cluster.engines.most > cluster.engines.replicas:
        engines = Role("engines", 1, cluster.engines.needs.by_name)
        more = 0
        wanted = cluster.engines.most - cluster.engines.replicas
        while more < wanted and (free := [node for node in nodes if node.has_room(engines.needs)]):
            free[0].take(engines)
            more += 1
        lines.append(f"cluster.engines.max={cluster.engines.most}: there is room for {more} of {wanted} more")
    return lines


def print_dry_run(cluster: ClusterSettings, *, uses_gpus: bool) -> None:
    """Prints what would be placed where; for `uses_gpus` see `await_room`.

    Raises:
        SetupError: the cluster cannot hold it, or is not reachable.
    """
    if not roles_of(cluster, has_gpus=False):
        print("dry run: Ray would place nothing, because trainer, engine, rewards and environments are in one process")
        return
    with cluster.connected() as ray:
        nodes = nodes_of(ray)
        used = _used(ray)
    has_gpus = uses_gpus and any(node.left.get("GPU", 0.0) > 0 for node in nodes)
    roles = roles_of(cluster, has_gpus=has_gpus)
    place(roles, nodes)
    print(f"dry run: the run fits on the cluster of {_nodes(len(nodes))}; nothing was trained")
    for line in described(cluster, roles, nodes):
        print(line)
    if used:
        print(
            f"the cluster's resources {_listed(used)} are in use now; processes that need these resources start when "
            "the resources are free"
        )


def _used(ray: Any) -> dict[str, float]:
    """Resources in use by others."""
    free = ray.available_resources()
    amounts = {name: total - free.get(name, 0.0) for name, total in ray.cluster_resources().items()}
    return {name: amount for name, amount in amounts.items() if amount > ROUNDING and name in ("CPU", "GPU")}


def _where(role: Role, nodes: Sequence[Node]) -> str:
    return ", ".join(f"{node.held[role.setting]} on {node.name}" for node in nodes if node.held[role.setting])


def _listed(amounts: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {amount:g}" for name, amount in amounts.items()) or "nothing"


def _nodes(number: int) -> str:
    return "1 node" if number == 1 else f"{number} nodes"
