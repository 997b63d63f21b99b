"""Who may reach Ray: its processes exchange pickles, so whoever reaches its ports runs code.

On loopback that is every user of this machine who can read the token; anywhere else token authentication is required.
"""

from __future__ import annotations

import ipaddress
import os
import sys
import time
from pathlib import Path
from typing import Any

from lit_async_rl.errors import SetupError
from lit_async_rl.runtime.waiting import announced

ANSWER_S = 60.0
PROBE_S = 3.0
RETRY_S = 1.0
BUSY_S = 15.0  # for a head that takes connections and does not answer yet
ALIVE = "/ray.rpc.NodeInfoGcsService/CheckAlive"
AUTH_MODE = "RAY_AUTH_MODE"
_set_here: list[str] = []  # the mode that this process has chosen itself
CLUSTERS = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"  # Ray's name; with 0 its processes bind to loopback, on any system


def is_loopback(address: str) -> bool:
    """Whether an address, `HOST` or `HOST:PORT`, is loopback."""
    has_port = address.count(":") == 1 or (address.startswith("[") and not address.endswith("]"))
    host = address.rpartition(":")[0] if has_port else address
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def use_token() -> None:
    """Has a Ray that this process starts ask for a token, and this process send it, also to a running cluster.

    Ray itself does the first, with a warning each time, but not the second.
    """
    if _given_mode() is None:
        _set_mode("token")


def _given_mode() -> str | None:
    """The mode that the user has set; None without one, or if this process has chosen it for an earlier cluster."""
    mode = os.environ.get(AUTH_MODE)
    return None if mode in _set_here else mode


def _set_mode(mode: str) -> None:
    _set_here[:] = [mode]
    os.environ[AUTH_MODE] = mode
    if sys.modules.get("ray") is not None:  # it has read the variable already
        from ray._raylet import Config  # type: ignore[attr-defined]

        Config.initialize("")


def follow(address: str) -> None:
    """Has this process send a token to a running cluster, and ask for one itself, exactly if that one does.

    If the two differ, each refuses the other's calls, and Ray takes an actor's owner for dead: it ends new actors at
    once, with `ActorDiedError`. Another cluster's token in the home directory is enough for that.

    Args:
        address: `HOST:PORT`, or `auto`.

    Raises:
        SetupError: `RAY_AUTH_MODE` is set here, and the cluster differs; or no head node answers there.
    """
    asks = _asks_once_there(address)
    mode = _given_mode()
    if mode is None:
        is_on = has_token() if asks is None else asks
        _set_mode("token" if is_on else "disabled")
    elif asks is not None and (mode.lower() == "token") != asks:
        raise SetupError(
            f"cluster: this process has {AUTH_MODE}={mode}, but the Ray cluster at {address} requires "
            f"{'a' if asks else 'no'} token: set {AUTH_MODE}={'token' if asks else 'disabled'} for this process, "
            f"or start the cluster with {AUTH_MODE}={mode}"
        )


def _asks_once_there(address: str) -> bool | None:
    """Whether a cluster asks for a token, once it answers: `ray.init` would wait for minutes, deaf to signals.

    Raises:
        SetupError: no head node answers there.
    """
    began = time.monotonic()
    with announced(f"Ray at {address}"):
        while True:
            try:
                return asks_for_token(address)
            except ConnectionError as error:
                limit_s = BUSY_S if isinstance(error, _Busy) else RETRY_S
                if time.monotonic() - began >= limit_s:
                    raise SetupError(
                        f"no Ray head node answers at {address}: {error}. Is this the address that `ray start "
                        "--head` printed, and is Ray running there?"
                    ) from None
            time.sleep(RETRY_S)


class _Busy(ConnectionError):
    pass


def asks_for_token(address: str) -> bool | None:
    """Whether a running cluster refuses a call without a token; None if that cannot be told. Does not import ray.

    Raises:
        ConnectionError: no head node answers there.
    """
    if address == "auto":
        named = Path(os.environ.get("RAY_TMPDIR", "/tmp"), "ray", "ray_current_cluster")
        address = named.read_text().strip() if named.is_file() else ""
    try:
        import grpc
    except ImportError:
        return None
    if ":" not in address or os.environ.get("RAY_USE_TLS", "0").lower() in ("1", "true"):
        return None
    options = [("grpc.enable_http_proxy", 0)]  # as in Ray itself
    with grpc.insecure_channel(address, options=options) as channel:
        ask: Any = channel.unary_unary(ALIVE, request_serializer=bytes, response_deserializer=bytes)
        try:
            ask(b"", timeout=PROBE_S)
        except grpc.RpcError as error:
            status: Any = error
            if status.code() is grpc.StatusCode.UNAUTHENTICATED:
                return True
            kind = _Busy if status.code() is grpc.StatusCode.DEADLINE_EXCEEDED else ConnectionError
            raise kind(" ".join(str(status.details()).split())[:200]) from None
    return False


def has_token() -> bool:
    """Whether there is a token in the environment, or in the file where Ray looks for one."""
    named = os.environ.get("RAY_AUTH_TOKEN") or os.environ.get("RAY_AUTH_TOKEN_PATH")
    return bool(named) or (Path.home() / ".ray" / "auth_token").is_file()


def check_access(ray: Any) -> None:
    """Refuses a cluster that other machines reach without a token. Asks its nodes: this process may differ from them.

    Raises:
        SetupError: a node is not on loopback and asks for no token; says what to do.
    """
    reachable = [node for node in ray.nodes() if node["Alive"] and not is_loopback(node["NodeManagerAddress"])]
    if not reachable:
        return
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    ask = ray.remote(num_cpus=0)(auth_mode)
    places = [NodeAffinitySchedulingStrategy(node["NodeID"], soft=False) for node in reachable]
    try:
        modes = ray.get([ask.options(scheduling_strategy=place).remote() for place in places], timeout=ANSWER_S)
    except ray.exceptions.RayError as error:
        raise SetupError(
            f"cluster: not every node has reported whether it requires an authentication token: {error}"
        ) from error
    for node, mode in zip(reachable, modes, strict=True):
        if mode != "token":
            raise SetupError(refusal(node["NodeManagerAddress"], mode))


def auth_mode() -> str | None:
    """`RAY_AUTH_MODE` of the Ray that this process belongs to."""
    return os.environ.get(AUTH_MODE)


def refusal(host: str, mode: str | None) -> str:
    """Message about a node that asks for no token."""
    return (
        f"cluster: the node {host} is not on loopback, and its Ray requires no token ({AUTH_MODE}={mode}): anyone who "
        f"reaches its ports can run code there. Set {AUTH_MODE}=token and the same token (`ray get-auth-token "
        "--generate`, or RAY_AUTH_TOKEN) on every node before `ray start`; docs/ray.md"
    )
