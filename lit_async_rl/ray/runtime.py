"""This process's connection to Ray: made once, shared by its users, and ended with the last of them."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lit_async_rl.errors import SetupError
from lit_async_rl.ray.actors import first_line
from lit_async_rl.ray.security import check_access, follow, is_loopback, use_token
from lit_async_rl.runtime.ports import reach
from lit_async_rl.runtime.waiting import announced

NAMESPACE = "lit_async_rl"
RETRY_S = 2.0  # before the second and last try
MISSING = (
    "{what} runs its parts as Ray actors, but Ray is not installed: pip install 'lit-async-rl[ray]'. "
    "One engine, in this process or in its own (data.engine.own_process), needs no Ray"
)
log = logging.getLogger(__name__)


class _Connection:
    """State of this process: one for all users."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.is_ours = False  # a local Ray that `connect` has started, and `release` ends
        self.users: weakref.WeakSet[Any] = weakref.WeakSet()


_connection = _Connection()


def import_ray(what: str) -> Any:
    """The module `ray`, which `what` needs.

    Raises:
        SetupError: it is not installed; says how to install it.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # Ray's own default to come, and no warning
    # a call after the end of the connection would start a Ray of its own, which listens on all addresses
    os.environ.setdefault("RAY_ENABLE_AUTO_CONNECT", "0")
    try:
        import ray
    except ImportError:
        raise SetupError(MISSING.format(what=what)) from None
    return ray


def connect(
    address: str | None = None,
    num_cpus: float | None = None,
    what: str = "RayEngine",
    *,
    user: object = None,
    asks_nodes: bool = True,
) -> Any:
    """Connects to Ray unless this process is connected already, and returns the module `ray`.

    Without an address it starts Ray on this machine: on loopback, without dashboard, and ended with this process,
    whatever ends that. After SIGKILL, two of Ray's agents first try to report it, for a minute.

    Args:
        address: of a running cluster (`auto`, `HOST:PORT`); None is that of `RAY_ADDRESS`, or starts one here.
        num_cpus: CPUs that a local Ray gives away, at least those of the machine; they are counted, not reserved.
        what: connects, for messages.
        user: keeps the connection until `release(user)`.
        asks_nodes: ask the nodes of a running cluster for their authentication, if others reach them.

    Raises:
        SetupError: Ray is not installed, cannot be reached or started, or asks for no token where others reach it.
    """
    running = address or os.environ.get("RAY_ADDRESS")
    if running is None:
        use_token()
    elif (loaded := sys.modules.get("ray")) is None or not loaded.is_initialized():
        follow(running)
    ray = import_ray(what)
    with _connection.lock:
        if not ray.is_initialized():
            _start(ray, address or os.environ.get("RAY_ADDRESS"), num_cpus)
            if asks_nodes and not _connection.is_ours:
                try:
                    check_access(ray)
                except SetupError:
                    ray.shutdown()
                    raise
        if user is not None:
            _connection.users.add(user)
    return ray


def release(user: object) -> None:
    """Ends a local Ray that `connect` has started when its last user is gone. Safe to call twice."""
    with _connection.lock:
        was_used = user in _connection.users
        _connection.users.discard(user)
        if was_used and _connection.is_ours and not _connection.users:
            import ray

            _connection.is_ours = False
            ray.shutdown()


def _start(ray: Any, address: str | None, num_cpus: float | None) -> None:
    settings: dict[str, Any] = {
        "namespace": NAMESPACE,
        "log_to_driver": False,  # the last lines of a process that failed are in its error
        "logging_level": logging.WARNING,
        "include_dashboard": False,
    }
    if address is None:
        settings["address"] = "local"  # without it Ray takes any cluster that runs here
        settings["num_cpus"] = max(os.cpu_count() or 1, int(-(-(num_cpus or 1) // 1)))
    else:
        settings["address"] = address
        del settings["include_dashboard"]  # the cluster's own choice
    is_loopback_only = address is None or _listens_on_loopback_only(ray, address)
    where = "on this machine" if address is None else f"at {address}"
    for attempt in (1, 2):
        try:
            with announced(f"Ray {where}"), _sigterm_kept(), _on_loopback(is_loopback_only):
                ray.init(**settings)
            _connection.is_ours = address is None
            if _connection.is_ours:
                _warn_if_reachable(ray)
            return
        except Exception as error:  # of many kinds: its own, ConnectionError, RuntimeError, ValueError
            ray.shutdown()
            reason = first_line(error)
            if attempt == 2:
                raise SetupError(
                    f"Ray {where} did not answer in two tries ({reason}). "
                    + ("Is the machine very busy, or out of memory? " if address is None else "Does it run there? ")
                    + "Its logs are in /tmp/ray/session_latest/logs"
                ) from error
            log.warning("Ray %s did not answer (%s); one more try in %g s", where, reason, RETRY_S)
            time.sleep(RETRY_S)


def _warn_if_reachable(ray: Any) -> None:
    """Warns if a Ray started here listens where other machines reach it."""
    for node in ray.nodes():
        if not is_loopback(node["NodeManagerAddress"]):
            log.warning(
                "Ray listens on %s: anyone who has its token and can reach its ports can run code under your account",
                node["NodeManagerAddress"],
            )


def _listens_on_loopback_only(ray: Any, address: str) -> bool:
    """Whether a running cluster listens on loopback alone; Ray itself would look at the machine's address."""
    if address == "auto":
        address = os.environ.get("RAY_ADDRESS") or ray._private.utils.read_ray_address() or ""
    if not is_loopback(address):
        return False
    port = address.rpartition(":")[2]
    try:
        reach(ray.util.get_node_ip_address(), int(port), RETRY_S)
    except (OSError, ValueError):
        return True
    return False


@contextmanager
def _on_loopback(is_local: bool) -> Iterator[None]:
    """Has this process, and a Ray that it starts, keep to loopback, as on macOS and Windows.

    `ray.init` has no setting for that: it replaces 127.0.0.1 by the machine's address, and then listens on all. The
    processes that it starts import what this one can.
    """
    if not is_local:
        yield
        return
    from ray._private import ray_constants

    before = ray_constants.ENABLE_RAY_CLUSTER, os.environ.get("PYTHONPATH")
    ray_constants.ENABLE_RAY_CLUSTER = False
    os.environ["PYTHONPATH"] = search_path()
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = before[0]
        if before[1] is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before[1]


def search_path() -> str:
    """`PYTHONPATH` with which another process imports what this one can."""
    return os.pathsep.join(path for path in sys.path if path)


@contextmanager
def _sigterm_kept() -> Iterator[None]:
    """Keeps the handler of SIGTERM, which Ray replaces by one that ends the process at once."""
    handler = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread() and handler is not None:
            signal.signal(signal.SIGTERM, handler)
