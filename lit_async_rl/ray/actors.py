"""Resources of actors, their end, the last lines of their logs, and their errors."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lit_async_rl.engines.embedded.own_process import from_json
from lit_async_rl.errors import EngineError
from lit_async_rl.ray.logs import tail
from lit_async_rl.runtime.threads import start_thread

LOG_LINES = 12
RETRY_S = 0.3  # between two tries to start an actor that Ray is bringing back
REFUSED_S = 5.0  # within which Ray refuses a call of such an actor
LOG_S = 10.0  # to read the log of a process on another node, where Ray starts one for it
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Resources:
    """Resources that Ray reserves for each actor.

    Attributes:
        amounts: by the name that Ray gives them; an actor sees only its own `GPU`.
        spread: on different nodes where possible.
    """

    amounts: Mapping[str, int | float]
    spread: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "amounts", {name: float(amount) for name, amount in self.amounts.items()})

    @property
    def num_cpus(self) -> float:
        """Processors, which are counted, not reserved."""
        return self.amounts.get("CPU", 0.0)

    @property
    def options(self) -> dict[str, Any]:
        """As Ray takes them: processors, GPUs and memory apart from the others."""
        others = dict(self.amounts)
        return {
            "num_cpus": others.pop("CPU", 0.0),
            "num_gpus": others.pop("GPU", 0.0),
            "memory": others.pop("memory", None),
            "resources": others or None,
            "scheduling_strategy": "SPREAD" if self.spread else "DEFAULT",
        }

    @property
    def restarting(self) -> dict[str, Any]:
        """Options of an actor that Ray starts again whenever its process or node is gone.

        Ray does not repeat calls: the caller knows what is missing.
        """
        return self.options | {"max_restarts": -1, "max_task_retries": 0}

    @property
    def by_name(self) -> dict[str, float]:
        """All that is more than nothing."""
        return {name: amount for name, amount in self.amounts.items() if amount}

    def __str__(self) -> str:
        settings = {"CPU": "num_cpus", "GPU": "num_gpus"}
        return ", ".join(f"{settings.get(name, name)}={amount:g}" for name, amount in self.by_name.items())


def is_refused(ray: Any, error: Exception, called: float) -> bool:
    """Whether a call failed at once, because Ray is still bringing its actor back; `ActorDiedError` is for good."""
    return time.monotonic() - called < REFUSED_S and not isinstance(error, ray.exceptions.ActorDiedError)


def kill_actor(ray: Any, actor: Any, is_for_good: bool) -> None:
    """Kills an actor's process; Ray makes another one unless that is for good."""
    if actor is not None:
        try:
            ray.kill(actor, no_restart=is_for_good)
        except Exception as error:  # it is gone already
            log.debug("killing an actor: %s", error)


def log_of(ray: Any, place: Mapping[str, Any]) -> str:
    """The last lines of an actor's log, for a message; empty where there are none.

    `place` is a result of `logs.read_place`.
    """
    if not place:
        return ""
    paths = list(place["logs"])
    is_here = place["node"] == ray.get_runtime_context().get_node_id()
    text = tail(paths, LOG_LINES) if is_here else _remote_log(ray, place["node"], paths)
    return f". The last lines of its log:\n{text}" if text else ""


def warn_with_log(ray: Any, text: str, place: Mapping[str, Any]) -> None:
    """Warns of a lost replica, with the last lines of its log in the place of `{log}`.

    A log on another node, which may be gone, too, is read in a thread of its own.
    """

    def warn() -> None:
        log.warning("%s", text.replace("{log}", log_of(ray, place)))

    if not place or place["node"] == ray.get_runtime_context().get_node_id():
        warn()
    else:
        start_thread(warn, name="log-of-replica")


def _remote_log(ray: Any, node: str, paths: Sequence[str]) -> str:
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    try:
        there = NodeAffinitySchedulingStrategy(node_id=node, soft=False)
        reader = ray.remote(num_cpus=0, max_retries=0, scheduling_strategy=there)(tail)
        return str(ray.get(reader.remote(list(paths), LOG_LINES), timeout=LOG_S))
    except Exception as error:  # the node is gone, too, or there never was one
        return f"(on node {node[:8]}, which does not answer: {type(error).__name__})"


def first_line(error: BaseException) -> str:
    """An error of Ray, shortened."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:200]}" if text else type(error).__name__


def last_line(error: BaseException) -> str:
    """Last line of an actor's creation error, which names the cause."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[-1][:400]}" if lines else type(error).__name__


def as_error(message: str, failure: Mapping[str, str] | None) -> Exception:
    """The error of a replica's engine as that engine would raise it here, with what is known of the replica."""
    if failure is None:
        return EngineError(message)
    return from_json({**failure, "message": message})
